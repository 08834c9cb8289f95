"""Options that are fields of a dataclass: `with_options` writes them into the signature that typer reads.

A verb takes the dataclass itself: ``def verb_build(recipe: str = ..., *, request: BuildRequest)``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from imgkit_builder.base.flags import Flag, changed, declared
from imgkit_entrypoints import terminal

Verb = Callable[..., None]
COMMAND = "imgkit.command"
"""Key of ``Context.meta``: the arguments behind ``--``."""
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY  # typer calls by keyword, so defaults may stand in any order


def with_options(verb: Verb, *, quiet: bool = False) -> Verb:
    """Return a function for typer that has an option for each field of the dataclasses that `verb` takes.

    The options stand where `verb` has a parameter with a dataclass as its type; a parameter of the type
    ``tuple[SystemFlags, ...]`` stands for those of all systems. The function creates the dataclasses with the
    options' values, and calls `verb`. Of the systems, it passes on those of which an option was given.

    Parameters
    ----------
    quiet : do not report plug-ins that cannot be used.
    """
    parameters: list[inspect.Parameter] = []
    requests: dict[str, _FieldOptions] = {}
    system_requests: dict[str, list[_FieldOptions]] = {}
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        name, kind = parameter.name, parameter.annotation
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            requests[name] = _FieldOptions(name, kind)
            parameters += requests[name].parameters()
        elif typing.get_origin(kind) is tuple:
            system_requests[name] = []
            for number, owner in enumerate(_flags_of_systems(quiet=quiet)):
                request = _FieldOptions(f"{name}_{number}", owner)
                system_requests[name].append(request)
                parameters += request.parameters()
        else:
            parameters.append(parameter.replace(kind=_KEYWORD_ONLY))

    @functools.wraps(verb)
    def call_verb(**values: Any) -> None:
        for name, request in requests.items():
            values[name] = request.take(values)
        for name, several in system_requests.items():
            all_flags = [request.take(values) for request in several]
            values[name] = tuple(flags for flags in all_flags if flags != type(flags)())
        verb(**values)

    call_verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call_verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call_verb


def field_option(owner: type[Any], field: str) -> Any:
    """Return the option that `field` of the dataclass `owner` declares, as a parameter's default."""
    return _typer_option(next(flag for flag in declared(owner) if flag.field == field))


def _typer_option(flag: Flag) -> Any:
    default = flag.default
    if isinstance(default, tuple):
        default = list(default)
    return typer.Option(
        False if flag.is_negative else default,
        *flag.names,
        metavar=flag.metavar or None,
        min=flag.minimum,
        help=flag.help,
        rich_help_panel=flag.group or None,
    )


class _FieldOptions:
    """The options of one dataclass, as parameters whose names begin with `prefix`.

    Without it, two systems could not have a field of the same name, nor a field the name ``with``.
    """

    def __init__(self, prefix: str, owner: type[Any]) -> None:
        self.owner = owner
        self.flags = {f"{prefix}_{flag.field}": flag for flag in declared(owner)}

    def parameters(self) -> list[inspect.Parameter]:
        """Return one parameter for each option."""
        parameters = []
        for name, flag in self.flags.items():
            kind = list[str] if isinstance(flag.default, tuple) else flag.type
            option = _typer_option(flag)
            parameters.append(inspect.Parameter(name, _KEYWORD_ONLY, default=option, annotation=kind))
        return parameters

    def take(self, values: dict[str, Any]) -> Any:
        """Remove the options from `values`, and return the dataclass that has them as its fields."""
        fields = {}
        for name, flag in self.flags.items():
            value = values.pop(name)
            if isinstance(value, list):
                value = tuple(value)
            fields[flag.field] = not value if flag.is_negative else value
        return changed(self.owner(), fields)


class JobCommand(TyperCommand):
    """A verb that submits jobs: a command follows ``--``, and most of its many options are rarely needed."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the arguments before ``--``, and keep the others as the command: RECIPE may be left out."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[COMMAND] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options of each group, and those of no group as "Advanced"."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], "Advanced": []}
        for parameter in self.get_params(ctx):
            title = getattr(parameter, "rich_help_panel", None) or "Advanced"
            if parameter.param_type_name == "argument":
                title = "Arguments"
            if record := parameter.get_help_record(ctx):
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _flags_of_systems(*, quiet: bool) -> list[type[Any]]:
    """Return the dataclass of each system's flags; report plug-ins that cannot be used, unless `quiet`."""
    # Not at the top: `imgkit --help` loads this module, and must neither import systems nor find plug-ins.
    from imgkit_builder.jobs import systems

    installed = systems.installed()
    if not quiet:
        for error in installed.errors:
            terminal.err(*f"imgkit: {error}".split("\n"))
    # Systems without flags have a class in common, and so have RunAI and Kubeflow.
    return list(dict.fromkeys(system.flags for system in installed.systems.values()))
