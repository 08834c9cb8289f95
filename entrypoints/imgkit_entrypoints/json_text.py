"""Read JSON from other programs, machines or people, and build dataclasses from it.

All of imgkit reads JSON with this module. Every fault of a text raises ValueError. The size of a text, its
nesting and the number of digits are limited. A key that occurs twice is refused, because programs differ in
which of the two values they use.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import functools
import hashlib
import json
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from imgkit_entrypoints import files
from imgkit_entrypoints.rules import Rule, Unfit

MOST_BYTES = 4 << 20
"""Size in bytes of the largest text. Registries refuse larger manifests, and imgkit's files are smaller."""
SEAL = "self_sha256"
"""Key of a SHA-256 digest of all other keys and values, as json.dumps writes them with sorted keys."""
_MAX_DEPTH = 100
"""Largest depth to which lists and objects may be nested."""
_MAX_BRACKETS = 100_000
"""Largest number of lists and objects in a text. 4 MiB of empty lists would take 100 MB of memory."""
# Largest number of digits in a number. The time that Python needs to read a number grows with the square of
# it.
_MOST_DIGITS = 100
_SHOWN = 60
"""Number of characters of a wrong value that a message shows."""


def parse(text: str | bytes, *, most_bytes: int = MOST_BYTES) -> Any:
    """Return the value of a JSON text. Bytes are decoded as UTF-8.

    Raises
    ------
    ValueError : the text is not JSON, is too large or nested too deeply, contains a key twice, or contains a
        number that is not finite or has more than 100 digits.
    """
    if len(text) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    if isinstance(text, bytes):
        text = text.decode()
    return _decode(text, _DECODER.decode)


def load(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """Return the value of a JSON file of at most `most_bytes` bytes.

    Raises
    ------
    OSError : the file cannot be read, is not a regular file, or is larger.
    ValueError : the content cannot be parsed (see `parse`).
    """
    return parse(files.read_bytes(path, most_bytes=most_bytes), most_bytes=most_bytes)


def first_object(output: str) -> Any:
    """Return the JSON object in a program's output, which may contain warnings before and after it.

    The first ``{`` in the output begins the object, so the warnings before it must not contain one. At most
    4 MiB are read from there.

    Raises
    ------
    ValueError : there is no object, or it cannot be parsed (see `parse`).
    """
    start = output.find("{")
    if start < 0:
        raise ValueError("it contains no JSON object")
    return _decode(output[start : start + MOST_BYTES], _decode_beginning)


def _decode_beginning(text: str) -> Any:
    """Return the JSON value at the beginning of `text`, and ignore the text after it."""
    value, _ = _DECODER.raw_decode(text)
    return value


def _decode(text: str, decode: Callable[[str], Any]) -> Any:
    """Return the value of a JSON text, which the function `decode` parses.

    Raises
    ------
    ValueError : the text is not JSON, has too many brackets, or is nested too deeply.
    """
    # Brackets inside of strings are counted as well. That only makes the limit slightly stricter.
    if text.count("[") + text.count("{") > _MAX_BRACKETS:
        raise ValueError(f"it has more than {_MAX_BRACKETS} lists and objects")
    try:
        value = decode(text)
        _check_depth([value])
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    return value


def _check_depth(level: Iterable[Any], depth: int = 0) -> None:
    """Raise RecursionError if the values in `level` are nested more than `_MAX_DEPTH` levels deep."""
    if depth > _MAX_DEPTH:
        raise RecursionError
    for value in level:
        if isinstance(value, dict | list):
            _check_depth(value.values() if isinstance(value, dict) else value, depth + 1)


def _parse_integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _parse_real(text: str) -> float:
    """Return the number in a text with a point or an exponent.

    Numbers such as 1e999 are refused because they are too large for a float.
    """
    value = float(text) if len(text) <= _MOST_DIGITS else math.inf
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:_SHOWN]} is too large or has too many digits")
    return value


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with the keys and values in `pairs`. Raise ValueError if a key occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        ((twice, _),) = counts.most_common(1)
        raise ValueError(f"the key {twice[:_SHOWN]!r} occurs twice")
    return values


def _refuse_constant(constant: str) -> NoReturn:
    """Raise ValueError for NaN and Infinity, which Python's decoder would accept."""
    raise ValueError(f"{constant} is not a JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_refuse_repeated_keys,
    parse_int=_parse_integer,
    parse_float=_parse_real,
    parse_constant=_refuse_constant,
)


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with a digest of them under the key `SEAL`, so that `unseal` can detect changes."""
    return {**values, SEAL: _digest(values)}


def unseal(values: dict[str, Any]) -> None:
    """Check the digest of parsed `values`, and remove the digest from them.

    Changes of the text that do not change a value are not detected. Examples are white space between values,
    and the case of a hexadecimal digit in an escape such as ``\\u00e9``.

    Raises
    ------
    ValueError : the digest is missing, or belongs to other values.
    """
    if values.pop(SEAL, "") != _digest(values):
        raise ValueError("its content does not match its sha256")


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def build_value(hint: Any, value: Any, name: str, *, closed: bool = False) -> Any:
    """Build a value of the type `hint`, usually a dataclass, from parsed JSON.

    A dataclass is built from an object, a tuple or list from an array, and ``X | None`` from null or an X.
    Types must match exactly: 1 is not a float, and true is not an integer. Rules in annotations (rules.py)
    apply to each value except null, and to the keys of a mapping.

    Parameters
    ----------
    name : name of the value in errors. A field of the value is then called ``name.field[0]``, for example.
    closed : True if an unknown key in an object is an error. Otherwise, such keys are ignored, so that an
        older version of imgkit can read what a newer one has written.

    Raises
    ------
    ValueError : a value has the wrong type or breaks a rule, or a field is missing. The message names the
        field.
    """
    try:
        return _find_reader(hint, closed)(value)
    except _Misfit as misfit:
        raise ValueError(f"{name}{misfit.path}{misfit.problem}") from None


class _Misfit(Exception):
    """The error about a value that does not fit the annotation of its field.

    `path` leads to the value, such as ``.ports[2].state``. It is completed while the error passes through the
    readers. Each reader prepends the key or index that it knows: ``.state``, then ``[2].state``, then
    ``.ports[2].state``.
    """

    def __init__(self, problem: str) -> None:
        self.path, self.problem = "", problem


_Reader = Callable[[Any], Any]
"""A function that returns a field's value for a part of parsed JSON, or raises `_Misfit`."""


@functools.cache
def _find_reader(hint: Any, closed: bool) -> _Reader:
    """Return the reader for the type `hint`: a function that returns values of the type for parsed JSON.

    For example, the reader of ``tuple[int, ...]`` returns ``(1, 2)`` for ``[1, 2]``. Most readers check the
    type of the JSON, and then call the type's builder (`_find_builder`), which calls the readers of the items
    or fields. Readers are cached, so that the annotations of a type are analyzed only once.

    Parameters
    ----------
    closed : True if a dataclass refuses keys that are not fields.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        rules = [item for item in hint.__metadata__ if isinstance(item, Rule)]
        return functools.partial(_read_checked, _find_reader(args[0], closed), rules)
    # The types are those that imgkit's dataclasses use. Of unions, only "X | None" is supported.
    is_optional = type(None) in args  # for "X | None", `args` contains X and the type of None
    if is_optional:
        return functools.partial(_read_optional, _find_reader(args[0], closed))
    if origin is Literal:
        return functools.partial(_read_choice, args)
    return functools.partial(_read_typed, _find_json_type(hint), _find_builder(hint, closed))


def _find_json_type(hint: Any) -> type:
    """Return the type of the parsed JSON from which a value of the type `hint` is built.

    A dataclass is written as an object, a tuple as an array, and a Path as a text: dict, list and str.
    """
    if dataclasses.is_dataclass(hint):
        return dict
    plain_type = typing.get_origin(hint) or hint  # tuple for tuple[int, ...]
    return _JSON_TYPES.get(plain_type, hint)


def _read_typed(json_type: type, build: _Reader | None, value: Any) -> Any:
    """Return the value that `build` makes of `value`, or `value` itself if `build` is None.

    Raise `_Misfit` if the type of `value` is not `json_type`, the type of parsed JSON that `build` accepts.
    """
    if type(value) is not json_type:  # isinstance would accept True as an int
        raise _describe_misfit(value, _NOUNS.get(json_type, "an object"))
    return value if build is None else build(value)


def _read_optional(read_value: _Reader, value: Any) -> Any:
    return None if value is None else read_value(value)


def _read_checked(read_value: _Reader, rules: Sequence[Rule], value: Any) -> Any:
    """Read `value` with the reader `read_value`, and apply `rules` to the result, unless it is None.

    A rule may return the value in another form. If the value breaks a rule, the rule raises `Unfit`, which
    becomes a `_Misfit`, the error that collects the path of the value.
    """
    result = read_value(value)
    if result is None:  # the value is optional and not set
        return None
    try:
        for rule in rules:
            result = rule.apply(result)
    except Unfit as error:
        hint = f"; {error.hint}" if error.hint else ""
        raise _Misfit(f": {error.message}{hint}") from None
    return result


def _read_choice(allowed: tuple[Any, ...], value: Any) -> Any:
    """Return `value` if it is one of the `allowed` values of a ``Literal``. Otherwise raise `_Misfit`."""
    if value not in allowed:
        raise _describe_misfit(value, " or ".join(allowed))
    return value


def _find_builder(hint: Any, closed: bool) -> _Reader | None:
    """Return a function that builds a value of the type `hint` from parsed JSON.

    The reader of the type has checked the type of the JSON before it calls the function. Return None if there
    is nothing to build, as for a text or a number.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _make_object_builder(hint, closed)
    if origin is collections.abc.Mapping:
        read_key, read_value = (_find_reader(arg, closed) for arg in args)
        return functools.partial(_build_mapping, read_key, read_value)
    if origin in (tuple, list):
        # For tuple[int, ...], `args` contains int and Ellipsis.
        item_readers = [_find_reader(arg, closed) for arg in args if arg is not Ellipsis]
        return functools.partial(_build_list, origin, item_readers)
    return Path if hint is Path else None


def _read_parts(values: Mapping[str, Any], readers: Mapping[str, _Reader]) -> dict[str, Any]:
    """Return the values of a JSON object by key. The reader of each key builds its value.

    Keys without a reader are ignored. If a value does not fit, its key is prepended to the path in the error.
    """
    parts, name = {}, ""
    try:
        for name, read_value in readers.items():
            if name in values:
                parts[name] = read_value(values[name])
    except _Misfit as misfit:  # `name` is the key of the value that does not fit
        misfit.path = f".{name}{misfit.path}"
        raise
    return parts


def _build_mapping(read_key: _Reader, read_value: _Reader, values: dict[str, Any]) -> dict[Any, Any]:
    parts = _read_parts(values, dict.fromkeys(values, read_value))
    return {read_key(name): value for name, value in parts.items()}


def _build_list(list_type: Any, readers: Sequence[_Reader], values: list[Any]) -> Any:
    """Return the list or tuple (`list_type`) of the items that the readers return for `values`.

    A single reader reads all items, as for ``list[int]`` and ``tuple[int, ...]``. Several readers read one
    item each, as for ``tuple[int, str]``. If an item does not fit, its index is prepended to the path in the
    error.
    """
    item_readers = readers if len(readers) > 1 else [readers[0]] * len(values)
    if len(values) != len(item_readers):
        raise _describe_misfit(values, f"a list of {len(readers)}")
    items: list[Any] = []
    try:
        for read_item, value in zip(item_readers, values, strict=True):
            items.append(read_item(value))
    except _Misfit as misfit:
        misfit.path = f"[{len(items)}]{misfit.path}"  # as many items have been read before this one
        raise
    return list_type(items)


def _make_object_builder(owner: Any, closed: bool) -> _Reader:
    """Return a function that builds the dataclass `owner` from a JSON object (see `_build_object`)."""
    # With include_extras, the annotations keep the rules in their metadata.
    hints = typing.get_type_hints(owner, include_extras=True)
    readers, required = {}, []
    for field in dataclasses.fields(owner):
        readers[field.name] = _find_reader(hints[field.name], closed)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(field.name)
    return functools.partial(_build_object, owner, readers, required, closed)


def _build_object(
    owner: Any, readers: Mapping[str, _Reader], required: Sequence[str], closed: bool, values: dict[str, Any]
) -> Any:
    """Build the dataclass `owner` from the JSON object `values`.

    Fields without a value in the object get their defaults.

    Parameters
    ----------
    readers : a reader for each field.
    required : the fields without a default. If one is missing in `values`, `_Misfit` is raised.
    closed : True to raise `_Misfit` for a key that is not a field. Otherwise, the key is ignored.
    """
    # A value with a wrong type is reported before a missing field or an unknown key.
    fields = _read_parts(values, readers)  # only the keys that are fields
    for name in required:
        if name not in fields:
            raise _Misfit(f" is not complete: it has no {name}")
    if closed:
        for name in values:
            if name not in readers:
                raise _Misfit(f".{name} is an unknown key")
    return owner(**fields)


def _describe_misfit(value: Any, noun: str) -> _Misfit:
    """Return the error about a value that is not a `noun`, such as ``is "4", not a whole number``."""
    return _Misfit(f" is {json.dumps(value, default=str)[:200]}, not {noun}")


_JSON_TYPES: Mapping[Any, type] = {tuple: list, list: list, collections.abc.Mapping: dict, Path: str}
"""The types of parsed JSON from which other types are built.

Dataclasses are not listed. They are built from dicts.
"""
# The names of the types of parsed JSON in messages.
_NOUNS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
