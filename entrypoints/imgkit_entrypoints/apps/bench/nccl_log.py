"""Read NCCL's own log for the transports it uses. The log goes to temporary files, not to the terminal.

The forms of its lines: NVIDIA/nccl, src/transport/*.cc, src/init.cc and src/plugin/net.cc (v2.18 to v2.30).
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

SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH"}
"""TUNING is left out: it writes one line for every launch, which must not happen while they are timed."""
_CONNECTED = re.compile(r" -> .* via ([A-Z0-9]+)(.*)")
_NETWORK = re.compile(r"Using network (.+)")
_CHANNELS = re.compile(r"(\d+) coll channels")


@contextlib.contextmanager
def collected(env: MutableMapping[str, str]) -> Iterator[Path | None]:
    """Make NCCL log to files in a folder; yields None if the user has set NCCL_DEBUG, or without GPUs."""
    if "NCCL_DEBUG" in env or env.get("IMGKIT_DEVICE") != "cuda":
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="imgkit-nccl-"))
    env.update(SETTINGS)
    env["NCCL_DEBUG_FILE"] = str(folder / "%h.%p")
    try:
        yield folder
    finally:
        for name in (*SETTINGS, "NCCL_DEBUG_FILE"):
            env.pop(name, None)
        shutil.rmtree(folder, ignore_errors=True)


def transports(folder: Path | None) -> frozenset[str]:
    """Return the transports in this process' log: ``network IB``, ``via NET/IB with GDRDMA``."""
    lines: list[str] = []
    for path in folder.glob(f"*.{os.getpid()}") if folder else ():
        with contextlib.suppress(OSError):
            lines += files.read_text(path, errors="replace").splitlines()
    return parse(lines)


def parse(lines: Iterable[str]) -> frozenset[str]:
    """Return the transports in the lines of a log, as short texts."""
    names = set()
    for line in lines:
        if match := _NETWORK.search(line):
            names.add(f"network {match[1].strip()}")
        elif match := _CHANNELS.search(line):
            names.add(f"{match[1]} channels")
        elif match := _CONNECTED.search(line):
            names.add(_transport(match[1], match[2]))
    return frozenset(names)


def _transport(transport: str, rest: str) -> str:
    if transport != "NET":
        return f"via {transport}"
    kind = rest.strip("/").split("/")[0]
    return f"via NET/{kind} with GDRDMA" if "GDRDMA" in rest else f"via NET/{kind} without GDRDMA"


def sentences(names: Iterable[str]) -> tuple[str, ...]:
    """Sum up the transports of all ranks' logs."""
    ordered = sorted(set(names))
    if not ordered:
        return ()
    lines = [f"NCCL's log: {', '.join(ordered)}."]
    if any(name.startswith("via NET/IB without") for name in ordered):
        lines.append(
            "Some data passes through host memory, without GPUDirect RDMA. Run dist-doctor to see why."
        )
    return tuple(lines)
