"""Turn the fields of a dataclass into typer options.

A verb has the dataclass as a parameter: ``def verb_build(recipe: str = ..., *, request: BuildRequest)``.
typer knows no dataclasses. It reads options from the signature of a function, so `with_options` makes a
function that has a parameter for each field.
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
# These classes belong to click. typer does not export them, and newer versions of typer contain a copy of
# click.
ClickContext = Any
HelpFormatter = Any
COMMAND = "imgkit.command"
"""The key of ``Context.meta`` under which a verb finds the job's command, the arguments after ``--``."""
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY  # typer calls by keyword, so defaults may stand in any order


class Without:
    """The fields of a request that should not become options of a verb.

    For example, ``request: Annotated[JobRequest, Without("nodes")]`` has no option ``--nodes``.
    """

    def __init__(self, *fields: str) -> None:
        self.fields = fields


def with_options(verb: Verb, *, quiet: bool = False) -> Verb:
    """Return a function for typer that has an option for each field of the dataclasses that `verb` takes.

    typer makes options from the parameters of a function, and knows no dataclasses. If a parameter of `verb`
    has a dataclass as its type, the returned function has a parameter for each field instead. If the type is
    ``tuple[SystemFlags, ...]``, the returned function has a parameter for each flag of all systems
    (schedulers).

    When typer calls the returned function, it creates the dataclasses from the values of the options, and
    calls `verb` with them. The tuple then contains only the flags of systems for which an option was given.

    Parameters
    ----------
    quiet : do not report plug-ins that cannot be used. This is for shell completion.
    """
    parameters: list[inspect.Parameter] = []
    # Both are keyed by the name of the parameter of `verb`.
    requests: dict[str, _FieldOptions] = {}
    system_requests: dict[str, list[_FieldOptions]] = {}
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        name = parameter.name
        kind, omitted = _split_annotation(parameter.annotation)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            requests[name] = _FieldOptions(name, kind, omitted)
            parameters += requests[name].parameters()
        elif typing.get_origin(kind) is tuple:
            system_requests[name] = _list_system_options(name, quiet=quiet)
            for field_options in system_requests[name]:
                parameters += field_options.parameters()
        else:
            parameters.append(parameter.replace(kind=_KEYWORD_ONLY))

    @functools.wraps(verb)
    def call_verb(**values: Any) -> None:
        for name, field_options in requests.items():
            values[name] = field_options.pop_instance(values)
        for name, options_of_systems in system_requests.items():
            all_flags = [field_options.pop_instance(values) for field_options in options_of_systems]
            # If all flags of a system have their default values, none was given, and the system is left out.
            values[name] = tuple(flags for flags in all_flags if flags != type(flags)())
        verb(**values)

    # typer reads both attributes. functools.wraps has set them to those of `verb`, so they are replaced.
    call_verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call_verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call_verb


def _split_annotation(annotation: Any) -> tuple[Any, Collection[str]]:
    """Return the type of a parameter, and the names of its fields that should not become options.

    ``Annotated[JobRequest, Without("nodes")] -> JobRequest, ("nodes",)``
    """
    if typing.get_origin(annotation) is not Annotated:
        return annotation, ()
    kind, without = typing.get_args(annotation)
    return kind, without.fields


def field_option(owner: type[Any], field: str) -> Any:
    """Return the typer option for one `field` of the dataclass `owner`.

    A verb uses it as the default value of a parameter, as usual with typer.
    """
    flags_by_field = {flag.field: flag for flag in declared_options(owner)}
    return _typer_option(flags_by_field[field])


def _typer_option(flag: Flag) -> Any:
    """Return the typer option for `flag`.

    typer turns a parameter into an option if its default value is such an object.
    """
    return typer.Option(
        _option_default(flag),
        *flag.names,
        metavar=flag.metavar or None,
        help=flag.help,
        # rich is not used. The heading of the option in the help is read from this attribute.
        rich_help_panel=flag.group or None,
    )


def _option_default(flag: Flag) -> Any:
    """Return the default value of the typer option for `flag`.

    It is the default of the flag's field, except for a negative flag. For example, ``--no-test`` belongs to a
    field ``test`` that is True by default. The option itself is False unless the user types it.
    """
    if flag.is_negative:
        return False
    if isinstance(flag.default, tuple):
        return list(flag.default)  # typer needs a list for an option that can be repeated
    return flag.default


class _FieldOptions:
    """The options for the fields of the dataclass `owner`, except the `omitted` fields.

    Each option is a parameter of the function for typer, and its name begins with `prefix`. Without the
    prefix, two systems could not have a flag of the same name. A flag could also not be called ``with``,
    which is a Python keyword.
    """

    def __init__(self, prefix: str, owner: type[Any], omitted: Collection[str] = ()) -> None:
        self.owner = owner
        self.flags: dict[str, Flag] = {}  # by the name of the parameter
        for flag in declared_options(owner):
            if flag.field not in omitted:
                self.flags[f"{prefix}_{flag.field}"] = flag

    def parameters(self) -> list[inspect.Parameter]:
        """Return a function parameter for each option, with the option as its default value."""
        parameters = []
        for name, flag in self.flags.items():
            kind = list[str] if isinstance(flag.default, tuple) else flag.type
            option = _typer_option(flag)
            parameters.append(inspect.Parameter(name, _KEYWORD_ONLY, default=option, annotation=kind))
        return parameters

    def pop_instance(self, values: dict[str, Any]) -> Any:
        """Remove the values of these options from `values`, and return an instance of `owner` with them.

        What is left in `values` belongs to the other parameters of the verb.

        Parameters
        ----------
        values : the values of all parameters, as typer passes them. Values of other parameters are left in
            it.
        """
        value_of_field: dict[str, Any] = {}
        for name, flag in self.flags.items():
            option_value = values.pop(name)
            if isinstance(option_value, list):
                # typer returns a list for a repeated option, and a frozen dataclass has a tuple.
                value_of_field[flag.field] = tuple(option_value)
            elif flag.is_negative:
                # The field is True by default, and an option such as --no-test sets it to False.
                value_of_field[flag.field] = not option_value
            else:
                value_of_field[flag.field] = option_value
        # Some fields belong to a nested request of `owner`, so they are no arguments of `owner` itself.
        return replace_fields(self.owner(), value_of_field)


def _list_system_options(prefix: str, *, quiet: bool) -> list[_FieldOptions]:
    """Return the options for the flags of each system (scheduler). `quiet` is that of `with_options`."""
    flag_classes = _flags_of_systems(quiet=quiet)
    return [_FieldOptions(f"{prefix}_{index}", flags) for index, flags in enumerate(flag_classes)]


class GroupedCommand(TyperCommand):
    """A verb whose help lists its options in groups."""

    default_group = "Options"
    """The heading of the options without a group."""

    def format_options(self, ctx: ClickContext, formatter: HelpFormatter) -> None:
        """Write a section of the help for the arguments, and one section for each group of options."""
        # These sections come first, in this order. Other groups follow.
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], "Advanced": []}
        for parameter in self.get_params(ctx):
            help_row = parameter.get_help_record(ctx)  # the names and the help; None for a hidden option
            if help_row is not None:
                sections.setdefault(self._section_title(parameter), []).append(help_row)
        for title, help_rows in sections.items():
            if help_rows:
                with formatter.section(title):
                    formatter.write_dl(help_rows)

    def _section_title(self, parameter: Any) -> str:
        """Return the title of the help section in which the argument or option `parameter` is listed."""
        if parameter.param_type_name == "argument":
            return "Arguments"
        return getattr(parameter, "rich_help_panel", None) or self.default_group


class JobCommand(GroupedCommand):
    """A verb that submits jobs, such as ``run``. The command of the job follows ``--``.

    These verbs have many options that are rarely needed, so options without a group are listed as advanced.
    """

    default_group = "Advanced"

    def parse_args(self, ctx: ClickContext, args: list[str]) -> Any:
        """Parse the arguments before ``--``, and store those after it in ``ctx.meta`` as the job's command.

        click itself would ignore ``--``. In ``imgkit run -- dist-bench``, it would use ``dist-bench`` as the
        argument RECIPE, which the user has left out. So the arguments are split here.
        """
        separator = args.index("--") if "--" in args else len(args)
        own_args = tuple(args[:separator])
        ctx.meta[COMMAND] = tuple(args[separator + 1 :])
        try:
            return super().parse_args(ctx, [*own_args])  # a copy, which click empties
        except Exception as error:
            # typer does not export the class of this error, but no other error has the attribute.
            is_about_unknown_option = hasattr(error, "option_name")
            if is_about_unknown_option:
                # This raises a more helpful error, unless no scheduler has such an option.
                scheduler_options.refuse_scheduler_options(own_args, self._own_options(ctx))
            raise

    def _own_options(self, ctx: ClickContext) -> dict[str, bool]:
        """Return the names of the verb's options, and for each name whether the option takes a value."""
        takes_value_by_name = {}
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            if parameter.param_type_name == "option":
                for name in (*parameter.opts, *parameter.secondary_opts):
                    takes_value_by_name[name] = not parameter.is_flag
        return takes_value_by_name


def _flags_of_systems(*, quiet: bool) -> list[type[Any]]:
    """Return the dataclasses with the flags of all systems (schedulers), without duplicates.

    Plug-ins that cannot be used are reported on stderr, unless `quiet` is True.
    """
    # The import is here because `imgkit --help` loads this module. It should neither import the systems nor
    # search for plug-ins.
    from imgkit_builder.jobs import systems

    loaded_systems = systems.load_systems()
    if not quiet:
        for error in loaded_systems.errors:
            terminal.print_messages(*f"imgkit: {error}".split("\n"))
    flag_classes = []
    for system in loaded_systems.systems.values():
        # Systems can share a class: all systems without flags do, and so do RunAI and Kubeflow.
        if system.flags not in flag_classes:
            flag_classes.append(system.flags)
    return flag_classes
