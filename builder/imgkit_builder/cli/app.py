"""The command line ``imgkit``: the list of its verbs, and `main`.

The module of a verb is imported only when the verb is used, so that ``imgkit --help`` stays quick.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from imgkit_builder.base import files
from imgkit_builder.base.process import INTERRUPTED
from imgkit_builder.cli.options import ClickContext, HelpFormatter, with_options
from imgkit_entrypoints import __version__, terminal
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError, shorten_message


class Verb(NamedTuple):
    """A verb of ``imgkit``, such as ``build``, with what ``imgkit --help`` prints about it."""

    module: str
    """The module of ``cli`` that defines the function ``verb_NAME``, or lists the verb in ``GROUPS``."""
    help: str
    """The first sentence of the verb's help. Thanks to this copy, ``--help`` need not import the module."""


VERB_GROUPS: dict[str, dict[str, Verb]] = {
    "Start here": {
        "build": Verb("build", "Build the image of a recipe, then test it."),
        "sif": Verb("sif", "Convert an image to a .sif for Singularity or Apptainer, and check it."),
        "run": Verb("run", "Run COMMAND in the image on N nodes, and follow its output."),
        "list": Verb("recipes", "List the shipped recipes."),
        "init": Verb(
            "project", "Write an imgkit.toml, a recipe and a .gitignore for a folder with a program."
        ),
    },
    "Images": {
        "save": Verb("archives", "Save an image as an archive, with checksum and manifest."),
        "test": Verb("images", "Run the smoke test in an image or .sif."),
        "shell": Verb(
            "images", "Open a shell in an image or .sif, without this machine's home folder and network."
        ),
        "push": Verb("images", "Send an image to a registry and print its digest."),
        "add": Verb("add", "Add Python packages to a .sif, in a squashfs beside it."),
        "lock": Verb("lock", "Pin every package of a recipe's image: version, URL and sha256."),
    },
    "Jobs": {
        "status": Verb("jobs", "Show a job, or all of your jobs that wait or run, here and on all remotes."),
        "wait": Verb("jobs", "Wait until a job has ended."),
        "logs": Verb("jobs", "Follow a job's output until the job ends."),
        "cancel": Verb("jobs", "End a job."),
        "fetch": Verb("run", "Copy a remote job's run folder here: curves, metrics and output."),
        "resume": Verb("resume", "Submit a job that has ended again, in the same run folder."),
        "runs": Verb("runs", "List runs, newest first."),
        "scaling": Verb(
            "scaling", "Run COMMAND on several numbers of nodes, wait, and report how it scales."
        ),
        "remote": Verb("remote", "Manage clusters that are reached over ssh."),
    },
    "Checks": {
        "check": Verb("recipes", "Check recipes and report every problem in one run."),
        "show": Verb("show", "Show a recipe, an image, a .sif or a .sqsh."),
        "doctor": Verb("doctor", "Check what this machine or a remote has and lacks, and suggest fixes."),
        "verify": Verb("archives", "Check an archive, .sif or .sqsh against its recorded digests."),
        "render": Verb("recipes", "Print the Dockerfile or definition file of a recipe."),
        "sbom": Verb("sbom", "List the packages in an image, with versions and digests."),
    },
}
"""The headings in ``imgkit --help``, and the verbs below each of them."""

VERBS = {name: verb for group in VERB_GROUPS.values() for name, verb in group.items()}


class GroupedVerbs(TyperGroup):
    """The command ``imgkit``, which lists its verbs under headings.

    The module of a verb is imported only when the verb is used.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # These commands only appear in --help. `resolve_command` imports the real command of a verb when it
        # is used.
        for name, verb in VERBS.items():
            # The help of these commands comes from the table above, so no module is imported.
            self.add_command(TyperCommand(name, help=verb.help))

    def resolve_command(self, ctx: ClickContext, args: list[str]) -> Any:
        """Return the name and the command of the verb with which `args` begin, and the other arguments."""
        name, command, remaining_args = super().resolve_command(ctx, args)
        if name not in VERBS:
            return name, command, remaining_args
        # resilient_parsing means that the shell is completing an argument. Messages about plug-ins would
        # disturb it.
        return name, verb_command(name, quiet=ctx.resilient_parsing), remaining_args

    def format_commands(self, ctx: ClickContext, formatter: HelpFormatter) -> None:
        """Write one section of the help for each group of verbs."""
        # The width that is left beside the names of verbs for their help, computed as in click.
        help_width = formatter.width - 6 - max(map(len, self.commands))
        for title, verbs in VERB_GROUPS.items():
            rows = [(name, self.commands[name].get_short_help_str(help_width)) for name in verbs]
            with formatter.section(title):
                formatter.write_dl(rows)


def build_app() -> typer.Typer:
    """Return the typer application. It knows the names of its verbs, but has not imported them."""
    app = typer.Typer(
        name="imgkit",
        cls=GroupedVerbs,
        no_args_is_help=True,
        # Help is plain text. Decorated help would import a Markdown parser, which doubles the time of --help.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    return app


def verb_command(name: str, *, quiet: bool = False) -> Any:
    """Import the module of the verb `name`, and return its command for typer.

    The module has a function ``verb_NAME``. Its table ``COMMAND_CLASSES`` has the class of each command that
    cannot use typer's own class. For a verb that is a group of verbs, such as ``remote``, the module has no
    such function, but a table ``GROUPS`` with the group. Both tables are optional, and have the name of the
    verb as the key.

    Parameters
    ----------
    quiet : do not report plug-ins that cannot be used.
    """
    module = importlib.import_module(f"imgkit_builder.cli.{VERBS[name].module}")
    groups = getattr(module, "GROUPS", {})
    command_classes = getattr(module, "COMMAND_CLASSES", {})
    # typer builds a command only as part of an app, so this app has the verb and nothing else.
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.callback()(_root)  # with a callback, typer returns a group even for a single verb
    if name in groups:
        app.add_typer(groups[name], name=name)
    else:
        function: Callable[..., Any] = getattr(module, f"verb_{name}")
        command_class = command_classes.get(name)  # None: typer's own class
        app.command(name, cls=command_class)(with_options(function, quiet=quiet))
    app_group: Any = typer.main.get_command(app)
    return app_group.commands[name]


def _print_version(value: bool) -> None:
    """Print the version and exit if ``--version`` was given."""
    if value:
        terminal.print_results(f"imgkit {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
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
    """Run the command line, and exit.

    An error is printed on stderr as one message, and the exit code is that of the kind of error. With
    ``--json``, an error is one JSON object on stdout and one JSON line on stderr, also if the command line is
    wrong.
    """
    # Arguments after "--" belong to the user's program, which may have a --json of its own.
    separator = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    as_json = "--json" in sys.argv[:separator]
    # Each function that prints an error also exits, with the exit code of the error.
    try:
        exit_code = _run_app()
    except ImgkitError as error:
        _print_error(error, as_json=as_json)
    except OSError as error:
        _print_error(_explain_system_error(error), as_json=as_json)
    except Exception as error:
        if not _is_usage_error(error):
            raise
        _print_usage_error(error, as_json=as_json)
    sys.exit(exit_code)


def _run_app() -> int:
    """Run the verb that the command line names, and return the exit code of this process.

    Raises
    ------
    Interrupted : the user pressed Ctrl-C. Any other error of the verb is passed on as well.
    """
    try:
        # standalone_mode=False makes typer raise errors instead of printing them, so that all errors look
        # the same.
        result = build_app()(standalone_mode=False)
    except typer.Abort:
        result = INTERRUPTED
    # After Ctrl-C, typer raises Abort or returns this exit code.
    if result == INTERRUPTED:
        raise Interrupted("interrupted; no partial file is left")
    # The result is the exit code of typer.Exit, or else what the verb has returned, which is no exit code.
    return result if isinstance(result, int) else 0


class Interrupted(ImgkitError):
    """The user pressed Ctrl-C, or the process got SIGTERM within `exit_on_sigterm`."""

    exit_code = INTERRUPTED


def _explain_system_error(error: OSError) -> ToolFailed:
    """Return the message for an operating system error that no function has handled, such as a full disk.

    The user needs the path and the reason, but no traceback.
    """
    path = error.filename
    hint = None
    if error.errno in files.FULL:
        path = files.find_full_disk_path(error)
        hint = "free some space there, or write to another disk"
    return ToolFailed(error.strerror or str(error), where=str(path) if path else None, hint=hint)


def _is_usage_error(error: Exception) -> bool:
    """Return whether `error` is one of typer's errors about a wrong command line.

    typer does not export the base class of these errors. They are recognized by two attributes that no other
    error has.
    """
    return hasattr(error, "ctx") and getattr(error, "exit_code", None) == UsageError.exit_code


def _print_usage_error(error: Any, *, as_json: bool) -> NoReturn:
    """Print typer's error about a wrong command line, and exit."""
    error.message = terminal.escape_controls(shorten_message(error.message))
    if not as_json:
        error.show()  # typer's own form, with the usage of the verb
        sys.exit(error.exit_code)
    command = error.ctx.command_path if error.ctx else "imgkit"
    _print_error(UsageError(error.format_message(), hint=f"see: {command} --help"), as_json=True)


def _print_error(error: ImgkitError, *, as_json: bool) -> NoReturn:
    """Print `error` as one message on stderr, and exit with the exit code of the error.

    With `as_json`, print one JSON object on stdout, and one JSON line on stderr, where progress is printed.
    """
    if as_json:
        # Imported here, because only --json needs it.
        from imgkit_builder.cli.common import error_data, print_result

        print_result(error_data(error), as_json=True)
        terminal.print_messages(json.dumps({"event": "error", "text": str(error)}))
    else:
        terminal.print_messages(*f"imgkit: {error}".split("\n"))
    sys.exit(error.exit_code)
