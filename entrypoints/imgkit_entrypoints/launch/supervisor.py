"""Run torchrun (or one program) on this node and end it well: on request, or when a node is lost or fails.

Three processes: this one, which takes the signals and holds the heartbeat; the guard, below which everything
runs (guard.py); torchrun. Schedulers signal every process of a job step, so torchrun and its workers are
started with `STOP_SIGNALS` blocked: only this process acts on them, by the stop flag (stopping.py). In a
user's program they are unblocked again (user_program.py).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from imgkit_entrypoints.errors import EXIT_NO, EXIT_SAVED, EXIT_TOOL_FAILED, NoPlan, ToolFailed, UsageError
from imgkit_entrypoints.launch import flight_recorder, guard, hang_watch, stop_protocol
from imgkit_entrypoints.rollcall.session import AllDone, Event, Failed, Lost, Place, Roll, StopAsked

if TYPE_CHECKING:
    from imgkit_entrypoints.rollcall.gather import Caller, Say

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
PORT_PENDING = "<port from the roll call>"
"""The word of a command that is replaced by torchrun's port, once the head has found a free one."""
LOGS_PENDING = "<log folder of this run>"
"""Replaced by a folder that goes with the run: torchrun would leave one of its own behind."""
END_STEP_S = 5.0
"""Between HUP, QUIT and KILL."""
PEER_FAILED_S = 10.0
"""Given to this node's workers to fail by themselves, with their own message, after a node has failed."""
REPEAT_S = 2.0
"""A signal that comes again this soon is the same one: launchers forward what the scheduler also sends."""
TICK_S = 1.0
"""At most, between two looks at the other nodes, the stop file and the workers."""
TAIL_BYTES = 64 * 1024


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    place: Place,
    me: Caller,
    say: Say,
    grace_s: float = 60.0,
    rollcall_timeout_s: float = 120.0,
    hang_after_s: float = 0.0,
    stop_dir: Path | None = None,
    meet: bool = True,
) -> int:
    """Meet the other nodes, run `argv` with `env`, supervise it, and return the exit code of this node.

    Parameters
    ----------
    argv : the words `PORT_PENDING` and `LOGS_PENDING` in it are replaced.
    env : the whole environment of the child; the stop protocol's variables and the line prefix are added.
    grace_s : seconds between a stop request and the end by signals.
    hang_after_s : seconds after which a worker that does not move is told, with its stack; 0 is never.
    stop_dir : parent of the node's stop folder; None makes one in the node's temporary folder.
    meet : False leaves the roll call out (an elastic run counts its own nodes).

    Raises
    ------
    NoPlan : the roll call failed. ToolFailed : `argv` cannot be started. UsageError : a folder of the run
    cannot be written.
    """
    with _signals() as signals, stop_protocol.folder(stop_dir, place.node_rank) as folder:
        roll: Roll | None = None
        if place.node_rank == 0 and env.get("IMGKIT_RUN_DIR"):
            try:
                stop_protocol.clear(Path(env["IMGKIT_RUN_DIR"]))
            except OSError as error:
                raise UsageError(
                    f"the marks of an earlier run cannot be removed: {error.strerror}",
                    where=f"IMGKIT_RUN_DIR: {error.filename}",
                    hint="name a writable folder that all nodes share",
                ) from error
        if meet and place.nnodes > 1:
            from imgkit_entrypoints.rollcall import gather  # one node starts without it, and sooner

            try:
                roll = gather.call(place, me, timeout_s=rollcall_timeout_s, say=say, stopped=signals.first)
            except NoPlan:
                if signals.got:
                    return 128 + signals.got[0]
                raise
            for warning in roll.warnings if place.node_rank == 0 else ():
                say(f"warning: {warning}")
        job_id = place.job_id or stop_protocol.LOCAL_JOB
        child_env = {
            # torchrun knows no host name: each line of --tee says [host:rank].
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{me.host.replace('$', '$$')}:${{rank}}]: ",
            **env,
            "IMGKIT_STOP_DIR": str(folder),
            "IMGKIT_JOB_ID": job_id,
            **flight_recorder.variables(env, me.identity.torch, job_id),
        }
        port = str(roll.port) if roll else ""
        pending = {PORT_PENDING: port, LOGS_PENDING: str(folder / "logs")}
        command = [pending.get(word, word) for word in argv]
        pulses = hang_watch.Pulses(folder, me.host, hang_after_s)
        try:
            return _Supervisor(command, child_env, folder, job_id, roll, pulses, signals, say, grace_s).run()
        finally:
            if roll is not None:
                roll.close()


class _Signals:
    """The stop signals that have come, in order."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.at: dict[int, float] = {}
        self.again = False
        """TERM or INT came a second time: end now."""
        self.reader, self.writer = os.pipe()
        for descriptor in (self.reader, self.writer):
            os.set_blocking(descriptor, False)

    def note(self, number: int, _frame: FrameType | None) -> None:
        """The handler."""
        now = time.monotonic()
        last = self.at.get(number)
        self.at[number] = now
        if last is None:
            self.got.append(number)
        elif now - last > REPEAT_S and number in (signal.SIGTERM, signal.SIGINT):
            self.again = True

    def first(self) -> str:
        """Name of the first one; empty while none has come."""
        return signal.Signals(self.got[0]).name if self.got else ""


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    signals = _Signals()
    before = {number: signal.signal(number, signals.note) for number in STOP_SIGNALS}
    woken = signal.set_wakeup_fd(signals.writer, warn_on_full_buffer=False)
    try:
        yield signals
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(signals.reader)
        os.close(signals.writer)


class _Copier(threading.Thread):
    """Copies the child's error output to ours and keeps its end.

    A thread, because a slow terminal must not hold up the heartbeat.
    """

    def __init__(self, source: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self.source = source
        self.tail = b""

    def run(self) -> None:
        """Copy until everybody has closed the other end."""
        target: int | None = 2
        while data := os.read(self.source.fileno(), 65536):
            self.tail = (self.tail + data)[-TAIL_BYTES:]
            while target is not None and data:
                try:
                    data = data[os.write(target, data) :]
                except OSError:  # ours is closed: go on reading, so that the program is not held up
                    target = None


class _Supervisor:
    """One run of one command."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        job_id: str,
        roll: Roll | None,
        pulses: hang_watch.Pulses,
        signals: _Signals,
        say: Say,
        grace_s: float,
    ) -> None:
        self.command, self.env, self.folder, self.job_id = command, env, folder, job_id
        self.roll, self.pulses, self.signals, self.say, self.grace_s = roll, pulses, signals, say, grace_s
        first = roll is None or roll.place.node_rank == 0  # all nodes share the folder: one looks after it
        self.run_dir = Path(env["IMGKIT_RUN_DIR"]) if first and env.get("IMGKIT_RUN_DIR") else None
        self.code: int | None = None
        """Of the command; negative: the signal that ended it."""
        self.stop_reason = ""
        self.ending = ""
        """Why it is being ended by force."""
        self.lost = False
        self.codes: tuple[int, ...] = ()
        self.all_done = False
        self._deadline = float("inf")
        self._steps: list[str] = []

    def run(self) -> int:
        """Start, supervise, meet the others at the end; the exit code."""
        began = time.time()
        guard.adopt_orphans()  # for the case that the guard itself is killed
        process, control, status = self._start()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, status)
            # Closing this end makes the guard end everything: also the way out for an exception here.
            stack.callback(os.close, control)
            copier = _Copier(process.stderr)  # type: ignore[arg-type]
            copier.start()
            self._supervise(control, status)
        process.wait()
        if self.code is None:
            self.say("the guard of this node's processes was killed; ending them")
            guard.end_all()
            self.code = -signal.SIGKILL
        copier.join(timeout=2.0)
        code = self._own_code()
        if code not in (0, EXIT_SAVED) and not self.stop_reason and not self.ending:
            from imgkit_entrypoints.launch import explain

            for found in explain.explain(copier.tail.decode(errors="replace")):
                self.say(str(found))
        if code not in (0, EXIT_SAVED) and (left := flight_recorder.dumps(self.env, began)):
            self.say(left)
        code = self._meet_at_the_end(code)
        if code == EXIT_SAVED:
            self._tell_the_job()
        return code

    def _start(self) -> tuple[subprocess.Popen[bytes], int, int]:
        control_read, control_write = os.pipe()
        status_read, status_write = os.pipe()
        python = (sys.executable or "python3", "-I", "-S", guard.__file__)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited by all below
        try:
            process = subprocess.Popen(
                [*python, str(control_read), str(status_write), *self.command],
                env=dict(self.env),
                stderr=subprocess.PIPE,
                pass_fds=(control_read, status_write),
                start_new_session=True,  # a kill of this process' group must leave the guard
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(control_read)
            os.close(status_write)
        return process, control_write, status_read

    def _supervise(self, control: int, status: int) -> None:
        """Until the guard has closed its end: then nothing of the run is left."""
        buffer = b""
        while True:
            ready = self._wait(status, self.signals.reader)
            if self.signals.reader in ready:
                os.read(self.signals.reader, 4096)
            if status in ready:
                data = os.read(status, 4096)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._guard_says(line.decode())
            for event in self.roll.tick() if self.roll else ():
                self._hear(event)
            self._act_on_signals()
            self._look_for_the_stop_file()
            self._look_at_the_workers()
            if time.monotonic() >= self._deadline:
                self._next_step(control)

    def _wait(self, *descriptors: int) -> set[int]:
        with selectors.DefaultSelector() as selector:
            for descriptor in descriptors:
                selector.register(descriptor, selectors.EVENT_READ)
            for link in self.roll.links() if self.roll else ():
                if link.fileno() >= 0:
                    selector.register(link.fileno(), selectors.EVENT_READ)
            left = min(TICK_S, max(0.0, self._deadline - time.monotonic()))
            return {key.fd for key, _ in selector.select(left)}

    def _guard_says(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "exit":
            self.code = int(rest)
        elif word == "failed":
            raise ToolFailed(
                f"the program cannot be started: {rest}",
                where=self.command[0],
                hint="is it in this image? dist-env shows what is",
            )
        elif word == "started" and rest.endswith(" alone"):
            self.say(
                "warning: this system does not let the guard adopt orphans; a killed torchrun may leave some"
            )
        elif word == "clean" and rest and not self.ending:
            self.say(f"ended what the program left running: {rest}")
        elif word == "stuck":
            self.say(f"these hang in the kernel and cannot be ended: {rest}")

    def _hear(self, event: Event) -> None:
        if isinstance(event, StopAsked):
            self._stop(f"{event.reason} on {event.node}")
        elif isinstance(event, Lost):
            self.lost = True
            self.say(f"lost {event.node}: {event.why}")
            self._end(f"{event.node} is lost", after_s=0.0)
        elif isinstance(event, Failed):
            self.say(f"{event.node} ended with exit code {event.code}; its own output says why")
            if not self.stop_reason:
                self._end(f"{event.node} has failed", after_s=PEER_FAILED_S)
        elif isinstance(event, AllDone):
            self.codes, self.all_done = event.codes, True

    def _act_on_signals(self) -> None:
        if self.signals.again and not self.ending:
            self._end("a second signal", after_s=0.0)
        elif self.signals.got and not self.stop_reason:
            name = self.signals.first()
            if self.roll:
                self.roll.ask_stop(name)
            self._stop(name)

    def _look_for_the_stop_file(self) -> None:
        """What a job script or a user may leave in the run's folder."""
        if self.run_dir is None or self.stop_reason:
            return
        if (self.run_dir / stop_protocol.STOP).exists():
            reason = str(self.run_dir / stop_protocol.STOP)
            if self.roll:
                self.roll.ask_stop(reason)
            self._stop(reason)

    def _look_at_the_workers(self) -> None:
        if self.roll:
            self.roll.span = self.pulses.span
        for text in self.pulses.look(self.roll.everyone if self.roll else None):
            self.say(text)

    def _stop(self, reason: str) -> None:
        """Ask the program to save and end, once."""
        if self.stop_reason:
            return
        self.stop_reason = reason
        stop_protocol.raise_flag(self.folder, reason)
        if self.code is None:
            self.say(f"{reason}: asked the program to save and end, waiting up to {self.grace_s:g} s")
        self._end("the grace time is over", after_s=self.grace_s)

    def _end(self, why: str, *, after_s: float) -> None:
        """Begin HUP, QUIT, KILL in `after_s` seconds, unless an earlier end is on its way."""
        at = time.monotonic() + after_s
        if not self.ending and at < self._deadline:
            self._deadline = at
            self._why = why
            self._steps = [f"signal {int(signal.SIGHUP)}", f"signal {int(signal.SIGQUIT)}", "kill"]

    def _next_step(self, control: int) -> None:
        if not self.ending:
            self.ending = self._why
            self.say(f"ending the program: {self.ending}")
        step = self._steps.pop(0)
        self._deadline = time.monotonic() + END_STEP_S if self._steps else float("inf")
        with contextlib.suppress(OSError):  # the guard has ended by itself
            os.write(control, f"{step}\n".encode())

    def _own_code(self) -> int:
        """What this node alone would exit with."""
        assert self.code is not None  # noqa: S101 - run() has set it
        step, problem = stop_protocol.saved_step(self.folder, self.job_id)
        if problem:
            self.say(f"warning: {problem}")
        if step is not None:
            self.say(f"state saved at step {step}")
            return EXIT_SAVED
        if self.code == 0:
            return 0
        if self.lost:
            return EXIT_TOOL_FAILED
        if self.ending and self.signals.got:
            return 128 + self.signals.got[0]
        if self.ending:
            return EXIT_NO
        if self.code == -signal.SIGKILL:
            self.say(
                "it was killed (SIGKILL), often by the kernel because memory ran out: dmesg | grep -i oom"
            )
        return self.code if self.code > 0 else 128 - self.code

    def _tell_the_job(self) -> None:
        """Leave the mark in the run's folder, which all nodes and the job script share."""
        if self.run_dir is None:
            return
        try:
            stop_protocol.hand_on(self.folder, self.run_dir)
        except OSError as error:
            why = f"{self.run_dir}: {error.strerror}"
            self.say(f"warning: {why}; the job script will not see that the state was saved")

    def _meet_at_the_end(self, code: int) -> int:
        """Closing barrier: a node that leaves with an error lets schedulers kill those that still save."""
        if self.roll is None:
            return code
        self.roll.span = None
        self.roll.done(code)
        if code not in (0, EXIT_SAVED) and not self.stop_reason:
            return code
        self._deadline = float("inf")
        if self.stop_reason:
            self._deadline = time.monotonic() + self.grace_s + 3 * END_STEP_S
        while not self.all_done and not self.lost and not self.signals.again:
            ready = self._wait(self.signals.reader)
            if self.signals.reader in ready:
                os.read(self.signals.reader, 4096)
            for event in self.roll.tick():
                self._hear(event)
            self._act_on_signals()
            if time.monotonic() >= self._deadline:
                self.say("the other nodes are not done; leaving without them")
                break
        if self.stop_reason and EXIT_SAVED in self.codes:
            return EXIT_SAVED  # schedulers report the highest code of all nodes
        return code
