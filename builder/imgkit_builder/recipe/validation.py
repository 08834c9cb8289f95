"""Validates parsed data that a person wrote, with pydantic: every mistake at once, with the path of its key.

pydantic is imported when there is data to validate, so that commands which read no recipe start without it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from imgkit_builder.recipe.problems import KeyPath

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

Model = TypeVar("Model")

_EXPECTED = {
    "string_type": "text",
    "path_type": "text",
    "int_type": "an integer",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "names",
    "dataclass_type": "a mapping",
}
"""pydantic's errors about types, with the expected form; ``names``: a mapping of the user's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A value that does not fit its field."""

    path: KeyPath
    kind: Literal["missing", "unknown", "rule", "choice", "type"]
    message: str = ""
    """What is wrong (``rule``), or which form was expected (``type``)."""
    hint: str = ""
    choices: tuple[str, ...] = ()
    """What a ``choice`` can be."""
    is_key: bool = False
    """Whether the last key of `path` is wrong, rather than its value."""


def validate(model: Callable[..., Model], data: Any) -> tuple[Model | None, tuple[Mistake, ...]]:
    """Make a value of the dataclass `model` from `data`; return it, or None and every mistake."""
    from pydantic import ValidationError

    try:
        return adapter(model).validate_python(data), ()
    except ValidationError as error:
        return None, tuple(_mistake(details) for details in error.errors(include_url=False))


@functools.cache
def adapter(model: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of `model`, which takes some time to make."""
    from pydantic import TypeAdapter

    return TypeAdapter(model)


def _mistake(details: ErrorDetails) -> Mistake:
    kind, path, context = details["type"], details["loc"], details.get("ctx", {})
    is_key = path[-1:] == ("[key]",)
    if is_key:
        path = path[:-1]
    if kind == "missing":
        return Mistake(path=path, kind="missing")
    if kind == "unexpected_keyword_argument":
        return Mistake(path=path, kind="unknown", is_key=True)
    if kind == "literal_error":
        return Mistake(path=path, kind="choice", choices=tuple(re.findall("'([^']*)'", context["expected"])))
    if kind == "value_error":
        error = context["error"]
        hint = getattr(error, "hint", "")
        return Mistake(path=path, kind="rule", message=str(error), hint=hint, is_key=is_key)
    return Mistake(path=path, kind="type", message=_EXPECTED[kind])
