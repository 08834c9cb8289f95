"""Flags of the command line, declared as fields of dataclasses.

`option_field` makes a field that carries the names, help and metavar of its flag. A request, such as
`JobRequest`, may contain other requests as fields (`nested_request`). Its verb then accepts their flags, too.
The names of the fields are also the keywords of the Python API (`replace_fields`).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Value = TypeVar("Value")
# The key in the metadata of the fields that `nested_request` makes. Its value is the class of the request.
_NESTED_CLASS = "nested"


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


def nested_request(request_class: type[Value], *, group: str = "") -> Value:
    """Return a dataclass field that holds a nested request, so that the dataclass also has its flags.

    For example, ``container: ContainerRequest = nested_request(ContainerRequest)`` gives a `JobRequest` the
    flags of a container. `declared_options` and `replace_fields` find the class in the field's metadata.

    Parameters
    ----------
    group : the heading above all of these flags in ``--help``. If it is empty, each flag keeps its own
        heading.
    """
    metadata = {_NESTED_CLASS: request_class, "group": group}
    nested_field: Any = field(default_factory=request_class, metadata=metadata)
    # Type checkers should see the type of the value that an instance holds, and not a `dataclasses.Field`.
    return typing.cast("Value", nested_field)


def declared_options(owner: type[Any]) -> tuple[Flag, ...]:
    """Return the flags of the dataclass `owner` and of its nested requests, in the order of the fields.

    A nested request contains no further requests. Fields without a help text are not flags.
    """
    type_by_field = typing.get_type_hints(owner)  # noqa: TID251 - makes options of them
    flags: list[Flag] = []
    for owner_field in dataclasses.fields(owner):
        metadata = owner_field.metadata
        if _NESTED_CLASS in metadata:  # `nested_request` made this field
            for flag in declared_options(metadata[_NESTED_CLASS]):
                group = metadata["group"] or flag.group
                flags.append(dataclasses.replace(flag, nested_in=owner_field.name, group=group))
        elif "help" in metadata:  # `option_field` made this field
            flags.append(_make_flag(owner_field, type_by_field[owner_field.name]))
    return tuple(flags)


def _make_flag(flag_field: dataclasses.Field[Any], flag_type: Any) -> Flag:
    """Return the flag that `flag_field`, a dataclass field made by `option_field`, declares."""
    metadata = flag_field.metadata
    # Without names, the field stop_before is the flag --stop-before.
    names = metadata["names"] or (f"--{flag_field.name.replace('_', '-')}",)
    return Flag(
        field=flag_field.name,
        nested_in="",
        names=names,
        type=flag_type,
        default=flag_field.default,
        metavar=metadata["metavar"],
        help=metadata["help"],
        group=metadata["group"],
    )


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
            continue
        # A flag that can be given several times has a tuple as its value.
        items = flag_value if isinstance(flag_value, tuple) else (str(flag_value),)
        for item in items:
            argv += (flag_name, item)
    return tuple(argv)


def replace_fields(request: Value, values: Mapping[str, Any]) -> Value:
    """Return a copy of `request` in which the fields named in `values` have new values.

    A field may belong to the request itself or to a nested request. For example, ``{"command": ("ls",)}``
    changes ``request.launch.command``.

    Raises
    ------
    TypeError : neither the request nor a nested request has a field with one of these names.
    """
    remaining = dict(values)  # an item is removed when the field with its name is found
    changes: dict[str, Any] = {}
    dataclass_value: Any = request  # mypy has no type that means "any dataclass"
    for own_field in dataclasses.fields(dataclass_value):
        name = own_field.name
        if name in remaining:
            changes[name] = remaining.pop(name)
        elif _NESTED_CLASS in own_field.metadata:  # `nested_request` made this field
            nested_changes = _take_fields(own_field.metadata[_NESTED_CLASS], remaining)
            changes[name] = dataclasses.replace(getattr(request, name), **nested_changes)
    if remaining:
        raise TypeError(f"{type(request).__name__} has no field {next(iter(remaining))!r}")
    changed_request: Value = dataclasses.replace(dataclass_value, **changes)
    return changed_request


def _take_fields(owner: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Remove the items named like a field of the dataclass `owner` from `values`, and return them."""
    names = [owner_field.name for owner_field in dataclasses.fields(owner)]
    return {name: values.pop(name) for name in names if name in values}
