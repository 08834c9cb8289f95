"""What NCCL's own log says of the way that the data takes; it goes to a file, nobody has to read it.

Lines after NVIDIA/nccl, src/transport/*.cc, src/init.cc and src/plugin/net.cc (v2.18 to v2.30).
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

SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH"}
"""Not TUNING, which tells algorithm and protocol by a line for every launch: never while one is timed."""
_CONNECTED = re.compile(r" -> .* via ([A-Z0-9]+)(.*)")
_NETWORK = re.compile(r"Using network (.+)")
_CHANNELS = re.compile(r"(\d+) coll channels")
_DECIDED = re.compile(r"Bytes -> Algo (\w+) proto (\w+)(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?")
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
"""By their numbers, which NCCL has printed before it printed names (src/include/nccl_common.h)."""


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
    return parsed(_lines(folder.glob(f"*.{os.getpid()}"))) if folder else frozenset()


def _lines(files: Iterable[Path]) -> list[str]:
    lines: list[str] = []
    for path in files:
        with contextlib.suppress(OSError):
            lines += path.read_text(errors="replace").splitlines()
    return lines


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """By what NCCL runs one collective at one size."""

    algorithm: str
    protocol: str
    channels: int | None


@contextlib.contextmanager
def deciding(folder: Path | None, env: MutableMapping[str, str]) -> Iterator[str]:
    """Have NCCL write its decisions for what is launched meanwhile, where it can be told so at run time.

    Yields how the names of its files begin, for `decided`; empty where there will be none.
    """
    reset = _reset() if folder else None
    if folder is None or reset is None:
        yield ""
        return
    number = sum(1 for _ in folder.iterdir())  # NCCL would empty a file that is there

    def log(subsystems: str, name: str) -> None:
        env.update({"NCCL_DEBUG_SUBSYS": subsystems, "NCCL_DEBUG_FILE": str(folder / f"{name}.%h.%p")})
        reset()

    log("TUNING", f"decided{number}")
    try:
        yield f"decided{number}."
    finally:
        log(SETTINGS["NCCL_DEBUG_SUBSYS"], f"later{number}")


def decided(folder: Path | None, begin: str) -> Decision | None:
    """What this process' NCCL has decided; None where it did not say."""
    if folder is None or not begin:
        return None
    return decision(_lines(folder.glob(f"{begin}*.{os.getpid()}")))


def decision(lines: Iterable[str]) -> Decision | None:
    """The same from the lines of a log."""
    for line in reversed(list(lines)):
        if match := _DECIDED.search(line):
            low, high = match[3], match[4]
            return Decision(
                algorithm=_named(match[1], _ALGORITHMS),
                protocol=_named(match[2], _PROTOCOLS),
                channels=int(high) - int(low) + 1 if high else None,
            )
    return None


def _named(word: str, names: tuple[str, ...]) -> str:
    return names[int(word)] if word.isdigit() and int(word) < len(names) else word


def _reset() -> Callable[[], object] | None:
    """NCCL's own function to read NCCL_DEBUG and its like anew (nccl.h, since 2.24); None without it."""
    try:
        # Only the library that torch has loaded: another one would be asked in vain.
        found: Callable[[], object] = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclResetDebugInit
    except (OSError, AttributeError):
        return None
    return found
