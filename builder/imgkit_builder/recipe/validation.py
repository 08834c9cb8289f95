"""Validates parsed data that a person wrote, with pydantic: every mistake at once, with the path of its key.

pydantic is imported when there is data to validate, so that commands which read no recipe start without it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from imgkit_builder.recipe.problems import ANY, KeyPath, allowed_hint
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import Fault, Rule

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

Model = TypeVar("Model")

_EXPECTED = {
    "string_type": "text",
    "path_type": "text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "names",
    "dataclass_type": "a mapping",
}
"""pydantic's errors about types -> the form that it expected. ``names`` is a mapping whose keys the user
chooses, such as ``env``."""


def rule_of(
    check: Callable[[Any], object], *, required: bool = False, core: Mapping[str, Any] | None = None
) -> Rule:
    """Return a rule for pydantic that refuses a value if `check` raises a UsageError for it.

    Parameters
    ----------
    required : check an empty value, too. Otherwise it stands for "not set", and passes.
    core : see `Rule`.
    """

    def rule(value: Any) -> Iterator[Fault]:
        if not value and not required:
            return
        try:
            check(value)
        except UsageError as error:
            yield error.what, error.hint or ""

    return Rule(rule, core=core)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A value that does not fit its field."""

    path: KeyPath
    kind: Literal["missing", "unknown", "rule", "choice", "type"]
    message: str
    hint: str = ""
    expected: str = ""
    """The form that a ``type`` should have."""
    choices: tuple[str, ...] = ()
    """What a ``choice`` can be."""
    is_key: bool = False
    """Whether the last key of `path` is wrong, rather than its value."""

    @property
    def is_value(self) -> bool:
        """Whether there is a value at `path`, and it is wrong."""
        return not self.is_key and self.kind != "missing"


def validate(model: Callable[..., Model], data: Any) -> tuple[Model | None, tuple[Mistake, ...]]:
    """Make a value of the dataclass `model` from `data`, as it was read from YAML or TOML.

    Return the value and no mistakes, or None and every mistake in `data`.
    """
    from pydantic import ValidationError

    try:
        return adapter(model).validate_python(data), ()
    except ValidationError as error:
        mistakes = [_to_mistake(details, model) for details in error.errors(include_url=False)]
        return None, tuple(mistakes)


@functools.cache
def adapter(model: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of `model`, which takes some time to make."""
    from pydantic import TypeAdapter

    return TypeAdapter(model)


def _to_mistake(details: ErrorDetails, model: Any) -> Mistake:
    """Convert one of pydantic's errors about a value of the class `model` to our form."""
    kind = details["type"]
    path = details["loc"]
    context = details.get("ctx", {})
    # pydantic ends the path with "[key]" if the key of a mapping is wrong, and not its value.
    is_key = path[-1:] == ("[key]",)
    if is_key:
        path = path[:-1]
    if kind == "missing":
        return Mistake(path=path, kind="missing", message="is missing")
    if kind == "unexpected_keyword_argument":
        hint = allowed_hint(str(path[-1]), allowed_keys(path, model))
        return Mistake(path=path, kind="unknown", message="unknown key", hint=hint, is_key=True)
    if kind == "literal_error":
        names = tuple(re.findall("'([^']*)'", context["expected"]))  # "'keep', 'ignore' or 'drop'"
        return Mistake(path=path, kind="choice", message="is not known", choices=names)
    if kind == "value_error":
        error = context["error"]
        hint = getattr(error, "hint", "")
        return Mistake(path=path, kind="rule", message=str(error), hint=hint, is_key=is_key)
    return Mistake(path=path, kind="type", message=f"must be {_EXPECTED[kind]}", expected=_EXPECTED[kind])


def key_paths(model: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key of the dataclass `model` and of those in it: ``("image", "pip", "packages")``.

    The paths have no indices of lists. `ANY` stands for a key that the user chooses, as below ``env``.
    """
    hints = typing.get_type_hints(model)  # noqa: TID251 - lists the keys of a recipe
    for field in dataclasses.fields(model):
        key_path = (*path, field.metadata.get("alias", field.name))
        yield key_path
        hint = hints[field.name]
        child_path = key_path
        # A mapping whose keys the user chooses, such as `env`.
        if typing.get_origin(hint) is collections.abc.Mapping:
            child_path = (*key_path, ANY)
        for candidate in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(candidate):
                yield from key_paths(candidate, child_path)


def allowed_keys(path: KeyPath, model: Any) -> list[str]:
    """Return the keys that `model` allows beside the last key of `path`."""
    parents = [key for key in path[:-1] if isinstance(key, str)]  # without indices of lists
    names = []
    for *pattern, name in key_paths(model):
        if len(pattern) == len(parents) and all(map(_is_key, parents, pattern)):
            names.append(name)
    return names


def _is_key(key: str, pattern: str) -> bool:
    return pattern in (key, ANY)
