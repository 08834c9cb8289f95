"""The commands of the image: sh shims on PATH that run ``python3 -I -m imgkit_entrypoints NAME``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One ``dist-*`` command."""

    name: str
    summary: str
    app: str | None = None
    """What each worker runs, whose ``add_arguments`` gives its options; None: no workers of its own."""


COMMANDS: tuple[Command, ...] = (
    Command(
        name="dist-run",
        summary="run your own script under torchrun: dist-run [OPTIONS] SCRIPT|-m MODULE [ARGS]",
    ),
    Command(name="dist-hello", summary="every rank says where it runs", app="imgkit_entrypoints.apps.hello"),
    Command(name="dist-pi", summary="compute pi on all ranks", app="imgkit_entrypoints.apps.pi"),
    Command(name="dist-train", summary="train a model with DDP", app="imgkit_entrypoints.apps.train"),
    Command(name="dist-env", summary="print what was found here and what it means for a launch"),
)


def shim(command: Command) -> str:
    """Text of the command's executable.

    ``-I`` keeps a host PYTHONPATH, ``~/.local`` and the current folder out: a ``json.py`` in any of them
    would otherwise break the launcher before its first line.
    """
    return f'#!/bin/sh\nexec python3 -I -m imgkit_entrypoints {command.name} "$@"\n'
