"""One node's part in the preflight; the head leads all nodes through the stages and judges them.

Each node has one measuring process, below a guard of its own: it hangs or dies without the node agent. A
node whose process hangs is out at the stage's limit, and the others go on. On the head, a second process
serves the store in which they meet. It measures nothing, and hangs with none of them.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed, NoPlan
from imgkit_entrypoints.launch.guarded import GuardedCommand
from imgkit_entrypoints.launch.preflight import verdict
from imgkit_entrypoints.launch.preflight.verdict import (
    Judgement,
    NodeFigures,
    PairFigures,
    Report,
    Stage,
    better,
    judge,
)
from imgkit_entrypoints.launch.stop_protocol import CollectedSignals
from imgkit_entrypoints.rollcall import messages, session
from imgkit_entrypoints.rollcall.connection import Connection
from imgkit_entrypoints.rollcall.messages import (
    Event,
    FromNode,
    MeasureRequest,
    MeasureResult,
    NodeLost,
    PreflightEnd,
    Refused,
    StopOrder,
)
from imgkit_entrypoints.rollcall.session import HeadSession, Readable, Session

ANSWER_S = 2.0
"""Further time for a node's answer to reach the head."""
TICK_S = 0.25
FILE = "preflight.json"
SAYS = {
    "alone": "each node measures itself",
    "pair": "pairs of nodes measure the network",
    "all": "all nodes measure together",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the preflight needs to know of the run."""

    mode: str
    """One of `messages.MODES`."""
    module: str
    """The module that measures a node."""
    env: Mapping[str, str]
    """Environment of the workers."""
    open_files: int
    signals: CollectedSignals
    say: Callable[..., None]
    folder: Path | None
    """The run's folder, for `FILE`."""
    spares: int = 0
    """Nodes that the run can do without."""


def preflight(roll: Session, around: Needs) -> tuple[int, ...]:
    """Measure all nodes of `roll`, and return the numbers of those that the run leaves out.

    Raises
    ------
    CheckFailed : on all nodes: more nodes are outliers than the run can do without. NoPlan : a stop was asked
    for, or the head is gone.
    """
    place = roll.placement
    env = {
        **around.env,
        "GROUP_RANK": str(place.node_rank),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": place.head if place.nnodes > 1 else "127.0.0.1",
    }
    process = MeasuringProcess(around.module, env, around.say, open_files=around.open_files)
    try:
        if isinstance(roll, HeadSession):
            return _Leading(roll, process, around).lead()
        return _follow(roll, process, around)
    finally:
        process.close()


def _follow(roll: Session, process: MeasuringProcess, around: Needs) -> tuple[int, ...]:
    """Measure what the head asks for, until it has judged."""
    while True:
        for event in _turn(roll, process, around):
            if isinstance(event, PreflightEnd):
                return event.left_out
            if isinstance(event, Refused):
                raise CheckFailed(event.what, where=event.where, hint=event.hint)
            if isinstance(event, NodeLost):
                raise NoPlan(f"lost {event.node} during the preflight: {event.reason}")


def _turn(
    roll: Session, process: MeasuringProcess, around: Needs, sources: Sequence[Readable] = ()
) -> Iterator[Event]:
    """Wait a moment, let this node's process begin and end stages, and yield all other events.

    Raises
    ------
    NoPlan : a stop was asked for, here or on another node.
    """
    roll.wait([*process.sources, *sources, around.signals], TICK_S)
    for event in roll.poll():
        if isinstance(event, MeasureRequest):
            process.begin(event)
        elif isinstance(event, StopOrder):
            raise NoPlan(f"stopped during the preflight: {event.reason} on {event.node}")
        else:
            yield event
    if found := process.answer():
        roll.report_measurement(found)
    around.signals.drain()
    if reason := around.signals.first():
        roll.ask_stop(reason)
        raise NoPlan(f"stopped during the preflight by {reason}")


class _Leading:
    """The head's side."""

    def __init__(self, roll: HeadSession, process: MeasuringProcess, around: Needs) -> None:
        self.roll, self.process, self.around = roll, process, around
        self.store = MeasuringProcess(
            around.module, around.env, around.say, open_files=around.open_files, words=(STORE,)
        )
        self.port = 0
        """Port of the store; 0 until it is served."""
        nodes = range(roll.placement.nnodes)
        self.figures = {rank: NodeFigures(rank=rank, host=self._host(rank)) for rank in nodes}
        self.pairs: list[PairFigures] = []
        self.all_reduce_GBps: float | None = None
        self.answers: dict[int, MeasureResult] = {}
        """Answers in the present stage."""

    def lead(self) -> tuple[int, ...]:
        """Lead all nodes through the stages, judge them, and tell everybody."""
        began = time.monotonic()
        seats = sorted(self.figures)
        try:
            if len(seats) > 1:
                self.store.start()
            self._measure(verdict.stage(0, seats))
            seats = [rank for rank in seats if rank not in self._out()]
            number, suspects = 1, {node.rank for node in self._judged().outliers}
            while stage := verdict.stage(number, seats, absent=self._out(), suspects=suspects):
                if stage.kind == "all":  # those with which the run may start
                    condemned = {node.rank for node in self._judged().condemned}
                    stage = verdict.stage(number, seats, absent=self._out() | condemned)
                self._measure(stage)
                number += 1
        finally:
            self.store.close()
        return self._end(self._judged(), time.monotonic() - began)

    def _judged(self) -> Judgement:
        return judge(list(self.figures.values()), self.pairs)

    def _end(self, judgement: Judgement, seconds: float) -> tuple[int, ...]:
        condemned = judgement.condemned
        passed = len(condemned) <= self.around.spares
        left_out = tuple(sorted(node.rank for node in condemned)) if passed else ()
        report = Report(
            judgement=judgement,
            seconds=seconds,
            all_reduce_GBps=self.all_reduce_GBps,
            left_out=left_out,
            passed=passed,
            scheduler=self.roll.placement.scheduler,
        )
        self.around.say("preflight", *report.table())
        self._save(report)
        if passed:
            self.roll.end_preflight(PreflightEnd(left_out=left_out))
            return left_out
        worst = condemned[0]
        error = CheckFailed(
            f"{worst.host} is an outlier: {worst.reasons[0]}"
            + (f" (and {len(condemned) - 1} more)" if len(condemned) > 1 else ""),
            where="preflight",
            hint=f"start again with {report.way}, or with a spare (--nnodes N+1) that replaces it; "
            "leave out --preflight to start as it is",
        )
        self.roll.end_preflight(Refused(what=error.what, where=error.where, hint=error.hint))
        raise error

    def _save(self, report: Report) -> None:
        if self.around.folder is None:
            return
        try:
            files.put(self.around.folder / FILE, report.to_json())
        except OSError as error:
            self.around.say(f"warning: {self.around.folder / FILE}: {error.strerror}")

    def _measure(self, stage: Stage | None) -> None:
        """Have all groups of a stage measure at once, and take what they found."""
        if stage is None or not stage.groups:
            return
        if stage.kind != "alone" and not self._store_is_served():
            return
        self.around.say(f"preflight: {SAYS[stage.kind]}, up to {stage.limit_s} s")
        self.answers = {}
        for group in stage.groups:
            order = MeasureRequest(
                stage=stage.number,
                kind=stage.kind,
                mode=self.around.mode,
                limit_s=stage.limit_s,
                group=group,
                store=self.port if len(group) > 1 else 0,
            )
            for rank in group:
                self.roll.request_measurement(rank, order)
        asked = {rank for group in stage.groups for rank in group}
        end = time.monotonic() + stage.limit_s + ANSWER_S
        while asked - self.answers.keys() - self._out() and time.monotonic() < end:
            self._turn(stage.number)
        for rank in asked - self.answers.keys() - self._out():
            why = f"its node agent hangs: no answer within {stage.limit_s} s"
            self.answers[rank] = MeasureResult(stage=stage.number, error=why, mute=True)
        self._take(stage)

    def _store_is_served(self) -> bool:
        end = time.monotonic() + verdict.ALONE_S
        while not self.port and self.store.sources and time.monotonic() < end:
            self._turn(-1)
        return self.port > 0

    def _turn(self, number: int) -> None:
        """Wait a moment, and hear all nodes and the process that serves the store."""
        for _ in _turn(self.roll, self.process, self.around, self.store.sources):
            pass  # a lost node is in `gone` too
        for rank, why in self.roll.lost.items():
            self.figures[rank] = replace(self.figures[rank], broken=f"lost: {why}", gone=True)
        heard, self.roll.measurements = self.roll.measurements, []
        self.answers.update({rank: said for rank, said in heard if said.stage == number})
        if served := self.store.answer():
            self.port = int(dict(served.figures).get(STORE, 0))

    def _take(self, stage: Stage) -> None:
        """Keep what the nodes have answered."""
        for rank, said in self.answers.items():
            known = self.figures[rank]
            broken = known.broken or (said.error if said.mute or stage.kind == "alone" else "")
            figures = better(known.figures, dict(said.figures)) if stage.kind == "alone" else known.figures
            together = [f"all nodes together: {said.error}"] if stage.kind == "all" and said.error else []
            self.figures[rank] = replace(
                known,
                figures=figures,
                broken=broken,
                failed=tuple(dict.fromkeys((*known.failed, *said.failed))),
                notes=tuple(dict.fromkeys((*known.notes, *said.notes, *together))),
            )
        if stage.kind == "all":
            rates = [dict(said.figures).get("all_reduce") for said in self.answers.values()]
            self.all_reduce_GBps = min((rate for rate in rates if rate is not None), default=None)
        for pair in stage.groups if stage.kind == "pair" else ():
            if set(pair) & self._out():
                continue  # the partner of a node that hangs has measured nothing about itself
            both = [self.answers[rank] for rank in pair]
            errors = [said.error for said in both if said.error]
            self.pairs.append(
                PairFigures(nodes=(pair[0], pair[1]), figures=dict(both[0].figures), error=", ".join(errors))
            )

    def _out(self) -> set[int]:
        return {rank for rank, node in self.figures.items() if node.broken}

    def _host(self, rank: int) -> str:
        """Name of a node, if possible the scheduler's: it stands in the words that exclude the node."""
        named = self.roll.placement.hosts[rank : rank + 1]
        return named[0] if named else self.roll.host(rank)


STORE = "store"
"""The word for a process that serves the store in which the others meet, and the figure of its port."""


class MeasuringProcess:
    """One process that measures stage after stage. One that hangs is ended, and the next stage has a new one.

    Parameters
    ----------
    module : the program, which gets the number of its socket.
    words : further arguments.
    """

    def __init__(
        self,
        module: str,
        env: Mapping[str, str],
        say: Callable[[str], None],
        *,
        open_files: int,
        words: tuple[str, ...] = (),
    ) -> None:
        self._module, self._env, self._say = module, env, say
        self._open_files, self._words = open_files, words
        self._child: GuardedCommand | None = None
        self._link: Connection[FromNode] | None = None
        self._ended: list[GuardedCommand] = []
        self._order: MeasureRequest | None = None
        self._deadline = 0.0

    @property
    def sources(self) -> list[Readable]:
        """Descriptors to wait for."""
        return [one for one in (self._child, self._link) if one is not None]

    def start(self) -> None:
        """Start the process if there is none."""
        if self._child is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            words = (str(theirs.fileno()), *self._words)
            self._child = GuardedCommand(
                (sys.executable or "python3", "-I", "-m", self._module, *words),
                self._env,
                self._say,
                speaks_for_all=False,
                open_files=self._open_files,
                inherited=(theirs.fileno(),),
            )
        self._child.__enter__()
        self._link = Connection(ours, messages.from_node)

    def begin(self, order: MeasureRequest) -> None:
        """Have the process measure; `answer` has the result later."""
        self.start()
        assert self._link is not None  # noqa: S101 - start has made it
        self._order, self._deadline = order, time.monotonic() + order.limit_s
        self._link.send(order)

    def answer(self) -> MeasureResult | None:
        """Return what the process has measured, or why it has not; None: nothing yet."""
        if self._child is None or self._link is None:
            return None
        for message in self._link.receive():
            if isinstance(message, MeasureResult) and (
                self._order is None or message.stage == self._order.stage
            ):
                return self._done(message)
        running = self._child.read()
        if self._order is None:
            return None
        stage = self._order.stage
        if not running or self._child.code is not None or self._link.error:
            code = self._child.code
            why = "its measuring process ended" + ("" if code is None else f" with exit code {code}")
            self._end()
            return self._done(MeasureResult(stage=stage, error=why))
        if time.monotonic() >= self._deadline:
            why = f"its measuring process hangs: no answer within {self._order.limit_s} s"
            self._end()
            return self._done(MeasureResult(stage=stage, error=why, mute=True))
        return None

    def close(self) -> None:
        """End the process, and wait until nothing of it is left."""
        self._end()
        for child in self._ended:
            while child.read():
                session.wait([child], 1.0)
            child.__exit__(None, None, None)
            child.wait()
        self._ended.clear()

    def _done(self, found: MeasureResult) -> MeasureResult:
        self._order = None
        if found.error:
            self._end()  # after an error it may hold a broken process group
        return found

    def _end(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._child is not None:
            self._child.send("kill")
            self._ended.append(self._child)
        self._child = self._link = None
