"""The command of this node below its guard (guard.py), and its end by force from a deadline on."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from imgkit_entrypoints.errors import ToolFailed
from imgkit_entrypoints.launch import guard
from imgkit_entrypoints.launch.user_program import MARK, STOP_SIGNALS

TAIL_BYTES = 1 << 20
"""The end of the error output that is kept for the log of a failed run."""
_NO_HOST_NAME = b"[c10d] The hostname of the client socket cannot be retrieved. err=-"
"""A warning of torch about each connection from an address without a name, in every process."""
_PREFIX = rb"(?:\[[^\]\n]*\]: )?(?:\[rank\d+\]:)?"
_LOG_ONLY = re.compile(
    _PREFIX + rb"(?:" + MARK.encode() + rb"|\[[WE]\d{4} [^\]\n]*TCPStore\.cpp:\d+\] "
    rb"|\[[WE]\d{4} [^\]\n]*ProcessGroupNCCL\.cpp:\d+\] (?:\[[^\]\n]*\] ?)*Failed to check the "
    rb"|Exception raised from [^\n]* \(most recent call first\):|frame #\d+: |<omitting python frames>)"
)
"""Lines that are of use in a log alone: marked ones (user_program.py), and stacks of torch's store in C++,
which every process prints whose torchrun has ended."""


class GuardedCommand:
    """A command and its guard; `close` ends everything that is left of them.

    Parameters
    ----------
    log : takes messages about the command.
    repeats_warnings : False: a warning that all nodes of a run print comes from another one.
    open_files : soft limit of the command's open files; None: that of this process.
    inherited : descriptors that the command gets under the same numbers.
    kind : how the guard starts the command: torchrun or node (guard.py).
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Callable[[str], None],
        *,
        repeats_warnings: bool = True,
        open_files: int | None = None,
        inherited: Sequence[int] = (),
        kind: str = "torchrun",
    ) -> None:
        if open_files is None:
            open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._argv, self._log, self._kind = argv, log, kind
        self.code: int | None = None
        """Exit code of the command; negative: the signal that ended it; None: it still runs."""
        self._buffer = b""
        self._is_forced = False
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        python = (sys.executable or "python3", "-I", "-S", guard.__file__)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited by all below
        try:
            self._process = subprocess.Popen(
                [*python, str(control), str(status), str(open_files), kind, *argv],
                env=dict(env),
                stderr=subprocess.PIPE,
                pass_fds=(control, status, *inherited),
                start_new_session=True,  # a kill of this process' group must leave the guard
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(control)
            os.close(status)
        assert self._process.stderr is not None  # noqa: S101 - it is a pipe
        self._copier = _Copier(self._process.stderr, has_warned=not repeats_warnings)
        self._copier.start()

    def close(self) -> None:
        """Close the pipes to the guard, which then ends everything that is left."""
        for descriptor in (self._control, self._status):
            with contextlib.suppress(OSError):  # closed before
                os.close(descriptor)
        self._control = self._status = -1

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the guard reports something."""
        return self._status

    def read(self) -> bool:
        """Take in the guard's reports; False once nothing of the command is left.

        Raises
        ------
        ToolFailed : the command cannot be started.
        """
        try:
            data = os.read(self._status, 4096)
        except BlockingIOError:
            return True
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._handle_report(line.decode())
        return bool(data)

    def send(self, step: str) -> None:
        """Have the guard take `step` towards the end: ``signal N`` or ``kill``."""
        self._is_forced = True
        with contextlib.suppress(OSError):  # the guard has ended by itself
            os.write(self._control, f"{step}\n".encode())

    def wait(self) -> int:
        """Close the pipes, wait for the guard, and return the command's exit code."""
        self.close()
        self._process.wait()
        if self.code is None:
            self._log("the guard of this node's processes was killed; ending them")
            guard.end_all()
            self.code = -signal.SIGKILL
        self._copier.join(timeout=2.0)
        return self.code

    def tail(self) -> str:
        """Return the end of the command's error output, also of the lines that were not printed."""
        return self._copier.tail().decode(errors="replace").replace(MARK, "")

    def _handle_report(self, line: str) -> None:
        event, _, value = line.partition(" ")
        if event == "exit":
            self.code = int(value)
        elif event == "failed":
            raise ToolFailed(
                f"the program cannot be started: {value}",
                where=self._argv[0],
                hint="check that the image contains it; dist-env shows what the image has",
            )
        elif event == "started" and value.endswith(" alone"):
            self._log(
                "warning: the guard cannot adopt orphaned processes on this machine; a killed torchrun may "
                "leave some running"
            )
        elif event == "clean" and value and not self._is_forced:
            self._log(f"ended processes that the program left running: {value}")
            if self._kind == "node" and self.code == 0:
                self._log(
                    "the run ends when its command returns: a command that starts daemons has to stay in "
                    "the foreground (ray start --block)"
                )
        elif event == "stuck":
            self._log(f"these processes hang in the kernel and cannot be killed: {value}")


_EMPTY = re.compile(_PREFIX + rb"\n")


class _Copier(threading.Thread):
    """Copies the command's error output to ours, and keeps the end of it.

    Not copied are lines `_LOG_ONLY`, and `_NO_HOST_NAME` after the first.

    It is a thread because a slow terminal must not hold up the heartbeat. It does not wait for whole lines:
    of one that arrives in two parts, the first decides.
    """

    def __init__(self, source: IO[bytes], *, has_warned: bool) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._has_warned = has_warned
        self._in_line = self._is_hidden = False

    def run(self) -> None:
        """Copy until every process has closed the other end."""
        target: int | None = 2
        while data := os.read(self._source.fileno(), 65536):
            self._chunks.append(data)
            self._size += len(data)
            while self._size - len(self._chunks[0]) >= TAIL_BYTES:
                self._size -= len(self._chunks.popleft())
            data = b"".join(self._visible_lines(data))
            while target is not None and data:
                try:
                    data = data[os.write(target, data) :]
                except OSError:  # ours is closed: read on, so that the program can go on writing
                    target = None

    def tail(self) -> bytes:
        """Return the end of what was read."""
        return b"".join(tuple(self._chunks))[-TAIL_BYTES:]

    def _visible_lines(self, data: bytes) -> Iterator[bytes]:
        for line in re.findall(rb"[^\n]*\n|[^\n]+", data):
            if not self._in_line:
                # An empty line follows a stack.
                is_end = self._is_hidden and _EMPTY.fullmatch(line) is not None
                self._is_hidden = is_end or _LOG_ONLY.match(line) is not None
                if _NO_HOST_NAME in line:
                    self._is_hidden, self._has_warned = self._has_warned, True
            self._in_line = not line.endswith(b"\n")
            if not self._is_hidden:
                yield line


END_STEP_S = 5.0
"""Seconds between HUP, QUIT and KILL."""
QUICK_STEP_S = 2.0
"""Seconds between HUP and KILL where the program could save nothing: others of its run are gone."""
_HUP, _QUIT = (f"signal {int(number)}" for number in (signal.SIGHUP, signal.SIGQUIT))
_TERMINATE, _KILL = "terminate", "kill"
"""TERM for every process of the command; KILL."""


class Deadline:
    """The time at which a program is ended, and the steps that follow: HUP, QUIT and KILL.

    Parameters
    ----------
    grace_s : for a command of dist-run --per-node: its first step is TERM, and KILL follows after this time.
    """

    def __init__(self, grace_s: float | None = None) -> None:
        self.at = float("inf")
        """Time of the next step, on the monotonic clock."""
        self.has_begun = False
        """The first step was taken."""
        self.is_forced = False
        """A step was taken after which the program cannot save."""
        self.reason = ""
        self._steps = [_HUP, _QUIT, _KILL]
        self._step_s, self._quick_step_s = END_STEP_S, QUICK_STEP_S
        if grace_s is not None:
            self._steps = [_TERMINATE, _KILL]
            self._step_s = self._quick_step_s = grace_s

    def set_within(self, seconds: float, reason: str) -> None:
        """End the program in `seconds`, unless an earlier end is set or was forced."""
        at = time.monotonic() + seconds
        if not self.is_forced and at < self.at:
            self.at, self.reason = at, reason

    def set_now(self, reason: str) -> None:
        """Begin the end of the program now; one that has begun goes on, with quick steps."""
        now = time.monotonic()
        if not self.has_begun:
            self.reason, self.at = reason, now
        self._step_s, self._steps = self._quick_step_s, [step for step in self._steps if step != _QUIT]
        self.at = min(self.at, now + self._quick_step_s)

    def is_due(self) -> bool:
        """Return whether the next step is due."""
        return time.monotonic() >= self.at

    def next_step(self) -> str:
        """Take the next step; return it as a command to the guard."""
        step = self._steps.pop(0)
        self.has_begun = True
        self.is_forced = step != _TERMINATE
        self.at = time.monotonic() + self._step_s if self._steps else float("inf")
        return step
