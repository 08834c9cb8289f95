"""The command of ``dist-run --per-node``, which runs once on each node instead of torchrun.

The node agent replaces placeholders in the command's arguments (`PLACEHOLDERS`), and passes the same values
as environment variables. Ray keeps its sockets and logs below RAY_TMPDIR. The node agent creates that folder,
and removes it after the run. The path of the folder is short, because the path of a Unix socket can have at
most 107 characters.
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
    "run_dir": "",  # the environment already has IMGKIT_RUN_DIR
}
"""The placeholders by name, each with the variable that has the same value, or "" if there is none.

For example, ``{head}`` in an argument becomes the address of the head (the node with rank 0), and MASTER_ADDR
is set to the same address.
"""
_NAMES = "|".join(PLACEHOLDERS)
# Group 1 is the inner part of "{{head}}", which stands for a literal "{head}". Group 2 is the name in
# "{head}".
_PLACEHOLDER = re.compile(rf"\{{(\{{(?:{_NAMES})\}})\}}|\{{({_NAMES})\}}")
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables of a single worker. They are removed, since a command that starts workers would pass them on."""
RAY_TMPDIR = "RAY_TMPDIR"
RAY_PREFIX = "imgkit-ray-"
RAY_PARENT = "/tmp"  # noqa: S108 - the folder below it is the user's own, and has a random name
"""Parent folder of RAY_TMPDIR.

It must be the same on all nodes, because Ray uses the head's path on every node. It must also be short,
because Ray adds about 68 characters: ``ray/session_TIME_PID/sockets/plasma_store``.
"""


def placeholder_values(order: AttemptStart, node_rank: int, nproc: int, run_dir: str) -> dict[str, str]:
    """Return the values of the placeholders in the user's command, such as ``{port}``, on this node.

    `order` is the head's order to start an attempt, which contains most of the values.
    """
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


def fill_placeholders(argv: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """Return `argv` with `values` in place of the placeholders, such as ``{port}``.

    Doubled braces keep the text of a placeholder, and all other braces stay as they are. For example, with
    ``{"port": "29500", ...}``, ``["--port={port}", "{{port}}", "{x}"]`` becomes ``["--port=29500", "{port}",
    "{x}"]``.
    """

    def value(match: re.Match[str]) -> str:
        # Group 1 is the text between doubled braces, and group 2 the name of a placeholder.
        return match[1] or values[match[2]]

    return [_PLACEHOLDER.sub(value, arg) for arg in argv]


def uses_placeholder(argv: Iterable[str], name: str) -> bool:
    """Return whether `fill_placeholders` would replace the placeholder `name`."""
    return any(match[2] == name for arg in argv for match in _PLACEHOLDER.finditer(arg))


def placeholder_variables(values: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with the values of the placeholders, such as MASTER_ADDR."""
    return {variable: values[name] for name, variable in PLACEHOLDERS.items() if variable}


def ray_folder(order: AttemptStart) -> Path:
    """Return the folder for RAY_TMPDIR in the attempt that `order` starts.

    Each attempt has its own folder, so that a new Ray cluster does not find files of the previous one.
    """
    return Path(RAY_PARENT, f"{RAY_PREFIX}{order.token}-{order.attempt}")
