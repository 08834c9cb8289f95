"""Read data that another program, machine or person wrote, and check it by the annotations of dataclasses.

This is the only reader of JSON: every fault of a text is a ValueError. It bounds size, nesting and digits. It
refuses a key that occurs twice, since readers differ in the one that counts.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from imgkit_entrypoints import files
from imgkit_entrypoints.rules import Rule, Unfit

MOST_BYTES = 4 << 20
"""Registries refuse larger manifests, and imgkit's own files are smaller."""
SEAL = "self_sha256"
"""Key of the digest of all other keys and values, as json.dumps writes them with sorted keys."""
DEEPEST = 100
"""Lists and objects within each other."""
MOST_BRACKETS = 100_000
"""Lists and objects in one text: 4 MiB of empty lists would take 100 MB of memory."""
_MOST_DIGITS = 100
_SHOWN = 60
"""Characters of a wrong value that a message repeats."""


def parse(text: str | bytes, *, most_bytes: int = MOST_BYTES, most_brackets: int = MOST_BRACKETS) -> Any:
    """Parse a JSON text; bytes are UTF-8.

    Raises
    ------
    ValueError : no JSON, too large, too deep, a key twice, or a number that is not finite or has 100 digits.
    """
    if len(text) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    if isinstance(text, bytes):
        text = text.decode()
    return _decode(text, _DECODER.decode, most_brackets)


def load(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """Parse the file `path`, and read no more of it than `most_bytes`.

    Raises
    ------
    OSError : it cannot be read, is not a regular file, or has more bytes.
    ValueError : as `parse`.
    """
    return parse(files.read_bytes(path, most_bytes=most_bytes), most_bytes=most_bytes)


def first_object(output: str) -> Any:
    """Parse the first JSON object in what a program printed, between its warnings.

    Raises
    ------
    ValueError : there is none, or as `parse`.
    """
    start = output.find("{")
    if start < 0:
        raise ValueError("it contains no JSON object")
    output = output[start : start + MOST_BYTES]
    return _decode(output, lambda text: _DECODER.raw_decode(text)[0], MOST_BRACKETS)


def _decode(text: str, decode: Callable[[str], Any], most_brackets: int) -> Any:
    if text.count("[") + text.count("{") > most_brackets:
        raise ValueError(f"it has more than {most_brackets} lists and objects")
    try:
        value = decode(text)
        _check_depth([value])
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    return value


def _check_depth(level: Iterable[Any], depth: int = 0) -> None:
    if depth > DEEPEST:
        raise RecursionError
    for value in level:
        if isinstance(value, dict | list):
            _check_depth(value.values() if isinstance(value, dict) else value, depth + 1)


def _parse_integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _parse_real(text: str) -> float:
    value = float(text) if len(text) <= _MOST_DIGITS else math.inf
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:_SHOWN]} is too large or has too many digits")
    return value


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        ((twice, _),) = counts.most_common(1)
        raise ValueError(f"the key {twice[:_SHOWN]!r} occurs twice")
    return values


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_refuse_repeated_keys,
    parse_int=_parse_integer,
    parse_float=_parse_real,
    parse_constant=_refuse_constant,
)


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with a digest of them under the key `SEAL`: `unseal` sees that a byte has changed."""
    return {**values, SEAL: _digest(values)}


def unseal(values: dict[str, Any]) -> None:
    """Take the digest out of parsed `values`.

    Two kinds of change have no meaning and pass: other spaces between values, and the case of a hex digit in
    an escape such as ``\\u00e9``.

    Raises
    ------
    ValueError : it is missing, or differs from that of the other values.
    """
    if values.pop(SEAL, "") != _digest(values):
        raise ValueError("its content does not match its sha256")


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def build_value(hint: Any, value: Any, name: str, *, closed: bool = False) -> Any:
    """Build a value of the type `hint`, often a dataclass, from parsed JSON.

    Dataclasses come from objects, whose unknown keys are ignored unless `closed`; tuples and lists from
    arrays; ``X | None`` from null or an X. The types are compared exactly: 1 is no float, true no integer.
    The rules of an annotation (rules.py) apply to each value but null, and to the keys of a mapping.

    Parameters
    ----------
    name : that of the value in errors.

    Raises
    ------
    ValueError : a value has another type than its field or breaks a rule, or a field is missing; names the
    field.
    """
    try:
        return _find_reader(hint, closed)(value)
    except _Misfit as misfit:
        raise ValueError(f"{name}{misfit.path}{misfit.problem}") from None


class _Misfit(Exception):
    """A value that does not fit the annotation of its field. `path` leads there, and grows on the way out."""

    def __init__(self, problem: str) -> None:
        self.path, self.problem = "", problem


_Reader = Callable[[Any], Any]


@functools.cache
def _find_reader(hint: Any, closed: bool) -> _Reader:
    """Return the function that builds values of the type `hint`; it knows the annotations already."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        rules = [item for item in hint.__metadata__ if isinstance(item, Rule)]
        return _check_rules(_find_reader(args[0], closed), rules)
    if type(None) in args:
        read_value = _find_reader(args[0], closed)
        return lambda value: None if value is None else read_value(value)
    if origin is Literal:
        return functools.partial(_read_choice, args)
    kind = _JSON_TYPES.get(origin or hint, dict if dataclasses.is_dataclass(hint) else hint)
    noun = _NOUNS.get(kind, "an object")
    build = _find_builder(hint, closed)

    def read_typed(value: Any) -> Any:
        if type(value) is not kind:
            raise _misfit(value, noun)
        return build(value) if build else value

    return read_typed


def _check_rules(read_value: _Reader, rules: Sequence[Rule]) -> _Reader:
    def read_checked(value: Any) -> Any:
        value = read_value(value)
        if value is None:
            return None
        try:
            for rule in rules:
                value = rule.apply(value)
        except Unfit as error:
            hint = f"; {error.hint}" if error.hint else ""
            raise _Misfit(f": {error.message}{hint}") from None
        return value

    return read_checked


def _read_choice(allowed: tuple[Any, ...], value: Any) -> Any:
    if value not in allowed:
        raise _misfit(value, " or ".join(allowed))
    return value


def _find_builder(hint: Any, closed: bool) -> _Reader | None:
    """Return what builds a value from JSON of the right type; None where that is the value."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _object_builder(hint, closed)
    if origin is collections.abc.Mapping:
        return _mapping_builder(_find_reader(args[0], closed), _find_reader(args[1], closed))
    if origin in (tuple, list):
        return _list_builder(origin, [_find_reader(arg, closed) for arg in args if arg is not Ellipsis])
    return Path if hint is Path else None


def _read_parts(values: Mapping[str, Any], readers: Mapping[str, _Reader]) -> dict[str, Any]:
    parts, name = {}, ""
    try:
        for name, read_value in readers.items():
            if name in values:
                parts[name] = read_value(values[name])
    except _Misfit as misfit:
        misfit.path = f".{name}{misfit.path}"
        raise
    return parts


def _mapping_builder(read_key: _Reader, read_value: _Reader) -> _Reader:
    def build_mapping(values: dict[str, Any]) -> Any:
        parts = _read_parts(values, dict.fromkeys(values, read_value))
        return {read_key(name): value for name, value in parts.items()}

    return build_mapping


def _list_builder(origin: Any, readers: Sequence[_Reader]) -> _Reader:
    """Return what builds a list or tuple: one reader is for each item, several are for one item each."""
    is_fixed = len(readers) > 1

    def build_list(values: list[Any]) -> Any:
        if is_fixed and len(values) != len(readers):
            raise _misfit(values, f"a list of {len(readers)}")
        items: list[Any] = []
        item_readers = readers if is_fixed else itertools.repeat(readers[0])
        try:
            for read_item, value in zip(item_readers, values, strict=False):
                items.append(read_item(value))
        except _Misfit as misfit:
            misfit.path = f"[{len(items)}]{misfit.path}"
            raise
        return origin(items)

    return build_list


def _object_builder(owner: Any, closed: bool) -> _Reader:
    hints = typing.get_type_hints(owner, include_extras=True)
    readers = {field.name: _find_reader(hints[field.name], closed) for field in dataclasses.fields(owner)}
    nothing = dataclasses.MISSING
    required = [
        field.name
        for field in dataclasses.fields(owner)
        if field.default is nothing and field.default_factory is nothing
    ]

    def build_object(values: dict[str, Any]) -> Any:
        parts = _read_parts(values, readers)
        for name in required:
            if name not in parts:
                raise _Misfit(f" is not complete: it has no {name}")
        for name in values if closed else ():
            if name not in readers:
                raise _Misfit(f".{name} is an unknown key")
        return owner(**parts)

    return build_object


def _misfit(value: Any, noun: str) -> _Misfit:
    return _Misfit(f" is {json.dumps(value, default=str)[:200]}, not {noun}")


_JSON_TYPES: Mapping[Any, type] = {tuple: list, list: list, collections.abc.Mapping: dict, Path: str}
"""Types of Python -> those of the parsed JSON; a dataclass comes from a dict, others from themselves."""
_NOUNS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
