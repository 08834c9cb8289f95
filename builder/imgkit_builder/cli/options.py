"""Options that are fields of a dataclass: `with_options` writes them into the signature that typer reads.

A verb takes the dataclass itself: ``def verb_build(recipe: str = ..., *, request: BuildRequest)``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from imgkit_builder.base.flags import Flag, declared_options, replace_fields
from imgkit_builder.cli import scheduler_options
from imgkit_entrypoints import terminal

Verb = Callable[..., None]
COMMAND = "imgkit.command"
"""Key of ``Context.meta``: the arguments behind ``--``."""
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY  # typer calls by keyword, so defaults may stand in any order


class Without:
    """Fields of a request that are no options of a verb: ``Annotated[JobRequest, Without("nodes")]``."""

    def __init__(self, *fields: str) -> None:
        self.fields = fields


def with_options(verb: Verb, *, quiet: bool = False) -> Verb:
    """Return a function for typer that has an option for each field of the dataclasses that `verb` takes.

    typer makes options of a function's parameters. For each parameter of `verb` whose type is a dataclass,
    the function has a parameter for each field. For a parameter of the type ``tuple[SystemFlags, ...]``, it
    has those of the flags of all systems. When typer calls the function, it creates the dataclasses from the
    options' values, and calls `verb`. The tuple has only the systems of which an option was given.

    Parameters
    ----------
    quiet : do not report plug-ins that cannot be used.
    """
    parameters: list[inspect.Parameter] = []
    requests: dict[str, _FieldOptions] = {}
    system_requests: dict[str, list[_FieldOptions]] = {}
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        name = parameter.name
        kind = parameter.annotation
        omitted: Collection[str] = ()
        if typing.get_origin(kind) is Annotated:
            kind, without = typing.get_args(kind)
            omitted = without.fields
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            requests[name] = _FieldOptions(name, kind, omitted)
            parameters += requests[name].parameters()
        elif typing.get_origin(kind) is tuple:
            system_requests[name] = []
            for number, owner in enumerate(_flags_of_systems(quiet=quiet)):
                field_options = _FieldOptions(f"{name}_{number}", owner)
                system_requests[name].append(field_options)
                parameters += field_options.parameters()
        else:
            parameters.append(parameter.replace(kind=_KEYWORD_ONLY))

    @functools.wraps(verb)
    def call_verb(**values: Any) -> None:
        for name, field_options in requests.items():
            values[name] = field_options.take(values)
        for name, options_of_systems in system_requests.items():
            all_flags = [field_options.take(values) for field_options in options_of_systems]
            values[name] = tuple(flags for flags in all_flags if flags != type(flags)())
        verb(**values)

    # typer reads both; functools.wraps has copied those of `verb`.
    call_verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call_verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call_verb


def field_option(owner: type[Any], field: str) -> Any:
    """Return the option that `field` of the dataclass `owner` declares, as a parameter's default."""
    flags_of_fields = {flag.field: flag for flag in declared_options(owner)}
    return _typer_option(flags_of_fields[field])


def _typer_option(flag: Flag) -> Any:
    """Return the typer option of `flag`, as a parameter's default."""
    default = flag.default
    if isinstance(default, tuple):
        default = list(default)  # typer takes lists only
    if flag.is_negative:
        default = False  # --no-test is not given
    return typer.Option(
        default,
        *flag.names,
        metavar=flag.metavar or None,
        min=flag.minimum,
        help=flag.help,
        rich_help_panel=flag.group or None,
    )


class _FieldOptions:
    """The options of one dataclass without `omitted` fields, as parameters whose names begin with `prefix`.

    Without the prefix, fields of two systems could not have the same name, and no field could be named
    ``with``, which is a keyword of Python.
    """

    def __init__(self, prefix: str, owner: type[Any], omitted: Collection[str] = ()) -> None:
        self.owner = owner
        self.flags = {
            f"{prefix}_{flag.field}": flag for flag in declared_options(owner) if flag.field not in omitted
        }

    def parameters(self) -> list[inspect.Parameter]:
        """Return one parameter for each option."""
        parameters = []
        for name, flag in self.flags.items():
            kind = list[str] if isinstance(flag.default, tuple) else flag.type
            option = _typer_option(flag)
            parameters.append(inspect.Parameter(name, _KEYWORD_ONLY, default=option, annotation=kind))
        return parameters

    def take(self, values: dict[str, Any]) -> Any:
        """Remove the values of the options from `values`, and return the dataclass with these values."""
        fields = {}
        for name, flag in self.flags.items():
            value = values.pop(name)
            if isinstance(value, list):
                value = tuple(value)
            if flag.is_negative:
                value = not value
            fields[flag.field] = value
        return replace_fields(self.owner(), fields)


class GroupedCommand(TyperCommand):
    """A verb whose help lists its options in groups."""

    default_group = "Options"
    """Heading of the options without a group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for the arguments, and one for each group of options."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], "Advanced": []}
        for parameter in self.get_params(ctx):
            title = getattr(parameter, "rich_help_panel", None) or self.default_group
            if parameter.param_type_name == "argument":
                title = "Arguments"
            record = parameter.get_help_record(ctx)
            if record:  # hidden options have none
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class JobCommand(GroupedCommand):
    """A verb that submits jobs: a command follows ``--``, and most of its many options are rarely needed."""

    default_group = "Advanced"

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the arguments before ``--``, and keep the others as the command.

        click would take the first word of the command for RECIPE where that is left out.
        """
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[COMMAND] = tuple(args[end + 1 :])
        try:
            return super().parse_args(ctx, args[:end])
        except Exception as error:
            # typer exports no class for its error about an unknown option.
            if hasattr(error, "option_name"):
                scheduler_options.refuse_scheduler_options(args[:end], self._own_options(ctx))
            raise

    def _own_options(self, ctx: Any) -> dict[str, bool]:
        """Return the name of each option, and whether it takes a value."""
        takes_value = {}
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            if parameter.param_type_name == "option":
                for name in (*parameter.opts, *parameter.secondary_opts):
                    takes_value[name] = not parameter.is_flag
        return takes_value


def _flags_of_systems(*, quiet: bool) -> list[type[Any]]:
    """Return the dataclasses of all systems' flags. Report plug-ins that cannot be used, unless `quiet`."""
    # Not at the top: `imgkit --help` loads this module, and must neither import systems nor find plug-ins.
    from imgkit_builder.jobs import systems

    installed = systems.load_systems()
    if not quiet:
        for error in installed.errors:
            terminal.print_messages(*f"imgkit: {error}".split("\n"))
    # Systems without flags have a class in common, and so have RunAI and Kubeflow.
    return list(dict.fromkeys(system.flags for system in installed.systems.values()))
