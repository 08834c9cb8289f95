"""Run torchrun, or one program, on this node and end it well: on request, or when a node is lost or fails.

Three processes: this one, which takes the signals and holds the heartbeat; the guard, below which everything
runs (guard.py); torchrun. Schedulers signal every process of a job step, so torchrun and its workers start
with `STOP_SIGNALS` blocked. Only this process acts on them, by the stop flag (stop_protocol.py). A user
program has them unblocked again (user_program.py).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_entrypoints.errors import EXIT_NO, EXIT_SAVED, EXIT_TOOL_FAILED, NoPlan
from imgkit_entrypoints.launch import (
    flight_recorder,
    forced_end,
    guard,
    markers,
    nccl_ras,
    run_folder,
    stop_protocol,
)
from imgkit_entrypoints.launch.forced_end import ForcedEnd
from imgkit_entrypoints.launch.guarded import GuardedCommand
from imgkit_entrypoints.launch.hang_watch import HangWatch
from imgkit_entrypoints.launch.run_folder import RunFolder, StopRequest
from imgkit_entrypoints.launch.signals import CollectedSignals
from imgkit_entrypoints.rollcall import descriptors
from imgkit_entrypoints.rollcall.messages import AllDone, Failed, Lost, StopAsked
from imgkit_entrypoints.rollcall.session import Event, LoneRoll, Roll

if TYPE_CHECKING:
    from imgkit_entrypoints.launch.request import Timeouts
    from imgkit_entrypoints.rollcall.messages import Caller
    from imgkit_entrypoints.schedulers.placement import Placement

PEER_FAILED_S = 10.0
"""Time that this node's workers have to fail with a message of their own, once another node has failed."""
TICK_S = 1.0
"""Longest time between two looks at the other nodes, the stop file and the workers."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """The surroundings of a run on this node."""

    env: Mapping[str, str]
    """Environment of the command."""
    open_files: int
    """Soft limit of the command's open files."""
    stop_folder: Path
    run_folder: RunFolder | None
    """Set on the one node that looks after it for all."""
    job_id: str
    head: bool
    roll: Roll
    hang_watch: HangWatch
    signals: CollectedSignals
    grace_s: float
    say: Say


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    place: Placement,
    me: Caller,
    say: Say,
    timeouts: Timeouts,
    secret: bytes | None = None,
) -> int:
    """Meet the other nodes, run `argv` with `env`, supervise it, and return the exit code of this node.

    Parameters
    ----------
    argv : markers in it are filled in (markers.py).
    env : the whole environment of the child; the stop protocol's variables and the line prefix are added.
        IMGKIT_STOP_DIR is the parent of the node's stop folder; unset, the folder is a temporary one.
    secret : what all nodes of the run know, and no stranger (rollcall/proof.py); None: an open start.

    Raises
    ------
    NoPlan : the roll call failed. ToolFailed : `argv` cannot be started. UsageError : a folder of the run
    cannot be written, or a file in it keeps the run from starting.
    """
    wanted = Path(env["IMGKIT_STOP_DIR"]) if env.get("IMGKIT_STOP_DIR") else None
    with (
        descriptors.limit_kept() as open_files,  # the roll call may raise it
        CollectedSignals().collecting() as signals,
        stop_protocol.folder(wanted, place.node_rank) as folder,
    ):
        shared = RunFolder.of(env, say)
        if shared and place.node_rank == 0:
            shared.clear()
        if shared:
            shared.refuse_stopped()  # on every node: none waits in the roll call for one that has refused
        try:
            roll = _meet(place, me, timeouts.rollcall_s, say, signals, secret)
        except NoPlan:
            if signals.got:
                return 128 + signals.got[0]
            raise
        job_id = place.job_id or stop_protocol.LOCAL_JOB
        child_env = {
            # torchrun knows no host name: each line of --tee says [host:rank].
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{me.host.replace('$', '$$')}:${{rank}}]: ",
            **env,
            "IMGKIT_STOP_DIR": str(folder),
            "IMGKIT_JOB_ID": job_id,
            **flight_recorder.variables(env, me.identity.torch, job_id),
        }
        node = _Node(
            env=child_env,
            open_files=open_files,
            stop_folder=folder,
            # All nodes share the folder, so the head looks after it.
            run_folder=shared if place.node_rank == 0 else None,
            job_id=job_id,
            head=place.node_rank == 0,
            roll=roll,
            hang_watch=HangWatch(
                folder, me.host, timeouts.hang_after_s, lambda: nccl_ras.question(child_env)
            ),
            signals=signals,
            grace_s=timeouts.grace_s,
            say=say,
        )
        try:
            nnodes, node_rank = roll.place.nnodes, roll.place.node_rank
            command = markers.filled(
                argv, port=roll.port, nnodes=nnodes, node_rank=node_rank, logs=folder / "logs"
            )
            return _supervised(command, node)
        finally:
            roll.close()


def _meet(
    place: Placement,
    me: Caller,
    timeout_s: float,
    say: Say,
    signals: CollectedSignals,
    secret: bytes | None,
) -> Roll:
    if place.nnodes == 1:
        return LoneRoll(place)
    from imgkit_entrypoints.rollcall import gather  # one node starts without it, and sooner

    roll = gather.call(place, me, timeout_s=timeout_s, say=say, stopped=signals.first, secret=secret)
    for warning in roll.warnings if place.node_rank == 0 else ():
        say(f"warning: {warning}")
    return roll


def _supervised(command: Sequence[str], node: _Node) -> int:
    began = time.time()
    guard.adopt_orphans()  # for the case that the guard itself is killed
    with GuardedCommand(
        command, node.env, node.say, speaks_for_all=node.head, open_files=node.open_files
    ) as child:
        supervisor = _Supervisor(node, child)
        supervisor.supervise()
    code = supervisor.node_code(child.wait())
    if code not in (0, EXIT_SAVED):
        supervisor.explain(began)
    code = supervisor.meet_at_the_end(code)
    if code != EXIT_SAVED:
        return code
    if supervisor.stop and not supervisor.stop.requeue:
        return 0  # a person asked for it: nobody is to requeue the job
    _mark_the_run(node)
    return EXIT_SAVED


def _mark_the_run(node: _Node) -> None:
    """Leave the mark in the run's folder, which all nodes and the job script share."""
    if node.run_folder is None:
        return
    try:
        node.run_folder.hand_on(node.stop_folder)
    except OSError as error:
        why = f"{node.run_folder.path}: {error.strerror}"
        node.say(f"warning: {why}; the job script will not see that the state was saved")


class _Supervisor:
    """One run: it reacts to the guard, the other nodes, the signals and the stop file."""

    def __init__(self, node: _Node, child: GuardedCommand) -> None:
        self.node, self.child = node, child
        self.stop: StopRequest | None = None
        self.end = ForcedEnd()
        self.lost = False
        self.codes: tuple[int, ...] | None = None
        """Exit codes of all nodes once every node is done."""

    def supervise(self) -> None:
        """React until nothing of the run is left."""
        node = self.node
        while True:
            self._wait(self.child, node.signals)
            if not self.child.read():
                return
            self._hear_the_others()
            self._act_on_signals()
            self._look_for_the_stop_file()
            node.roll.span = node.hang_watch.span
            for text in node.hang_watch.look(node.roll.everyone):
                node.say(text)
            if self.end.due():
                if not self.end.begun:
                    node.say(f"ending the program: {self.end.why}")
                self.child.send(self.end.step())

    def node_code(self, code: int) -> int:
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
        if self.lost:
            return EXIT_TOOL_FAILED
        if self.end.begun:
            return 128 + node.signals.got[0] if node.signals.got else EXIT_NO
        if code == -signal.SIGKILL:
            node.say(
                "the program was killed (SIGKILL), often by the kernel because memory ran out: "
                "dmesg | grep -i oom"
            )
        return code if code > 0 else 128 - code

    def explain(self, began: float) -> None:
        """Say what is known about a failure of the run that began at `began` (seconds of the epoch)."""
        if not self.stop and not self.end.begun:
            from imgkit_entrypoints.launch import explain

            for found in explain.explain(self.child.tail()):
                self.node.say(str(found))
        if dumps := flight_recorder.dumps(self.node.env, began):
            self.node.say(dumps)

    def meet_at_the_end(self, code: int) -> int:
        """Wait until all nodes are done, and return the exit code.

        A node that leaves with an error lets schedulers kill those that still save.
        """
        node = self.node
        node.roll.span = None
        node.roll.done(code)
        if code not in (0, EXIT_SAVED) and not self.stop:
            return code
        self.end = ForcedEnd()  # from here on: the end of the waiting
        if self.stop:
            self.end.within(node.grace_s + 3 * forced_end.END_STEP_S, "the other nodes are not done")
        self._hear_the_others()
        while self.codes is None and not self.lost and not node.signals.again:
            self._wait(node.signals)
            self._hear_the_others()
            self._act_on_signals()
            if self.end.due():
                node.say("the other nodes are not done; leaving without them")
                break
        if self.stop and EXIT_SAVED in (self.codes or ()):
            return EXIT_SAVED  # schedulers report the highest code of all nodes
        return code

    def _wait(self, *sources: GuardedCommand | CollectedSignals) -> None:
        left = min(TICK_S, max(0.0, self.end.deadline - time.monotonic()))
        self.node.roll.wait(sources, left)
        self.node.signals.drain()

    def _hear_the_others(self) -> None:
        for event in self.node.roll.tick():
            self._hear(event)

    def _act_on_signals(self) -> None:
        signals = self.node.signals
        if signals.again and not self.end.begun:
            self.end.within(0.0, "a second signal")
        elif signals.got and not self.stop:
            self._ask_all(StopRequest(reason=signals.first(), requeue=True))

    def _hear(self, event: Event) -> None:
        if isinstance(event, StopAsked):
            self._stop(StopRequest(reason=f"{event.reason} on {event.node}", requeue=event.requeue))
        elif isinstance(event, Lost):
            self.lost = True
            self.node.say(f"lost {event.node}: {event.why}")
            self.end.within(0.0, f"{event.node} is lost")
        elif isinstance(event, Failed):
            self.node.say(f"{event.node} ended with exit code {event.code}; its own output says why")
            if not self.stop:
                self.end.within(PEER_FAILED_S, f"{event.node} has failed")
        elif isinstance(event, AllDone):
            self.codes = event.codes

    def _look_for_the_stop_file(self) -> None:
        """React to a request that a job script or a person has left in the run's folder."""
        folder = self.node.run_folder
        if folder and not self.stop and (request := folder.request()):
            if text := run_folder.warning(request.reason):
                self.node.say(text)
            self._ask_all(request)

    def _ask_all(self, request: StopRequest) -> None:
        self.node.roll.ask_stop(request.reason, requeue=request.requeue)
        self._stop(request)

    def _stop(self, request: StopRequest) -> None:
        """Ask the program to save and end, once. Of two requests, the one of a person counts."""
        if self.stop:
            self.stop = request if self.stop.requeue else self.stop
            return
        self.stop, grace_s = request, self.node.grace_s
        stop_protocol.raise_flag(self.node.stop_folder, request.reason)
        if self.child.code is None:
            self.node.say(f"{request.reason}: asked the program to save and end, waiting up to {grace_s:g} s")
        self.end.within(grace_s, "the grace time is over")
