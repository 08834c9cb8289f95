"""A FAKE nvidia-smi, which prints readings in the format of ``--format=csv,noheader,nounits``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from file_tree import write_program

TRAINING = ("0, 522", "0, 522", "97, 61234", "93, 61240", "99, 61234", "91, 61240")
"""Three readings of two GPUs, the first while the program starts: use in percent, and memory in MiB."""


def write_fake_nvidia_smi(folder: Path, lines: Sequence[str] = TRAINING, *, ends: bool = False) -> Path:
    """Write a program that prints `lines` and then waits like ``--loop``, and return its path.

    It writes its arguments into the file ``arguments`` beside it, and makes ``printed`` after its last line.
    With `ends`, it then exits with an error.
    """
    script = [
        'cd "$(dirname "$0")"',
        'echo "$@" > arguments',
        f"printf '%s\\n' {shlex.join(lines)}",
        "touch printed",
        "exit 9" if ends else "exec sleep 1000",
    ]
    return write_program(folder / "nvidia-smi", "\n".join(script))
