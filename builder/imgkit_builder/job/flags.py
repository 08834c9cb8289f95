"""Flags of ``imgkit submit``, declared as fields of frozen dataclasses.

`Request` declares the flags of every job, and each system has a class for its own. ``cli/job_flags.py`` turns
them into options.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag, as its field declares it."""

    field: str
    names: tuple[str, ...]
    """``--account``, then short forms: ``-A``."""
    type: Any
    """The field's type: str, int, bool, Path or a Literal, also with ``| None``. A flag of the type
    ``tuple[str, ...]`` can be repeated.
    """
    default: Any
    metavar: str
    help: str
    choices: tuple[str, ...]
    """The values that a Literal flag takes; empty for other types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFlags:
    """A system without flags of its own."""


def flag(default: Any, *names: str, help: str, metavar: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that is a flag.

    Parameters
    ----------
    default : also decides whether the flag was given.
    names : the flag's words; default: ``--`` and the field's name.
    help : one line of ``imgkit submit --help``.
    metavar : the value's name in ``--help``.
    choices : the values that the flag takes; default: those of the field's Literal type.
    """
    return dataclasses.field(
        default=default, metadata={"names": names, "help": help, "metavar": metavar, "choices": choices}
    )


def declared(owner: type[Any]) -> tuple[Flag, ...]:
    """The flags that dataclass `owner` declares, in order."""
    types = typing.get_type_hints(owner)
    return tuple(
        Flag(
            field=known.name,
            names=known.metadata["names"] or (f"--{known.name.replace('_', '-')}",),
            type=types[known.name],
            default=known.default,
            metavar=known.metadata["metavar"],
            help=known.metadata["help"],
            choices=known.metadata["choices"] or _literals(types[known.name]),
        )
        for known in dataclasses.fields(owner)
        if "help" in known.metadata
    )


def given(flags: Any) -> tuple[str, ...]:
    """The flags in `flags` that differ from their defaults, by their first name."""
    return tuple(
        known.names[0] for known in declared(type(flags)) if getattr(flags, known.field) != known.default
    )


def _literals(kind: Any) -> tuple[str, ...]:
    """The values of a Literal, or of a Literal or None; empty for other types."""
    for part in (kind, *typing.get_args(kind)):
        if typing.get_origin(part) is typing.Literal:
            return typing.get_args(part)
    return ()
