"""Validate data from YAML or TOML with pydantic, and report every mistake with the path of its key.

pydantic is imported only when there is data to validate, so commands that read no recipe start faster.
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
"""pydantic's name for an error about a type -> the form that was expected. ``names`` is a mapping whose keys
the user chooses, such as ``env``."""


def make_rule(
    check: Callable[[Any], object], *, required: bool = False, core_schema: Mapping[str, Any] | None = None
) -> Rule:
    """Return a rule for pydantic that refuses a value if `check` raises a UsageError for it.

    For example, the type of a field may be ``Annotated[str, make_rule(check_host)]``.

    Parameters
    ----------
    required : whether to check an empty value, too. By default an empty value means "not set", and passes.
    core_schema : pydantic's schema for the value before the check. None for that of the annotated type.
    """

    def find_fault(value: Any) -> Iterator[Fault]:
        is_unset = not value and not required
        if is_unset:
            return
        try:
            check(value)
        except UsageError as error:
            yield error.what, error.hint or ""

    return Rule(find_fault, core=core_schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A value that its field does not allow."""

    path: KeyPath
    kind: Literal["missing", "unknown", "rule", "choice", "type"]
    message: str
    hint: str = ""
    expected: str = ""
    """The form that the value should have. Set for the kind ``type``."""
    choices: tuple[str, ...] = ()
    """The allowed values. Set for the kind ``choice``."""
    is_key: bool = False
    """Whether the last key of `path` is wrong, rather than its value."""

    @property
    def is_value(self) -> bool:
        """Whether `path` has a value, and that value is wrong."""
        return not self.is_key and self.kind != "missing"


def validate(model: Callable[..., Model], data: Any) -> tuple[Model | None, tuple[Mistake, ...]]:
    """Make an instance of the dataclass `model` from `data`, which was read from YAML or TOML.

    Return the instance and no mistakes, or None and every mistake in `data`.
    """
    from pydantic import ValidationError

    try:
        return adapter(model).validate_python(data), ()
    except ValidationError as error:
        mistakes = [_to_mistake(details, model) for details in error.errors(include_url=False)]
        return None, tuple(mistakes)


@functools.cache
def adapter(model: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator for `model`. It is cached, because it takes some time to create."""
    from pydantic import TypeAdapter

    return TypeAdapter(model)


def _to_mistake(details: ErrorDetails, model: Any) -> Mistake:
    """Convert `details`, one of pydantic's errors about an instance of `model`, to a `Mistake`.

    Each kind of error that is not handled by name means a wrong type, and must have words in `_EXPECTED`.
    """
    kind = details["type"]
    path = details["loc"]
    context = details.get("ctx", {})
    # If the key of a mapping is wrong, and not its value, pydantic adds "[key]" to the path.
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
    """Yield the path of every key of the dataclass `model`, such as ``("image", "pip", "packages")``.

    Keys of nested dataclasses are included. The paths contain no indices of lists. `ANY` stands for a key
    that the user chooses, as below ``env``.
    """
    annotations = typing.get_type_hints(model)  # noqa: TID251 - lists the keys of a recipe
    for field in dataclasses.fields(model):
        key_path = (*path, field.metadata.get("alias", field.name))
        yield key_path
        annotation = annotations[field.name]
        child_path = key_path
        # A mapping whose keys the user chooses, such as `env`.
        if typing.get_origin(annotation) is collections.abc.Mapping:
            child_path = (*key_path, ANY)
        for nested_type in (annotation, *typing.get_args(annotation)):
            if dataclasses.is_dataclass(nested_type):
                yield from key_paths(nested_type, child_path)


def allowed_keys(path: KeyPath, model: Any) -> list[str]:
    """Return the keys that `model` allows in place of the last key of `path`."""
    parents = [key for key in path[:-1] if isinstance(key, str)]  # without indices of lists
    names = []
    for *pattern, name in key_paths(model):
        if len(pattern) == len(parents) and all(map(_is_key, parents, pattern)):
            names.append(name)
    return names


def _is_key(key: str, pattern: str) -> bool:
    """Return whether `key` matches `pattern`, a key from `key_paths`."""
    return pattern in (key, ANY)
