"""Run torchrun, or one program, on this node and end it well: on request, or when a node is lost or fails.

The nodes meet (`run`); the head then starts attempts (attempts.py), and every node takes part in them
(`NodeRun`): each attempt's torchrun below its guard, and the waiting in between.

Three processes: this one, which takes the signals and holds the heartbeat; the guard, below which
everything runs (guard.py); torchrun. Schedulers signal every process of a job step, so torchrun and its
workers start with `STOP_SIGNALS` blocked. Only this process acts on them, by the stop flag
(stop_protocol.py). A user program has them unblocked again (user_program.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_entrypoints import fence
from imgkit_entrypoints.errors import EXIT_NO, EXIT_SAVED, EXIT_TOOL_FAILED, ImgkitError, NoPlan
from imgkit_entrypoints.launch import failures, guard, guarded, nccl, plan, start_up, stop_protocol
from imgkit_entrypoints.launch.attempts import Attempts, RendezvousWatch
from imgkit_entrypoints.launch.failures import FinalMessage, LateRecords, NodeFailure
from imgkit_entrypoints.launch.guarded import ForcedEnd, GuardedCommand
from imgkit_entrypoints.launch.progress import StepTimer
from imgkit_entrypoints.launch.start_up import StartUp, process_began_s, start_began_s
from imgkit_entrypoints.launch.stop_protocol import CollectedSignals, RunFolder, StopRequest
from imgkit_entrypoints.launch.watchdog import Watchdog
from imgkit_entrypoints.rollcall.messages import (
    STARTING,
    WORKERS,
    AllDone,
    AttemptEnded,
    AttemptStart,
    EndAttempt,
    Event,
    NodeFailed,
    NodeLost,
    StopOrder,
)
from imgkit_entrypoints.rollcall.session import HeadSession, Session
from imgkit_entrypoints.schedulers.placement import Size

if TYPE_CHECKING:
    from imgkit_entrypoints.launch.plan import Timeouts
    from imgkit_entrypoints.rollcall.messages import NodeInfo, RankFailure
    from imgkit_entrypoints.schedulers.placement import Placement


Say = Callable[..., None]


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    place: Placement,
    me: NodeInfo,
    say: Say,
    timeouts: Timeouts,
    max_failures: int = 0,
    secret: bytes | None = None,
    preflight: str = "",
    measures: str = "",
    log_dir: str | None = None,
) -> int:
    """Meet the other nodes, run `argv` with `env`, supervise it, and return the exit code of this node.

    Parameters
    ----------
    argv : markers in it are filled in (`plan.filled`).
    env : the whole environment of the child; the stop protocol's variables and the line prefix are added.
        IMGKIT_STOP_DIR is the parent of the node's stop folder; unset, the folder is a temporary one.
    max_failures : lost nodes and failed workers that the run survives by a new attempt.
    secret : what all nodes of the run know, and no stranger (rollcall/connection.py); None: an open start.
    preflight : how all nodes are measured before the start (launch/preflight); empty: not at all.
    measures : the module that then measures a node.
    log_dir : folder for the log of a failed run; None: the run's folder, or a temporary one.

    Raises
    ------
    NoPlan : the roll call failed. ToolFailed : `argv` cannot be started. UsageError : a folder of the run
    cannot be written, or a file in it prevents the run from starting. CheckFailed : the
    preflight found more outliers than the run can do without.
    """
    wanted = Path(env["IMGKIT_STOP_DIR"]) if env.get("IMGKIT_STOP_DIR") else None
    head, job_id = place.node_rank == 0, place.job_id or stop_protocol.LOCAL_JOB
    elastic, word = place.size is not None or max_failures > 0, secrets.token_hex(4)
    with (
        limit_kept() as open_files,
        CollectedSignals().collecting() as signals,
        stop_protocol.folder(wanted, place.node_rank) as folder,
    ):
        shared = RunFolder.of(env, say)
        # Now, before the files of an earlier start are removed; only that of the head is shown.
        began_s = start_began_s(env, shared if head else None)
        if shared and head:
            shared.refuse_unusable()
            shared.clear()
        with _result(shared if head else None, job_id, say) as result, ExitStack() as held:
            last_words = FinalMessage(say)
            held.callback(last_words)
            if shared:
                shared.refuse_stopped()  # on every node: none waits in the roll call for one that has refused
            started = StartUp(began_s)
            started.ends("container", process_began_s())
            started.ends("node_agent")
            try:
                roll = _meet(place, me, timeouts.rollcall_s, say, signals, secret, elastic=elastic)
            except NoPlan:
                if signals.got:
                    result.code = 128 + signals.got[0]
                    return result.code
                raise
            started.ends("roll_call")
            roll.lost_after_s = timeouts.lost_after_s
            timer = StepTimer(began_s)
            around = Surroundings(
                argv=argv,
                env={**_variables(env, me, folder, job_id), **({fence.VARIABLE: word} if head else {})},
                open_files=open_files,
                host=me.host,
                stop_folder=folder,
                # All nodes share the folder, so the head looks after it.
                run_folder=shared if head else None,
                job_id=job_id,
                head=head,
                roll=roll,
                attempts=_attempts(roll, max_failures, job_id, word, shared, say),
                timer=timer,
                started=started,
                last_words=last_words,
                log_folder=str(Path(log_dir, f"node{place.node_rank}")) if log_dir else _path_of(shared),
                signals=signals,
                rendezvous_s=timeouts.rollcall_s,
                grace_s=timeouts.grace_s,
                hang_after_s=timeouts.hang_after_s,
                say=say,
            )
            guard.adopt_orphans()  # for the case that a guard itself is killed
            try:
                left_out = _measured(preflight, measures, around, shared) if preflight else ()
                if preflight:
                    started.ends("preflight")
                if around.attempts:
                    around.attempts.start(left_out)
                result.code = NodeRun(around).to_the_end()
            except NoPlan:
                if signals.got:
                    result.code = 128 + signals.got[0]
                    return result.code
                raise
            finally:
                roll.close()
                if head and (line := timer.summary(roll.placement.nnodes)):
                    say(line)
        return result.code


def _path_of(folder: RunFolder | None) -> str:
    return str(folder.path) if folder else ""


@contextlib.contextmanager
def limit_kept() -> Iterator[int]:
    """Yield this process' soft limit of open files, and restore it: the roll call may raise it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@dataclass(slots=True)
class _RunEnd:
    code: int = EXIT_NO


@contextlib.contextmanager
def _result(folder: RunFolder | None, job_id: str, say: Say) -> Iterator[_RunEnd]:
    """Leave the exit code of the whole run in `folder` as the last thing."""
    result = _RunEnd()
    try:
        yield result
    except ImgkitError as error:
        result.code = error.exit_code
        raise
    finally:
        if folder:
            try:
                folder.end(job_id, result.code)
            except OSError as error:
                why = f"{folder.path}: {error.strerror}"
                say(f"warning: {why}; the job script and imgkit status will not see how the run has ended")


def _variables(env: Mapping[str, str], me: NodeInfo, stop_folder: Path, job_id: str) -> Mapping[str, str]:
    """The environment of the command, in every attempt."""
    return {
        # torchrun knows no host name: each line of --tee says [host:rank].
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{me.host.replace('$', '$$')}:${{rank}}]: ",
        **env,
        "IMGKIT_STOP_DIR": str(stop_folder),
        "IMGKIT_JOB_ID": job_id,
        **nccl.recorder_variables(env, me.software.torch, job_id),
    }


def _attempts(
    roll: Session, max_failures: int, job_id: str, word: str, folder: RunFolder | None, say: Say
) -> Attempts | None:
    if not isinstance(roll, HeadSession) or not roll.can_restart:
        return None

    def admit(attempt: int) -> None:
        if folder and (why := fence.admit(folder.path, job_id, attempt, word)):
            say(f"warning: {why}")

    nnodes = roll.placement.nnodes
    size = roll.placement.size or Size(training=nnodes)
    return Attempts(roll, size, max_failures=max_failures, say=say, fence=admit)


def _measured(mode: str, module: str, around: Surroundings, shared: RunFolder | None) -> tuple[int, ...]:
    """Measure all nodes; return the numbers of those that the run leaves out."""
    from imgkit_entrypoints.launch.preflight.run import Needs, preflight

    place = around.roll.placement
    needs = Needs(
        mode=mode,
        module=module,
        env=around.env,
        open_files=around.open_files,
        signals=around.signals,
        say=around.say,
        folder=shared.path if shared else None,
        spares=place.nnodes - place.size.training if place.size else 0,
    )
    return preflight(around.roll, needs)


def _meet(
    place: Placement,
    me: NodeInfo,
    timeout_s: float,
    say: Say,
    signals: CollectedSignals,
    secret: bytes | None,
    *,
    elastic: bool,
) -> Session:
    from imgkit_entrypoints.rollcall import gather

    roll = gather.meet(
        place,
        me,
        timeout_s=timeout_s,
        log=say,
        stop_reason=signals.first,
        secret=secret,
        can_restart=elastic,
    )
    for warning in roll.warnings if place.node_rank == 0 else ():
        say(f"warning: {warning}")
    return roll


PEER_FAILED_S = 10.0
"""Time that this node's workers have to fail with a message of their own, once another node has failed.

As long, the head waits for the cause where its own workers have failed because a rank elsewhere is gone."""
EXPLAINED = 64 * 1024
"""Last characters of the error output that are searched for known failures."""
TICK_S = 1.0
"""Longest time between two looks at the other nodes, the stop file and the workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a run finds on this node."""

    argv: Sequence[str]
    """The command with its markers (`plan.filled`)."""
    env: Mapping[str, str]
    """Environment of the command."""
    open_files: int
    """Soft limit of the command's open files."""
    host: str
    stop_folder: Path
    run_folder: RunFolder | None
    """Set on the one node that looks after it for all."""
    job_id: str
    head: bool
    roll: Session
    attempts: Attempts | None
    """Set on the head, where a failure may be followed by another attempt."""
    timer: StepTimer
    started: StartUp
    """The time until the first attempt."""
    last_words: FinalMessage
    log_folder: str
    """Where the log of a failed run goes; empty: into a temporary folder."""
    signals: CollectedSignals
    rendezvous_s: float
    """Longest time of torchrun's rendezvous."""
    grace_s: float
    hang_after_s: float
    say: Callable[..., None]


class NodeRun:
    """One node from the first attempt to the end of the run.

    It reacts to the guard, the other nodes, the signals and the stop file.
    """

    def __init__(self, around: Surroundings) -> None:
        self.node = around
        self.stop: StopRequest | None = None
        self.end = ForcedEnd()
        """The end of the program by force; between attempts, the end of the waiting."""
        self.lost = False
        """A node that the run cannot do without is lost."""
        self.stalled = False
        """Torchrun's rendezvous of this attempt took too long; only the head knows."""
        self.codes: tuple[int, ...] | None = None
        """Exit codes of all nodes once every node is done; of an elastic run, the code of the run."""
        self._start: AttemptStart | None = None
        self._cancelled = 0
        """The attempt that was over before it has begun here."""
        self._child: GuardedCommand | None = None
        self._own: RankFailure | None = None
        """The first failed worker of this node in the latest attempt."""

    def to_the_end(self) -> int:
        """Take part until the run is over; return the exit code of this node."""
        code = self._all_attempts() if self.node.roll.can_restart else self._only_attempt()
        if code not in (0, EXIT_SAVED):
            self.node.last_words.lines = self._last_words()
        if code != EXIT_SAVED:
            return code
        if self.stop and not self.stop.requeue:
            return 0  # a person asked for it: nobody is to requeue the job
        self._mark_the_run()
        return EXIT_SAVED

    def _only_attempt(self) -> int:
        place = self.node.roll.placement
        start = AttemptStart(
            attempt=1, nnodes=place.nnodes, node_rank=place.node_rank, port=self.node.roll.port
        )
        code = self._take_part(start)
        # A node that leaves with an error lets schedulers kill those that still save.
        if code not in (0, EXIT_SAVED) and not self.stop:
            self._wait_for_the_cause()
            return code
        self._wait_for_the_others()
        if self.stop and EXIT_SAVED in (self.codes or ()):
            return EXIT_SAVED  # schedulers report the highest code of all nodes
        return code

    def _all_attempts(self) -> int:
        code = EXIT_NO
        while True:
            self._wait_for_the_others()
            if self._start is None or self.lost:
                break
            start, self._start = self._start, None
            if start.attempt > 1 and (lines := self._last_words(before=True)):
                self.node.say(*lines)
            self._own = None
            if start.node_rank is not None:
                code = self._take_part(start)
        if self.codes is not None:
            return self.codes[0]
        if self.lost:
            return EXIT_TOOL_FAILED
        return 128 + self.node.signals.got[0] if self.node.signals.got else code

    def _take_part(self, start: AttemptStart) -> int:
        """Run the command once, report how it has ended, and return the exit code of this node alone."""
        node, began, code = self.node, time.time(), EXIT_NO
        self.end, self.stalled, node.roll.phase = ForcedEnd(), False, STARTING
        stop_protocol.clear(node.stop_folder)
        if self.stop:  # it has come while the others started
            self._raise_flag(self.stop)
        self._late = LateRecords(node.stop_folder)
        watch = Watchdog(node.stop_folder, node.host, node.hang_after_s, lambda: nccl.question(node.env))
        first_s = node.timer.start_attempt(node.stop_folder)
        if start.attempt > self._cancelled:
            with GuardedCommand(
                self._command(start),
                {
                    **node.env,
                    "IMGKIT_ATTEMPT": str(start.attempt),
                    start_up.VARIABLE: self._started(start.attempt).text(),
                    start_up.FIRST_ATTEMPT: f"{first_s:.3f}",
                },
                node.say,
                speaks_for_all=node.head,
                open_files=node.open_files,
            ) as child:
                if start.attempt > 1 and node.attempts:
                    waited_s = time.monotonic() - node.attempts.noticed
                    node.say(f"torchrun starts again {waited_s:.1f} s after the failure was noticed")
                self._child = child
                self._supervise(child, watch)
            code = self._node_code(child.wait())
            self._child = None
            if code not in (0, EXIT_SAVED):
                self._own = self._failure(child, start.attempt)
                self._explain(child, began)
        node.timer.end_attempt(node.stop_folder)
        node.roll.positions = None
        node.roll.report_end(
            AttemptEnded(
                code=code,
                attempt=start.attempt,
                position=watch.furthest(),
                failure=self._own,
            )
        )
        return code

    def _started(self, attempt: int) -> StartUp:
        """The start so far; a later attempt begins with torchrun."""
        return self.node.started if attempt == 1 else StartUp(time.monotonic())

    def _command(self, start: AttemptStart) -> list[str]:
        assert start.node_rank is not None  # noqa: S101 - a spare has no command
        return plan.filled(
            self.node.argv,
            attempt=start.attempt,
            port=start.port,
            nnodes=start.nnodes,
            node_rank=start.node_rank,
            logs=self.node.stop_folder / "logs" / f"attempt{start.attempt}",
        )

    def _supervise(self, child: GuardedCommand, watch: Watchdog) -> None:
        """React until nothing of the command is left."""
        node = self.node
        rendezvous = (
            RendezvousWatch(node.roll, node.rendezvous_s) if isinstance(node.roll, HeadSession) else None
        )
        while True:
            self._wait(child, node.signals)
            if not child.read():
                return
            self._react()
            node.roll.positions = watch.span
            if node.roll.phase != WORKERS:
                node.roll.phase = start_up.noted(node.stop_folder)
            if rendezvous and not self.stalled and (why := rendezvous.stalled()):
                self.stalled = True
                self.end.now(why)
            for text in watch.look(node.roll.run_positions):
                node.say(*text.split("\n"))
            for lines in self._late.look():
                node.say(*lines)
            if self.end.due():
                if not self.end.begun:
                    node.say(f"ending the program: {self.end.why}")
                child.send(self.end.step())

    def _node_code(self, code: int) -> int:
        """Return the exit code of this node alone, where its command ended with `code`."""
        node = self.node
        step, problem = stop_protocol.saved_step(node.stop_folder, node.job_id)
        if problem:
            node.say(f"warning: {problem}")
        if step is not None:
            node.say(f"state saved at step {step}")
            return EXIT_SAVED
        if code == 0:
            return 0
        if self.lost or self.stalled:
            return EXIT_TOOL_FAILED
        if self.end.begun:
            return 128 + node.signals.got[0] if node.signals.got else EXIT_NO
        if code == -signal.SIGKILL:
            node.say(
                "the program was killed (SIGKILL), often by the kernel because memory ran out: "
                "dmesg | grep -i oom"
            )
        return code if code > 0 else 128 - code

    def _explain(self, child: GuardedCommand, began: float) -> None:
        """Say what is known about a failure of the attempt that began at `began` (seconds of the epoch)."""
        # What is known of a killed rank is in the last words.
        killed = self._own is not None and self._own.rank is not None and not self._own.lines
        if not self.stop and not self.end.begun and not killed:
            from imgkit_entrypoints.launch import explain

            alone = self.node.roll.placement.nnodes == 1
            of_rank = self._own is not None and self._own.rank is not None
            has_cause = of_rank and not (self._own and self._own.after_peer and alone)
            for found in explain.explain(child.tail()[-EXPLAINED:], has_cause=has_cause):
                self.node.say(*found.lines)
        if dumps := nccl.recorder_dumps(self.node.env, began):
            self.node.say(dumps)

    def _failure(self, child: GuardedCommand, attempt: int) -> RankFailure | None:
        """Find the worker of this node that failed first, and write the log."""
        node = self.node
        killed_by = 0 if self.end.begun or child.code is None else max(0, -child.code)
        found = failures.of_node(node.stop_folder, "", killed_by)
        if found is None:
            return None
        log = failures.write_log(child.tail(), node.log_folder, node.roll.placement.node_rank, attempt)
        return dataclasses.replace(found, log=log)

    def _wait_for_the_cause(self) -> None:
        """Wait on the head for the node whose worker is gone, where this node's failed because of that."""
        node = self.node
        if not isinstance(node.roll, HeadSession) or node.roll.placement.nnodes == 1:
            return
        if self._own is not None and not self._own.after_peer:
            return
        self.end = ForcedEnd()
        self.end.within(PEER_FAILED_S, "no other node has reported a failure")
        while self.codes is None and not self.lost and not self.end.due() and not node.signals.again:
            if any(not failure.after_peer for _, _, failure in node.roll.failures):
                return
            self._wait(node.signals)
            self._react()

    def _last_words(self, *, before: bool = False) -> tuple[str, ...]:
        """Return what is printed last; `before`: of the attempt before the one that starts now."""
        node = self.node
        name = node.roll.node_name(node.roll.placement.node_rank, node.host)
        if isinstance(node.roll, HeadSession):
            return failures.of_run(node.roll, name, node.say, before=before)
        if self._own is None:
            return ()
        own = NodeFailure(at=0.0, node=name, failure=self._own)
        return failures.block(own) if self.lost else (failures.one_line(own),)

    def _wait_for_the_others(self) -> None:
        """Wait until all nodes are done, or until the next attempt starts."""
        node = self.node
        self.end = ForcedEnd()
        if self.stop:
            self.end.within(self._patience_s(), "the other nodes are not done")
        self._react()
        while self._start is None and self.codes is None and not self.lost and not node.signals.again:
            self._wait(node.signals)
            self._react()
            if self.end.due() and not self.lost:
                node.say("the other nodes are not done; leaving without them")
                break

    def _patience_s(self) -> float:
        """Seconds that the others have to save and end, in which this node has nothing to do."""
        return self.node.grace_s + 3 * guarded.END_STEP_S

    def _wait(self, *sources: GuardedCommand | CollectedSignals) -> None:
        left = min(TICK_S, max(0.0, self.end.deadline - time.monotonic()))
        self.node.roll.wait(sources, left)
        self.node.signals.drain()

    def _react(self) -> None:
        for event in self.node.roll.poll():
            self._hear(event)
        self._act_on_signals()
        self._look_for_the_stop_file()
        if self.node.attempts:
            self.node.attempts.look(stopped=self.stop is not None)

    def _act_on_signals(self) -> None:
        signals = self.node.signals
        if signals.again and not self.end.begun:
            self.end.within(0.0, "a second signal")
        elif signals.got and not self.stop:
            self._ask_all(StopRequest(reason=signals.first(), requeue=True))

    def _hear(self, event: Event) -> None:
        if isinstance(event, StopOrder):
            self._stop(StopRequest(reason=f"{event.reason} on {event.node}", requeue=event.requeue))
        elif isinstance(event, AttemptStart):
            self._start = event
        elif isinstance(event, EndAttempt):
            self._cancelled = event.attempt
            if self._child:
                self.end.now(event.reason)
        elif isinstance(event, NodeLost):
            self.lost = True
            self.node.say(f"lost {event.node}: {event.reason}")
            if self.node.roll.can_restart:
                self.end.now(f"{event.node} is lost")
            else:
                self.end.within(0.0, f"{event.node} is lost")
        elif isinstance(event, NodeFailed):
            why = "its own output says why" if event.rank is None else f"rank {event.rank} failed first there"
            self.node.say(f"{event.node} ended with exit code {event.code}; {why}")
            if not self.stop:
                self.end.within(PEER_FAILED_S, f"{event.node} has failed")
        elif isinstance(event, AllDone):
            self.codes = event.codes

    def _look_for_the_stop_file(self) -> None:
        """React to a request that a job script or a person has left in the run's folder."""
        folder = self.node.run_folder
        if folder and not self.stop and (request := folder.request()):
            self._ask_all(request)

    def _ask_all(self, request: StopRequest) -> None:
        self.node.roll.ask_stop(request.reason, requeue=request.requeue)
        self._stop(request)

    def _stop(self, request: StopRequest) -> None:
        """Ask the program to save and end, once. Of two requests, the one of a person counts."""
        if self.stop:
            self.stop = request if self.stop.requeue else self.stop
            return
        self.stop = request
        if self._child:
            self._raise_flag(request)
        else:
            self.end.within(self._patience_s(), "the other nodes are not done")

    def _raise_flag(self, request: StopRequest) -> None:
        grace_s = self.node.grace_s
        stop_protocol.raise_flag(self.node.stop_folder, request.reason)
        self.node.say(f"{request.reason}: asked the program to save and end, waiting up to {grace_s:g} s")
        self.end.within(grace_s, "the grace time is over")

    def _mark_the_run(self) -> None:
        """Leave the mark in the run's folder, which all nodes and the job script share."""
        node = self.node
        if node.run_folder is None:
            return
        try:
            node.run_folder.hand_on(node.stop_folder)
        except OSError as error:
            why = f"{node.run_folder.path}: {error.strerror}"
            node.say(f"warning: {why}; the job script will not see that the state was saved")
