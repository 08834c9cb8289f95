"""Read NCCL's own log for the transports it uses. The log goes to temporary files, not to the terminal.

The forms of its lines: NVIDIA/nccl, src/transport/*.cc, src/init.cc and src/plugin/net.cc (v2.18 to v2.30).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.arguments import digits

SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH"}
"""TUNING is left out: it writes one line for every launch, which must not happen while they are timed."""
_CONNECTED = re.compile(r" -> .* via ([A-Z0-9]+)(.*)")
_NETWORK = re.compile(r"Using network (.+)")
_CHANNELS = re.compile(r"(\d+) coll channels")
_DECIDED = re.compile(r"Bytes -> Algo (\w+) proto (\w+)(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?")
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
"""Indexed by number: older NCCL prints numbers instead of names (src/include/nccl_common.h)."""


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


def found(folder: Path | None) -> frozenset[str]:
    """The transports in this process' log, as short texts: ``network IB``, ``via NET/IB with GDRDMA``."""
    return parsed(_lines(folder.glob(f"*.{os.getpid()}"))) if folder else frozenset()


def _lines(paths: Iterable[Path]) -> list[str]:
    lines: list[str] = []
    for path in paths:
        with contextlib.suppress(OSError):
            lines += files.read_text(path, errors="replace").splitlines()
    return lines


def parsed(lines: Iterable[str]) -> frozenset[str]:
    """The transports in the lines of a log, as short texts."""
    told = set()
    for line in lines:
        if match := _NETWORK.search(line):
            told.add(f"network {match[1].strip()}")
        elif match := _CHANNELS.search(line):
            told.add(f"{match[1]} channels")
        elif match := _CONNECTED.search(line):
            told.add(_transport(match[1], match[2]))
    return frozenset(told)


def _transport(transport: str, rest: str) -> str:
    if transport != "NET":
        return f"via {transport}"
    kind = rest.strip("/").split("/")[0]
    return f"via NET/{kind} with GDRDMA" if "GDRDMA" in rest else f"via NET/{kind} without GDRDMA"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclChoice:
    """How NCCL runs one collective at one size."""

    algorithm: str
    protocol: str
    channels: int | None


@contextlib.contextmanager
def deciding(folder: Path | None, env: MutableMapping[str, str]) -> Iterator[str]:
    """Make NCCL log its choices for launches in this block, if this NCCL can change its log at run time.

    Yields the prefix of the log files' names, for `decided`; empty if there will be no such log.
    """
    reset = _reset() if folder else None
    if folder is None or reset is None:
        yield ""
        return
    number = sum(1 for _ in folder.iterdir())  # a new name: NCCL truncates existing files

    def log(subsystems: str, name: str) -> None:
        env.update({"NCCL_DEBUG_SUBSYS": subsystems, "NCCL_DEBUG_FILE": str(folder / f"{name}.%h.%p")})
        reset()

    log("TUNING", f"decided{number}")
    try:
        yield f"decided{number}."
    finally:
        log(SETTINGS["NCCL_DEBUG_SUBSYS"], f"later{number}")


def decided(folder: Path | None, begin: str) -> NcclChoice | None:
    """NCCL's choice in this process; None if the log does not name it."""
    if folder is None or not begin:
        return None
    return last_choice(_lines(folder.glob(f"{begin}*.{os.getpid()}")))


def last_choice(lines: Iterable[str]) -> NcclChoice | None:
    """NCCL's last choice in the lines of a log."""
    for line in reversed(list(lines)):
        if match := _DECIDED.search(line):
            low, high = match[3], match[4]
            return NcclChoice(
                algorithm=_named(match[1], _ALGORITHMS),
                protocol=_named(match[2], _PROTOCOLS),
                channels=int(high) - int(low) + 1 if high else None,
            )
    return None


def _named(word: str, names: tuple[str, ...]) -> str:
    return names[place] if (place := digits(word)) is not None and place < len(names) else word


def _reset() -> Callable[[], object] | None:
    """NCCL's function that reads NCCL_DEBUG and the like again (nccl.h, since 2.24); None in older ones."""
    try:
        # Only the library that torch has loaded: another copy would not change the log.
        found: Callable[[], object] = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclResetDebugInit
    except (OSError, AttributeError):
        return None
    return found


def sentences(transports: Iterable[str]) -> tuple[str, ...]:
    """Sum up the `transports` of all ranks' logs, as ``nccl_log.found`` returns them."""
    words = sorted(set(transports))
    if not words:
        return ()
    result = [f"NCCL's log: {', '.join(words)}."]
    if any(word.startswith("via NET/IB without") for word in words):
        result.append(
            "Some data passes through host memory, without GPUDirect RDMA. Run dist-doctor to see why."
        )
    return tuple(result)
