"""The end of a failed run: which worker failed first, and what its user sees last, once.

A worker that ends by an exception leaves a record in its node's stop folder (user_program.py), and torchrun
leaves the exit codes of all workers of the node (apps/torchrun.py). The node agent finds the first failure
of its node, and reports it to the head with the end of the attempt. When one rank is gone, those that wait
for it fail, too; such a consequence counts only if there is nothing else. The head prints the failure that
came first on any node, and every other node one line.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from imgkit_entrypoints import files, json_text, terminal
from imgkit_entrypoints.errors import EXIT_NO, shortened
from imgkit_entrypoints.launch.user_program import RECORD

if TYPE_CHECKING:
    from imgkit_entrypoints.rollcall.messages import RankFailure
    from imgkit_entrypoints.rollcall.session import HeadSession

CODES = "torchrun-failed"
"""File in the stop folder: exit codes of failed workers by rank."""
_TORCHRUN = "torchrun"
"""Stands for the rank in the name of torchrun's own record."""
LATE_S, LATE_AFTER_PEER_S = 5.0, 30.0
"""A worker that ends by an exception, and is still there after this time, has its traceback printed."""
HEAD_LINES, MOST_BYTES = 20, 40_000
"""First lines of a long text that are kept, besides its last ones; and bytes of all of them as JSON."""
_BY_TORCHRUN = (-signal.SIGHUP, -signal.SIGTERM)
"""torchrun ends the other workers so, once one has failed."""
_AFTER_PEER = re.compile(
    r"(?:reset|closed) by peer|Broken pipe|Socket closed|Connection refused|DistStoreError|DistNetworkError"
    r"|ncclRemoteError|ncclSystemError|remote process exited|recvValue failed|Failed to recv, got 0 bytes"
    r"|Timed out waiting \d+ms for (?:recv|send)|connectFullMesh failed|Watchdog caught collective"
)
"""What torch, gloo and NCCL say where another rank is gone."""
_STACK_IN_CPP = re.compile(r"(?m)^(?:Exception raised from .* \(most recent call first\):|frame #\d+: .*)\n?")
_ERROR = re.compile(r"(?m)^[\w.]+(?:Error|Exception)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """The last words of a worker."""

    rank: int | None
    """None: torchrun."""
    at: float
    """Seconds of the epoch."""
    text: str

    @property
    def after_peer(self) -> bool:
        """Whether it waited for a rank or node that is gone."""
        return _AFTER_PEER.search(self.text) is not None

    @property
    def lines(self) -> tuple[str, ...]:
        """What a user needs of it: of torchrun the error alone, and of nobody the stack in C++."""
        text = _STACK_IN_CPP.sub("", self.text)
        if self.rank is None and (errors := list(_ERROR.finditer(text))):
            text = text[errors[-1].start() :]
        return bounded(text.rstrip("\n"))


def note_codes(env: Mapping[str, str], codes: Mapping[int, int], *, own: bool) -> None:
    """Leave the exit codes of a node's failed workers for its node agent; torchrun's part.

    A program of this package (`own`) that leaves with a code has printed or recorded the reason.
    """
    found = {"own": own, "codes": {str(rank): code for rank, code in codes.items()}}
    with contextlib.suppress(KeyError, OSError):
        files.put(Path(env["IMGKIT_STOP_DIR"]) / CODES, json.dumps(found))


def note_torchrun(env: Mapping[str, str], text: str) -> bool:
    """Leave the error by which torchrun itself ends for its node agent; False: it cannot be left."""
    try:
        files.put(Path(env["IMGKIT_STOP_DIR"]) / f"{RECORD}{_TORCHRUN}", f"{time.time()}\n{text}")
    except (KeyError, OSError):
        return False
    return True


def clear(stop_folder: Path) -> None:
    """Remove what an earlier attempt has left.

    Raises
    ------
    OSError : a file cannot be removed.
    """
    for path in (stop_folder / CODES, *stop_folder.glob(f"{RECORD}*")):
        path.unlink(missing_ok=True)


def records(stop_folder: Path) -> list[RankRecord]:
    """Return what workers of this node have left, the first one first."""
    return sorted(_records(stop_folder), key=lambda one: one.at)


def _records(stop_folder: Path) -> Iterator[RankRecord]:
    for path in stop_folder.glob(f"{RECORD}*"):
        rank = path.name.removeprefix(RECORD)
        with contextlib.suppress(OSError, ValueError):
            at, _, text = files.read_text(path, errors="replace").partition("\n")
            when = float(at)
            if (rank.isdigit() or rank == _TORCHRUN) and math.isfinite(when):
                yield RankRecord(rank=int(rank) if rank.isdigit() else None, at=when, text=text)


def _codes(stop_folder: Path) -> tuple[Mapping[int, int], bool]:
    """Return what `note_codes` has left."""
    try:
        found = json_text.parse(files.read_own(stop_folder / CODES))
        return {int(rank): int(code) for rank, code in found["codes"].items()}, bool(found["own"])
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}, False


def of_node(stop_folder: Path, log: str, killed_by: int = 0) -> RankFailure | None:
    """Return the worker of this node that failed first; None where none is known to have failed.

    Parameters
    ----------
    log : path of this node's full log.
    killed_by : signal that ended torchrun itself, not sent by its node agent; 0: none.
    """
    from imgkit_entrypoints.rollcall.messages import RankFailure

    (codes, own), left = _codes(stop_folder), records(stop_folder)
    causes = [one for one in left if not one.after_peer]
    recorded = {one.rank for one in left}
    silent = [
        rank
        for rank, code in codes.items()
        if rank not in recorded and code not in _BY_TORCHRUN and not (own and code > 0)
    ]
    now = time.time()
    if first := next(iter(causes or ([] if silent or killed_by else left)), None):
        return RankFailure(
            rank=first.rank,
            code=EXIT_NO if first.rank is None else codes.get(first.rank),
            age_ms=max(0, int(1000 * (now - first.at))),
            after_peer=not causes,
            log=log,
            lines=first.lines,
        )
    if silent:
        return RankFailure(rank=silent[0], code=codes[silent[0]], age_ms=0, after_peer=False, log=log)
    if killed_by:
        return RankFailure(rank=None, code=-killed_by, age_ms=0, after_peer=False, log=log)
    return None


def bounded(text: str) -> tuple[str, ...]:
    """Return the lines of `text` as a message between nodes can carry them: the first ones and the last."""
    from imgkit_entrypoints.rollcall.messages import LINE, LINES

    lines = [shortened(line.expandtabs())[:LINE] for line in text.split("\n")]
    kept, size = list[str](), 0
    for position in (*range(min(HEAD_LINES, len(lines))), *range(len(lines) - 1, HEAD_LINES - 1, -1)):
        size += len(json.dumps(lines[position])) + 2
        if size > MOST_BYTES or len(kept) >= LINES - 1:
            left = len(lines) - len(kept)
            kept.insert(HEAD_LINES, f"... {left} more lines in the full log ...")
            break
        kept.insert(position if position < HEAD_LINES else HEAD_LINES, lines[position])
    return tuple(kept)


class LateRecords:
    """Reports an exception at once where its worker does not end, as one that waits for other ranks."""

    def __init__(self, stop_folder: Path) -> None:
        self._folder = stop_folder
        self._told: set[int | None] = set()

    def look(self) -> Iterator[tuple[str, ...]]:
        """Yield the lines of each new report, mostly none; call it about once a second."""
        if not any(self._folder.glob(f"{RECORD}*")):
            return
        for one in records(self._folder):
            late_s = LATE_AFTER_PEER_S if one.after_peer else LATE_S
            if one.rank not in self._told and time.time() - one.at > late_s:
                self._told.add(one.rank)
                what = f"{_who(one.rank)} has failed, and its process has not ended after {late_s:g} s"
                yield (what, *one.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """A failure as the head has received it."""

    at: float
    """When the worker failed, on the head's monotonic clock."""
    node: str
    """The node, as users know it."""
    failure: RankFailure


def first(told: Iterable[NodeFailure]) -> NodeFailure | None:
    """Return the failure that came first. A consequence of another rank's end counts only without others."""
    return min(told, key=lambda one: (one.failure.after_peer, one.at), default=None)


def of_run(roll: HeadSession, head: str, say: Callable[..., None], *, before: bool) -> tuple[str, ...]:
    """Return the last lines that the head prints; empty where no failed worker is known.

    Parameters
    ----------
    head : the head's name, also where it is the only node.
    before : of the attempt before the one that starts now.
    """
    told = [
        NodeFailure(at=at, node=roll.node_name(number) if number else head, failure=one)
        for at, number, one in (roll.previous_failures if before else roll.failures)
    ]
    cause = first(told)
    if cause is None:
        return ()
    if (
        cause.failure.after_peer and roll.placement.nnodes > 1
    ):  # each node has left the explanation to the head
        from imgkit_entrypoints.launch import explain

        for found in explain.explain("\n".join(cause.failure.lines)):
            say(*found.lines)
    return block(cause, told)


def block(told: NodeFailure, nodes: Sequence[NodeFailure] = ()) -> tuple[str, ...]:
    """Return the last lines of a failed run: rank, node, exit code, log, and the user's own traceback."""
    failure = told.failure
    others = [_who(one.failure.rank) for one in nodes if one is not told]
    lines = [f"{_who(failure.rank)} on {told.node} failed first: {ending(failure.code)}"]
    if others:
        more = f" and {len(others) - 8} more" if len(others) > 8 else ""
        lines.append(f"  then on other nodes: {', '.join(others[:8])}{more}")
    lines.append(f"  full log on that node: {failure.log}" if failure.log else "  there is no full log")
    return (*lines, *(failure.lines or (_SILENT.get(failure.code or 0, _NO_REASON),)))


def one_line(told: NodeFailure) -> str:
    """Return the line by which another node than the head names its worker."""
    failure = told.failure
    last = next((line for line in reversed(failure.lines) if line.strip()), "")
    what = f": {shortened(last.strip())[:200]}" if last else ""
    log = f"; full log: {failure.log}" if failure.log else ""
    return f"{_who(failure.rank)} on {told.node} failed, {ending(failure.code)}{what}{log}"


def _who(rank: int | None) -> str:
    return _TORCHRUN if rank is None else f"rank {rank}"


_NO_REASON = "it left no traceback; what it printed is above and in the full log"
_STACK = "it left no traceback; a program of dist-run prints one with PYTHONFAULTHANDLER=1"
_SILENT = {
    -signal.SIGSEGV: _STACK,
    -signal.SIGABRT: _STACK,
    -signal.SIGBUS: "it left no traceback; usual causes: a full /dev/shm, a mapped file that has shrunk",
    -signal.SIGKILL: "it left no traceback; most often the kernel has killed it because memory ran out "
    "(dmesg | grep -i oom): ask for more memory (Slurm: --mem), or use fewer data workers",
}


def ending(code: int | None) -> str:
    """Return how a worker has ended, in words."""
    if code is None:
        return "exit code unknown"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def write_log(text: str, folder: str, node_rank: int, attempt: int) -> str:
    """Write the full log of this node into `folder`, or a temporary one; return its path, or nothing.

    Parameters
    ----------
    folder : of the user's logs, or of the run; empty: there is none.
    """
    name = f"errors-node{node_rank}" + (f"-attempt{attempt}" if attempt > 1 else "")
    content = terminal.shown(terminal.unstyled(text), keep="\n\t")
    for path in (PurePath(folder, f"{name}.log") if folder else None, None):
        try:
            if path is not None:
                place = Path(path)
                place.parent.mkdir(parents=True, exist_ok=True)
            else:
                place = Path(tempfile.mkdtemp(prefix="imgkit-")) / f"{name}.log"
            files.put(place, content)
        except OSError:
            continue
        return str(place.absolute())
    return ""


class FinalMessage:
    """What the node agent prints after everything else."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self.lines: tuple[str, ...] = ()

    def __call__(self) -> None:
        """Print it."""
        if self.lines:
            self._say(*self.lines)
