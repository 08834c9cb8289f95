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
from types import TracebackType
from typing import IO

from imgkit_entrypoints.errors import ToolFailed
from imgkit_entrypoints.launch import guard
from imgkit_entrypoints.launch.user_program import MARK, STOP_SIGNALS

TAIL_BYTES = 1 << 20
"""The end of the error output that is kept for the log of a failed run."""
_NAMELESS = b"[c10d] The hostname of the client socket cannot be retrieved. err=-"
"""A warning of torch about each connection from an address without a name, in every process."""
_PREFIX = rb"(?:\[[^\]\n]*\]: )?(?:\[rank\d+\]:)?"
_FOR_THE_LOG = re.compile(
    _PREFIX + rb"(?:" + MARK.encode() + rb"|\[[WE]\d{4} [^\]\n]*TCPStore\.cpp:\d+\] "
    rb"|\[[WE]\d{4} [^\]\n]*ProcessGroupNCCL\.cpp:\d+\] (?:\[[^\]\n]*\] ?)*Failed to check the "
    rb"|Exception raised from [^\n]* \(most recent call first\):|frame #\d+: |<omitting python frames>)"
)
"""Lines that are of use in a log alone: marked ones (user_program.py), and stacks of torch's store in C++,
which every process prints whose torchrun has ended."""


class GuardedCommand:
    """A command and its guard. Leaving the context ends everything that is left of them."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        say: Callable[[str], None],
        *,
        speaks_for_all: bool = True,
        open_files: int | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start `command`; a warning that all nodes of a run print comes from one that `speaks_for_all`.

        `open_files` is the soft limit of its open files; None: that of this process. `inherited` are
        descriptors that the command gets under the same numbers.
        """
        if open_files is None:
            open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._command, self._say = command, say
        self.code: int | None = None
        """Exit code of the command; negative: the signal that ended it; None: it still runs."""
        self._buffer = b""
        self._forced = False
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        python = (sys.executable or "python3", "-I", "-S", guard.__file__)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited by all below
        try:
            self._process = subprocess.Popen(
                [*python, str(control), str(status), str(open_files), *command],
                env=dict(env),
                stderr=subprocess.PIPE,
                pass_fds=(control, status, *inherited),
                start_new_session=True,  # a kill of this process' group must leave the guard
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(control)
            os.close(status)
        self._copier = _Copier(self._process.stderr, warned=not speaks_for_all)  # type: ignore[arg-type]

    def __enter__(self) -> GuardedCommand:
        self._copier.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._control)  # the guard ends everything when this closes
        os.close(self._status)

    def fileno(self) -> int:
        """Descriptor that becomes readable when the guard reports something."""
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
            self._take(line.decode())
        return bool(data)

    def send(self, step: str) -> None:
        """Have the guard take `step` towards the end: ``signal N`` or ``kill``."""
        self._forced = True
        with contextlib.suppress(OSError):  # the guard has ended by itself
            os.write(self._control, f"{step}\n".encode())

    def wait(self) -> int:
        """Wait for the guard, after the context; the command's exit code."""
        self._process.wait()
        if self.code is None:
            self._say("the guard of this node's processes was killed; ending them")
            guard.end_all()
            self.code = -signal.SIGKILL
        self._copier.join(timeout=2.0)
        return self.code

    def tail(self) -> str:
        """Return the end of the command's error output, also of the lines that were not printed."""
        return self._copier.tail().decode(errors="replace").replace(MARK, "")

    def _take(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "exit":
            self.code = int(rest)
        elif word == "failed":
            raise ToolFailed(
                f"the program cannot be started: {rest}",
                where=self._command[0],
                hint="check that the image contains it; dist-env shows what the image has",
            )
        elif word == "started" and rest.endswith(" alone"):
            self._say(
                "warning: the guard cannot adopt orphaned processes on this machine; a killed torchrun may "
                "leave some running"
            )
        elif word == "clean" and rest and not self._forced:
            self._say(f"ended processes that the program left running: {rest}")
        elif word == "stuck":
            self._say(f"these processes hang in the kernel and cannot be killed: {rest}")


_EMPTY = re.compile(_PREFIX + rb"\n")


class _Copier(threading.Thread):
    """Copies the command's error output to ours, and keeps the end of it.

    Not copied are lines `_FOR_THE_LOG`, and `_NAMELESS` after the first.

    It is a thread because a slow terminal must not hold up the heartbeat. It does not wait for whole lines:
    of one that arrives in two parts, the first decides.
    """

    def __init__(self, source: IO[bytes], *, warned: bool) -> None:
        super().__init__(daemon=True)
        self.source = source
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._warned = warned
        self._in_line = self._hides = False

    def run(self) -> None:
        """Copy until every process has closed the other end."""
        target: int | None = 2
        while data := os.read(self.source.fileno(), 65536):
            self._keep(data)
            data = b"".join(self._printed(data))
            while target is not None and data:
                try:
                    data = data[os.write(target, data) :]
                except OSError:  # ours is closed: read on, so that the program can go on writing
                    target = None

    def tail(self) -> bytes:
        """Return the end of what was read."""
        return b"".join(tuple(self._kept))[-TAIL_BYTES:]

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._size += len(data)
        while self._size - len(self._kept[0]) >= TAIL_BYTES:
            self._size -= len(self._kept.popleft())

    def _printed(self, data: bytes) -> Iterator[bytes]:
        for line in re.findall(rb"[^\n]*\n|[^\n]+", data):
            if not self._in_line:
                # An empty line follows a stack.
                ends = self._hides and _EMPTY.fullmatch(line) is not None
                self._hides = ends or _FOR_THE_LOG.match(line) is not None
                if _NAMELESS in line:
                    self._hides, self._warned = self._warned, True
            self._in_line = not line.endswith(b"\n")
            if not self._hides:
                yield line


END_STEP_S = 5.0
"""Seconds between HUP, QUIT and KILL."""
QUICK_STEP_S = 2.0
"""Seconds between HUP and KILL where the program could save nothing: others of its run are gone."""
_HUP, _QUIT = (f"signal {int(number)}" for number in (signal.SIGHUP, signal.SIGQUIT))


class ForcedEnd:
    """The deadline of a program and the steps that follow it."""

    def __init__(self) -> None:
        self.deadline = float("inf")
        """Time of the next step, on the monotonic clock."""
        self.begun = False
        self.why = ""
        self._steps = [_HUP, _QUIT, "kill"]
        self._step_s = END_STEP_S

    def within(self, seconds: float, why: str) -> None:
        """Begin in `seconds`, unless an earlier end is set or has begun."""
        at = time.monotonic() + seconds
        if not self.begun and at < self.deadline:
            self.deadline, self.why = at, why

    def now(self, why: str) -> None:
        """Begin at once, and quickly; an end that has begun goes on quickly."""
        if not self.begun:
            self.why, self.deadline = why, time.monotonic()
        self._step_s, self._steps = QUICK_STEP_S, [step for step in self._steps if step != _QUIT]
        self.deadline = min(self.deadline, time.monotonic() + QUICK_STEP_S)

    def due(self) -> bool:
        """Whether the next step is due."""
        return time.monotonic() >= self.deadline

    def step(self) -> str:
        """Take the next step; the guard's word for it."""
        self.begun = True
        step = self._steps.pop(0)
        self.deadline = time.monotonic() + self._step_s if self._steps else float("inf")
        return step
