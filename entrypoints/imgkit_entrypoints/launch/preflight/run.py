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
from imgkit_entrypoints.launch.preflight.verdict import LinkResult, NodeResult, Report, judge, pair_up
from imgkit_entrypoints.launch.stop_protocol import CollectedSignals
from imgkit_entrypoints.rollcall.connection import Connection
from imgkit_entrypoints.rollcall.messages import (
    Event,
    HeadLost,
    MeasureRequest,
    MeasureResult,
    PreflightEnd,
    Refused,
    StopOrder,
)
from imgkit_entrypoints.rollcall.session import HeadSession, Readable, Session, wait

ROUNDS = 3
"""Rounds of pairs: with three partners, a node that reaches nobody differs from a connection that is down."""
ALONE_S, PAIR_S = 40, 6
"""Limits of the stages, 58 s together. The first includes the start of the measuring processes."""
ANSWER_S = 2.0
"""Further time for a node's answer to reach the head."""
TICK_S = 0.25
FILE = "preflight.json"
STORE = "store"
"""Argument of a process that serves the store in which the others meet, and the figure of its port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightConfig:
    """What the preflight needs to know of the run."""

    module: str
    """The module that measures a node."""
    env: Mapping[str, str]
    """Environment of the workers."""
    open_files: int
    signals: CollectedSignals
    log: Callable[..., None]
    folder: Path | None
    """The run's folder, for `FILE`."""
    spares: int = 0
    """Nodes that the run can do without."""


def run_preflight(session: Session, config: PreflightConfig) -> tuple[int, ...]:
    """Measure all nodes of `session`, and return the numbers of those that the run leaves out.

    Raises
    ------
    CheckFailed : on all nodes: more nodes are outliers than the run can do without. NoPlan : a stop was asked
    for, or the head is gone.
    """
    placement = session.placement
    env = {
        **config.env,
        "GROUP_RANK": str(placement.node_rank),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": placement.head if placement.nnodes > 1 else "127.0.0.1",
    }
    process = MeasuringProcess(config, env)
    try:
        if isinstance(session, HeadSession):
            return _Leader(session, process, config).lead()
        while True:
            for event in _poll(session, process, config):
                if isinstance(event, PreflightEnd):
                    return event.left_out
                if isinstance(event, Refused):
                    raise CheckFailed(event.what, where=event.where, hint=event.hint)
                if isinstance(event, HeadLost):
                    raise NoPlan(f"lost {event.node} during the preflight: {event.reason}")
    finally:
        process.close()


def _poll(
    session: Session, process: MeasuringProcess, config: PreflightConfig, sources: Sequence[Readable] = ()
) -> Iterator[Event]:
    """Wait a moment, let this node's process begin and end stages, and yield all other events.

    Raises
    ------
    NoPlan : a stop was asked for, here or on another node.
    """
    session.wait([*process.sources, *sources, config.signals], TICK_S)
    for event in session.poll():
        if isinstance(event, MeasureRequest):
            process.request(event)
        elif isinstance(event, StopOrder):
            raise NoPlan(f"stopped during the preflight: {event.reason} on {event.node}")
        else:
            yield event
    if answer := process.answer():
        session.report(answer)
    config.signals.drain()
    if reason := config.signals.first():
        session.report(StopOrder(reason=reason))
        raise NoPlan(f"stopped during the preflight by {reason}")


class _Leader:
    """The head's side."""

    def __init__(self, session: HeadSession, process: MeasuringProcess, config: PreflightConfig) -> None:
        self._session, self._process, self._config = session, process, config
        self._store = MeasuringProcess(config, config.env, (STORE,))
        self._port = 0
        """Port of the store; 0 until it is served."""
        self._nodes = {
            rank: NodeResult(rank=rank, host=self._host(rank)) for rank in range(session.placement.nnodes)
        }
        self._links: list[LinkResult] = []
        self._answers: dict[int, MeasureResult] = {}
        """Answers in the present stage."""

    def lead(self) -> tuple[int, ...]:
        """Lead all nodes through the stages, judge them, and report the verdict to everybody."""
        start, nnodes = time.monotonic(), len(self._nodes)
        try:
            if nnodes > 1:
                self._store.start()
            self._config.log(f"preflight: each node measures itself, up to {ALONE_S} s")
            self._measure(0, [(rank,) for rank in self._nodes], ALONE_S)
            for rank, answer in self._answers.items():
                self._nodes[rank] = replace(
                    self._nodes[rank],
                    matmul_TFLOPs=dict(answer.figures).get("matmul"),
                    error=self._nodes[rank].error or answer.error,
                    failed=answer.failed,
                    notes=answer.notes,
                )
            for turn in range(min(ROUNDS, nnodes + nnodes % 2 - 1) if self._store_port() else 0):
                # Nodes that are out keep their seats, so that no two nodes meet twice.
                pairs = [pair for pair in pair_up(nnodes, turn) if not self._out() & set(pair)]
                self._config.log(f"preflight: pairs of nodes measure the network, up to {PAIR_S} s")
                self._measure(turn + 1, pairs, PAIR_S)
                # The partner of a node that hangs is not to blame.
                self._links += [self._link_result(pair) for pair in pairs if not self._out() & set(pair)]
        finally:
            self._store.close()
        return self._conclude(time.monotonic() - start)

    def _conclude(self, seconds: float) -> tuple[int, ...]:
        verdict = judge(list(self._nodes.values()), self._links)
        excluded = tuple(sorted(node.rank for node in verdict.excluded))
        # Nobody can take the place of the head, where the nodes have met.
        passed = len(excluded) <= self._config.spares and 0 not in excluded
        report = Report(
            verdict=verdict,
            seconds=seconds,
            left_out=excluded if passed else (),
            passed=passed,
            scheduler=self._session.placement.scheduler,
        )
        self._config.log("preflight", *report.table())
        self._save(report)
        if passed:
            self._session.send_all(PreflightEnd(left_out=excluded))
            return excluded
        worst, count = verdict.excluded[0], len(excluded) - 1
        remedy = report.exclude if report.exclude.startswith("--") else f"other hosts than {report.exclude}"
        error = CheckFailed(
            f"{worst.host} is an outlier: {verdict.reasons[worst.rank][0]}"
            + (f" (and {count} more)" if count else ""),
            where="preflight",
            hint=f"start again with {remedy}, or with a spare (--nnodes N+1) that replaces it; "
            "leave out --preflight to start as it is",
        )
        self._session.send_all(Refused(what=error.what, where=error.where, hint=error.hint))
        raise error

    def _save(self, report: Report) -> None:
        if self._config.folder is None:
            return
        try:
            files.write_file(self._config.folder / FILE, report.to_json())
        except OSError as error:
            self._config.log(f"warning: {self._config.folder / FILE}: {error.strerror}")

    def _measure(self, stage: int, groups: Sequence[tuple[int, ...]], limit_s: int) -> None:
        """Have all groups measure at once, and take their answers; a node that hangs is out."""
        self._answers = {}
        for group in groups:
            order = MeasureRequest(stage=stage, limit_s=limit_s, group=group, store=self._port)
            for rank in group:
                self._session.send(rank, order)
        ranks = {rank for group in groups for rank in group}
        deadline = time.monotonic() + limit_s + ANSWER_S
        while ranks - self._answers.keys() - self._out() and time.monotonic() < deadline:
            self._turn(stage)
        for rank in ranks - self._answers.keys() - self._out():
            error = f"its node agent hangs: no answer within {limit_s} s"
            self._answers[rank] = MeasureResult(stage=stage, error=error, mute=True)
        for rank, answer in self._answers.items():
            if answer.mute and not self._nodes[rank].error:
                self._nodes[rank] = replace(self._nodes[rank], error=answer.error)

    def _link_result(self, pair: tuple[int, int]) -> LinkResult:
        answers = [self._answers[rank] for rank in pair]
        errors = [answer.error for answer in answers if answer.error]
        rate = dict(answers[0].figures).get("bandwidth")
        return LinkResult(nodes=pair, GBps=None if errors else rate, error=", ".join(errors))

    def _store_port(self) -> int:
        """Return the port of the store, once it is served; 0: it is not."""
        deadline = time.monotonic() + PAIR_S
        while not self._port and self._store.sources and time.monotonic() < deadline:
            self._turn(-1)
        return self._port

    def _turn(self, stage: int) -> None:
        """Wait a moment, and hear all nodes and the process that serves the store."""
        for _ in _poll(self._session, self._process, self._config, self._store.sources):
            pass  # a lost node is in `gone` too
        for rank, reason in self._session.lost.items():
            self._nodes[rank] = replace(self._nodes[rank], error=f"lost: {reason}", is_gone=True)
        for rank, answer in self._session.measurements.items():
            if answer.stage == stage:
                self._answers[rank] = answer
        if served := self._store.answer():
            self._port = int(dict(served.figures).get(STORE, 0))

    def _out(self) -> set[int]:
        return {rank for rank, node in self._nodes.items() if node.error}

    def _host(self, rank: int) -> str:
        """Return the name of a node, if possible the scheduler's: its option excludes the node by it."""
        names = self._session.placement.hosts[rank : rank + 1]
        return names[0] if names else self._session.host(rank)


class MeasuringProcess:
    """One process that measures stage after stage. One that hangs is ended, and the next stage has a new one.

    Parameters
    ----------
    arguments : follow the number of the socket.
    """

    def __init__(
        self, config: PreflightConfig, env: Mapping[str, str], arguments: tuple[str, ...] = ()
    ) -> None:
        self._config, self._env, self._arguments = config, env, arguments
        self._process: tuple[GuardedCommand, Connection] | None = None
        self._commands: list[GuardedCommand] = []
        self._order: MeasureRequest | None = None
        self._deadline = 0.0

    @property
    def sources(self) -> Sequence[Readable]:
        """Descriptors to wait for."""
        return self._process or ()

    def start(self) -> None:
        """Start the process if there is none."""
        if self._process:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            command = GuardedCommand(
                (
                    *(sys.executable or "python3", "-I", "-m", self._config.module),
                    *(str(theirs.fileno()), *self._arguments),
                ),
                self._env,
                self._config.log,
                repeats_warnings=False,
                open_files=self._config.open_files,
                inherited=(theirs.fileno(),),
            )
        self._process = command, Connection(ours)

    def request(self, order: MeasureRequest) -> None:
        """Have the process measure; `answer` has the result later."""
        self.start()
        assert self._process is not None  # noqa: S101 - start has made it
        self._order, self._deadline = order, time.monotonic() + order.limit_s
        self._process[1].send(order)

    def answer(self) -> MeasureResult | None:
        """Return what the process has measured, or why it has not; None: nothing yet."""
        if self._process is None:
            return None
        command, connection = self._process
        for message in connection.receive():
            if isinstance(message, MeasureResult) and (
                self._order is None or message.stage == self._order.stage
            ):
                return self._finish(message)
        is_running = command.read() and command.code is None and not connection.error
        if self._order is None or (is_running and time.monotonic() < self._deadline):
            return None
        if is_running:
            error = f"its measuring process hangs: no answer within {self._order.limit_s} s"
        else:
            ending = "" if command.code is None else f" with exit code {command.code}"
            error = f"its measuring process ended{ending}"
        return self._finish(MeasureResult(stage=self._order.stage, error=error, mute=is_running))

    def close(self) -> None:
        """End the process, and wait until nothing of it is left."""
        self._end()
        for command in self._commands:
            while command.read():
                wait([command], 1.0)
            command.wait()
        self._commands.clear()

    def _finish(self, answer: MeasureResult) -> MeasureResult:
        self._order = None
        if answer.error:
            self._end()  # after an error it may hold a broken process group
        return answer

    def _end(self) -> None:
        if self._process:
            command, connection = self._process
            connection.close()
            command.send("kill")
            self._commands.append(command)
        self._process = None
