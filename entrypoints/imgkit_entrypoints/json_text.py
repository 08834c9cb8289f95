"""Read JSON that another program or machine wrote: every fault of it is a ValueError."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

Value = TypeVar("Value")

_SHOWN = 60
"""Characters of a wrong value that a message repeats."""


def parse(text: str | bytes) -> Any:
    """Parse a JSON text, as json.loads does.

    Raises
    ------
    ValueError : no JSON, brackets thousands deep, or NaN or Infinity, which JSON does not have.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("its brackets lie too deep within each other") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def typed(value: Value) -> Value:
    """Return the dataclass `value`, which was made from parsed JSON, if its fields have the declared types.

    Raises
    ------
    ValueError : a field has another type.
    """
    hints = typing.get_type_hints(type(value))
    for known in dataclasses.fields(value):  # type: ignore[arg-type]
        found = getattr(value, known.name)
        if not _fits(found, hints[known.name]):
            raise ValueError(f"{known.name} is {repr(found)[:_SHOWN]}")
    return value


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return isinstance(value, typing.cast("type", hint)) and typed(value) is value
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(one, inner[0]) for one in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(key, inner[0]) and _fits(one, inner[1]) for key, one in value.items()
        )
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is typing.Literal:
        return value in inner
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)
