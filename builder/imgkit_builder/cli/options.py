"""Make typer options of the fields of a dataclass.

A verb takes the dataclass itself: ``def verb_build(recipe: str = ..., *, request: BuildRequest)``. typer
reads the options from the signature of a function, so `with_options` makes one with a parameter for each
field.
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
# typer exports neither of these classes of click, of which its newer versions have a copy.
ClickContext = Any
HelpFormatter = Any
COMMAND = "imgkit.command"
"""The key of ``Context.meta`` under which a verb finds the arguments after ``--``."""
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY  # typer calls by keyword, so defaults may stand in any order


class Without:
    """Names the fields of a request that a verb does not have as options.

    For example, ``request: Annotated[JobRequest, Without("nodes")]`` has no option ``--nodes``.
    """

    def __init__(self, *fields: str) -> None:
        self.fields = fields


def with_options(verb: Verb, *, quiet: bool = False) -> Verb:
    """Return a function for typer that has an option for each field of the dataclasses that `verb` takes.

    typer makes options of a function's parameters, and knows no dataclasses. So for a parameter of `verb`
    whose type is a dataclass, the returned function has a parameter for each field. For a parameter of the
    type ``tuple[SystemFlags, ...]``, it has one for each flag of all systems (schedulers).

    When typer calls the returned function, that function creates the dataclasses from the values of the
    options, and calls `verb`. The tuple has only the flags of systems of which an option was given.

    Parameters
    ----------
    quiet : do not report plug-ins that cannot be used, as while the shell completes an argument.
    """
    parameters: list[inspect.Parameter] = []
    # By the names of the parameters of `verb`.
    requests: dict[str, _FieldOptions] = {}
    system_requests: dict[str, list[_FieldOptions]] = {}
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        name = parameter.name
        kind, omitted = _split_annotation(parameter.annotation)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            requests[name] = _FieldOptions(name, kind, omitted)
            parameters += requests[name].parameters()
        elif typing.get_origin(kind) is tuple:
            system_requests[name] = []
            for number, flags_class in enumerate(_flags_of_systems(quiet=quiet)):
                field_options = _FieldOptions(f"{name}_{number}", flags_class)
                system_requests[name].append(field_options)
                parameters += field_options.parameters()
        else:
            parameters.append(parameter.replace(kind=_KEYWORD_ONLY))

    @functools.wraps(verb)
    def call_verb(**values: Any) -> None:
        for name, field_options in requests.items():
            values[name] = field_options.pop_instance(values)
        for name, options_of_systems in system_requests.items():
            all_flags = [field_options.pop_instance(values) for field_options in options_of_systems]
            # Flags that equal their defaults were not given, and their system is left out.
            values[name] = tuple(flags for flags in all_flags if flags != type(flags)())
        verb(**values)

    # typer reads both; functools.wraps has copied those of `verb`.
    call_verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call_verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call_verb


def _split_annotation(annotation: Any) -> tuple[Any, Collection[str]]:
    """Return the type of a parameter, and the names of the fields that are to have no option.

    ``Annotated[JobRequest, Without("nodes")] -> JobRequest, ("nodes",)``
    """
    if typing.get_origin(annotation) is not Annotated:
        return annotation, ()
    kind, without = typing.get_args(annotation)
    return kind, without.fields


def field_option(owner: type[Any], field: str) -> Any:
    """Return the typer option that `field` of the dataclass `owner` declares.

    A verb uses it as the default of a parameter, as typer expects.
    """
    flags_by_field = {flag.field: flag for flag in declared_options(owner)}
    return _typer_option(flags_by_field[field])


def _typer_option(flag: Flag) -> Any:
    """Return the typer option for `flag`, to use as the default of a parameter.

    typer makes an option of each parameter whose default is such an object.
    """
    if flag.is_negative:
        default: Any = False  # the value of the option --no-test; the field `test` is True then
    elif isinstance(flag.default, tuple):
        default = list(flag.default)  # typer knows lists as repeated options, and no tuples of any length
    else:
        default = flag.default
    return typer.Option(
        default,
        *flag.names,
        metavar=flag.metavar or None,
        help=flag.help,
        rich_help_panel=flag.group or None,
    )


class _FieldOptions:
    """The options of the dataclass `owner`, apart from its `omitted` fields.

    They are parameters whose names begin with `prefix`. Without the prefix, the flags of two systems could
    not have the same name, and none could be called ``with``, which is a keyword of Python.
    """

    def __init__(self, prefix: str, owner: type[Any], omitted: Collection[str] = ()) -> None:
        self.owner = owner
        self.flags: dict[str, Flag] = {}  # by the name of the parameter
        for flag in declared_options(owner):
            if flag.field not in omitted:
                self.flags[f"{prefix}_{flag.field}"] = flag

    def parameters(self) -> list[inspect.Parameter]:
        """Return a parameter for each option, with the option as its default."""
        parameters = []
        for name, flag in self.flags.items():
            kind = list[str] if isinstance(flag.default, tuple) else flag.type
            option = _typer_option(flag)
            parameters.append(inspect.Parameter(name, _KEYWORD_ONLY, default=option, annotation=kind))
        return parameters

    def pop_instance(self, values: dict[str, Any]) -> Any:
        """Remove the values of these options from `values`, and return an instance of `owner` with them.

        Parameters
        ----------
        values : the values of all of the verb's parameters, as typer passes them.
        """
        fields: dict[str, Any] = {}
        for name, flag in self.flags.items():
            value = values.pop(name)
            if isinstance(value, list):
                fields[flag.field] = tuple(value)
            elif flag.is_negative:
                fields[flag.field] = not value
            else:
                fields[flag.field] = value
        return replace_fields(self.owner(), fields)


class GroupedCommand(TyperCommand):
    """A verb whose help lists its options in groups."""

    default_group = "Options"
    """The heading of the options without a group."""

    def format_options(self, ctx: ClickContext, formatter: HelpFormatter) -> None:
        """Write a section of the help for the arguments, and one for each group of options."""
        # These come first and in this order. Other groups follow.
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], "Advanced": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)  # the names and the help; None for a hidden option
            if record is not None:
                sections.setdefault(self._section_title(parameter), []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def _section_title(self, parameter: Any) -> str:
        """Return the title of the section of the help that lists the argument or option `parameter`."""
        if parameter.param_type_name == "argument":
            return "Arguments"
        return getattr(parameter, "rich_help_panel", None) or self.default_group


class JobCommand(GroupedCommand):
    """A verb that submits jobs, such as ``run``. The command of the job follows ``--``.

    Most of the many options are rarely needed, so that those without a group are listed as advanced.
    """

    default_group = "Advanced"

    def parse_args(self, ctx: ClickContext, args: list[str]) -> Any:
        """Parse the arguments before ``--``, and store those after it in ``ctx.meta`` as the job's command.

        The arguments are split here, because click itself ignores ``--``: in ``imgkit run -- dist-bench``, it
        would take ``dist-bench`` for the argument RECIPE, which the user has left out.
        """
        separator = args.index("--") if "--" in args else len(args)
        own_args = tuple(args[:separator])
        ctx.meta[COMMAND] = tuple(args[separator + 1 :])
        try:
            return super().parse_args(ctx, [*own_args])  # a copy, which click empties
        except Exception as error:
            # Only the error about an unknown option has this attribute. typer does not export its class.
            if hasattr(error, "option_name"):
                scheduler_options.refuse_scheduler_options(own_args, self._own_options(ctx))
            raise

    def _own_options(self, ctx: ClickContext) -> dict[str, bool]:
        """Return the names of the verb's options, and for each whether it takes a value."""
        takes_value = {}
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            if parameter.param_type_name == "option":
                for name in (*parameter.opts, *parameter.secondary_opts):
                    takes_value[name] = not parameter.is_flag
        return takes_value


def _flags_of_systems(*, quiet: bool) -> list[type[Any]]:
    """Return the dataclasses with the flags of all systems (schedulers), each once.

    Plug-ins that cannot be used are reported on stderr, unless `quiet` is set.
    """
    # Not at the top of the module: `imgkit --help` loads it, and should neither import the systems nor search
    # for plug-ins.
    from imgkit_builder.jobs import systems

    installed = systems.load_systems()
    if not quiet:
        for error in installed.errors:
            terminal.print_messages(*f"imgkit: {error}".split("\n"))
    classes = []
    for system in installed.systems.values():
        # Systems without flags have the same class, and so have RunAI and Kubeflow.
        if system.flags not in classes:
            classes.append(system.flags)
    return classes
