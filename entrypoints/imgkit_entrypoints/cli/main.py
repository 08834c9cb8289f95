"""Dispatch: find the command of a ``dist-*`` program, and run it."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from imgkit_entrypoints import terminal
from imgkit_entrypoints.cli import options, start, worker
from imgkit_entrypoints.cli.commands import COMMANDS, Command
from imgkit_entrypoints.doctor import saved_environment
from imgkit_entrypoints.errors import ImgkitError, UsageError
from imgkit_entrypoints.launch import delta_check, plan
from imgkit_entrypoints.launch.plan import Series


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``NAME ARGS`` and exit with its code."""
    words = tuple(sys.argv[1:] if argv is None else argv)
    try:
        sys.exit(_run(words, os.environ))
    except ImgkitError as error:
        if options.plan_wanted(words, os.environ):
            parts = {"what": error.what, "where": error.where, "hint": error.hint}
            terminal.document(json.dumps({"schema": plan.SCHEMA, "error": parts}, indent=2) + "\n")
        terminal.err(*f"{words[0] if words else 'imgkit_entrypoints'}: {error}".split("\n"))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def program() -> None:
    """Run the command that this process was started as: pip's ``dist-*`` scripts of an installed package."""
    main((Path(sys.argv[0]).name, *sys.argv[1:]))


def _run(words: tuple[str, ...], env: Mapping[str, str]) -> int:
    command = _command(words[0] if words else "")
    env = saved_environment.replayed(env)
    delta_check.require(env)
    if command.here is not None:
        return int(importlib.import_module(command.here).main(words[1:], env))
    if words[1:] and words[1] in command.verbs:
        return int(importlib.import_module(command.verbs[words[1]]).main(words[2:]))
    parse = worker.of_user_program if command.app is None else worker.of_app
    asked, program = parse(command, words, env)
    place = start.place(asked.wanted, env)
    if command.series is None:
        return start.launch(asked, program, env, place)

    def launch(given: Sequence[str], variables: Mapping[str, str]) -> int:
        return start.launch(asked, program.with_words(given), {**env, **variables}, place)

    series = Series(
        words=program.words, command=words, asked=asked, place=place, env=env, launch=launch, say=start.say
    )
    return int(importlib.import_module(command.series).run(series))


def _command(name: str) -> Command:
    for known in COMMANDS:
        if known.name == name:
            return known
    names = ", ".join(known.name for known in COMMANDS)
    raise UsageError(f"unknown command {name!r}", hint=f"one of: {names}")
