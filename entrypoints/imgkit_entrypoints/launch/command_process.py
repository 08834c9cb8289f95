"""The command of this node below its guard (guard.py), and its end by force from a deadline on.

`CommandProcess` is the node agent's side of the guard: it starts the command, takes the guard's reports, and
copies the error output. `Deadline` says when the command is ended, and with which signals.
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
# What may precede the text of a line: "[n3:4]: " of torchrun's --tee, and "[rank4]:" of torch's tracebacks.
_PREFIX = rb"(?:\[[^\]\n]*\]: )?(?:\[rank\d+\]:)?"
# Lines that are of use in a log alone: lines with a mark (user_program.py), and C++ stacks of torch's store.
# Every process prints such a stack after its torchrun has ended.
_LOG_ONLY = re.compile(
    _PREFIX + rb"(?:" + MARK.encode() + rb"|\[[WE]\d{4} [^\]\n]*TCPStore\.cpp:\d+\] "
    rb"|\[[WE]\d{4} [^\]\n]*ProcessGroupNCCL\.cpp:\d+\] (?:\[[^\]\n]*\] ?)*Failed to check the "
    rb"|Exception raised from [^\n]* \(most recent call first\):|frame #\d+: |<omitting python frames>)"
)


class CommandProcess:
    """A command and its guard. `close` ends everything that is left of them.

    Parameters
    ----------
    log : prints messages about the command.
    repeats_warnings : False leaves out a warning that all nodes of a run print, since another node prints it.
    open_files : soft limit of the command's open files.
    inherited : descriptors that the command gets under the same numbers.
    kind : how the guard starts the command: ``torchrun`` or ``node`` (guard.py).
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

        None while it runs.
        """
        self._buffer = b""
        self._is_forced = False
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        # -I and -S: the guard uses the standard library alone.
        python = (sys.executable or "python3", "-I", "-S", guard.__file__)
        # Every process below inherits the mask. This process gets its own one back right after the start.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [*python, str(control), str(status), str(open_files), kind, *argv],
                env=dict(env),
                stderr=subprocess.PIPE,
                pass_fds=(control, status, *inherited),
                start_new_session=True,  # a signal to the group of this process must not reach the guard
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
            with contextlib.suppress(OSError):  # the pipe was closed before
                os.close(descriptor)
        self._control = self._status = -1

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the guard reports something."""
        return self._status

    def read_reports(self) -> bool:
        """Handle the guard's new reports. Return False once no process of the command is left.

        The guard is a process of imgkit between this one and the command (guard.py).

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
        return bool(data)  # end of file: the guard has ended, and everything below it

    def send_step(self, step: str) -> None:
        """Have the guard take one step towards the end: ``signal N``, ``terminate`` or ``kill``."""
        self._is_forced = True
        with contextlib.suppress(OSError):  # the guard has ended by itself
            os.write(self._control, f"{step}\n".encode())

    def wait(self) -> int:
        """Close the pipes, wait until the guard has ended, and return the command's exit code.

        If the guard itself was killed, kill the processes that it has left, and return -9 as for a killed
        command.
        """
        self.close()
        self._process.wait()
        if self.code is None:
            self._log("the guard of this node's processes was killed; ending them")
            guard.end_all()
            self.code = -signal.SIGKILL
        self._copier.join(timeout=2.0)
        return self.code

    def output_tail(self) -> str:
        """Return the end of the command's error output, including the lines that were not printed."""
        return self._copier.tail().decode(errors="replace").replace(MARK, "")

    def _handle_report(self, line: str) -> None:
        """React to one line of the guard, such as ``exit 1`` or ``clean python3 wandb-core``.

        ``clean`` lists the processes that were still there when the command had ended, and that the guard has
        killed.
        """
        event, _, value = line.partition(" ")
        match event:
            case "started":
                if value.endswith(" alone"):  # the guard could not become a subreaper
                    self._log(
                        "warning: the guard cannot adopt orphaned processes on this machine; a killed "
                        "torchrun may leave some running"
                    )
            case "failed":
                raise ToolFailed(
                    f"the program cannot be started: {value}",
                    where=self._argv[0],
                    hint="check that the image contains it; dist-env shows what the image has",
                )
            case "exit":
                self.code = int(value)
            case "clean":
                if value and not self._is_forced:
                    self._log_remaining(value)
            case "stuck":
                self._log(f"these processes hang in the kernel and cannot be killed: {value}")

    def _log_remaining(self, names: str) -> None:
        """Print the names of the processes that the command has left and the guard has ended."""
        self._log(f"ended processes that the program left running: {names}")
        if self._kind == "node" and self.code == 0:
            self._log(
                "the run ends when its command returns: a command that starts daemons has to stay in "
                "the foreground (ray start --block)"
            )


# A line without a text. One such line follows a C++ stack.
_EMPTY = re.compile(_PREFIX + rb"\n")


class _Copier(threading.Thread):
    """Copies the command's error output to our own, and keeps the end of it.

    Lines that match `_LOG_ONLY` are not copied, and neither is `_NO_HOST_NAME` after the first time.

    The copier is a thread because a slow terminal must not delay the heartbeat. It does not wait for whole
    lines: if a line arrives in two parts, the first part decides whether it is copied.
    """

    def __init__(self, source: IO[bytes], *, has_warned: bool) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._has_warned = has_warned
        self._in_line = self._is_hidden = False

    def run(self) -> None:
        """Copy the command's error output until every process has closed its end of the pipe.

        Everything is kept for the log of a failed run, but only what the user should see is printed.
        """
        can_write = True
        while True:
            data = os.read(self._source.fileno(), 65536)
            if not data:
                return
            self._keep(data)
            visible = b"".join(self._visible_lines(data))
            try:
                # A write may take only a part of the data, as to a full pipe. Descriptor 2 is standard error.
                while can_write and visible:
                    visible = visible[os.write(2, visible) :]
            except OSError:  # our own output is closed: read on, so that the program does not block
                can_write = False

    def _keep(self, data: bytes) -> None:
        """Add `data` to the tail, and drop chunks from its start that are not needed for `TAIL_BYTES`."""
        self._chunks.append(data)
        self._size += len(data)
        while self._size - len(self._chunks[0]) >= TAIL_BYTES:
            self._size -= len(self._chunks.popleft())

    def tail(self) -> bytes:
        """Return the last `TAIL_BYTES` that were read."""
        return b"".join(tuple(self._chunks))[-TAIL_BYTES:]

    def _visible_lines(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines, and parts of lines, in `data` that the user should see.

        Lines for the log alone are left out, such as a traceback that the node agent prints later.
        """
        for line in re.findall(rb"[^\n]*\n|[^\n]+", data):
            if self._in_line:
                pass  # the beginning of this line was in the data before, and has decided
            elif _NO_HOST_NAME in line:  # only the first such line is shown
                self._is_hidden = self._has_warned
                self._has_warned = True
            elif self._is_hidden and _EMPTY.fullmatch(line):
                pass  # the empty line after a hidden stack belongs to it
            else:
                self._is_hidden = _LOG_ONLY.match(line) is not None
            if not self._is_hidden:
                yield line
            self._in_line = not line.endswith(b"\n")


END_STEP_S = 5.0
"""Seconds between HUP, QUIT and KILL."""
QUICK_STEP_S = 2.0
"""Seconds between HUP and KILL if the program cannot save any more, since other nodes of its run are gone."""
# Commands to the guard. HUP and QUIT go to torchrun alone.
_HUP = f"signal {int(signal.SIGHUP)}"
_QUIT = f"signal {int(signal.SIGQUIT)}"
_TERMINATE = "terminate"  # TERM for every process
_KILL = "kill"


class Deadline:
    """The time at which a program is ended, and the steps that follow: HUP, QUIT and KILL.

    Parameters
    ----------
    grace_s : for a command of dist-run --per-node, the seconds between TERM and KILL, its only steps. None
        for torchrun.
    """

    def __init__(self, grace_s: float | None = None) -> None:
        self.at = math.inf
        """Time of the next step, on the monotonic clock. Infinite while no end is set."""
        self.has_begun = False
        """True once the first step was taken."""
        self.is_forced = False
        """True once a step was taken after which the program cannot save."""
        self.reason = ""
        self._steps = [_HUP, _QUIT, _KILL]
        self._step_s, self._quick_step_s = END_STEP_S, QUICK_STEP_S
        if grace_s is not None:
            self._steps = [_TERMINATE, _KILL]
            self._step_s = self._quick_step_s = grace_s

    @property
    def is_set(self) -> bool:
        """Return whether a step will follow."""
        return self.at < math.inf

    def set_within(self, seconds: float, reason: str) -> None:
        """End the program in `seconds`, unless an earlier end is set or has begun by force."""
        at = time.monotonic() + seconds
        if not self.is_forced and at < self.at:
            self.at, self.reason = at, reason

    def set_now(self, reason: str) -> None:
        """Begin the end of the program now, and leave out QUIT, so that the end comes sooner.

        If the end has begun before, it goes on from the step where it is, with the shorter time between two
        steps.
        """
        now = time.monotonic()
        if self.has_begun:
            self.at = min(self.at, now + self._quick_step_s)
        else:
            self.reason, self.at = reason, now
        self._step_s = self._quick_step_s
        self._steps = [step for step in self._steps if step != _QUIT]

    def is_due(self) -> bool:
        """Return whether the next step is due."""
        return time.monotonic() >= self.at

    def next_step(self) -> str:
        """Take the next step towards the end, and return it as a command to the guard, such as ``signal 1``.

        The step after it is due after the time between two steps. After the last step, no step is due any
        more.
        """
        step = self._steps.pop(0)
        self.has_begun = True
        self.is_forced = step != _TERMINATE
        self.at = math.inf
        if self._steps:
            self.at = time.monotonic() + self._step_s
        return step
