"""The list of verbs, and `main`. Verb modules import nothing heavy at their top: ``--help`` stays quick."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from imgkit_builder.base import files
from imgkit_builder.base.process import INTERRUPTED
from imgkit_entrypoints import __version__, terminal
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError, shortened

VERB_GROUPS: dict[str, dict[str, str]] = {
    "Start here": {
        "build": "build",
        "sif": "sif",
        "run": "run",
        "list": "recipes",
        "init": "project",
    },
    "Images": {
        "save": "archives",
        "test": "images",
        "shell": "images",
        "push": "images",
        "lock": "lock",
    },
    "Jobs": {
        "status": "jobs",
        "wait": "jobs",
        "logs": "jobs",
        "cancel": "jobs",
        "fetch": "run",
        "runs": "runs",
        "remote": "remote",
    },
    "Checks": {
        "check": "recipes",
        "show": "recipes",
        "doctor": "doctor",
        "verify": "archives",
        "render": "recipes",
        "sbom": "sbom",
    },
}
"""Group of ``--help`` to its verbs, the commonest first, with the module of ``cli`` for ``verb_NAME``."""

VERBS = {verb: module for group in VERB_GROUPS.values() for verb, module in group.items()}
"""Verb to module."""


class GroupedVerbs(TyperGroup):
    """Lists the verbs under the headings of `VERB_GROUPS`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group that has a verb here."""
        limit = formatter.width - 6 - max(map(len, self.commands))
        for title, verbs in VERB_GROUPS.items():
            rows = [
                (verb, self.commands[verb].get_short_help_str(limit))
                for verb in verbs
                if verb in self.commands
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def build_app(verbs: Sequence[str] = tuple(VERBS)) -> typer.Typer:
    """The typer application with `verbs`."""
    app = typer.Typer(
        name="imgkit",
        cls=GroupedVerbs,
        no_args_is_help=True,
        # Plain help: decorated help imports a Markdown parser, which doubles the time of --help.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for verb in verbs:
        module = importlib.import_module(f"imgkit_builder.cli.{VERBS[verb]}")
        if group := getattr(module, "GROUPS", {}).get(verb):
            app.add_typer(group, name=verb)
            continue
        function: Callable[..., Any] = getattr(module, f"verb_{verb}")
        # A verb may need a class of its own, for flags that no signature can list.
        app.command(verb, cls=getattr(module, "COMMAND_CLASSES", {}).get(verb))(function)
    return app


def _version(value: bool) -> None:
    if value:
        terminal.out(f"imgkit {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Build container images for distributed PyTorch on clusters, from a recipe to a running .sif.

    \b
    Start with:
      imgkit build mn5                              on a laptop or in CI
      imgkit sif mn5                                there, or from an archive on the cluster
      singularity exec --nv mn5.sif dist-train      in a job
    """


def main() -> None:
    """Run the command line; an error prints one message and exits with the code of its kind.

    The message goes to stderr. With ``--json`` one JSON object goes to stdout, also for a wrong command line,
    and stderr gets a JSON line.
    """
    argv = sys.argv[1:]
    # Words behind "--" belong to the user's program.
    as_json = "--json" in (argv[: argv.index("--")] if "--" in argv else argv)
    try:
        code = build_app(_needed(argv))(standalone_mode=False)
    except ImgkitError as error:
        _end(error, as_json=as_json)
    except OSError as error:
        # No function expected this one: a full disk or a denied folder needs no traceback.
        full = error.errno in files.FULL
        path = files.where_full(error) if full else error.filename
        failure = ToolFailed(
            error.strerror or str(error),
            where=str(path) if path else None,
            hint="free some space there, or write to another disk" if full else None,
        )
        _end(failure, as_json=as_json)
    except _WRONG_COMMAND_LINE as error:
        _end_usage(error, as_json=as_json)
    except typer.Abort:
        _end(Interrupted(_NOTHING_LEFT), as_json=as_json)
    if code == Interrupted.exit_code:
        _end(Interrupted(_NOTHING_LEFT), as_json=as_json)
    sys.exit(code if isinstance(code, int) else 0)


def _needed(argv: Sequence[str]) -> Sequence[str]:
    """The verb that begins the command line, whose module alone is loaded; all where none does."""
    return argv[:1] if argv and argv[0] in VERBS else tuple(VERBS)


_WRONG_COMMAND_LINE: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a wrong command line; it exports only this one of its kinds."""

_NOTHING_LEFT = "interrupted; no partial file is left"


class Interrupted(ImgkitError):
    """The user pressed Ctrl-C; typer has turned that into this code."""

    exit_code = INTERRUPTED


def _end_usage(error: Any, *, as_json: bool) -> NoReturn:
    error.message = terminal.shown(shortened(error.message))
    if not as_json:
        error.show()
        sys.exit(error.exit_code)
    command = error.ctx.command_path if error.ctx else "imgkit"
    _end(UsageError(error.format_message(), hint=f"see: {command} --help"), as_json=True)


def _end(error: ImgkitError, *, as_json: bool) -> NoReturn:
    if as_json:
        from imgkit_builder.cli.common import error_data, show

        show(error_data(error), as_json=True)
        terminal.err(json.dumps({"event": "error", "text": str(error)}))
    else:
        terminal.err(*f"imgkit: {error}".split("\n"))
    sys.exit(error.exit_code)
