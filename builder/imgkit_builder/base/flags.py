"""Flags of the command line, declared as fields of dataclasses.

`option_field` makes a field that carries the names, help and metavar of its flag. A request, such as
`JobRequest`, may contain other requests (`part`), whose flags it then has as well. The names of the fields
are also the keywords of the Python API (`replace_fields`).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of the command line, with what its field declares about it."""

    field: str
    """The name of the dataclass field, ``stop_before`` for ``--stop-before``."""
    part: str
    """The name of the part of the request that has the field. Empty if the request itself has it."""
    names: tuple[str, ...]
    """The long name and then the short ones: ``("--account", "-A")``."""
    type: Any
    """The field's type, which is str, int, bool, Path or a Literal, also with ``| None``. A flag of the type
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
        """Return the value of this flag's field in `request` or in the part that has the field."""
        owner = getattr(request, self.part) if self.part else request
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
    """Return a dataclass field that is a flag.

    Parameters
    ----------
    default : the field's value without the flag. If it is True, the flag sets the field to False.
    names : the names of the flag, such as ``--account``, ``-A``. Without any, it is ``--`` and the field's
        name.
    help : the flag's description in ``--help``.
    metavar : the value's name in ``--help``.
    group : the heading above the flag in ``--help``. Empty: the heading of the verb's other options.
    """
    metadata = {"names": names, "help": help, "metavar": metavar, "group": group}
    return field(default=default, metadata=metadata)


def part(kind: type[Value], *, group: str = "") -> Value:
    """Return a dataclass field that holds another request, whose flags the dataclass then has as well.

    ``container: ContainerRequest = part(ContainerRequest)`` gives a `JobRequest` the flags of a container.

    Parameters
    ----------
    group : the heading above all of these flags in ``--help``. Empty: each flag keeps its own heading.
    """
    # For type checkers, the field has the type of the value that an instance holds in it.
    part_field: Any = field(default_factory=kind, metadata={"part": kind, "group": group})
    return typing.cast("Value", part_field)


def declared_options(owner: type[Any]) -> tuple[Flag, ...]:
    """Return the flags that the dataclass `owner` and its parts declare, in the order of the fields.

    A part is a field that contains another request (`part`). Fields without help are no flags.
    """
    types = typing.get_type_hints(owner)  # noqa: TID251 - makes options of them
    flags: list[Flag] = []
    for item in dataclasses.fields(owner):
        if "part" in item.metadata:
            for part_flag in declared_options(item.metadata["part"]):
                group = item.metadata["group"] or part_flag.group
                flags.append(dataclasses.replace(part_flag, part=item.name, group=group))
        elif "help" in item.metadata:  # other fields are no flags
            # The field stop_before is the flag --stop-before.
            names = item.metadata["names"] or (f"--{item.name.replace('_', '-')}",)
            metadata = {**item.metadata, "names": names}
            flags.append(
                Flag(field=item.name, part="", type=types[item.name], default=item.default, **metadata)
            )
    return tuple(flags)


def flags_in(request: Any) -> tuple[str, ...]:
    """Return the first names of the flags whose values in `request` differ from their defaults."""
    names = []
    for declared_flag in declared_options(type(request)):
        if declared_flag.value(request) != declared_flag.default:
            names.append(declared_flag.names[0])
    return tuple(names)


def option_arguments(kind: type[Any], request: Any) -> tuple[str, ...]:
    """Return the arguments of a command line that give the same `request`: ``("--time", "1h", "--verbose")``.

    A flag whose value is its default is left out.

    Parameters
    ----------
    kind : the dataclass whose flags are written. `request` can be of a subclass with more flags.
    """
    argv: list[str] = []
    for declared_flag in declared_options(kind):
        value = declared_flag.value(request)
        name = declared_flag.names[0]
        if value == declared_flag.default:
            continue
        if isinstance(value, bool):
            argv.append(name)
        elif isinstance(value, tuple):
            for item in value:
                argv += (name, item)
        else:
            argv += (name, str(value))
    return tuple(argv)


def replace_fields(request: Value, values: Mapping[str, Any]) -> Value:
    """Return a copy of `request` with other values for the fields that `values` names.

    A field can be one of the request, or of a part, which is a request in a field: ``{"command": ("ls",)}``
    changes ``request.launch.command``.

    Raises
    ------
    TypeError : neither the request nor a part has a field with such a name.
    """
    # Both the request and its parts are frozen, so that each part is replaced once, with all its changes.
    part_of_field = _part_of_field(type(request))
    changes: dict[str, Any] = {}
    part_changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in part_of_field:
            raise TypeError(f"{type(request).__name__} has no field {name!r}")
        part_name = part_of_field[name]
        if part_name:
            part_changes.setdefault(part_name, {})[name] = value
        else:
            changes[name] = value
    for part_name, field_values in part_changes.items():
        changes[part_name] = dataclasses.replace(getattr(request, part_name), **field_values)
    dataclass_value: Any = request  # mypy knows no bound that all dataclasses have
    changed_request: Value = dataclasses.replace(dataclass_value, **changes)
    return changed_request


def _part_of_field(kind: type[Any]) -> Mapping[str, str]:
    """Return for each field the name of the part that has it, or "" if the request itself has it.

    In ``{"directory": "", "launch": "", "command": "launch"}``, `launch` is a part: a field that contains
    another request, which has the field `command`.
    """
    parts = {}
    for item in dataclasses.fields(kind):
        parts[item.name] = ""
        if "part" in item.metadata:
            for part_item in dataclasses.fields(item.metadata["part"]):
                parts[part_item.name] = item.name
    return parts
