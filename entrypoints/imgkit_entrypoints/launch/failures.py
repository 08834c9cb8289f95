"""Find the worker that failed first in a run, and describe its error in the last lines that are printed.

A worker that ends with an exception leaves a record of it in its node's stop folder (user_program.py), and
torchrun leaves the exit codes of all failed workers of the node (apps/torchrun.py). The node agent finds the
first failure on its node, and reports it to the head (the node with rank 0) when the attempt ends.

When one rank is gone, the ranks that wait for it fail as well. Such a consequence is reported only if no
other failure is known. The head prints the failure that came first on any node. Every other node prints one
line about its own failure.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_entrypoints import files, json_text, terminal
from imgkit_entrypoints.errors import join_names, shorten_message
from imgkit_entrypoints.launch import explain
from imgkit_entrypoints.launch.user_program import RECORD
from imgkit_entrypoints.rollcall.messages import LINE_CHARACTERS, MAX_LINES, RankFailure

if TYPE_CHECKING:
    from imgkit_entrypoints.rollcall.session import HeadSession, ReportedFailure

CODES = "torchrun-failed"
"""File in the stop folder with the exit codes of failed workers by rank."""
# Stands for the rank in the name of torchrun's own record: "failed-torchrun" beside "failed-3".
_TORCHRUN = "torchrun"
_RECORD_NAME = re.compile(rf"{RECORD}(?:([0-9]+)|{_TORCHRUN})")
LATE_S = 5.0
"""Seconds after which the traceback of a failed worker is printed although its process has not ended."""
LATE_ELSEWHERE_S = 30.0
"""The same limit for a traceback that the user should rather see elsewhere.

On nodes other than the head, this applies to every traceback: the head prints it once the worker has ended,
which may take some seconds on a busy machine. It also applies to an error that only says that another rank is
gone, since the error of that rank is the one to print.
"""
HEAD_LINES = 20
"""Number of lines that are kept from the beginning of a long text, besides its last lines."""
MAX_BYTES = 40_000
"""Largest size of the shortened text in bytes of JSON. One message between nodes must be able to carry it."""
MAX_FOLLOWERS = 8
"""Largest number of workers that the final message names besides the one that failed first."""
MAX_REASON = 200
"""Largest number of characters of an error in the single line that a node other than the head prints."""
COMMAND_LINES = 20
"""Number of last lines of a failed command that are printed at the end: enough for a short traceback."""
# Exit codes of workers that torchrun has ended by a signal because another worker has failed.
_CODES_OF_ENDED_WORKERS = (-signal.SIGHUP, -signal.SIGTERM)
# What torch, gloo and NCCL print when another rank is gone.
_AFTER_PEER = re.compile(
    r"(?:reset|closed) by peer|Broken pipe|Socket closed|Connection refused|DistStoreError|DistNetworkError"
    r"|ncclRemoteError|ncclSystemError|remote process exited|recvValue failed|Failed to recv, got 0 bytes"
    r"|Timed out waiting \d+ms for (?:recv|send)|connectFullMesh failed|Watchdog caught collective"
)
# C++ frames in the text of a torch error: "frame #3: c10d::TCPStore::get(...) + 0x1f (0x7f... in ...)".
_STACK_IN_CPP = re.compile(r"(?m)^(?:Exception raised from .* \(most recent call first\):|frame #\d+: .*)\n?")
# The line of a traceback that names the exception: "torch.distributed.DistStoreError: ...".
_ERROR = re.compile(r"(?m)^[\w.]+(?:Error|Exception)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """The recorded error of a worker, or of torchrun itself."""

    rank: int | None
    """The worker's rank, or None for torchrun."""
    at: float
    """Time of the error in seconds of the epoch."""
    text: str
    """The traceback, or the message of SystemExit."""

    @property
    def after_peer(self) -> bool:
        """Return whether the error is only a consequence: it says that another rank or node is gone."""
        return _AFTER_PEER.search(self.text) is not None

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the lines for the user, without the C++ frames.

        For torchrun itself (`rank` is None), only its last error is returned. The errors before it led to
        that one. The text is shortened, so that a message between nodes can carry it.
        """
        error_text = _STACK_IN_CPP.sub("", self.text)
        errors = list(_ERROR.finditer(error_text))
        if self.rank is None and errors:
            error_text = error_text[errors[-1].start() :]
        return limit_lines(error_text.rstrip("\n"))


def write_exit_codes(env: Mapping[str, str], codes: Mapping[int, int], *, runs_own_program: bool) -> None:
    """Write the exit codes of a node's failed workers into the stop folder, for the node agent.

    torchrun's process calls this function. Without a node agent, or if the file cannot be written, it does
    nothing. `codes` contains the exit codes by rank. `runs_own_program` says whether the workers run a
    program of this package. If such a program ends with an exit code, it has already printed or recorded the
    reason. So `find_node_failure` does not report a missing traceback for it.
    """
    document = {"is_imgkits": runs_own_program, "codes": {str(rank): code for rank, code in codes.items()}}
    with contextlib.suppress(KeyError, OSError):
        files.write_file(Path(env["IMGKIT_STOP_DIR"]) / CODES, json.dumps(document))


def write_torchrun_error(env: Mapping[str, str], text: str) -> bool:
    """Record an error of torchrun itself in the stop folder, for the node agent.

    Return False if the record cannot be written.
    """
    try:
        files.write_file(Path(env["IMGKIT_STOP_DIR"]) / f"{RECORD}{_TORCHRUN}", f"{time.time()}\n{text}")
    except (KeyError, OSError):
        return False
    return True


def clear_records(stop_folder: Path) -> None:
    """Remove the errors and exit codes that workers of an earlier attempt have recorded.

    Raises
    ------
    OSError : a file cannot be removed.
    """
    for path in (stop_folder / CODES, *stop_folder.glob(f"{RECORD}*")):
        path.unlink(missing_ok=True)


def read_records(stop_folder: Path) -> list[RankRecord]:
    """Return the errors that workers of this node have recorded, the earliest first.

    A record is a file such as ``failed-3`` for rank 3. It contains the time of the error and the traceback.
    Incomplete files are skipped, because a worker may still be writing.
    """
    records = []
    for path in stop_folder.glob(f"{RECORD}*"):
        record = _read_record(path)
        if record is not None:
            records.append(record)
    return sorted(records, key=lambda record: record.at)


def _read_record(path: Path) -> RankRecord | None:
    """Return the record in the file `path`, or None if the file is incomplete or not a record.

    Workers and torchrun write records of their errors. The time in a record must be a finite number, because
    `read_records` sorts by it.
    """
    match = _RECORD_NAME.fullmatch(path.name)
    if match is None:
        return None
    rank = None if match[1] is None else int(match[1])  # None: the record is of torchrun itself
    try:
        # The first line is the time of the error, and the traceback follows.
        seconds, _, traceback_text = files.read_text(path, errors="replace").partition("\n")
        at = float(seconds)
    except (OSError, ValueError):
        return None
    return RankRecord(rank=rank, at=at, text=traceback_text) if math.isfinite(at) else None


def _read_codes(stop_folder: Path) -> tuple[Mapping[int, int], bool]:
    """Return what `write_exit_codes` wrote: the exit codes by rank, and whether the program is imgkit's.

    If the file is missing or malformed, return ``({}, False)``. torchrun then was ended before it wrote the
    file, or no worker has failed.
    """
    try:
        document = json_text.parse(files.read_own(stop_folder / CODES))
        codes = {int(rank): int(code) for rank, code in document["codes"].items()}
        return codes, bool(document["is_imgkits"])
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}, False


def find_node_failure(stop_folder: Path, killed_by: int = 0) -> RankFailure | None:
    """Return the worker of this node that failed first, or None if none is known to have failed.

    A worker leaves a record of its error in the stop folder. One failed worker makes others fail, so the
    candidates are considered in this order. First comes a worker with an error of its own. Then comes a
    worker that ended without a record, most often because it was killed. Last comes a worker whose error only
    says that another rank is gone.

    Parameters
    ----------
    killed_by : number of the signal that ended torchrun itself. 0 if there was none, or if the node agent has
        sent it.
    """
    codes, runs_own_program = _read_codes(stop_folder)
    records = read_records(stop_folder)  # the earliest error comes first
    for record in records:
        if not record.after_peer:  # else the error only says that another rank is gone
            return _make_recorded_failure(record, codes)
    recorded_ranks = {record.rank for record in records}
    for rank, code in codes.items():
        has_printed_reason = runs_own_program and code > 0  # as programs of this package do
        was_ended_by_torchrun = code in _CODES_OF_ENDED_WORKERS  # after another worker has failed
        if rank not in recorded_ranks and not has_printed_reason and not was_ended_by_torchrun:
            return _make_unrecorded_failure(rank, code)
    if killed_by:
        return _make_unrecorded_failure(None, -killed_by)
    if records:
        return _make_recorded_failure(records[0], codes)
    return None


def _make_unrecorded_failure(rank: int | None, code: int) -> RankFailure:
    """Return the failure of a worker that has left no record. `rank` is None for torchrun itself.

    The time of the failure is unknown, so it counts as now (`age_ms` is 0).
    """
    return RankFailure(rank=rank, code=code, age_ms=0, after_peer=False, log="")


def _make_recorded_failure(record: RankRecord, codes: Mapping[int, int]) -> RankFailure:
    """Return the failure of the worker, or of torchrun itself, that wrote `record`.

    `codes` contains the exit codes of the failed workers by rank.
    """
    # If torchrun was ended too early, it has written no codes. Python's exit code after an exception is 1.
    code = 1
    if record.rank is not None:
        code = codes.get(record.rank, 1)
    return RankFailure(
        rank=record.rank,
        code=code,
        age_ms=max(0, int(1000 * (time.time() - record.at))),
        after_peer=record.after_peer,
        log="",
        lines=record.lines,
    )


def make_command_failure(code: int, output: str) -> RankFailure:
    """Return the failure of a command of ``dist-run --per-node``, which has just ended.

    Such a command is no worker, so it has no rank and leaves no record. Its last lines of output show whether
    it has only failed because another node is gone (`after_peer`).

    Parameters
    ----------
    code : the command's exit code, or the negative number of the signal that ended it.
    output : the end of what the command has written to standard error.
    """
    last_lines = output.rstrip("\n").split("\n")[-COMMAND_LINES:]
    output_end = "\n".join(last_lines)
    return RankFailure(
        rank=None,
        is_command=True,
        code=code,
        age_ms=0,
        after_peer=_AFTER_PEER.search(output_end) is not None,
        log="",
        lines=limit_lines(output_end) if output_end else (),
    )


def limit_lines(text: str) -> tuple[str, ...]:
    """Return the lines of `text`, shortened so that a message between nodes can carry them.

    Long lines are cut off. If there are too many lines, keep the first `HEAD_LINES` and as many of the last
    lines as the message can hold. A line between the two parts says how many lines are missing. The limits
    are `MAX_LINES` lines and `MAX_BYTES` bytes.
    """
    lines = [shorten_message(line.expandtabs())[:LINE_CHARACTERS] for line in text.split("\n")]
    first_lines, last_lines = lines[:HEAD_LINES], lines[HEAD_LINES:]
    # The lines in the order of their importance: the first lines, and then the others backwards from the end.
    kept = _count_fitting([*first_lines, *reversed(last_lines)])
    omitted = len(lines) - kept
    if omitted == 0:
        return tuple(lines)
    # If not even the first lines fit, the gap begins earlier, and no last line is kept.
    gap_start = min(kept, HEAD_LINES)
    gap_end = gap_start + omitted
    return (*lines[:gap_start], f"... {omitted} more lines in the full log ...", *lines[gap_end:])


def _count_fitting(lines: Sequence[str]) -> int:
    """Return how many of the first `lines` fit into a message between nodes.

    The limits are `MAX_LINES` lines and `MAX_BYTES` bytes of JSON, because the message is JSON. The result
    leaves room for one more line, which says how many lines are missing.
    """
    size = 0
    for index, line in enumerate(lines):
        size += len(json.dumps(line)) + 2  # JSON has ", " between two elements
        if size > MAX_BYTES or index >= MAX_LINES - 1:
            return index
    return len(lines)


class LateRecords:
    """Reports the exception of a worker whose process does not end after it.

    Such a worker may wait for other ranks at its exit. Without the report, the run would show no error until
    it ends.
    """

    def __init__(self, stop_folder: Path, *, is_head: bool) -> None:
        self._folder, self._is_head = stop_folder, is_head
        self._reported: set[int | None] = set()

    def collect_reports(self) -> Iterator[tuple[str, ...]]:
        """Yield the lines of each new report: a title, and then the traceback. Call this about once a second.

        An exception is reported if its worker is still running some seconds later. Each exception is reported
        only once.
        """
        for record in read_records(self._folder):
            # In two cases, the user should see a better message first, so there is more time for it. If
            # another rank is gone (`after_peer`), the error of that rank explains this one. On nodes other
            # than the head, the head prints the traceback once the worker has ended.
            delay_s = LATE_S
            if record.after_peer or not self._is_head:
                delay_s = LATE_ELSEWHERE_S
            if record.rank in self._reported or time.time() - record.at <= delay_s:
                continue
            self._reported.add(record.rank)
            name = _describe_rank(record.rank)
            title = f"{name} has failed, and its process has not ended after {delay_s:g} s"
            yield (title, *record.lines)


def first_failure(failures: Iterable[ReportedFailure]) -> ReportedFailure | None:
    """Return the failure that came first, or None if `failures` is empty.

    A failure that only results from the end of another rank is returned only if there is no other failure.
    """
    return min(failures, key=lambda report: (report.failure.after_peer, report.at), default=None)


def explain_run_failure(
    session: HeadSession, reports: Sequence[ReportedFailure], *, memory: str
) -> tuple[explain.Explanation, ...]:
    """Return known explanations of a failed attempt whose cause no node has reported.

    The first failure then only results from the end of another rank (`after_peer`). On several nodes, the
    node agents leave it to the head to explain this (`NodeAttempt._log_explanations`), since only the head
    knows whether another node has reported the cause. In all other cases, return ().

    Parameters
    ----------
    reports : the failures that the nodes have reported in the attempt.
    memory : the value of `explain.MEMORY`, which is the memory that the job requested.
    """
    first = first_failure(reports)
    if first is None or not first.failure.after_peer or session.placement.nnodes == 1:
        return ()
    return explain.find_explanations("\n".join(first.failure.lines), memory=memory)


def describe_run_failure(
    session: HeadSession, reports: Sequence[ReportedFailure], *, memory: str
) -> tuple[str, ...]:
    """Return the last lines that the head (the node with rank 0) prints about a failed attempt.

    Return () if no failed worker is known. The parameters are those of `explain_run_failure`.
    """
    first = first_failure(reports)
    if first is None:
        return ()
    followers = [_describe_failed_part(report.failure) for report in reports if report is not first]
    return describe_failure(first.failure, session.node_name(first.number), followers, memory=memory)


def describe_failure(
    failure: RankFailure, node: str, followers: Sequence[str] = (), *, memory: str = ""
) -> tuple[str, ...]:
    """Return the last lines of a failed run: rank, node, exit code, path of the log, and the traceback.

    If there is no traceback, the last line says what usually ends a worker in this way.

    Parameters
    ----------
    failure : the failure that came first.
    node : the name of its node, as users know it.
    followers : names of the ranks that failed later on other nodes, such as ``rank 3``.
    memory : the value of `explain.MEMORY`, which is the memory that the job requested.
    """
    lines = [f"{_describe_failed_part(failure)} on {node} failed first: {describe_ending(failure.code)}"]
    if followers:
        lines.append(f"  then on other nodes: {join_names(followers, MAX_FOLLOWERS)}")
    lines.append(f"  full log on that node: {failure.log}" if failure.log else "  there is no full log")
    if failure.lines:
        return (*lines, *failure.lines)
    # The code of a worker that a signal has killed is the negative number of the signal.
    if failure.code == -signal.SIGKILL:
        return (*lines, f"{_KILLED}: {explain.memory_remedy(memory)}")
    return (*lines, _SILENT.get(failure.code, _NO_REASON))


def summarize_failure(failure: RankFailure, node: str) -> str:
    """Return one line about the failed worker of this node, which nodes other than the head print.

    An example is ``rank 3 on n2 failed, exit code 1: ValueError: no data; full log: /logs/errors-n2.log``.
    """
    summary = f"{_describe_failed_part(failure)} on {node} failed, {describe_ending(failure.code)}"
    # The last line of a traceback names the exception.
    filled_lines = [line.strip() for line in failure.lines if line.strip()]
    if filled_lines:
        summary += f": {shorten_message(filled_lines[-1])[:MAX_REASON]}"
    if failure.log:
        summary += f"; full log: {failure.log}"
    return summary


def _describe_rank(rank: int | None) -> str:
    return _TORCHRUN if rank is None else f"rank {rank}"


def _describe_failed_part(failure: RankFailure) -> str:
    return "the command" if failure.is_command else _describe_rank(failure.rank)


# The last lines of `describe_failure` about a worker that has left no traceback.
_NO_REASON = "it left no traceback; what it printed is above and in the full log"
_STACK = "it left no traceback; a program of dist-run prints one with PYTHONFAULTHANDLER=1"
_SILENT = {
    -signal.SIGSEGV: _STACK,
    -signal.SIGABRT: _STACK,
    -signal.SIGBUS: "it left no traceback; usual causes: a full /dev/shm, a mapped file that has shrunk",
}
_KILLED = "it left no traceback; most often the kernel has killed it because memory ran out"


def describe_ending(code: int) -> str:
    """Return how a worker has ended, such as ``exit code 1`` for 1, or ``killed by SIGKILL`` for -9."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # Python has no name for this signal
        return f"killed by signal {-code}"


def write_log(text: str, folder: str, node: str, attempt: int) -> str:
    """Write the full error output of this node into a file, and return the file's path.

    If `folder` cannot be written, use a temporary folder. If that fails as well, return "".

    Parameters
    ----------
    text : the error output. In the file, colours are removed and control characters are escaped.
    folder : the folder of the user's logs or of the run. If it is empty, a temporary folder is used.
    node : part of the file's name, which must differ between the node agents of a run.
    attempt : number of the attempt. From the second attempt on, it is part of the file's name.
    """
    name = f"errors-{node}.log"
    if attempt > 1:
        name = f"errors-{node}-attempt{attempt}.log"
    log_text = terminal.escape_controls(terminal.strip_styles(text), keep="\n\t")
    if folder:
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            files.write_file(Path(folder, name), log_text)
            return str(Path(folder, name).absolute())
    with contextlib.suppress(OSError):
        path = Path(tempfile.mkdtemp(prefix="imgkit-"), name)
        files.write_file(path, log_text)
        return str(path.absolute())
    return ""
