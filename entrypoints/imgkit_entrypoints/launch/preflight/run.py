"""One node's part in the preflight, which measures all nodes before the run starts.

The head (the node with rank 0) leads all nodes through the stages, and judges the results. Each node has a
measuring process below a guard of its own, so that the node agent survives if the process hangs or dies. If
the process of a node hangs, the node drops out at the time limit of the stage, and the other nodes continue.
On the head, a second process serves the store in which the measuring processes meet. It measures nothing, so
it does not hang with any of them.
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
"""Number of rounds in which pairs of nodes measure the link between them.

A node has another partner in each round. With three partners, a node that reaches no other node can be
distinguished from a single broken connection.
"""
ALONE_S = 40
"""Time limit in seconds for the stage in which the processes start and each node measures itself."""
PAIR_S = 6
"""Time limit in seconds for each round of pairs. All stages together take at most 58 s."""
ANSWER_S = 2.0
"""Seconds after a stage's time limit in which a node's answer can still reach the head."""
# Longest time in seconds to wait for a message before the time limits are checked.
TICK_S = 0.25
# Name of the report in the run's folder.
FILE = "preflight.json"
STORE = "store"
"""Argument of the process that serves the store. Its answer contains the store's port under the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightConfig:
    """The settings of a preflight, which come from the run."""

    module: str
    """The module that measures a node."""
    env: Mapping[str, str]
    """Environment of the workers."""
    open_files: int
    """The measuring process's soft limit for the number of open files. It is the same as for the workers."""
    signals: CollectedSignals
    log: Callable[..., None]
    folder: Path | None
    """The run's folder, into which the report `FILE` is written. None on nodes other than the head."""
    spares: int = 0
    """Number of nodes that the run can exclude and still start."""


def run_preflight(session: Session, config: PreflightConfig) -> tuple[int, ...]:
    """Measure all nodes of `session`, and return the numbers of the nodes that the run excludes.

    Every node calls this function. All of them return the same result, or raise the same `CheckFailed`.

    Raises
    ------
    CheckFailed : more nodes are outliers (slow or broken) than the run has spares.
    NoPlan : a stop was requested, or the head is lost.
    """
    # The head (the node with rank 0) leads, and all other nodes follow. See `_Leader` and `_follow`.
    placement = session.placement
    env = {
        **config.env,
        "GROUP_RANK": str(placement.node_rank),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": placement.head if placement.nnodes > 1 else "127.0.0.1",
    }
    # All processes must end before torchrun starts, so `close` is in `finally`: they use the GPUs.
    process = MeasuringProcess(config, env)
    try:
        if isinstance(session, HeadSession):
            return _Leader(session, process, config).lead()
        return _follow(session, process, config)
    finally:
        process.close()


def _follow(session: Session, process: MeasuringProcess, config: PreflightConfig) -> tuple[int, ...]:
    """Measure what the head requests, and return the numbers of the nodes that the head excludes.

    Every node except the head runs this function.

    Raises
    ------
    CheckFailed : the head has decided that the run cannot start.
    NoPlan : a stop was requested, or the head is lost.
    """
    while True:
        for event in _exchange_messages(session, process, config):
            match event:
                case PreflightEnd():
                    return event.left_out
                case Refused():
                    raise CheckFailed(event.what, where=event.where, hint=event.hint)
                case HeadLost():
                    raise NoPlan(f"lost {event.node} during the preflight: {event.reason}")


def _exchange_messages(
    session: Session, process: MeasuringProcess, config: PreflightConfig, sources: Sequence[Readable] = ()
) -> Iterator[Event]:
    """Wait up to `TICK_S` for messages from the head, this node's measuring process or `sources`, and react.

    Requests to measure are passed to `process`, and the results of `process` are passed to the head. All
    other events are yielded to the caller. This is a generator: results are passed on, and stops are noticed,
    only if the caller reads all events.

    Raises
    ------
    NoPlan : a stop was requested on this or another node.
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
    config.signals.drain()  # else the descriptor stays readable, and the next `wait` returns at once
    signal_name = config.signals.first_name()
    if signal_name:  # the scheduler or the user wants the job to stop, so tell all other nodes
        session.report(StopOrder(reason=signal_name))
        raise NoPlan(f"stopped during the preflight by {signal_name}")


class _Leader:
    """The head's side of the preflight: it sends requests to all nodes, and collects their answers."""

    def __init__(self, session: HeadSession, process: MeasuringProcess, config: PreflightConfig) -> None:
        self._session, self._process, self._config = session, process, config
        self._store = MeasuringProcess(config, config.env, (STORE,))
        self._store_port = 0
        """Port of the store. 0 until the process that serves the store has answered."""
        self._nodes: dict[int, NodeResult] = {}
        """The results of each node so far, by rank."""
        for rank in range(session.placement.nnodes):
            self._nodes[rank] = NodeResult(rank=rank, host=self._host(rank))
        self._link_results: list[LinkResult] = []
        self._stage_answers: dict[int, MeasureResult] = {}
        """Answers in the current stage, by rank."""

    def lead(self) -> tuple[int, ...]:
        """Lead all nodes through the stages of the preflight, judge them, and send them the result.

        First each node measures itself. Then pairs of nodes measure the link between them. Return the ranks
        of the nodes that the run excludes.
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
        return self._judge_and_announce(time.monotonic() - start)

    def _measure_nodes(self) -> None:
        """Let each node measure itself, and store the figures and errors in `_nodes`.

        This is stage 0 of the preflight. A node with an error takes no part in later stages.
        """
        self._config.log(f"preflight: each node measures itself, up to {ALONE_S} s")
        self._measure_groups(0, [(rank,) for rank in self._nodes], ALONE_S)
        for rank, answer in self._stage_answers.items():
            self._nodes[rank] = replace(
                self._nodes[rank],
                matmul_TFLOPs=dict(answer.figures).get("matmul"),
                error=self._nodes[rank].error or answer.error,
                failed=answer.failed,
                notes=answer.notes,
            )

    def _measure_links(self) -> None:
        """Let pairs of nodes measure the link between them, in at most `ROUNDS` rounds.

        In each round, every node has another partner.
        """
        nnodes = len(self._nodes)
        # With n nodes, each node has met every other node after n - 1 rounds, or n rounds if n is odd.
        all_rounds = nnodes if nnodes % 2 else nnodes - 1
        for round_index in range(min(ROUNDS, all_rounds)):
            # `pair_up` gets all nodes, including those that dropped out. Otherwise two nodes could meet
            # twice.
            pairs = self._keep_complete_pairs(pair_up(nnodes, round_index))
            self._config.log(f"preflight: pairs of nodes measure the network, up to {PAIR_S} s")
            self._measure_groups(round_index + 1, pairs, PAIR_S)
            # A node may have dropped out in this round. The result of its pair then says nothing about its
            # partner.
            self._link_results += [self._make_link_result(pair) for pair in self._keep_complete_pairs(pairs)]

    def _keep_complete_pairs(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the pairs in which both nodes still take part."""
        failed_ranks = self._find_failed_ranks()
        return [pair for pair in pairs if failed_ranks.isdisjoint(pair)]

    def _judge_and_announce(self, seconds: float) -> tuple[int, ...]:
        """Judge the results, print and save the report, and send the result to all nodes.

        Return the ranks of the nodes that the run excludes.

        Raises
        ------
        CheckFailed : the run cannot start without the outliers.
        """
        verdict = judge(list(self._nodes.values()), self._link_results)
        excluded = tuple(sorted(node.rank for node in verdict.excluded))
        # No spare can replace the head (rank 0), because all nodes are connected to it.
        # If the preflight has not passed, the run does not start, so it leaves out no node.
        passed = len(excluded) <= self._config.spares and 0 not in excluded
        report = Report(
            verdict=verdict,
            seconds=seconds,
            left_out=excluded if passed else (),
            passed=passed,
            scheduler=self._session.placement.scheduler,
        )
        self._config.log("preflight", *report.table())
        self._save(report)  # before an error is raised, since the user needs the report then
        if not passed:
            error = _make_outlier_error(report)
            # The other nodes wait for the result in `_follow`. Without this message, they would report a lost
            # head, and not the reason.
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

    def _measure_groups(self, stage: int, groups: Sequence[tuple[int, ...]], limit_s: int) -> None:
        """Let all groups of nodes measure at the same time, and collect their answers.

        A node that does not answer in time gets an error, and takes no part in later stages.

        Parameters
        ----------
        stage : number of the stage. In stage 0, each node is alone. Later stages are rounds of pairs.
        groups : ranks of the nodes that measure together.
        limit_s : time limit of the stage in seconds.
        """
        self._stage_answers = {}  # before any request is sent, so that no answer of this stage is dropped
        for group in groups:
            request = MeasureRequest(stage=stage, limit_s=limit_s, group=group, store=self._store_port)
            for rank in group:
                self._session.send(rank, request)
        ranks = set(itertools.chain.from_iterable(groups))
        # An answer that is sent just before the limit needs time to arrive.
        deadline = time.monotonic() + limit_s + ANSWER_S
        while self._find_unanswered(ranks) and time.monotonic() < deadline:
            self._collect_answers(stage)
        for rank in self._find_unanswered(ranks):
            error = f"its node agent hangs: no answer within {limit_s} s"
            self._stage_answers[rank] = MeasureResult(stage=stage, error=error, mute=True)
        # `mute` means that a node cannot measure anything more. Its error is stored, so that it drops out of
        # later stages. An error of a node that can still measure is left to the caller.
        for rank, answer in self._stage_answers.items():
            if answer.mute and not self._nodes[rank].error:
                self._nodes[rank] = replace(self._nodes[rank], error=answer.error)

    def _find_unanswered(self, ranks: set[int]) -> set[int]:
        """Return the ranks among `ranks` whose answers are still missing, without nodes that dropped out."""
        return ranks - self._stage_answers.keys() - self._find_failed_ranks()

    def _make_link_result(self, pair: tuple[int, int]) -> LinkResult:
        """Return the bandwidth between the two nodes of `pair`, or the errors in their answers."""
        answers = [self._stage_answers[rank] for rank in pair]
        errors = [answer.error for answer in answers if answer.error]
        if errors:
            return LinkResult(nodes=pair, error=", ".join(errors))
        return LinkResult(nodes=pair, GBps=dict(answers[0].figures).get("bandwidth"))

    def _wait_for_store(self) -> bool:
        """Wait until the store is served. Return False if that takes longer than `PAIR_S` seconds."""
        deadline = time.monotonic() + PAIR_S
        while not self._store_port and self._store.sources and time.monotonic() < deadline:
            self._collect_answers(-1)  # no stage has this number, so answers of nodes are ignored
        return self._store_port != 0

    def _collect_answers(self, stage: int) -> None:
        """Wait up to `TICK_S` for messages, and store the answers for `stage` in `_stage_answers`.

        A lost node gets an error. The process that serves the store, in which the nodes meet, reports its
        port.
        """
        # The loop only runs the generator to its end.
        for _ in _exchange_messages(self._session, self._process, self._config, self._store.sources):
            pass  # the session has already recorded the events, such as lost nodes
        for rank, reason in self._session.lost.items():
            self._nodes[rank] = replace(self._nodes[rank], error=f"lost: {reason}", is_gone=True)
        for rank, answer in self._session.measurements.items():
            if answer.stage == stage:  # the session keeps the last answer of a node, also from an old stage
                self._stage_answers[rank] = answer
        store_answer = self._store.next_answer()
        if store_answer:
            self._store_port = int(dict(store_answer.figures).get(STORE, 0))

    def _find_failed_ranks(self) -> set[int]:
        """Return the ranks of the nodes that dropped out because of an error."""
        return {rank for rank, node in self._nodes.items() if node.error}

    def _host(self, rank: int) -> str:
        """Return the host name of a node.

        The scheduler's name is preferred, because its option ``--exclude`` needs that name.
        """
        hosts = self._session.placement.hosts
        if rank < len(hosts):
            return hosts[rank]
        return self._session.host(rank)


def _make_outlier_error(report: Report) -> CheckFailed:
    """Return the error about a run that cannot start without its outliers, which are slow or broken nodes.

    The error names the slowest of them. The hint tells the user how to start again without these nodes.
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
    """A measuring process, and the connection for its requests and results."""

    command: CommandProcess
    connection: Connection


class MeasuringProcess:
    """The process that measures this node in one stage after another.

    If the process hangs, the next stage starts a new one.

    Parameters
    ----------
    config : the settings of the preflight.
    env : environment of the process.
    arguments : further arguments of the module, after the number of the socket.
    """

    def __init__(
        self, config: PreflightConfig, env: Mapping[str, str], arguments: tuple[str, ...] = ()
    ) -> None:
        self._config, self._env, self._arguments = config, env, arguments
        self._process: _Process | None = None
        self._ending_commands: list[CommandProcess] = []
        """Processes that were told to end. `close` waits until they have ended."""
        self._pending_request: MeasureRequest | None = None
        """The request whose result is still missing."""
        self._deadline = 0.0
        """Time limit of `_pending_request` on the monotonic clock."""

    @property
    def sources(self) -> Sequence[Readable]:
        """Return what to wait for: the process and its connection, or nothing if there is no process."""
        return self._process or ()

    def start(self) -> None:
        """Start the process, unless it is already running.

        The process receives requests and sends results over a pair of sockets.
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
        """Send `request` to the process, after starting it if needed.

        `next_answer` returns the result later.
        """
        self.start()
        assert self._process is not None  # noqa: S101 - start has made it
        self._pending_request, self._deadline = request, time.monotonic() + request.limit_s
        self._process.connection.send(request)

    def next_answer(self) -> MeasureResult | None:
        """Return the result of the last request, or None while it has not arrived.

        If the process has ended, or has not answered within the time limit of the request, the result
        contains an error. Its field `mute` is True if the process hangs, and so cannot measure anything more.
        Each result is returned only once.
        """
        if self._process is None:
            return None
        command, connection = self._process
        request = self._pending_request
        for message in connection.receive():
            # The process that serves the store sends its answer without a request. An answer of another stage
            # came too late and is dropped.
            if isinstance(message, MeasureResult) and (request is None or message.stage == request.stage):
                return self._finish(message)
        # `read_reports` must be called even without a request: it reads the descriptor for which `sources`
        # waits, and updates `command.code`.
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
        """End the process, and wait until all processes below it have ended."""
        self._end()
        for command in self._ending_commands:
            while command.read_reports():
                wait([command], 1.0)
            command.wait()
        self._ending_commands.clear()

    def _finish(self, answer: MeasureResult) -> MeasureResult:
        """Forget the current request, and return `answer`, which is its result."""
        self._pending_request = None
        if answer.error:
            self._end()  # torch's process group may be broken after an error, so a new process is needed
        return answer

    def _end(self) -> None:
        """End the process without waiting for its end. `close` waits for all processes that were ended."""
        if self._process:
            self._process.connection.close()
            self._process.command.send_step("kill")
            self._ending_commands.append(self._process.command)
        self._process = None
