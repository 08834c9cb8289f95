"""Start the command of this node below its guard (guard.py), and end it by force after a deadline.

`CommandProcess` is the node agent's side of the guard: it starts the command, handles the guard's reports,
and copies the error output. `Deadline` decides when the command is ended by force, and with which signals.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
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
"""Number of last bytes of the error output that are kept for the log of a failed run: 1 MiB."""
# torch prints this warning in every process, for each connection from an address without a name.
_NO_HOST_NAME = b"[c10d] The hostname of the client socket cannot be retrieved. err=-"
# Prefixes that may precede the text of a line: "[n3:4]: " from torchrun's --tee, and "[rank4]:" from torch's
# tracebacks.
_PREFIX = rb"(?:\[[^\]\n]*\]: )?(?:\[rank\d+\]:)?"
# Lines that are kept for the log, but not shown: lines with a mark (user_program.py), and C++ stacks of
# torch's store. Every process prints such a stack after its torchrun has ended.
_LOG_ONLY = re.compile(
    _PREFIX + rb"(?:" + MARK.encode() + rb"|\[[WE]\d{4} [^\]\n]*TCPStore\.cpp:\d+\] "
    rb"|\[[WE]\d{4} [^\]\n]*ProcessGroupNCCL\.cpp:\d+\] (?:\[[^\]\n]*\] ?)*Failed to check the "
    rb"|Exception raised from [^\n]* \(most recent call first\):|frame #\d+: |<omitting python frames>)"
)


class CommandProcess:
    """A command and its guard, the process between the node agent and the command. `close` ends both.

    Parameters
    ----------
    log : prints messages about the command.
    repeats_warnings : False to hide a warning that all nodes of a run print, because another node shows it.
    open_files : the command's soft limit for the number of open files.
    inherited : descriptors that the command inherits under the same numbers.
    kind : how the guard starts the command, ``torchrun`` or ``node`` (guard.py).
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Callable[[str], None],
        *,
        repeats_warnings: bool = True,
        open_files: int,
        inherited: Sequence[int] = (),
        kind: str = "torchrun",
    ) -> None:
        self._argv, self._log, self._kind = argv, log, kind
        self.code: int | None = None
        """Exit code of the command, or the negative number of the signal that ended it.

        It is None while the command runs.
        """
        self._buffer = b""
        self._is_forced = False
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        guard_args = [str(control), str(status), str(open_files), kind, *argv]
        try:
            self._process = _start_guard(guard_args, env, (control, status, *inherited))
        finally:
            os.close(control)
            os.close(status)
        assert self._process.stderr is not None  # noqa: S101 - it is a pipe
        self._copier = _Copier(self._process.stderr, has_warned=not repeats_warnings)
        self._copier.start()

    def close(self) -> None:
        """Close the pipes to the guard, which then ends everything that is left."""
        for descriptor in (self._control, self._status):
            with contextlib.suppress(OSError):  # the pipe was closed before
                os.close(descriptor)
        self._control = self._status = -1

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the guard reports something."""
        return self._status

    def read_reports(self) -> bool:
        """Handle new reports from the guard, the process between this one and the command.

        Return False once no process of the command is left.

        Raises
        ------
        ToolFailed : the command cannot be started.
        """
        try:
            received = os.read(self._status, 4096)
        except BlockingIOError:
            return True
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            self._handle_report(line.decode())
        return bool(received)  # no data means end of file: the guard and everything below it have ended

    def send_step(self, step: str) -> None:
        """Tell the guard to take one step that ends the command: ``signal N``, ``terminate`` or ``kill``."""
        self._is_forced = True
        with contextlib.suppress(OSError):  # the guard has ended by itself
            os.write(self._control, f"{step}\n".encode())

    def wait(self) -> int:
        """Close the pipes, wait until the guard has ended, and return the command's exit code.

        If the guard itself was killed, kill the processes that it has left. Then return -9, as for a command
        that was killed.
        """
        self.close()
        self._process.wait()
        # `read_reports` sets `code` when the guard reports the end of the command. So the guard was killed.
        if self.code is None:
            self._log("the guard of this node's processes was killed; ending them")
            guard.end_all()
            self.code = -signal.SIGKILL
        # A process that hangs in the kernel keeps the pipe open, so the wait for the last output is limited.
        self._copier.join(timeout=2.0)
        return self.code

    def output_tail(self) -> str:
        """Return the end of the command's error output, including the lines that were not printed."""
        return self._copier.tail().decode(errors="replace").replace(MARK, "")

    def _handle_report(self, line: str) -> None:
        """React to one line from the guard, such as ``exit 1`` or ``clean python3 wandb-core``.

        ``clean`` lists the processes that were still running when the command had ended, and that the guard
        has killed.
        """
        event, _, detail = line.partition(" ")
        match event:
            case "started":
                if detail.endswith(" alone"):  # the guard could not become a subreaper
                    self._log(
                        "warning: the guard cannot adopt orphaned processes on this machine; a killed "
                        "torchrun may leave some running"
                    )
            case "failed":
                raise ToolFailed(
                    f"the program cannot be started: {detail}",
                    where=self._argv[0],
                    hint="check that the image contains it; dist-env shows what the image has",
                )
            case "exit":
                self.code = int(detail)
            case "clean":
                if detail and not self._is_forced:
                    self._log_remaining(detail)
            case "stuck":
                self._log(f"these processes hang in the kernel and cannot be killed: {detail}")

    def _log_remaining(self, names: str) -> None:
        """Print the names of processes that the command left running, and that the guard has ended."""
        self._log(f"ended processes that the program left running: {names}")
        if self._kind == "node" and self.code == 0:
            self._log(
                "the run ends when its command returns: a command that starts daemons has to stay in "
                "the foreground (ray start --block)"
            )


def _start_guard(
    guard_args: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start the guard with the stop signals blocked, and return its process, whose standard error is a pipe.

    `guard_args` ends with the argv of the command. The guard inherits `descriptors` under the same numbers.
    """
    # The guard only uses the standard library. -I and -S make it start faster, and ignore the user's modules.
    python = (sys.executable or "python3", "-I", "-S", guard.__file__)
    # All processes below this one inherit the mask of blocked signals. Afterwards, this process restores its
    # own.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return subprocess.Popen(
            [*python, *guard_args],
            env=dict(env),
            stderr=subprocess.PIPE,
            pass_fds=descriptors,
            start_new_session=True,  # a signal to the group of this process must not reach the guard
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# A line without any text. Such a line follows each C++ stack.
_EMPTY_LINE = re.compile(_PREFIX + rb"\n")


class _Copier(threading.Thread):
    """Copies the command's error output to our own standard error, and keeps the last part of it.

    Lines that match `_LOG_ONLY` are not copied. The warning `_NO_HOST_NAME` is copied only once.

    The copier is a thread, because a slow terminal must not delay the node agent's heartbeats. It does not
    wait for whole lines. If a line arrives in two parts, the first part decides whether the line is copied.
    """

    def __init__(self, source: IO[bytes], *, has_warned: bool) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._has_warned = has_warned
        self._is_inside_line = self._is_hidden = False

    def run(self) -> None:
        """Copy the command's error output until every process has closed its end of the pipe.

        This is the body of the thread. The node agent reads the kept output with `tail`.
        Everything is kept for the log of a failed run, but only the visible lines are printed.
        """
        can_write = True
        while True:
            output = os.read(self._source.fileno(), 65536)
            if not output:  # every process has closed its end of the pipe
                return
            self._keep(output)
            visible = b"".join(self._filter_visible_lines(output))
            try:
                # A write may accept only a part of the data, for example if a pipe is full. Descriptor 2 is
                # standard error.
                while can_write and visible:
                    visible = visible[os.write(2, visible) :]
            except OSError:  # our own output is closed: read on, so that the program does not block
                can_write = False

    def _keep(self, data: bytes) -> None:
        """Append `data` to the kept output, and drop the oldest chunks that exceed `TAIL_BYTES`."""
        self._chunks.append(data)
        self._size += len(data)
        while self._size - len(self._chunks[0]) >= TAIL_BYTES:
            self._size -= len(self._chunks.popleft())

    def tail(self) -> bytes:
        """Return the last `TAIL_BYTES` of the output."""
        return b"".join(tuple(self._chunks))[-TAIL_BYTES:]

    def _filter_visible_lines(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines, or parts of lines, in `data` that the user should see.

        Lines that are only for the log are skipped, such as a traceback that the node agent prints later.
        `data` is the next piece of the output. It may begin or end within a line, so the attributes
        `_is_inside_line` and `_is_hidden` keep the state between two calls.
        """
        for line in re.findall(rb"[^\n]*\n|[^\n]+", data):
            if not self._is_inside_line:  # else the first part of the line has decided for all of it
                self._is_hidden = self._should_hide(line)
                self._has_warned |= _NO_HOST_NAME in line
            if not self._is_hidden:
                yield line
            self._is_inside_line = not line.endswith(b"\n")

    def _should_hide(self, line: bytes) -> bool:
        """Return whether a line is not for the user. `_is_hidden` says whether the line before it was hidden.

        torch's warning `_NO_HOST_NAME` is shown once, and all others are hidden.
        """
        if _NO_HOST_NAME in line:
            return self._has_warned
        if self._is_hidden and _EMPTY_LINE.fullmatch(line):  # the end of a hidden stack
            return True
        return _LOG_ONLY.match(line) is not None


END_STEP_S = 5.0
"""Seconds between the steps HUP, QUIT and KILL."""
QUICK_STEP_S = 2.0
"""Seconds between HUP and KILL if the program cannot save, because other nodes of its run are gone."""
# Commands to the guard. It sends HUP and QUIT only to torchrun.
_HUP = f"signal {int(signal.SIGHUP)}"
_QUIT = f"signal {int(signal.SIGQUIT)}"
_TERMINATE = "terminate"  # TERM for every process
_KILL = "kill"


class Deadline:
    """The time at which a program is ended by force, and the steps that end it: HUP, QUIT and KILL.

    Parameters
    ----------
    grace_s : for a command of dist-run --per-node, the seconds between its only two steps, TERM and KILL.
        None for torchrun.
    """

    def __init__(self, grace_s: float | None = None) -> None:
        self.next_step_at = math.inf
        """Time of the next step, on the monotonic clock. It is infinite if no step is planned."""
        self.has_begun = False
        """True once the first step was taken."""
        self.is_forced = False
        """True once a step was taken after which the program can no longer save its state."""
        self.reason = ""
        self._steps = [_HUP, _QUIT, _KILL]
        self._step_s, self._quick_step_s = END_STEP_S, QUICK_STEP_S
        if grace_s is not None:
            self._steps = [_TERMINATE, _KILL]
            self._step_s = self._quick_step_s = grace_s

    @property
    def is_set(self) -> bool:
        """Return whether a next step is planned."""
        return self.next_step_at < math.inf

    def set_within(self, seconds: float, reason: str) -> None:
        """Plan the first step in `seconds`, unless an earlier step is planned or force was used already."""
        step_at = time.monotonic() + seconds
        if not self.is_forced and step_at < self.next_step_at:
            self.next_step_at, self.reason = step_at, reason

    def set_now(self, reason: str) -> None:
        """Plan the first step for now, and end the program quickly from then on.

        A program of torchrun cannot save any more then, so the step QUIT is left out and the waits between
        the steps are shorter. If a step was taken before, the remaining steps follow after the shorter wait,
        and the reason stays the first one.
        """
        now = time.monotonic()
        if self.has_begun:
            self.next_step_at = min(self.next_step_at, now + self._quick_step_s)
        else:
            self.reason, self.next_step_at = reason, now
        self._step_s = self._quick_step_s
        self._steps = [step for step in self._steps if step != _QUIT]

    def is_due(self) -> bool:
        """Return whether the next step is due."""
        return time.monotonic() >= self.next_step_at

    def take_step(self) -> str:
        """Take the next step, and return it as a command to the guard, such as ``signal 1``.

        The steps are HUP, QUIT and KILL for torchrun, and TERM and KILL for a command of dist-run --per-node.
        Also plan the step after it, if there is one.
        """
        step = self._steps.pop(0)
        self.has_begun = True
        self.is_forced = step != _TERMINATE  # after TERM, the command may still save
        self.next_step_at = math.inf
        if self._steps:
            self.next_step_at = time.monotonic() + self._step_s
        return step
