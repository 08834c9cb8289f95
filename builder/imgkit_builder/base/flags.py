"""Flags of the command line, declared as fields of dataclasses.

`option_field` makes a field that carries the names, help and metavar of its flag. A request, such as
`JobRequest`, may contain other requests as fields (`part`). Its verb then accepts their flags, too. The names
of the fields are also the keywords of the Python API (`replace_fields`).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Value = TypeVar("Value")
# The key in the metadata of a field that holds a nested request. Its value is the class of that request.
_NESTED = "nested"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of the command line, as a field of a dataclass declares it."""

    field: str
    """The name of the dataclass field, ``stop_before`` for ``--stop-before``."""
    nested_in: str
    """The name of the field that holds the nested request, if the flag belongs to one. Otherwise empty."""
    names: tuple[str, ...]
    """The long name and then the short ones: ``("--account", "-A")``."""
    type: Any
    """The field's type: str, int, bool, Path or a Literal, possibly with ``| None``. A flag with the type
    ``tuple[str, ...]`` can be repeated.
    """
    default: Any
    metavar: str
    help: str
    group: str
    """The heading above the flag in ``--help``; see `option_field`."""

    @property
    def is_negative(self) -> bool:
        """Whether the flag sets a field to False that is True by default: ``--no-test`` for ``test``."""
        return self.default is True

    def value(self, request: Any) -> Any:
        """Return the value of this flag's field in `request`, or in the nested request that holds it."""
        owner = getattr(request, self.nested_in) if self.nested_in else request
        return getattr(owner, self.field)


USUAL = "Options"
"""The heading in ``--help`` above the flags that most calls of a verb need."""


def option_field(
    default: Any,
    *names: str,
    help: str,
    metavar: str = "",
    group: str = "",
) -> Any:
    """Return a dataclass field that is also a flag of the command line.

    Parameters
    ----------
    default : the value of the field if the flag is not given. If it is True, the flag sets the field to
        False.
    names : the names of the flag, such as ``--account``, ``-A``. If there are none, the flag is called ``--``
        and the name of the field.
    help : the description of the flag in ``--help``.
    metavar : the name of the flag's value in ``--help``.
    group : the heading above the flag in ``--help``. If it is empty, the flag is listed with the verb's other
        options.
    """
    metadata = {"names": names, "help": help, "metavar": metavar, "group": group}
    return field(default=default, metadata=metadata)


def part(kind: type[Value], *, group: str = "") -> Value:
    """Return a dataclass field that holds a nested request, so that the dataclass also has its flags.

    For example, ``container: ContainerRequest = part(ContainerRequest)`` gives a `JobRequest` the flags of a
    container.

    Parameters
    ----------
    group : the heading above all of these flags in ``--help``. If it is empty, each flag keeps its own
        heading.
    """
    # Type checkers should see the type of the value that an instance holds, and not a `dataclasses.Field`.
    nested_field: Any = field(default_factory=kind, metadata={_NESTED: kind, "group": group})
    return typing.cast("Value", nested_field)


def declared_options(owner: type[Any]) -> tuple[Flag, ...]:
    """Return the flags of the dataclass `owner` and of its nested requests, in the order of the fields.

    Fields without a help text are not flags.
    """
    type_by_field = typing.get_type_hints(owner)  # noqa: TID251 - makes options of them
    flags: list[Flag] = []
    for field_of_owner in dataclasses.fields(owner):
        metadata = dict(field_of_owner.metadata)
        if _NESTED in metadata:  # `part` made this field, which holds a nested request
            for flag in declared_options(metadata[_NESTED]):
                group = metadata["group"] or flag.group
                flags.append(dataclasses.replace(flag, nested_in=field_of_owner.name, group=group))
        elif "help" in metadata:
            # The field stop_before is the flag --stop-before.
            names = metadata.pop("names") or (f"--{field_of_owner.name.replace('_', '-')}",)
            flag_type = type_by_field[field_of_owner.name]
            flags.append(
                Flag(
                    field=field_of_owner.name,
                    nested_in="",
                    names=names,
                    type=flag_type,
                    default=field_of_owner.default,
                    **metadata,
                )
            )
    return tuple(flags)


def flags_in(request: Any) -> tuple[str, ...]:
    """Return the first names of the flags whose values in `request` differ from their defaults."""
    changed_flags = []
    for declared_flag in declared_options(type(request)):
        if declared_flag.value(request) != declared_flag.default:
            changed_flags.append(declared_flag.names[0])
    return tuple(changed_flags)


def option_arguments(kind: type[Any], request: Any) -> tuple[str, ...]:
    """Return the command-line arguments that produce `request`, such as ``("--time", "1h", "--verbose")``.

    Flags that have their default value are left out.

    Parameters
    ----------
    kind : the dataclass whose flags are written. `request` may be an instance of a subclass with more flags,
        which are left out.
    """
    argv: list[str] = []
    for declared_flag in declared_options(kind):
        flag_value = declared_flag.value(request)
        flag_name = declared_flag.names[0]
        if flag_value == declared_flag.default:
            continue
        if isinstance(flag_value, bool):
            # A flag without a value. Its value differs from the default, so the flag was given.
            argv.append(flag_name)
        elif isinstance(flag_value, tuple):  # the flag can be given several times
            for item in flag_value:
                argv += (flag_name, item)
        else:
            argv += (flag_name, str(flag_value))
    return tuple(argv)


def replace_fields(request: Value, values: Mapping[str, Any]) -> Value:
    """Return a copy of `request` in which the fields named in `values` have new values.

    A field may belong to the request itself or to a nested request. For example, ``{"command": ("ls",)}``
    changes ``request.launch.command``.

    Raises
    ------
    TypeError : neither the request nor a nested request has a field with one of these names.
    """
    remaining = dict(values)
    changes: dict[str, Any] = {}
    dataclass_value: Any = request  # mypy has no type that means "any dataclass"
    for own_field in dataclasses.fields(dataclass_value):
        if own_field.name in remaining:
            changes[own_field.name] = remaining.pop(own_field.name)
        elif _NESTED in own_field.metadata:  # `part` made this field, which holds a nested request
            nested_names = [
                nested_item.name for nested_item in dataclasses.fields(own_field.metadata[_NESTED])
            ]
            nested_changes = {name: remaining.pop(name) for name in nested_names if name in remaining}
            changes[own_field.name] = dataclasses.replace(getattr(request, own_field.name), **nested_changes)
    # Each name that belongs to a field has been removed.
    if remaining:
        raise TypeError(f"{type(request).__name__} has no field {next(iter(remaining))!r}")
    changed_request: Value = dataclasses.replace(dataclass_value, **changes)
    return changed_request
