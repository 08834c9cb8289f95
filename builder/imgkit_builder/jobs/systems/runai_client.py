"""Find out which of RunAI's clients is on PATH, and which options its commands have.

The client is recognized by its help and not by its version. The first client and the later one were both
released with version 2.18 of the platform, and the output of ``runai version`` is not documented.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import Literal

from imgkit_builder.base import process
from imgkit_entrypoints.errors import UsageError

Client = Literal["v1", "v2"]
"""``v1`` is the first client, with the commands ``runai submit`` and ``runai submit-dist``.

``v2`` is the later client, with ``runai training submit`` and ``runai training pytorch submit``.
"""
PROGRAM = "runai"
PYTORCH = ("training", "pytorch")
"""The start of the later client's commands for a job with several pods: ``runai training pytorch submit``."""


def find_client_version() -> Client | None:
    """Return the version of the client on PATH, or None if there is no ``runai``.

    Raises
    ------
    UsageError : the ``runai`` on PATH is neither of RunAI's two clients.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        return None
    return _identify_client(program)


def refuse_unknown(command: Sequence[str], argv: Iterable[str]) -> None:
    """Raise UsageError if the client on PATH does not have a command, or an option that imgkit passes to it.

    The options in `argv` are compared with the help of ``runai COMMAND``. If ``runai`` is not on PATH,
    nothing is checked. This check works only for the later client. The help of the first client does not list
    all of its options, for example ``--pvc``.

    Raises
    ------
    UsageError : the client has no such command, or the command has no such option.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        return
    command_text = " ".join(command)
    supported = _read_options(program, tuple(command))
    if not supported:
        raise UsageError(
            f"{program} has no command {command_text}",
            where="--format",
            hint=f"--format runai-{_identify_client(program)}, the one that is on PATH",
        )
    for argument in argv:
        option, _, _ = argument.partition("=")
        if option.startswith("-") and option not in supported:
            raise UsageError(
                f"{program}: {command_text} has no option {option}",
                where=program,
                hint="imgkit run --dry-run prints the command",
            )


@functools.cache
def _identify_client(program: str) -> Client:
    """Return the version of the client `program`, which is recognized by its commands.

    Raises
    ------
    UsageError : `program` has neither client's command for jobs with several pods.
    """
    if "--workers" in _read_options(program, (*PYTORCH, "submit")):
        return "v2"
    if "--workers" in _read_options(program, ("submit-dist", "pytorch")):
        return "v1"
    raise UsageError(
        f"{program} is no runai client that imgkit knows: it has neither training pytorch submit nor "
        "submit-dist pytorch",
        where="PATH",
        hint="runai training pytorch submit --help; or --format runai-v1, or runai-v2",
    )


@functools.cache
def _read_options(program: str, command: tuple[str, ...]) -> frozenset[str]:
    """Return the options in the help of a command, or an empty set if the program has no such command."""
    finished = process.run([program, *command, "--help"], check=False)
    if finished.returncode:
        return frozenset()
    # Both clients list one option on each line: "  -e, --environment stringArray   What it does".
    options: set[str] = set()
    for short_and_long in re.findall(r"^\s+(?:(-\w), )?(--[\w-]+)", finished.output, re.MULTILINE):
        options.update(short_and_long)
    return frozenset(options - {""})
