"""The flags of ``imgkit run`` as options: those of every job, then those of each system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from imgkit_entrypoints import terminal

if TYPE_CHECKING:
    from imgkit_builder.base.flags import Flag
    from imgkit_builder.jobs.code import CodeFolder
    from imgkit_builder.jobs.request import JobRequest


USUAL = ("on", "nodes", "time", "account", "queue", "qos", "code", "env", "detach", "dry_run")
"""Names of the options that most jobs need; help lists the others below them."""
COMMAND = "imgkit.command"
"""Key of ``Context.meta``: the words behind ``--``."""


class OptionsCommand(TyperCommand):
    """A verb with the flags of dataclasses as its options; the verb finds their value in ``Context.obj``.

    They are collected when the verb is used: ``imgkit --help`` neither imports a system nor finds plug-ins.
    """

    without: tuple[str, ...] = ()
    """Fields whose flags the verb does not have."""
    _options: tuple[_FlagOption, ...] = ()

    def owners(self, *, quiet: bool) -> list[type[Any]]:
        """The dataclasses; `quiet` reports nothing on the way."""
        raise NotImplementedError

    def build(self, values: dict[type[Any], dict[str, Any]]) -> Any:
        """What the verb finds in ``Context.obj``, made of each dataclass's fields."""
        raise NotImplementedError

    def get_params(self, ctx: Any) -> Any:
        """The verb's own parameters, with the flags after its arguments."""
        if not self._options:
            from imgkit_builder.base.flags import declared

            owners = dict.fromkeys(self.owners(quiet=ctx.resilient_parsing))
            self._options = tuple(
                _option(owner, flag)
                for owner in owners
                for flag in declared(owner)
                if flag.field not in self.without
            )
            at = sum(parameter.param_type_name == "argument" for parameter in self.params)
            self.params[at:at] = [option.parameter for option in self._options]
        return super().get_params(ctx)

    def invoke(self, ctx: Any) -> Any:
        """Call the verb, with the flags in ``ctx.obj``."""
        values: dict[type[Any], dict[str, Any]] = {}
        for option in self._options:
            value = option.value(ctx.params.pop(option.parameter.name))
            values.setdefault(option.owner, {})[option.flag.field] = value
        ctx.obj = self.build(values)
        return super().invoke(ctx)


class JobCommand(OptionsCommand):
    """A verb with the flags of all systems; `build` says what it finds in ``Context.obj``."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the words before ``--``, and keep the others as the command: RECIPE may be left out."""
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[COMMAND] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options that most jobs need, and the others as "Advanced"."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], "Advanced": []}
        for parameter in self.get_params(ctx):
            title = "Options" if parameter.name in USUAL else "Advanced"
            if parameter.param_type_name == "argument":
                title = "Arguments"
            if record := parameter.get_help_record(ctx):
                sections[title].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def owners(self, *, quiet: bool) -> list[type[Any]]:
        """`JobRequest`, then the flags of each system; reports plug-ins that cannot be used."""
        from imgkit_builder.jobs import systems
        from imgkit_builder.jobs.request import JobRequest

        installed = systems.installed()
        if not quiet:
            for error in installed.errors:
                terminal.err(*f"imgkit: {error}".split("\n"))
        return [JobRequest, *(system.flags for system in installed.systems.values())]

    def build(self, values: dict[type[Any], dict[str, Any]]) -> Any:
        """The request, with what was given for systems."""
        from imgkit_builder.jobs.request import JobRequest

        common = values.pop(JobRequest)
        all_flags = (owner(**fields) for owner, fields in values.items())
        chosen = tuple(flags for flags in all_flags if flags != type(flags)())
        return JobRequest.of(**common, system_flags=chosen)


def read_code(request: JobRequest, *, as_json: bool) -> CodeFolder | None:
    """The code of ``--code``, if it is given; asks a person about large code, unless the answer is JSON."""
    if request.container.code is None:
        return None
    from imgkit_builder.cli.common import with_leave
    from imgkit_builder.cli.progress import reporter
    from imgkit_builder.jobs import code

    def read(large: bool) -> CodeFolder:
        with reporter(as_json=as_json) as report:
            return code.read(request, large=large, report=report)

    return with_leave(read, large=request.container.yes, may_ask=not as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlagOption:
    owner: type[Any]
    """The dataclass that declares `flag`."""
    flag: Flag
    parameter: Any
    convert: Callable[[Any], Any] | None

    def value(self, parsed: Any) -> Any:
        """Return the field's value."""
        value = self.convert(parsed) if self.convert else parsed
        return tuple(value) if isinstance(value, list) else value


def _option(owner: type[Any], flag: Flag) -> _FlagOption:
    # typer reads options from a function's signature; this is the part of it that takes one parameter.
    from typer.main import get_click_param
    from typer.models import ParamMeta

    kind, default = flag.type, flag.default
    if isinstance(default, tuple):
        kind, default = list[str], list(default)
    info = typer.Option(default, *flag.names, metavar=flag.metavar or None, help=flag.help)
    name = flag.names[0].removeprefix("--").replace("-", "_")
    parameter, convert = get_click_param(ParamMeta(name=name, default=info, annotation=kind))
    return _FlagOption(owner=owner, flag=flag, parameter=parameter, convert=convert)
