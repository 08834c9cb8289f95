"""Flags of the command line as fields of dataclasses: each field has its names, help and metavar beside it.

A request may be composed of other requests (`part`); its flags are then those of its parts as well. The same
names are keywords of the Python API (`make`).
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
    """One flag, as its field declares it."""

    field: str
    part: str
    """The part of the request that has the field; empty: the request itself."""
    names: tuple[str, ...]
    """``--account``, then short forms: ``-A``."""
    type: Any
    """The field's type: str, int, bool, Path or a Literal, also with ``| None``. A flag of the type
    ``tuple[str, ...]`` can be repeated.
    """
    default: Any
    metavar: str
    help: str
    group: str
    """As in `flag`."""
    minimum: float | None

    @property
    def is_negative(self) -> bool:
        """Whether the flag turns off what its field has turned on: ``--no-test`` for ``test = True``."""
        return self.default is True

    def value(self, request: Any) -> Any:
        """Return the value that `request` has for this flag."""
        owner = getattr(request, self.part) if self.part else request
        return getattr(owner, self.field)


USUAL = "Options"
"""The group of those that most calls of a verb need."""


def flag(
    default: Any,
    *names: str,
    help: str,
    metavar: str = "",
    group: str = "",
    minimum: float | None = None,
) -> Any:
    """Return a dataclass field that is a flag.

    Parameters
    ----------
    default : also decides whether the flag was given. The flag of a field that is True turns it off.
    names : the flag's words; default: ``--`` and the field's name.
    help : one line of ``--help``.
    metavar : the value's name in ``--help``.
    group : the heading above it in ``--help``; empty: that of the verb's other options.
    minimum : the smallest number that it takes.
    """
    metadata = {"names": names, "help": help, "metavar": metavar, "group": group, "minimum": minimum}
    return field(default=default, metadata=metadata)


def part(kind: type[Value]) -> Value:
    """Return a dataclass field that holds a request of `kind`, whose flags are those of the whole."""
    part_field: Any = field(default_factory=kind, metadata={"part": kind})
    return typing.cast("Value", part_field)


def declared(owner: type[Any]) -> tuple[Flag, ...]:
    """Return the flags that dataclass `owner` and its parts declare, in order."""
    types = typing.get_type_hints(owner)  # noqa: TID251 - makes options of them
    flags: list[Flag] = []
    for item in dataclasses.fields(owner):
        if "part" in item.metadata:
            inner = declared(item.metadata["part"])
            flags += (dataclasses.replace(each, part=item.name) for each in inner)
        elif "help" in item.metadata:
            metadata = {**item.metadata, "names": item.metadata["names"] or (_long_name(item.name),)}
            flags.append(
                Flag(field=item.name, part="", type=types[item.name], default=item.default, **metadata)
            )
    return tuple(flags)


def _long_name(field_name: str) -> str:
    return f"--{field_name.replace('_', '-')}"


def flags_in(request: Any) -> tuple[str, ...]:
    """Return the flags of `request` that differ from their defaults, by their first name."""
    return tuple(each.names[0] for each in declared(type(request)) if each.value(request) != each.default)


def changed(request: Value, values: Mapping[str, Any]) -> Value:
    """Return `request` with other `values`, each by the name of its field, in whichever part that is.

    Raises
    ------
    TypeError : there is no such field.
    """
    owners = _owners(type(request))
    by_owner: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in owners:
            raise TypeError(f"{type(request).__name__} has no field {name!r}")
        by_owner.setdefault(owners[name], {})[name] = value
    changes = by_owner.pop("", {})
    for owner, inner in by_owner.items():
        changes[owner] = dataclasses.replace(getattr(request, owner), **inner)
    dataclass_value: Any = request  # mypy knows no bound that all dataclasses have
    changed_request: Value = dataclasses.replace(dataclass_value, **changes)
    return changed_request


def value(request: Any, name: str) -> Any:
    """Return the value of the field `name`, in whichever part of `request` that is."""
    owner = _owners(type(request))[name]
    return getattr(getattr(request, owner) if owner else request, name)


def _owners(kind: type[Any]) -> Mapping[str, str]:
    """Return the part that has each field; the request itself has those of the part "" ."""
    owners = {}
    for item in dataclasses.fields(kind):
        owners[item.name] = ""
        for inner in dataclasses.fields(item.metadata["part"]) if "part" in item.metadata else ():
            owners[inner.name] = item.name
    return owners
