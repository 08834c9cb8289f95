"""One node's part in the preflight. The head leads all nodes through the stages and judges them.

Each node has one measuring process below a guard of its own, so that the node agent survives if that process
hangs or dies. A node whose process hangs is out at the stage's time limit, and the others go on. On the head,
a second process serves the store in which the measuring processes meet. It measures nothing, so it does not
hang with any of them.
"""

from __future__ import annotations

import itertools
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed, NoPlan
from imgkit_entrypoints.launch.command_process import CommandProcess
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
"""Number of rounds in which pairs of nodes measure their link.

With three partners, a node that reaches nobody can be told from a single connection that is down.
"""
ALONE_S = 40
"""Limit in seconds of the stage in which each node is alone, with the start of the measuring processes."""
PAIR_S = 6
"""Limit in seconds of each round of pairs. All stages together take 58 s at most."""
ANSWER_S = 2.0
"""Seconds after a stage's limit in which a node's answer can still reach the head."""
# Longest wait in seconds for a message before the time limits are checked.
TICK_S = 0.25
# Name of the report in the run's folder.
FILE = "preflight.json"
STORE = "store"
"""Argument of the process that serves the store, and name of the store's port in its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightConfig:
    """What the preflight takes from the run."""

    module: str
    """The module that measures a node."""
    env: Mapping[str, str]
    """Environment of the workers."""
    open_files: int
    """Soft limit of open files for the measuring process, the same as for the workers."""
    signals: CollectedSignals
    log: Callable[..., None]
    folder: Path | None
    """The run's folder, into which the report `FILE` is written. None on nodes other than the head."""
    spares: int = 0
    """Number of nodes that the run can do without."""


def run_preflight(session: Session, config: PreflightConfig) -> tuple[int, ...]:
    """Measure all nodes of `session`, and return the numbers of the nodes that the run leaves out.

    Every node calls this function, and all of them return the same result or raise the same `CheckFailed`.

    Raises
    ------
    CheckFailed : more nodes are outliers (slow or broken) than the run can do without.
    NoPlan : a stop was requested, or the head is lost.
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
        return _follow(session, process, config)
    finally:
        process.close()


def _follow(session: Session, process: MeasuringProcess, config: PreflightConfig) -> tuple[int, ...]:
    """Measure what the head orders, and return the numbers of the nodes that the head leaves out.

    Every node but the head runs this function.

    Raises
    ------
    CheckFailed : the head has judged that the run cannot start.
    NoPlan : a stop was requested, or the head is lost.
    """
    while True:
        for event in _poll(session, process, config):
            match event:
                case PreflightEnd():
                    return event.left_out
                case Refused():
                    raise CheckFailed(event.what, where=event.where, hint=event.hint)
                case HeadLost():
                    raise NoPlan(f"lost {event.node} during the preflight: {event.reason}")


def _poll(
    session: Session, process: MeasuringProcess, config: PreflightConfig, sources: Sequence[Readable] = ()
) -> Iterator[Event]:
    """Wait up to `TICK_S` for the head, this node's measuring process or `sources`, and react.

    Requests of the head to measure go to `process`, and the results of `process` go to the head. All other
    events are yielded to the caller.

    Raises
    ------
    NoPlan : a stop was requested on this node or another one.
    """
    session.wait([*process.sources, *sources, config.signals], TICK_S)
    for event in session.poll():
        if isinstance(event, MeasureRequest):
            process.request(event)
        elif isinstance(event, StopOrder):
            raise NoPlan(f"stopped during the preflight: {event.reason} on {event.node}")
        else:
            yield event
    answer = process.next_answer()
    if answer:
        session.report(answer)
    config.signals.drain()
    signal_name = config.signals.first_name()
    if signal_name:
        session.report(StopOrder(reason=signal_name))
        raise NoPlan(f"stopped during the preflight by {signal_name}")


class _Leader:
    """The head's side of the preflight: it gives orders to all nodes, and collects their answers."""

    def __init__(self, session: HeadSession, process: MeasuringProcess, config: PreflightConfig) -> None:
        self._session, self._process, self._config = session, process, config
        self._store = MeasuringProcess(config, config.env, (STORE,))
        self._port = 0
        """Port of the store. It is 0 until the process that serves the store has answered."""
        self._nodes: dict[int, NodeResult] = {}
        """What is known about each node, by rank."""
        for rank in range(session.placement.nnodes):
            self._nodes[rank] = NodeResult(rank=rank, host=self._host(rank))
        self._links: list[LinkResult] = []
        self._answers: dict[int, MeasureResult] = {}
        """Answers of the current stage by rank."""

    def lead(self) -> tuple[int, ...]:
        """Lead all nodes through the stages of the preflight, judge them, and send them the verdict.

        First each node measures itself, and then pairs of nodes measure their link. Return the ranks of the
        nodes that the run leaves out.
        """
        start = time.monotonic()
        try:
            if len(self._nodes) > 1:
                self._store.start()
            self._measure_nodes()
            if self._wait_for_store():  # without a store, no two nodes can meet
                self._measure_links()
        finally:
            self._store.close()
        return self._conclude(time.monotonic() - start)

    def _measure_nodes(self) -> None:
        """Let each node measure itself, and enter the figures and errors in `_nodes`.

        This is stage 0 of the preflight. A node with an error takes no part in later stages.
        """
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

    def _measure_links(self) -> None:
        """Let pairs of nodes measure the link between them, in at most `ROUNDS` rounds.

        Each round has other pairs.
        """
        nnodes = len(self._nodes)
        # Among n nodes, n - 1 rounds (n, if n is odd) pair each two nodes once.
        all_rounds = nnodes if nnodes % 2 else nnodes - 1
        for turn in range(min(ROUNDS, all_rounds)):
            # Nodes that are out keep their numbers in `pair_up`, so that no two nodes meet twice.
            pairs = self._complete_pairs(pair_up(nnodes, turn))
            self._config.log(f"preflight: pairs of nodes measure the network, up to {PAIR_S} s")
            self._measure(turn + 1, pairs, PAIR_S)
            # If a node hangs, the result of its pair says nothing about the partner.
            self._links += [self._link_result(pair) for pair in self._complete_pairs(pairs)]

    def _complete_pairs(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the pairs of which both nodes still take part."""
        failed_ranks = self._failed_ranks()
        return [pair for pair in pairs if failed_ranks.isdisjoint(pair)]

    def _conclude(self, seconds: float) -> tuple[int, ...]:
        """Judge the results, print and save the report, and send the verdict to all nodes.

        Return the ranks of the nodes that the run leaves out.

        Raises
        ------
        CheckFailed : the run cannot do without the outliers.
        """
        verdict = judge(list(self._nodes.values()), self._links)
        excluded = tuple(sorted(node.rank for node in verdict.excluded))
        # No spare can replace the head, since all nodes are connected to it.
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
        if not passed:
            error = _outlier_error(report)
            self._session.send_all(Refused.from_error(error))
            raise error
        self._session.send_all(PreflightEnd(left_out=excluded))
        return excluded

    def _save(self, report: Report) -> None:
        """Write the report into the run's folder, if there is one. Print a warning if that fails."""
        if self._config.folder is None:
            return
        try:
            files.write_file(self._config.folder / FILE, report.to_json())
        except OSError as error:
            self._config.log(f"warning: {self._config.folder / FILE}: {error.strerror}")

    def _measure(self, stage: int, groups: Sequence[tuple[int, ...]], limit_s: int) -> None:
        """Have all groups of nodes measure at the same time, and collect their answers.

        A node that does not answer in time gets an error, and takes no part in later stages.

        Parameters
        ----------
        stage : number of the stage. In stage 0, each node is alone. Stages from 1 on are rounds of pairs.
        groups : ranks that measure together.
        limit_s : time limit of the stage in seconds.
        """
        self._answers = {}
        for group in groups:
            request = MeasureRequest(stage=stage, limit_s=limit_s, group=group, store=self._port)
            for rank in group:
                self._session.send(rank, request)
        ranks = set(itertools.chain.from_iterable(groups))
        # An answer may be sent just before the limit, and needs time to arrive.
        deadline = time.monotonic() + limit_s + ANSWER_S
        while self._unanswered(ranks) and time.monotonic() < deadline:
            self._collect_answers(stage)
        for rank in self._unanswered(ranks):
            error = f"its node agent hangs: no answer within {limit_s} s"
            self._answers[rank] = MeasureResult(stage=stage, error=error, mute=True)
        for rank, answer in self._answers.items():
            if answer.mute and not self._nodes[rank].error:
                self._nodes[rank] = replace(self._nodes[rank], error=answer.error)

    def _unanswered(self, ranks: set[int]) -> set[int]:
        """Return which of `ranks` have not answered yet and may still do so."""
        return ranks - self._answers.keys() - self._failed_ranks()

    def _link_result(self, pair: tuple[int, int]) -> LinkResult:
        """Return the bandwidth between two nodes from their answers, or why there is none."""
        answers = [self._answers[rank] for rank in pair]
        errors = [answer.error for answer in answers if answer.error]
        if errors:
            return LinkResult(nodes=pair, error=", ".join(errors))
        return LinkResult(nodes=pair, GBps=dict(answers[0].figures).get("bandwidth"))

    def _wait_for_store(self) -> bool:
        """Wait until the store is served. Return False if it is not within `PAIR_S`."""
        deadline = time.monotonic() + PAIR_S
        while not self._port and self._store.sources and time.monotonic() < deadline:
            self._collect_answers(-1)  # no stage has this number, so no answer of a node is taken
        return self._port != 0

    def _collect_answers(self, stage: int) -> None:
        """Wait up to `TICK_S` for messages, and enter the answers for `stage` in `_answers`.

        A node that is lost gets an error. The process that serves the store, in which the nodes meet, sends
        its port.
        """
        for _ in _poll(self._session, self._process, self._config, self._store.sources):
            pass  # the session keeps what the events say, such as lost nodes
        for rank, reason in self._session.lost.items():
            self._nodes[rank] = replace(self._nodes[rank], error=f"lost: {reason}", is_gone=True)
        for rank, answer in self._session.measurements.items():
            if answer.stage == stage:
                self._answers[rank] = answer
        store_answer = self._store.next_answer()
        if store_answer:
            self._port = int(dict(store_answer.figures).get(STORE, 0))

    def _failed_ranks(self) -> set[int]:
        """Return the ranks of the nodes that take no further part."""
        return {rank for rank, node in self._nodes.items() if node.error}

    def _host(self, rank: int) -> str:
        """Return the name of a node.

        The scheduler's name comes first, since its ``--exclude`` needs that one.
        """
        hosts = self._session.placement.hosts
        if rank < len(hosts):
            return hosts[rank]
        return self._session.host(rank)


def _outlier_error(report: Report) -> CheckFailed:
    """Return the error about a run that cannot do without its outliers. It names the slowest of them.

    The hint tells the user how to start again without these nodes.
    """
    excluded = report.verdict.excluded
    worst = excluded[0]
    problem = f"{worst.host} is an outlier: {report.verdict.reasons[worst.rank][0]}"
    if len(excluded) > 1:
        problem += f" (and {len(excluded) - 1} more)"
    remedy = report.exclude if report.exclude.startswith("--") else f"other hosts than {report.exclude}"
    return CheckFailed(
        problem,
        where="preflight",
        hint=f"start again with {remedy}, or with a spare (--nnodes N+1) that replaces it; "
        "leave out --preflight to start as it is",
    )


class _Process(NamedTuple):
    """A process that measures, with the connection for its requests and results."""

    command: CommandProcess
    connection: Connection


class MeasuringProcess:
    """The process that measures stage after stage. If it hangs, the next stage starts a new process.

    Parameters
    ----------
    env : environment of the process.
    arguments : arguments of the module after the number of the socket.
    """

    def __init__(
        self, config: PreflightConfig, env: Mapping[str, str], arguments: tuple[str, ...] = ()
    ) -> None:
        self._config, self._env, self._arguments = config, env, arguments
        self._process: _Process | None = None
        self._ending_commands: list[CommandProcess] = []
        """Processes that were told to end, and for whose end `close` waits."""
        self._request: MeasureRequest | None = None
        """The request whose result is not there yet."""
        self._deadline = 0.0
        """Time limit of `_request` on the monotonic clock."""

    @property
    def sources(self) -> Sequence[Readable]:
        """Return the descriptors to wait for. Empty without a process."""
        return self._process or ()

    def start(self) -> None:
        """Start the process, unless it runs already.

        It gets requests and sends its results over a pair of sockets.
        """
        if self._process:
            return
        own_socket, child_socket = socket.socketpair()
        with child_socket:
            python = (sys.executable or "python3", "-I", "-m", self._config.module)
            command = CommandProcess(
                (*python, str(child_socket.fileno()), *self._arguments),
                self._env,
                self._config.log,
                repeats_warnings=False,
                open_files=self._config.open_files,
                inherited=(child_socket.fileno(),),
            )
        self._process = _Process(command, Connection(own_socket))

    def request(self, request: MeasureRequest) -> None:
        """Send `request` to the process, and start it if needed. `next_answer` returns the result later."""
        self.start()
        assert self._process is not None  # noqa: S101 - start has made it
        self._request, self._deadline = request, time.monotonic() + request.limit_s
        self._process.connection.send(request)

    def next_answer(self) -> MeasureResult | None:
        """Return the result of the last request, or None while it is not there.

        If the process has ended, or has not answered within the time limit of the request, the result has an
        error. `mute` is True if the process hangs, so that it cannot measure anything more.
        """
        if self._process is None:
            return None
        command, connection = self._process
        request = self._request
        for message in connection.receive():
            # The process that serves the store gets no request, and sends its answer by itself.
            if isinstance(message, MeasureResult) and (request is None or message.stage == request.stage):
                return self._finish(message)
        is_running = command.read_reports() and command.code is None and not connection.error
        if request is None:
            return None
        if is_running and time.monotonic() < self._deadline:
            return None
        if is_running:
            error = f"its measuring process hangs: no answer within {request.limit_s} s"
        elif command.code is None:
            error = "its measuring process ended"
        else:
            error = f"its measuring process ended with exit code {command.code}"
        return self._finish(MeasureResult(stage=request.stage, error=error, mute=is_running))

    def close(self) -> None:
        """End the process, and wait until nothing of it is left."""
        self._end()
        for command in self._ending_commands:
            while command.read_reports():
                wait([command], 1.0)
            command.wait()
        self._ending_commands.clear()

    def _finish(self, answer: MeasureResult) -> MeasureResult:
        """Forget the request to which `answer` belongs, and return `answer`."""
        self._request = None
        if answer.error:
            self._end()  # after an error, the process may have a broken process group
        return answer

    def _end(self) -> None:
        """End the process without waiting for it. `close` waits for all of them."""
        if self._process:
            self._process.connection.close()
            self._process.command.send_step("kill")
            self._ending_commands.append(self._process.command)
        self._process = None
