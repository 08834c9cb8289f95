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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from imgkit_entrypoints import files

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
    return _decode(text, _DECODER.decode, most_bytes, most_brackets)


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
    text = output[start : start + MOST_BYTES]
    return _decode(text, lambda text: _DECODER.raw_decode(text)[0], MOST_BYTES, MOST_BRACKETS)


def _decode(text: str | bytes, decode: Callable[[str], Any], most_bytes: int, most_brackets: int) -> Any:
    if len(text) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    if isinstance(text, bytes):
        text = text.decode()
    if text.count("[") + text.count("{") > most_brackets:
        raise ValueError(f"it has more than {most_brackets} lists and objects")
    too_deep = ValueError("its brackets are nested too deeply")
    try:
        value = decode(text)
    except RecursionError:
        raise too_deep from None
    containers = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST + 1):
        if not containers:
            return value
        children = itertools.chain.from_iterable(
            container.values() if isinstance(container, dict) else container for container in containers
        )
        containers = [child for child in children if isinstance(child, dict | list)]
    raise too_deep


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _real(text: str) -> float:
    value = float(text) if len(text) <= _MOST_DIGITS else math.inf
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:_SHOWN]} is too large or has too many digits")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        ((key, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key[:_SHOWN]!r} occurs twice")
    return values


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_float=_real, parse_constant=_refuse
)


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
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


def read(hint: Any, value: Any, name: str, *, closed: bool = False) -> Any:
    """Build a value of the type `hint`, often a dataclass, from parsed JSON.

    Dataclasses come from objects, whose unknown keys are ignored unless `closed`; tuples and lists from
    arrays; ``X | None`` from null or an X. The types are compared exactly: 1 is no float, true no integer.

    Parameters
    ----------
    name : the value's name in errors.

    Raises
    ------
    ValueError : a value has another type than its field, a field is missing, or the dataclass refuses it.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in inner:
        return None if value is None else read(inner[0], value, name, closed=closed)
    if origin is Literal:
        if value not in inner:
            raise _mismatch(name, value, " or ".join(inner))
        return value
    kind = _JSON_TYPES.get(origin or hint, dict if dataclasses.is_dataclass(hint) else hint)
    if type(value) is not kind:
        raise _mismatch(name, value, _NOUNS.get(kind, "an object"))
    data: Any = value  # for the type checker, which keeps what `is not` says
    if dataclasses.is_dataclass(hint):
        return _read_dataclass(hint, data, name, closed=closed)
    if origin in (tuple, list):
        items = (read(inner[0], item, f"{name}[{n}]", closed=closed) for n, item in enumerate(data))
        return origin(items)
    if origin is collections.abc.Mapping:
        return {key: read(inner[1], item, f"{name}.{key}", closed=closed) for key, item in data.items()}
    return Path(data) if hint is Path else data


def _read_dataclass(hint: Any, value: Mapping[str, Any], name: str, *, closed: bool) -> Any:
    hints, fields = _type_hints(hint), {field.name: field for field in dataclasses.fields(hint)}
    values = {
        key: read(hints[key], value[key], f"{name}.{key}", closed=closed) for key in fields if key in value
    }
    for key, field in fields.items():
        is_required = field.default is field.default_factory is dataclasses.MISSING
        if is_required and key not in value:
            raise ValueError(f"{name} is not complete: it has no {key}")
    for key in value if closed else ():
        if key not in fields:
            raise ValueError(f"{name}.{key} is an unknown key")
    return hint(**values)


def _mismatch(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{name} is {json.dumps(value, default=str)[:200]}, not {expected}")


@functools.cache
def _type_hints(hint: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(hint)


_JSON_TYPES: Mapping[Any, type] = {tuple: list, list: list, collections.abc.Mapping: dict, Path: str}
"""Types of Python -> those of the parsed JSON; a dataclass comes from a dict, others from themselves."""
_NOUNS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
