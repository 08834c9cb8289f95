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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import CheckFailed, NoPlan
from imgkit_entrypoints.launch.attempts import HEAD
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
from imgkit_entrypoints.rollcall.session import HeadSession, Readable, Session, wait_readable

# Number of the stage in which each node measures itself. The rounds of pairs are the stages after it.
ALONE_STAGE = 0
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
    # The head (the node with rank 0) leads, and all other nodes measure what it requests.
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
        return _measure_for_head(session, process, config)
    finally:
        process.close()


def _measure_for_head(
    session: Session, process: MeasuringProcess, config: PreflightConfig
) -> tuple[int, ...]:
    """Measure what the head requests, and return the numbers of the nodes that the head excludes.

    Every node except the head runs this function. The loop ends when the head ends the preflight.

    Raises
    ------
    CheckFailed : the head has decided that the run cannot start.
    NoPlan : a stop was requested, or the head is lost.
    """
    while True:
        for event in _receive_events(session, process, config):
            match event:
                case PreflightEnd():
                    return event.left_out
                case Refused():
                    raise CheckFailed(event.what, where=event.where, hint=event.hint)
                case HeadLost():
                    raise NoPlan(f"lost {event.node} during the preflight: {event.reason}")
        _report_own_events(session, process, config)


def _receive_events(
    session: Session, process: MeasuringProcess, config: PreflightConfig, sources: Sequence[Readable] = ()
) -> list[Event]:
    """Wait up to `TICK_S` for messages from other nodes, this node's measuring process or `sources`.

    Requests to measure are passed to `process`. Return all other events.

    Raises
    ------
    NoPlan : a stop was requested on another node.
    """
    session.wait([*process.sources, *sources, config.signals], TICK_S)
    events: list[Event] = []
    for event in session.poll():
        if isinstance(event, MeasureRequest):
            process.request(event)
        elif isinstance(event, StopOrder):
            raise NoPlan(f"stopped during the preflight: {event.reason} on {event.node}")
        else:
            events.append(event)
    return events


def _report_own_events(session: Session, process: MeasuringProcess, config: PreflightConfig) -> None:
    """Report what has happened on this node: a new result of its measuring process, or a stop signal.

    The head gets the result, and all nodes get an order to stop.

    Raises
    ------
    NoPlan : this node has received a stop signal.
    """
    answer = process.take_answer()
    if answer:
        session.report(answer)
    config.signals.drain()  # else the descriptor stays readable, and the next wait returns at once
    signal_name = config.signals.first_name()
    if signal_name:
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

        A node with an error could not measure at all, and takes no part in later stages. A node with failed
        checks of dist-doctor (`failed`) still does.
        """
        self._config.log(f"preflight: each node measures itself, up to {ALONE_S} s")
        groups = [(rank,) for rank in self._nodes]
        for rank, answer in self._measure_groups(ALONE_STAGE, groups, ALONE_S).items():
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
            pairs = self._select_complete_pairs(pair_up(nnodes, round_index))
            self._config.log(f"preflight: pairs of nodes measure the network, up to {PAIR_S} s")
            stage = ALONE_STAGE + 1 + round_index
            answers = self._measure_groups(stage, pairs, PAIR_S)
            # A node may have dropped out in this round. The result of its pair then says nothing about its
            # partner.
            for pair in self._select_complete_pairs(pairs):
                self._link_results.append(_make_link_result(pair, answers))

    def _select_complete_pairs(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
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
        report = self._make_report(seconds)
        self._config.log("preflight", *report.table())
        self._save(report)  # before an error is raised, since the user needs the report then
        if not report.passed:
            error = _make_outlier_error(report)
            # The other nodes wait for the result. Without this message, they would report a lost head, and
            # not the reason.
            self._session.send_all(Refused.from_error(error))
            raise error
        self._session.send_all(PreflightEnd(left_out=report.left_out))
        return report.left_out

    def _make_report(self, seconds: float) -> Report:
        """Judge the results, and return the report, which also says whether the run can start.

        `seconds` is the duration of the preflight.
        """
        verdict = judge(list(self._nodes.values()), self._link_results)
        excluded = tuple(sorted(node.rank for node in verdict.excluded))
        # No spare can replace the head, because all nodes are connected to it.
        can_replace_excluded = len(excluded) <= self._config.spares and HEAD not in excluded
        return Report(
            verdict=verdict,
            seconds=seconds,
            left_out=excluded if can_replace_excluded else (),  # a run that does not start leaves out no node
            passed=can_replace_excluded,
            scheduler=self._session.placement.scheduler,
        )

    def _save(self, report: Report) -> None:
        """Write the report into the run's folder, if there is one. Print a warning if that fails."""
        if self._config.folder is None:
            return
        try:
            files.write_file(self._config.folder / FILE, report.to_json())
        except OSError as error:
            self._config.log(f"warning: {self._config.folder / FILE}: {error.strerror}")

    def _measure_groups(
        self, stage: int, groups: Sequence[tuple[int, ...]], limit_s: int
    ) -> dict[int, MeasureResult]:
        """Let all groups of nodes measure at the same time, and return their answers by rank.

        A node that does not answer in time gets an answer with an error. If a node cannot measure anything
        more, it drops out: its error is stored in `_nodes`, and it takes no part in later stages. A lost node
        may have no answer.

        Parameters
        ----------
        stage : number of the stage. In `ALONE_STAGE`, each node is alone. Later stages are rounds of pairs.
        groups : ranks of the nodes that measure together.
        limit_s : time limit of the stage in seconds.
        """
        for group in groups:
            request = MeasureRequest(stage=stage, limit_s=limit_s, group=group, store=self._store_port)
            for rank in group:
                self._session.send(rank, request)
        ranks = set(itertools.chain.from_iterable(groups))
        # An answer that is sent just before the limit needs time to arrive.
        answers = self._collect_answers(stage, ranks, time.monotonic() + limit_s + ANSWER_S)
        for rank in self._find_unanswered(ranks, answers):
            error = f"its node agent hangs: no answer within {limit_s} s"
            answers[rank] = MeasureResult(stage=stage, error=error, mute=True)
        # `mute` means that a node cannot measure anything more. Its error is stored, so that it drops out of
        # later stages. An error of a node that can still measure is left to the caller.
        for rank, answer in answers.items():
            if answer.mute and not self._nodes[rank].error:
                self._nodes[rank] = replace(self._nodes[rank], error=answer.error)
        return answers

    def _collect_answers(self, stage: int, ranks: set[int], deadline: float) -> dict[int, MeasureResult]:
        """Wait for the answers of the nodes `ranks` in `stage`, and return those that have arrived, by rank.

        The wait ends at `deadline`, or once every node in `ranks` has answered or dropped out.
        """
        answers: dict[int, MeasureResult] = {}
        while self._find_unanswered(ranks, answers) and time.monotonic() < deadline:
            self._wait_for_messages()
            # The session keeps the last answer of each node, which may be from an earlier stage.
            for rank, answer in self._session.measurements.items():
                if answer.stage == stage:
                    answers[rank] = answer
        return answers

    def _find_unanswered(self, ranks: set[int], answers: Mapping[int, MeasureResult]) -> set[int]:
        """Return the ranks among `ranks` whose answers are still missing, without nodes that dropped out."""
        return ranks - answers.keys() - self._find_failed_ranks()

    def _wait_for_store(self) -> bool:
        """Wait until the store is served. Return False if that takes longer than `PAIR_S` seconds."""
        deadline = time.monotonic() + PAIR_S
        while not self._store_port and self._store.sources and time.monotonic() < deadline:
            self._wait_for_messages()
        return self._store_port != 0

    def _wait_for_messages(self) -> None:
        """Wait up to `TICK_S` for messages of the nodes and of the store.

        The session stores the answers of the nodes in `measurements`. This method stores the errors of lost
        nodes in `_nodes`, and the port of the store in `_store_port`.
        """
        # The events need no reaction here, because the session has already recorded them.
        _receive_events(self._session, self._process, self._config, self._store.sources)
        _report_own_events(self._session, self._process, self._config)
        for rank, reason in self._session.lost.items():
            self._nodes[rank] = replace(self._nodes[rank], error=f"lost: {reason}", is_gone=True)
        # The process that serves the store, in which pairs of nodes meet, reports its port once.
        store_answer = self._store.take_answer()
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


def _make_link_result(pair: tuple[int, int], answers: Mapping[int, MeasureResult]) -> LinkResult:
    """Return the bandwidth between the two nodes of `pair`, or the errors in their answers.

    `answers` contains the answers of all nodes by rank.
    """
    first, second = pair
    errors = [answer.error for answer in (answers[first], answers[second]) if answer.error]
    if errors:
        return LinkResult(nodes=pair, error=", ".join(errors))
    # Both nodes have measured the same exchange, so one answer is enough.
    return LinkResult(nodes=pair, GBps=dict(answers[first].figures).get("bandwidth"))


def _make_outlier_error(report: Report) -> CheckFailed:
    """Return the error about a run that cannot start without its outliers, which are slow or broken nodes.

    The error names the slowest of them. The hint tells the user how to start again without these nodes.
    """
    excluded = report.verdict.excluded
    worst = excluded[0]
    problem = f"{worst.host} is an outlier: {report.verdict.reasons[worst.rank][0]}"
    if len(excluded) > 1:
        problem += f" (and {len(excluded) - 1} more)"
    remedy = report.exclude_option
    if not remedy.startswith("--"):  # only the hosts, because the scheduler has no such option
        remedy = f"other hosts than {remedy}"
    return CheckFailed(
        problem,
        where="preflight",
        hint=f"start again with {remedy}, or with a spare (--nnodes N+1) that replaces it; "
        "leave out --preflight to start as it is",
    )


def _describe_process_end(code: int | None) -> str:
    """Return a text about a measuring process that has ended. `code` is None if its exit code is unknown."""
    if code is None:
        return "its measuring process ended"
    return f"its measuring process ended with exit code {code}"


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

        `take_answer` returns the result later.
        """
        self.start()
        assert self._process is not None  # noqa: S101 - start has made it
        self._pending_request, self._deadline = request, time.monotonic() + request.limit_s
        self._process.connection.send(request)

    def take_answer(self) -> MeasureResult | None:
        """Return the result of the last request, or None while it has not arrived.

        The process that serves the store of a preflight gets no request, and answers once. Each result is
        returned only once. If the process has ended, or has not answered within the time limit of the
        request, the result contains an error.
        """
        if self._process is None:
            return None
        command, connection = self._process
        answer = self._receive_answer(connection)
        if answer:
            return self._finish(answer)
        # This comes before the test of the request, because it also reads the descriptor for which `sources`
        # waits. It updates `command.code`.
        has_processes = command.read_reports()
        request = self._pending_request
        if request is None:
            return None
        is_running = has_processes and command.code is None and not connection.error
        if is_running and time.monotonic() < self._deadline:
            return None
        error = f"its measuring process hangs: no answer within {request.limit_s} s"
        if not is_running:
            error = _describe_process_end(command.code)
        # `mute`: a process that hangs cannot measure anything more, and neither can the node.
        return self._finish(MeasureResult(stage=request.stage, error=error, mute=is_running))

    def _receive_answer(self, connection: Connection) -> MeasureResult | None:
        """Return the result that the process has sent, or None if there is none yet.

        If a request is pending, the result of another stage came too late and is dropped.
        """
        request = self._pending_request
        for message in connection.receive():
            if isinstance(message, MeasureResult) and (request is None or message.stage == request.stage):
                return message
        return None

    def close(self) -> None:
        """End the process, and wait until all processes below it have ended."""
        self._end()
        for command in self._ending_commands:
            while command.read_reports():
                wait_readable([command], 1.0)
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
