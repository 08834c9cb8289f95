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
from imgkit_entrypoints.errors import EXIT_NO, shorten_message
from imgkit_entrypoints.launch import explain
from imgkit_entrypoints.launch.user_program import RECORD
from imgkit_entrypoints.rollcall.messages import LINE, LINES, RankFailure

if TYPE_CHECKING:
    from imgkit_entrypoints.rollcall.session import HeadSession

CODES = "torchrun-failed"
"""File in the stop folder: exit codes of failed workers by rank."""
_TORCHRUN = "torchrun"
"""Stands for the rank in the name of torchrun's own record."""
LATE_S, LATE_AFTER_PEER_S = 5.0, 30.0
"""A worker that ends by an exception, and is still there after this time, has its traceback printed."""
HEAD_LINES, MAX_BYTES = 20, 40_000
"""First lines of a long text that are kept, besides its last ones; and bytes of all of them as JSON."""
COMMAND_LINES = 20
"""Last lines of a failed command that are printed at the end: enough for a short traceback."""
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
        """True if it waited for a rank or node that is gone."""
        return _AFTER_PEER.search(self.text) is not None

    @property
    def lines(self) -> tuple[str, ...]:
        """What a user needs of it: of torchrun the error alone, and of nobody the stack in C++."""
        text = _STACK_IN_CPP.sub("", self.text)
        if self.rank is None and (errors := list(_ERROR.finditer(text))):
            text = text[errors[-1].start() :]
        return limit_lines(text.rstrip("\n"))


def note_codes(env: Mapping[str, str], codes: Mapping[int, int], *, is_imgkits: bool) -> None:
    """Leave the exit codes of a node's failed workers for its node agent; torchrun's part.

    A program of this package (`is_imgkits`) that leaves with a code has printed or recorded the reason.
    """
    content = {"is_imgkits": is_imgkits, "codes": {str(rank): code for rank, code in codes.items()}}
    with contextlib.suppress(KeyError, OSError):
        files.write_file(Path(env["IMGKIT_STOP_DIR"]) / CODES, json.dumps(content))


def note_torchrun(env: Mapping[str, str], text: str) -> bool:
    """Leave the error by which torchrun itself ends for its node agent; False: it cannot be left."""
    try:
        files.write_file(Path(env["IMGKIT_STOP_DIR"]) / f"{RECORD}{_TORCHRUN}", f"{time.time()}\n{text}")
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
    entries = []
    for path in stop_folder.glob(f"{RECORD}*"):
        rank = path.name.removeprefix(RECORD)
        with contextlib.suppress(OSError, ValueError):
            seconds, _, text = files.read_text(path, errors="replace").partition("\n")
            at = float(seconds)
            if (rank.isdigit() or rank == _TORCHRUN) and math.isfinite(at):
                entries.append(RankRecord(rank=int(rank) if rank.isdigit() else None, at=at, text=text))
    return sorted(entries, key=lambda record: record.at)


def _read_codes(stop_folder: Path) -> tuple[Mapping[int, int], bool]:
    """Return what `note_codes` has left."""
    try:
        content = json_text.parse(files.read_own(stop_folder / CODES))
        return {int(rank): int(code) for rank, code in content["codes"].items()}, bool(content["is_imgkits"])
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}, False


def of_node(stop_folder: Path, killed_by: int = 0) -> RankFailure | None:
    """Return the worker of this node that failed first; None where none is known to have failed.

    `killed_by` is the signal that ended torchrun itself, not sent by its node agent; 0: none.
    """
    (codes, is_imgkits), entries = _read_codes(stop_folder), records(stop_folder)
    causes = [record for record in entries if not record.after_peer]
    recorded = {record.rank for record in entries}
    silent = [
        rank
        for rank, code in codes.items()
        if rank not in recorded and code not in _BY_TORCHRUN and not (is_imgkits and code > 0)
    ]
    if not causes and (silent or killed_by):
        rank = silent[0] if silent else None
        code = codes[silent[0]] if silent else -killed_by
        return RankFailure(rank=rank, code=code, age_ms=0, after_peer=False, log="")
    if not entries:
        return None
    record = (causes or entries)[0]
    # Python ends with 1 after an exception; a torchrun that was ended meanwhile has left no codes.
    code = EXIT_NO if record.rank is None else codes.get(record.rank, EXIT_NO)
    return RankFailure(
        rank=record.rank,
        code=code,
        age_ms=max(0, int(1000 * (time.time() - record.at))),
        after_peer=not causes,
        log="",
        lines=record.lines,
    )


def of_command(code: int, output: str) -> RankFailure:
    """Return the failure of a command of dist-run --per-node.

    Parameters
    ----------
    code : its exit code; negative: the signal that ended it.
    output : what it has written to standard error.
    """
    text = "\n".join(output.rstrip("\n").split("\n")[-COMMAND_LINES:])
    return RankFailure(
        rank=None,
        is_command=True,
        code=code,
        age_ms=0,
        after_peer=_AFTER_PEER.search(text) is not None,
        log="",
        lines=limit_lines(text) if text else (),
    )


def limit_lines(text: str) -> tuple[str, ...]:
    """Return the lines of `text` as a message between nodes can carry them: the first ones and the last."""
    lines = [shorten_message(line.expandtabs())[:LINE] for line in text.split("\n")]
    result, size = list[str](), 0
    for position in (*range(min(HEAD_LINES, len(lines))), *range(len(lines) - 1, HEAD_LINES - 1, -1)):
        size += len(json.dumps(lines[position])) + 2
        if size > MAX_BYTES or len(result) >= LINES - 1:
            omitted = len(lines) - len(result)
            result.insert(HEAD_LINES, f"... {omitted} more lines in the full log ...")
            break
        result.insert(position if position < HEAD_LINES else HEAD_LINES, lines[position])
    return tuple(result)


class LateRecords:
    """Reports an exception at once where its worker does not end, as one that waits for other ranks."""

    def __init__(self, stop_folder: Path) -> None:
        self._folder = stop_folder
        self._reported: set[int | None] = set()

    def look(self) -> Iterator[tuple[str, ...]]:
        """Yield the lines of each new report, mostly none; call it about once a second."""
        for record in records(self._folder):
            late_s = LATE_AFTER_PEER_S if record.after_peer else LATE_S
            if record.rank not in self._reported and time.time() - record.at > late_s:
                self._reported.add(record.rank)
                title = f"{_name(record.rank)} has failed, and its process has not ended after {late_s:g} s"
                yield (title, *record.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """A failure as the head has received it."""

    at: float
    """When the worker failed, on the head's monotonic clock."""
    node: str
    """The node, as users know it."""
    failure: RankFailure


def first(reported: Iterable[NodeFailure]) -> NodeFailure | None:
    """Return the failure that came first. A consequence of another rank's end counts only without others."""
    return min(reported, key=lambda entry: (entry.failure.after_peer, entry.at), default=None)


def of_run(
    session: HeadSession, head: str, log: Callable[..., None], *, memory: str, of_previous: bool
) -> tuple[str, ...]:
    """Return the last lines that the head prints; empty where no failed worker is known.

    Parameters
    ----------
    head : the head's name, also where it is the only node.
    memory : the value of `explain.MEMORY`.
    of_previous : of the attempt before the one that starts now.
    """
    reported = [
        NodeFailure(at=at, node=session.node_name(number) if number else head, failure=failure)
        for at, number, failure in (session.previous_failures if of_previous else session.failures)
    ]
    cause = first(reported)
    if cause is None:
        return ()
    if (
        cause.failure.after_peer and session.placement.nnodes > 1
    ):  # each node has left the explanation to the head
        for explanation in explain.explain("\n".join(cause.failure.lines), memory=memory):
            log(*explanation.lines)
    return block(cause, reported, memory=memory)


def block(cause: NodeFailure, reported: Sequence[NodeFailure] = (), *, memory: str = "") -> tuple[str, ...]:
    """Return the last lines of a failed run: rank, node, exit code, log, and the user's own traceback."""
    failure = cause.failure
    followers = [_failed_name(entry.failure) for entry in reported if entry is not cause]
    lines = [f"{_failed_name(failure)} on {cause.node} failed first: {ending(failure.code)}"]
    if followers:
        rest = f" and {len(followers) - 8} more" if len(followers) > 8 else ""
        lines.append(f"  then on other nodes: {', '.join(followers[:8])}{rest}")
    lines.append(f"  full log on that node: {failure.log}" if failure.log else "  there is no full log")
    if failure.lines:
        return (*lines, *failure.lines)
    if failure.code == -signal.SIGKILL:
        return (*lines, f"{_KILLED}: {explain.memory_remedy(memory)}")
    return (*lines, _SILENT.get(failure.code, _NO_REASON))


def one_line(entry: NodeFailure) -> str:
    """Return the line by which another node than the head names its worker."""
    failure = entry.failure
    last = next((line for line in reversed(failure.lines) if line.strip()), "")
    reason = f": {shorten_message(last.strip())[:200]}" if last else ""
    log = f"; full log: {failure.log}" if failure.log else ""
    return f"{_failed_name(failure)} on {entry.node} failed, {ending(failure.code)}{reason}{log}"


def _name(rank: int | None) -> str:
    return _TORCHRUN if rank is None else f"rank {rank}"


def _failed_name(failure: RankFailure) -> str:
    return "the command" if failure.is_command else _name(failure.rank)


_NO_REASON = "it left no traceback; what it printed is above and in the full log"
_STACK = "it left no traceback; a program of dist-run prints one with PYTHONFAULTHANDLER=1"
_SILENT = {
    -signal.SIGSEGV: _STACK,
    -signal.SIGABRT: _STACK,
    -signal.SIGBUS: "it left no traceback; usual causes: a full /dev/shm, a mapped file that has shrunk",
}
_KILLED = "it left no traceback; most often the kernel has killed it because memory ran out"


def ending(code: int) -> str:
    """Return how a worker has ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def write_log(text: str, folder: str, node: str, attempt: int) -> str:
    """Write the full log of this node into `folder`, or a temporary one; return its path, or nothing.

    Parameters
    ----------
    folder : of the user's logs, or of the run; empty: there is none.
    node : the node's part of the file's name, which no other node agent of the run has.
    """
    name = f"errors-{node}" + (f"-attempt{attempt}" if attempt > 1 else "")
    content = terminal.escape_controls(terminal.strip_styles(text), keep="\n\t")
    for path in (PurePath(folder, f"{name}.log") if folder else None, None):
        try:
            if path is not None:
                target = Path(path)
                target.parent.mkdir(parents=True, exist_ok=True)
            else:
                target = Path(tempfile.mkdtemp(prefix="imgkit-")) / f"{name}.log"
            files.write_file(target, content)
        except OSError:
            continue
        return str(target.absolute())
    return ""
