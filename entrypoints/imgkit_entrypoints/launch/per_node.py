"""The command of ``dist-run --per-node``, which runs once on each node in the place of torchrun.

The node agent replaces placeholders in its arguments (`PLACEHOLDERS`), and gives it the same values as
variables. Ray keeps its sockets and logs below RAY_TMPDIR. The node agent makes that folder and
removes it after the run. The path is short, for that of a Unix socket has at most 107 characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from imgkit_entrypoints.rollcall.messages import AttemptStart

PLACEHOLDERS = ("head", "port", "port2", "nnodes", "node_rank", "nproc", "world_size", "run_dir")
_NAMES = "|".join(PLACEHOLDERS)
_PLACEHOLDER = re.compile(rf"\{{(\{{(?:{_NAMES})\}})\}}|\{{({_NAMES})\}}")
"""``{{head}}``, which means a literal ``{head}``, or ``{head}``."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables of one worker: a program that starts several would take them for its own."""
RAY_TMPDIR = "RAY_TMPDIR"
RAY_PREFIX = "imgkit-ray-"
RAY_PARENT = "/tmp"  # noqa: S108 - the folder below it is the user's own, and has a random name
"""Parent of RAY_TMPDIR, the same on all nodes: Ray takes the head's folder on each of them.

It is short, since Ray adds about 68 characters: `ray/session_TIME_PID/sockets/plasma_store`.
"""


def placeholder_values(order: AttemptStart, node_rank: int, nproc: int, run_dir: str) -> dict[str, str]:
    """Return the value of each placeholder in the attempt that `order` starts."""
    values = (
        *(order.head, order.port, order.second_port, order.nnodes),
        *(node_rank, nproc, order.world_size, run_dir),
    )
    return dict(zip(PLACEHOLDERS, map(str, values), strict=True))


def fill(argv: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """Return `argv` with the values in place of the placeholders; other braces stay as they are."""

    def value(match: re.Match[str]) -> str:
        return match[1] or values[match[2]]

    return [_PLACEHOLDER.sub(value, arg) for arg in argv]


def uses_placeholder(argv: Iterable[str], name: str) -> bool:
    """Return whether `fill` would replace the placeholder `name`."""
    return any(match[2] == name for arg in argv for match in _PLACEHOLDER.finditer(arg))


def variables(values: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have the same values."""
    return {
        "MASTER_ADDR": values["head"],
        "MASTER_PORT": values["port"],
        "NNODES": values["nnodes"],
        "NODE_RANK": values["node_rank"],
        "IMGKIT_NPROC": values["nproc"],
    }


def ray_folder(order: AttemptStart) -> Path:
    """Return the folder for RAY_TMPDIR in an attempt: a next cluster finds nothing of the last one."""
    return Path(RAY_PARENT, f"{RAY_PREFIX}{order.token}-{order.attempt}")
