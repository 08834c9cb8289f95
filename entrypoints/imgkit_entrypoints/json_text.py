"""Read data that another program, machine or person wrote, and check it by the annotations of dataclasses.

This is the only reader of JSON: every fault of a text is a ValueError. It bounds size, nesting and digits. It
refuses a key that occurs twice, since readers differ in the one that counts. `checked` finds all faults of
parsed data, `read` raises the first.
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
from collections.abc import Mapping
from dataclasses import dataclass
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
    _check_size(text, most_bytes, most_brackets)
    if isinstance(text, bytes):
        text = text.decode()
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise _too_deep() from None
    return _shallow(value)


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
    _check_size(output, MOST_BYTES, MOST_BRACKETS)
    try:
        value, _ = _DECODER.raw_decode(output)
    except RecursionError:
        raise _too_deep() from None
    return _shallow(value)


def _check_size(text: str | bytes, most_bytes: int, most_brackets: int) -> None:
    if len(text) > most_bytes:
        raise ValueError(f"it has more than {most_bytes} bytes")
    if isinstance(text, bytes):
        brackets = text.count(b"[") + text.count(b"{")
    else:
        brackets = text.count("[") + text.count("{")
    if brackets > most_brackets:
        raise ValueError(f"it has more than {most_brackets} lists and objects")


def _shallow(value: Any) -> Any:
    level = [value]
    for _ in range(DEEPEST):
        inner = (
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        )
        level = [child for children in inner for child in children if isinstance(child, dict | list)]
        if not level:
            return value
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError("its brackets are nested too deeply")


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _real(text: str) -> float:
    value = float(text) if len(text) <= _MOST_DIGITS else math.inf
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:_SHOWN]} is too large or has too many digits")
    return value


def _single(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        ((twice, _),) = counts.most_common(1)
        raise ValueError(f"the key {twice[:_SHOWN]!r} occurs twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_single, parse_int=_whole, parse_float=_real, parse_constant=_refuse
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


def read(hint: Any, value: Any, place: str, *, closed: bool = False) -> Any:
    """Build a value of the type `hint`, often a dataclass, from parsed JSON.

    Dataclasses come from objects, whose unknown keys are ignored unless `closed`; tuples and lists from
    arrays; ``X | None`` from null or an X. The types are compared exactly: 1 is no float, true no integer.

    Parameters
    ----------
    place : the value's name in errors.

    Raises
    ------
    ValueError : a value has another type than its field, or a field is missing; names the field.
    """
    made, faults = checked(hint, value, closed=closed)
    if faults:
        raise ValueError(faults[0].text(place))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One value that does not fit the annotation of the field that it is for."""

    path: tuple[str | int, ...]
    """Keys and indices from the outermost value."""
    kind: Literal["missing", "unknown", "type", "choice", "rule"]
    """``rule``: the dataclass refused its values, and `expected` is its reason."""
    expected: Any = None
    """The annotation without ``| None`` (``type``), the values (``choice``) or the keys (``unknown``)."""
    value: Any = None

    def text(self, place: str) -> str:
        """The sentence for an error; `place` is the name of the outermost value."""
        whole = place + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in self.path)
        if self.kind == "missing":
            above = whole.rpartition(".")[0]
            return f"{above} is not complete: it has no {self.path[-1]}"
        if self.kind == "unknown":
            return f"{whole} is an unknown key"
        if self.kind == "rule":
            return str(self.expected)
        allowed = self.expected if self.kind == "choice" else ()
        wanted = " or ".join(allowed) if allowed else _noun(self.expected)
        return f"{whole} is {json.dumps(self.value, default=str)[:200]}, not {wanted}"


def checked(hint: Any, value: Any, *, closed: bool = False) -> tuple[Any, tuple[Fault, ...]]:
    """Build a value of the type `hint` as `read` does, and find every fault; with a fault the value is None.

    Parameters
    ----------
    closed : a key that a dataclass does not have is a fault; by default it is ignored.
    """
    faults: list[Fault] = []
    made = _built(hint, value, (), faults, closed=closed)
    return (None if faults else made), tuple(faults)


def _built(hint: Any, value: Any, path: _Path, faults: list[Fault], *, closed: bool) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in inner:
        return None if value is None else _built(inner[0], value, path, faults, closed=closed)
    if origin is Literal:
        if value not in inner:
            faults.append(Fault(path=path, kind="choice", expected=inner, value=value))
        return value
    if type(value) is not _JSON_TYPES.get(origin or hint, dict if dataclasses.is_dataclass(hint) else hint):
        faults.append(Fault(path=path, kind="type", expected=hint, value=value))
        return None
    data: Any = value  # for the type checker, which keeps what `is not` says
    if dataclasses.is_dataclass(hint):
        return _object(hint, data, path, faults, closed=closed)
    if origin in (tuple, list):
        items = (_built(inner[0], one, (*path, at), faults, closed=closed) for at, one in enumerate(data))
        return origin(items)
    if origin is collections.abc.Mapping:
        return {key: _built(inner[1], one, (*path, key), faults, closed=closed) for key, one in data.items()}
    return Path(data) if hint is Path else data


def _object(owner: Any, value: Mapping[str, Any], path: _Path, faults: list[Fault], *, closed: bool) -> Any:
    before, hints = len(faults), _hints(owner)
    known = {field.name: field for field in dataclasses.fields(owner)}
    made = {
        name: _built(hints[name], value[name], (*path, name), faults, closed=closed)
        for name in known
        if name in value
    }
    missing, nothing = set(known) - set(value), dataclasses.MISSING
    for name, field in known.items():
        if name in missing and field.default is nothing and field.default_factory is nothing:
            faults.append(Fault(path=(*path, name), kind="missing"))
    for name in value if closed else ():
        if name not in known:
            faults.append(Fault(path=(*path, name), kind="unknown", expected=tuple(known)))
    if len(faults) > before:
        return None
    try:
        return owner(**made)
    except ValueError as error:
        faults.append(Fault(path=path, kind="rule", expected=str(error)))
        return None


@functools.cache
def _hints(owner: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(owner)


_Path = tuple[str | int, ...]
_JSON_TYPES: Mapping[Any, type] = {tuple: list, list: list, collections.abc.Mapping: dict, Path: str}
"""Types of Python -> those of the parsed JSON; a dataclass comes from a dict, others from themselves."""
_NOUNS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}


def _noun(hint: Any) -> str:
    return _NOUNS.get(_JSON_TYPES.get(typing.get_origin(hint) or hint, hint), "an object")
