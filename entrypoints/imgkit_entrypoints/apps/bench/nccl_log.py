"""Find out from NCCL's log which transports (ways of moving data) it uses.

The log goes to temporary files instead of the terminal. Its lines are written in NVIDIA/nccl,
src/transport/*.cc, src/init.cc and src/plugin/net.cc (v2.18 to v2.30).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path

from imgkit_entrypoints import files

# TUNING is left out, because it writes a line for every launch, which would disturb the timing.
SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH"}
# "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA", "Using network IB" and "8 coll channels".
_CONNECTED = re.compile(r" -> .* via ([A-Z0-9]+)(.*)")
_NETWORK = re.compile(r"Using network (.+)")
_CHANNELS = re.compile(r"(\d+) coll channels")


@contextlib.contextmanager
def collect_log(env: MutableMapping[str, str]) -> Iterator[Path | None]:
    """Make NCCL write its log to files in a temporary folder, by variables in `env`, and yield the folder.

    When the ``with`` block ends, the variables are removed and the folder is deleted. If the user has set
    NCCL_DEBUG, or the run does not use GPUs, nothing changes and the result is None.
    """
    if "NCCL_DEBUG" in env or env.get("IMGKIT_DEVICE") != "cuda":
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="imgkit-nccl-"))
    env.update(SETTINGS)
    env["NCCL_DEBUG_FILE"] = str(folder / "%h.%p")  # NCCL replaces %h by the host and %p by the process id
    try:
        yield folder
    finally:
        for name in (*SETTINGS, "NCCL_DEBUG_FILE"):
            env.pop(name, None)
        shutil.rmtree(folder, ignore_errors=True)


def read_transports(folder: Path | None) -> frozenset[str]:
    """Return the transports in the log of this process, such as ``via NET/IB with GDRDMA``.

    If `folder` is None, no log was collected, and the result is empty.
    """
    lines: list[str] = []
    if folder is None:
        return frozenset()
    # The files of other processes on this node have other process ids at the end of their names.
    for path in folder.glob(f"*.{os.getpid()}"):
        with contextlib.suppress(OSError):
            lines += files.read_text(path, errors="replace").splitlines()
    return find_transports(lines)


def find_transports(lines: Iterable[str]) -> frozenset[str]:
    """Return what the lines of a log say about transports, such as ``network IB`` and ``2 channels``."""
    names = set()
    for line in lines:
        network = _NETWORK.search(line)
        channels = _CHANNELS.search(line)
        connected = _CONNECTED.search(line)
        if network:
            names.add(f"network {network[1].strip()}")
        elif channels:
            names.add(f"{channels[1]} channels")
        elif connected:
            names.add(_describe_connection(connected[1], connected[2]))
    return frozenset(names)


def _describe_connection(transport: str, details: str) -> str:
    """Return a short text for a connection: ``NET`` and ``/IB/0/GDRDMA`` give ``via NET/IB with GDRDMA``.

    GDRDMA means that the NIC accesses the memory of the GPU directly.
    """
    if transport != "NET":
        return f"via {transport}"
    kind, _, _ = details.strip("/").partition("/")
    preposition = "with" if "GDRDMA" in details else "without"
    return f"via NET/{kind} {preposition} GDRDMA"


def describe_transports(names: Iterable[str]) -> tuple[str, ...]:
    """Return sentences for the report about the transports in the logs of all ranks."""
    ordered = sorted(set(names))
    if not ordered:
        return ()
    lines = [f"NCCL's log: {', '.join(ordered)}."]
    if any(name.startswith("via NET/IB without") for name in ordered):
        lines.append(
            "Some data passes through host memory, without GPUDirect RDMA. Run dist-doctor to see why."
        )
    return tuple(lines)
