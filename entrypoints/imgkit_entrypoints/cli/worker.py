"""The command of each worker, taken from the words that the user typed."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.cli import options
from imgkit_entrypoints.cli.commands import Command
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import user_program
from imgkit_entrypoints.launch.plan import LaunchOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What torchrun starts for each rank."""

    start: tuple[str, ...]
    """Python, and the module or script that it runs."""
    words: tuple[str, ...]
    """The arguments."""
    own: bool
    """It is a program of this package, and needs no PYTHONPATH."""
    goodput: str = ""
    """`CountedStart.source` in launch/goodput.py; empty: it measures or shows something, and ends soon."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The whole command line."""
        return (*self.start, *self.words)

    def with_words(self, words: Sequence[str]) -> Worker:
        """The same program with other arguments."""
        return dataclasses.replace(self, words=tuple(words))


def of_module(module: str, words: Sequence[str]) -> Worker:
    """Return `module` of this package with `words`; the current folder and PYTHONPATH do not reach it."""
    return Worker(start=(sys.executable, "-I", "-u", "-m", module), words=tuple(words), own=True)


def of_app(command: Command, words: Sequence[str], env: Mapping[str, str]) -> tuple[LaunchOptions, Worker]:
    """Return the options of the launch, and the app of `command` with the rest of `words`.

    Raises
    ------
    UsageError : an option is unknown, has a wrong value, or contradicts another.
    """
    assert command.app is not None  # noqa: S101 - the caller branches on it
    app = importlib.import_module(command.options or command.app)
    both = options.parser(command.name, command.summary, env, device=command.device)
    app.add_arguments(both)
    both.formatter_class, both.epilog = argparse.RawDescriptionHelpFormatter, getattr(app, "EXAMPLES", None)
    both.parse_args(words[1:])  # one check of everything, and --help with all groups
    launch = options.parser(command.name, command.summary, env, device=command.device)
    parsed, rest = launch.parse_known_args(words[1:])
    if hasattr(app, "check"):
        app.check(rest, env)
    worker = of_module(command.app, rest)
    return options.read(parsed, tuple(words)), dataclasses.replace(worker, goodput=command.goodput)


def of_user_program(
    command: Command, words: Sequence[str], env: Mapping[str, str]
) -> tuple[LaunchOptions, Worker]:
    """Return the options of the launch, and the user program that follows them in `words`.

    Raises
    ------
    UsageError : an option is unknown or has a wrong value, or there is no program.
    """
    usage = "%(prog)s [OPTIONS] SCRIPT|-m MODULE [ARGS]"
    parser = options.parser(command.name, command.summary, env, usage)
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the next word is a module, not a script"
    )
    parser.add_argument(
        "--pass-local-rank",
        action="store_true",
        help="pass --local_rank=N to the program, as torch.distributed.launch did",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="your script or module and its arguments")
    parsed = parser.parse_args(words[1:])
    if not parsed.program:
        raise UsageError("no script given", hint="dist-run [OPTIONS] SCRIPT|-m MODULE [ARGS]")
    flags = (("--pass-local-rank", parsed.pass_local_rank), ("-m", parsed.module))
    given = tuple(flag for flag, wanted in flags if wanted)
    start = (sys.executable, "-u", user_program.__file__)
    worker = Worker(start=start, words=(*given, *parsed.program), own=False, goodput=command.goodput)
    return options.read(parsed, tuple(words)), worker
