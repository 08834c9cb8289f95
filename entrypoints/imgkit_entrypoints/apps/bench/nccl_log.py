"""What NCCL's own log says of the way that the data takes; it goes to a file, nobody has to read it.

Lines after NVIDIA/nccl, src/transport/*.cc, src/init.cc and src/plugin/net.cc (v2.18 to v2.30).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path

SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH"}
"""Not TUNING, which would tell algorithm and protocol: it writes a line for every launch that is timed."""
_CONNECTED = re.compile(r" -> .* via ([A-Z0-9]+)(\S*)")
_NETWORK = re.compile(r"Using network (.+)")
_CHANNELS = re.compile(r"(\d+) coll channels")


@contextlib.contextmanager
def collected(env: MutableMapping[str, str]) -> Iterator[Path | None]:
    """Have NCCL write its log to files in a folder while this lasts; None where the user has other plans."""
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


def found(folder: Path | None) -> frozenset[str]:
    """What this process' log tells, as short texts: ``network IB``, ``via NET/IB with GDRDMA``."""
    if folder is None:
        return frozenset()
    texts = []
    for path in folder.glob(f"*.{os.getpid()}"):
        with contextlib.suppress(OSError):
            texts.append(path.read_text(errors="replace"))
    return parsed("\n".join(texts).splitlines())


def parsed(lines: Iterable[str]) -> frozenset[str]:
    """The same from the lines of a log."""
    told = set()
    for line in lines:
        if match := _NETWORK.search(line):
            told.add(f"network {match[1].strip()}")
        elif match := _CHANNELS.search(line):
            told.add(f"{match[1]} channels")
        elif match := _CONNECTED.search(line):
            told.add(_way(match[1], match[2]))
    return frozenset(told)


def _way(transport: str, rest: str) -> str:
    if transport != "NET":
        return f"via {transport}"
    kind = rest.strip("/").split("/")[0]
    return f"via NET/{kind} with GDRDMA" if "GDRDMA" in rest else f"via NET/{kind} without GDRDMA"


def sentences(told: Iterable[str]) -> tuple[str, ...]:
    """For people: what all ranks' logs say together."""
    words = sorted(set(told))
    if not words:
        return ()
    said = [f"NCCL's log: {', '.join(words)}."]
    if any(word.startswith("via NET/IB without") for word in words):
        said.append("Some of it goes through host memory, without GPUDirect RDMA: dist-doctor says why.")
    return tuple(said)
