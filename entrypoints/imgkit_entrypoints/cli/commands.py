"""The table of all ``dist-*`` commands.

In an image, each command is a sh script that runs ``python3 -I -m imgkit_entrypoints NAME`` (`shim_text`). An
installation with pip creates scripts for them as well (pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TORCHRUN = "imgkit_entrypoints.apps.torchrun"
"""Module that runs torchrun on a node."""
PREFLIGHT = "imgkit_entrypoints.apps.preflight"
"""Module that measures a node before the start of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One ``dist-*`` command."""

    name: str
    summary: str
    """The description of the command in its ``--help``."""
    app: str | None = None
    """Module that each worker runs. None for a command without an app of its own."""
    options: str | None = None
    """Module that contains the command's own ``OPTIONS``, if it is not `app`. It must not import torch."""
    device: str = "auto"
    """Default of ``--device``."""
    prints_json: bool = False
    """True if ``--json`` prints the result as JSON. Otherwise it applies only to a dry run."""
    verbs: Mapping[str, str] = field(default_factory=dict)
    """Modules of subcommands by their first word, such as ``dist-train export``.

    The function ``main(words)`` of the module runs in this process, without a launch. It must not import
    torch.
    """


# The table contains the names of modules as text. A module is imported only by the command that needs it, so
# that --dry-run never imports torch (docs/adr/0007-packages.md).
COMMANDS: tuple[Command, ...] = (
    Command(
        name="dist-run",
        summary="run your own script under torchrun: dist-run [OPTIONS] SCRIPT|-m MODULE [ARGS]",
    ),
    Command(
        name="dist-hello",
        summary="send a message to every rank and show where each one runs",
        app="imgkit_entrypoints.apps.hello",
    ),
    Command(
        name="dist-pi",
        summary="compute pi on all ranks; needs no GPU",
        app="imgkit_entrypoints.apps.pi",
        device="cpu",
    ),
    Command(
        name="dist-train",
        summary="train a model with DDP",
        app="imgkit_entrypoints.apps.train",
        options="imgkit_entrypoints.apps.train.options",
        verbs={"export": "imgkit_entrypoints.run.export"},
    ),
    Command(
        name="dist-bench",
        summary="measure collectives, with verified values",
        app="imgkit_entrypoints.apps.bench",
        options="imgkit_entrypoints.apps.bench.options",
    ),
    Command(
        name="dist-env",
        summary="print the facts of this node and the settings of a launch, with reasons",
        prints_json=True,
    ),
    Command(
        name="dist-doctor",
        summary="check the network, limits and libraries of this node, or of all nodes of a job, and print "
        "the fixes",
        app="imgkit_entrypoints.apps.doctor",
        options="imgkit_entrypoints.doctor.node",
        prints_json=True,
    ),
)


def shim_text(command: Command) -> str:
    """Return the text of the command's executable in an image.

    With ``-I``, Python ignores the host's PYTHONPATH, ``~/.local`` and the current folder. Otherwise, a file
    ``json.py`` in any of these could break the node agent before its first line runs.
    """
    return f'#!/bin/sh\nexec python3 -I -m imgkit_entrypoints {command.name} "$@"\n'
