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

PLACEHOLDERS = {
    "head": "MASTER_ADDR",
    "port": "MASTER_PORT",
    "port2": "",
    "nnodes": "NNODES",
    "node_rank": "NODE_RANK",
    "nproc": "IMGKIT_NPROC",
    "world_size": "",
    "run_dir": "",  # IMGKIT_RUN_DIR is set before
}
"""The variable that has the same value, by the name in braces; empty: there is none."""
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
    return {
        "head": order.head,
        "port": str(order.port),
        "port2": str(order.second_port),
        "nnodes": str(order.nnodes),
        "node_rank": str(node_rank),
        "nproc": str(nproc),
        "world_size": str(order.world_size),
        "run_dir": run_dir,
    }


def fill(argv: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """Return `argv` with the values in place of the placeholders; other braces stay as they are."""

    def value(match: re.Match[str]) -> str:
        return match[1] or values[match[2]]

    return [_PLACEHOLDER.sub(value, arg) for arg in argv]


def uses_placeholder(argv: Iterable[str], name: str) -> bool:
    """Return whether `fill` would replace the placeholder `name`."""
    return any(match[2] == name for arg in argv for match in _PLACEHOLDER.finditer(arg))


def variables(values: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have the same values as the placeholders."""
    return {variable: values[name] for name, variable in PLACEHOLDERS.items() if variable}


def ray_folder(order: AttemptStart) -> Path:
    """Return the folder for RAY_TMPDIR in an attempt: a next cluster finds nothing of the last one."""
    return Path(RAY_PARENT, f"{RAY_PREFIX}{order.token}-{order.attempt}")
