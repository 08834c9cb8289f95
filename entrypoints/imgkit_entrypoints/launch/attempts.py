"""The head's decisions about attempts: when one is over, and whether and where the next one starts.

An attempt is one start of the command on all nodes that train. All nodes report to the head (the node with
rank 0), and only the head decides. `Attempts` keeps the state of a run. `assign_ranks`, `end_reason` and
`describe_cause` are the rules. They are pure functions of what the head knows.

Each node gets a number in the roll call, in which the nodes meet. The number never changes, while the node
rank may differ between attempts. The head has number 0, and rank 0 in every attempt.
"""

from __future__ import annotations

import dataclasses
import operator
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.errors import EXIT_SAVED, EXIT_TOOL_FAILED, count_text, join_names
from imgkit_entrypoints.rollcall.messages import CONNECTING, RENDEZVOUS, STARTING, EndAttempt, EndRun
from imgkit_entrypoints.rollcall.session import HeadSession
from imgkit_entrypoints.schedulers.placement import Size

# Exit codes of a node that has done its part of an attempt: its command succeeded, or has saved its state.
SUCCESS_CODES = (0, EXIT_SAVED)
# Number of the head among the nodes.
HEAD = 0
# Largest number of nodes that a message names. It only counts the other nodes.
MAX_NAMED = 8
MIN_START_S = 10.0
"""Shortest time limit for torchrun's rendezvous, in seconds.

A node that cannot connect to the store yet tries again only some seconds later.
"""
PEER_FAILED_S = 10.0
"""Seconds that the head waits for the cause of a failure.

The first reports may only say that another rank is gone, and the report of that rank arrives later. With
--per-node, the head also waits this long for its own command after the command of another node has ended:
`ray symmetric-run` ends its cluster, and so the commands on the other nodes, before it returns its exit code.
"""
QUICK_S = 60.0
"""Two failures in a row end the run if each came before the first step and within so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """The end of an attempt that did not finish."""

    cause: str
    """What happened to which node, such as ``n3 ended with exit code 1``."""
    position: int | None
    """Position of the furthest worker (launch/watchdog.py), or None if no worker has written a position."""
    after_s: float
    """Seconds from the attempt's start to the failure."""
    code: int = EXIT_TOOL_FAILED
    """Exit code of the run if this failure ends it."""

    @property
    def step(self) -> int | None:
        """Return the step that the furthest worker had reached.

        Return None before the first step, or if the position is unknown. Position 1 (during step 1) and
        position 2 (after it) both mean step 1.
        """
        if self.position is None or self.position < 0:
            return None
        return (self.position + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttemptResults:
    """What the head knows about the end of the current attempt on each node.

    Nodes are given by their numbers.
    """

    codes: Mapping[int, int]
    """Exit codes of the nodes that have reported, in the order in which their reports arrived."""
    failed: Mapping[int, int]
    """Exit codes of the failed nodes, such as ``{2: 1}``. The first entry is the first failure."""
    lost: Collection[int]
    """Nodes that were lost before they reported a success."""

    @property
    def ended_nodes(self) -> Collection[int]:
        """Return the nodes on which the attempt is over."""
        return self.codes.keys() | self.lost


class Attempts:
    """The attempts of a run. The head starts and ends them, and finally ends the run."""

    def __init__(
        self,
        session: HeadSession,
        size: Size,
        *,
        max_failures: int,
        log: Callable[[str], None],
        on_start: Callable[[int], None],
        is_per_node: bool = False,
    ) -> None:
        """Prepare a run of `size`. The method `start` begins the first attempt.

        Parameters
        ----------
        size : the number of nodes that train, and the number of spares (nodes that replace lost ones).
        max_failures : number of failures after which the run still starts another attempt.
        on_start : called with an attempt's number before the attempt starts.
        is_per_node : True if the nodes run the user's own commands. The run then ends with the exit code of
            the head's command.
        """
        self._session, self._size, self._max_failures = session, size, max_failures
        self._log, self._on_start, self._is_per_node = log, on_start, is_per_node
        self._number = 0
        """Number of the current attempt, from 1."""
        self._ranks: Mapping[int, int] = {}
        """Node ranks in the current attempt, by node number."""
        self._started_at = 0.0
        self._failed_attempts: list[FailedAttempt] = []
        self._failure: FailedAttempt | None = None
        """The first failure of the current attempt, or None if nothing has failed."""
        self._is_cancelled = False
        """True once the head has told all nodes to end the current attempt."""
        self._excluded_nodes: set[int] = set()
        """Numbers of the nodes that the preflight has excluded because they are slow or broken."""
        self._logged_losses: set[int] = set()
        self._is_over = False
        self.failed_at = 0.0
        """Time at which the last failure was noticed, on the monotonic clock."""

    def start(self, excluded: Collection[int] = ()) -> None:
        """Start the next attempt with the nodes that are alive, or end the run if that cannot succeed.

        An attempt is one start of the command on all nodes that train. The nodes in `excluded` take part
        neither in this attempt nor in later ones.

        Each node has a number from the roll call, in which the nodes met. The number never changes, while the
        node rank may differ between attempts.

        Raises
        ------
        NoPlan : no port is free.
        """
        self._excluded_nodes |= set(excluded)
        alive = [number for number in self._session.alive if number not in self._excluded_nodes]
        reason = self._find_end_reason(len(alive))
        if reason:
            # Without a failure, nodes were lost or excluded before the first attempt.
            code = self._failure.code if self._failure else EXIT_TOOL_FAILED
            self._end_run(reason, code)
            return
        self._number += 1
        ranks = assign_ranks(alive, self._size.training, self._ranks)
        if self._number == 1:  # nothing has changed yet, so only spares are worth a message
            self._log_spares([number for number in alive if number not in ranks])
        else:
            changes = self._describe_rank_changes(ranks)
            self._log(f"attempt {self._number} starts with {count_text(len(ranks), 'node')}{changes}")
        # `_describe_rank_changes` has compared with the old ranks, so they are replaced only now.
        self._ranks, self._started_at = ranks, time.monotonic()
        self._failure, self._is_cancelled = None, False
        # This must come before the order to start: workers of this attempt may write as soon as they run.
        self._on_start(self._number)
        self._session.start_attempt(self._number, ranks)

    def _find_end_reason(self, nodes: int) -> str:
        """Return why no further attempt can start with `nodes` nodes alive, or "" if one can start.

        For example, too few nodes are left, or two attempts have failed at the same step.
        """
        if nodes < self._size.training:
            return f"{count_text(nodes, 'node')} left, and the run needs {self._size.training}"
        reason = end_reason(self._failed_attempts, self._max_failures)
        if not reason:
            return ""
        # The user should also see the failures that `reason` counts, the latest first.
        last_causes = [failure.cause for failure in self._failed_attempts[-2:]]
        return f"{reason} ({'; before that: '.join(reversed(last_causes))})"

    def check(self, *, stopped: bool) -> None:
        """React to the reports of the nodes: end the attempt, start the next one, or end the run.

        An attempt is one start of the command on all nodes that train. The head (the node with rank 0) calls
        this about once a second. `stopped` is True if a stop of the run was requested.
        """
        if self._is_over or not self._ranks:  # without ranks, no attempt has started yet
            return
        has_new_losses = len(self._session.lost) != len(self._logged_losses)
        has_news = self._session.reports or has_new_losses or self._failure
        if not has_news:  # the following checks take time for each node
            return
        self._log_losses()
        results = self._collect_results()
        head_has_succeeded = results.codes.get(HEAD) in SUCCESS_CODES
        if self._is_per_node and head_has_succeeded:
            self._end_after_head(results)
        else:
            self._update_failure(results)
            self._cancel_if_cause_known(results, stopped=stopped)
        # Wait until the attempt is over on every node, since its workers would disturb the next attempt.
        if results.ended_nodes != self._ranks.keys():
            return
        if self._failure:
            self._finish_failed_attempt(self._failure, results, stopped=stopped)
        else:
            self._end_successful_run(results.codes)

    def _collect_results(self) -> _AttemptResults:
        """Return what the nodes of the current attempt have reported, and which of them are lost.

        Spares are left out, since they have no rank in the attempt. A node that reported success and was lost
        afterwards counts as a success.
        """
        reports = self._session.reports  # in the order of their arrival, which `codes` and `failed` keep
        codes = {number: report.code for number, report in reports.items() if number in self._ranks}
        failed = {number: code for number, code in codes.items() if code not in SUCCESS_CODES}
        lost = self._session.lost.keys() & self._ranks.keys()
        succeeded = codes.keys() - failed.keys()
        return _AttemptResults(codes=codes, failed=failed, lost=lost - succeeded)

    def _update_failure(self, results: _AttemptResults) -> None:
        """Record the first failure of the attempt in `_failure`, if a node has failed or was lost.

        With ``--per-node``, the exit code of the run is that of the head's command. So the code of the
        failure changes if the head's command fails later, but not once the head has ended the attempt itself.
        """
        if self._failure is None and (results.lost or results.failed):
            self.failed_at = time.monotonic()
            self._failure = self._make_first_failure(results, self.failed_at)
        if self._failure is None or self._is_cancelled:
            return
        if self._is_per_node and HEAD in results.failed:
            self._failure = dataclasses.replace(self._failure, code=results.failed[HEAD])

    def _cancel_if_cause_known(self, results: _AttemptResults, *, stopped: bool) -> None:
        """End a failed attempt on all nodes, once it is known why it has failed.

        After a stop request, a failed worker does not end the attempt, because the other nodes may still
        save. A lost node does end it: without that node, no other node can save.
        """
        # Once cancelled, the nodes have the order to end. It must not be sent again in each call.
        if self._failure is None or self._is_cancelled:
            return
        if results.lost or (not stopped and self._is_cause_known(results.failed)):
            self._is_cancelled = True
            self._session.send_all(EndAttempt(attempt=self._number, reason=self._failure.cause))

    def _make_first_failure(self, results: _AttemptResults, failed_at: float) -> FailedAttempt:
        """Return the failure that the head has just noticed, at the time `failed_at` of the monotonic clock.

        The result contains the cause, such as a lost node, and the position of the furthest worker. Its exit
        code becomes that of the run if no further attempt starts.
        """
        furthest = None
        if self._session.run_positions:
            _, furthest = self._session.run_positions  # of the slowest and the furthest worker
        code = EXIT_TOOL_FAILED
        if not results.lost:  # then at least one node has failed, and the first failure comes first
            code = next(iter(results.failed.values()))
        return FailedAttempt(
            cause=self._describe_cause(results),
            position=furthest,
            after_s=failed_at - self._started_at,
            code=code,
        )

    def _end_after_head(self, results: _AttemptResults) -> None:
        """End the commands of the other nodes, because the head's command has succeeded.

        This applies only to a run with ``--per-node``. If another node has failed before, its failure is
        printed but does not change the result.
        """
        if self._is_cancelled:  # the nodes already have the order to end, for this reason or after a failure
            return
        if results.lost or results.failed:
            cause = self._describe_cause(results)
            self._log(f"{cause}; the head's command has succeeded, and its code counts")
        self._failure = None  # so that `check` ends the run as a success once all nodes have ended
        self._is_cancelled = True
        self._session.send_all(EndAttempt(attempt=self._number, reason="the head's command has ended"))

    def have_others_ended(self) -> bool:
        """Return whether the attempt is over on all nodes except the head.

        Return False if there are no other nodes.
        """
        others = self._ranks.keys() - {HEAD}
        return bool(others) and others <= self._session.reports.keys() | self._session.lost.keys()

    def _finish_failed_attempt(
        self, failure: FailedAttempt, results: _AttemptResults, *, stopped: bool
    ) -> None:
        """Record a failed attempt that is over on all nodes.

        Afterwards, start another attempt, or end the run if a further attempt cannot succeed. If a stop of
        the run was requested, always end the run. `failure` is the first failure of the attempt.
        """
        cause = failure.cause
        # If a node was lost in the meantime, its loss explains why workers of other nodes have failed.
        if results.lost:
            cause = self._describe_cause(results)
        # A position says how far a worker has come. `failure` has the furthest one at the time of the
        # failure. Some nodes report theirs only at the end of the attempt.
        positions = [failure.position]
        positions += [self._session.reports[number].position for number in results.codes]
        furthest = max((position for position in positions if position is not None), default=None)
        self._failed_attempts.append(dataclasses.replace(failure, cause=cause, position=furthest))
        if stopped:
            self._end_run("a stop was requested", self._choose_stopped_code(failure, results))
        else:
            self.start()

    def _choose_stopped_code(self, failure: FailedAttempt, results: _AttemptResults) -> int:
        """Return the exit code of a run that was asked to stop and in which a node has failed.

        A saved state takes precedence over the failure, so that the job is requeued and continues from that
        state.
        """
        if EXIT_SAVED in results.codes.values():
            return EXIT_SAVED
        # After a loss, the head has ended the other nodes by force, so their codes only result from that.
        if results.lost:
            return failure.code
        if self._is_per_node:
            return results.codes[HEAD]
        # A code is from 0 to 255, and 0 means success. So the maximum is the code of a failed node.
        return max(results.codes.values())

    def _end_successful_run(self, codes: Mapping[int, int]) -> None:
        """End the run on all nodes, with the exit code for success.

        The code is 85 (requeue me) if any node has saved its state, otherwise 0. With ``--per-node``, it is
        the exit code of the head's command.
        """
        code = 0
        if self._is_per_node:
            code = codes[HEAD]
        elif EXIT_SAVED in codes.values():
            code = EXIT_SAVED
        self._session.send_all(EndRun(code=code))
        self._is_over = True

    def _is_cause_known(self, failed_nodes: Collection[int]) -> bool:
        """Return whether the head knows the cause of the failure, given the reports of `failed_nodes`.

        The nodes are given by their numbers from the roll call, in which the nodes met.
        If these nodes only report that another rank is gone, return False, so that the head waits for the
        report of that rank. With ``--per-node``, return False until the head's command has failed, so that
        its exit code can still arrive. After `PEER_FAILED_S` seconds, return True in any case.
        """
        if time.monotonic() - self.failed_at > PEER_FAILED_S:
            return True
        if self._is_per_node and HEAD not in failed_nodes:
            return False
        for node_number in failed_nodes:
            failure = self._session.reports[node_number].failure
            # `after_peer` is True if the error only says that another rank is gone. Without a known failure,
            # nothing says that the cause is on another node.
            if failure is None or not failure.after_peer:
                return True
        return False

    def _log_spares(self, spares: Sequence[int]) -> None:
        """Print which nodes are spares, if any. A spare waits until it replaces a lost node."""
        if not spares:
            return
        names = ", ".join(self._session.node_name(number) for number in spares)
        verb = "waits" if len(spares) == 1 else "wait"
        self._log(f"{count_text(self._size.training, 'node')} train; {names} {verb}")

    def _log_losses(self) -> None:
        """Print each lost node, but only once."""
        for number in self._session.lost.keys() - self._logged_losses:
            self._logged_losses.add(number)
            role = "" if number in self._ranks else ", a spare"
            self._log(f"lost {self._session.node_name(number)}{role}: {self._session.lost[number]}")

    def _describe_cause(self, results: _AttemptResults) -> str:
        """Return a text about the lost nodes of `results`, or about the first failed node if none is lost."""
        name, reasons = self._session.node_name, self._session.lost
        return describe_cause(
            {name(number): reasons[number] for number in sorted(results.lost)},
            {name(number): code for number, code in results.failed.items()},
        )

    def _end_run(self, reason: str, code: int) -> None:
        """End the run on all nodes with exit code `code`, and print why no further attempt starts."""
        # A run that can never have a second attempt needs no such message.
        if self._max_failures or self._size.spares:
            self._log(f"no further attempt: {reason}")
        self._session.send_all(EndRun(code=code))
        self._is_over = True

    def _describe_rank_changes(self, ranks: Mapping[int, int]) -> str:
        """Return the end of a message about nodes with a new rank, such as ``; n4 takes rank 1``.

        Return "" if all ranks are unchanged.
        """
        changes = ""
        for number, rank in sorted(ranks.items(), key=operator.itemgetter(1)):
            if self._ranks.get(number) != rank:
                changes += f"; {self._session.node_name(number)} takes rank {rank}"
        return changes


class StartWatch:
    """Limits the time in which an attempt must start, until all ranks are connected. Only the head uses it.

    Nodes wait for each other in torchrun's rendezvous, and ranks in init_process_group. Both wait for keys in
    torch's store. Anyone who can reach the store's port can delete these keys, and torch would then wait for
    up to 30 minutes.
    """

    def __init__(self, session: HeadSession, limit_s: float) -> None:
        self._session, self._limit_s = session, max(limit_s, MIN_START_S)
        self._phase = ""
        """Phase of the start to which the time limit applies now, or "" if it applies to none."""
        self._phase_since = 0.0
        """Time of the last change of `_phase`, on the monotonic clock."""

    def check_for_stall(self) -> str:
        """Return why the head must end the attempt, or "" if its start is still within the time limit.

        The time counts from the call in which all nodes had reached the same waiting phase. So call this
        method about once a second.
        """
        now = time.monotonic()
        phase = self._find_limited_phase()
        if phase != self._phase:  # the time limit begins anew
            self._phase, self._phase_since = phase, now
        is_within_limit = now - self._phase_since < self._limit_s
        if not phase or is_within_limit:
            return ""
        return self._describe_stall(phase)

    def _find_limited_phase(self) -> str:
        """Return the phase of the start to which the time limit applies now, or "" if it applies to none.

        The limit applies to the rendezvous once every node has reached it. Until then, a node may still be
        reading torchrun from a slow file system. The limit also applies while every rank tries to connect.
        """
        node_phases = set(self._session.phases.values())
        if RENDEZVOUS in node_phases and STARTING not in node_phases:
            return RENDEZVOUS
        if node_phases == {CONNECTING}:
            return CONNECTING
        return ""

    def _describe_stall(self, phase: str) -> str:
        """Return the message for the user about nodes that have waited in `phase` for too long.

        `phase` is either torchrun's rendezvous, in which the nodes meet, or the connection of the ranks after
        it.
        """
        waiting = [number for number, node_phase in self._session.phases.items() if node_phase == phase]
        names = join_names([self._session.node_name(number) for number in waiting], MAX_NAMED)
        if phase == RENDEZVOUS:
            problem = (
                f"torchrun's rendezvous did not complete within {self._limit_s:g} s (--rollcall-timeout); "
                f"without workers: {names}"
            )
        else:
            problem = (
                f"the ranks did not connect within {self._limit_s:g} s (--rollcall-timeout); "
                f"all of them are in init_process_group: {names}"
            )
        return (
            f"{problem}. They wait for torch's store on port {self._session.port} of the head: a firewall "
            "blocks it, or another program deletes its keys, since the store has no authentication. Start "
            "the job again: a new job gets another port"
        )


def assign_ranks(alive: Collection[int], nnodes: int, previous: Mapping[int, int]) -> Mapping[int, int]:
    """Return the node rank of each node that trains in the next attempt, by node number.

    A node keeps its rank from the previous attempt. Free ranks go to spares, which are alive but did not
    train. For example, nodes 0, 2 and 3 are alive, two ranks are needed, and the previous ranks were ``{0: 0,
    1: 1}``. The result is then ``{0: 0, 2: 1}``. The result is empty if fewer than `nnodes` nodes are alive.

    Parameters
    ----------
    alive : numbers of the nodes that are alive.
    nnodes : number of nodes that train.
    previous : node ranks of the previous attempt, by node number. Empty before the first attempt.
    """
    if len(alive) < nnodes:  # every rank is needed, since torchrun allows no gaps
        return {}
    ranks = {number: rank for number, rank in previous.items() if number in alive}
    free_ranks = sorted(set(range(nnodes)) - set(ranks.values()))
    spares = sorted(set(alive) - ranks.keys())
    # There may be more spares than free ranks. The remaining nodes stay spares (strict=False).
    ranks.update(zip(spares, free_ranks, strict=False))
    return ranks


def end_reason(failures: Sequence[FailedAttempt], max_failures: int) -> str:
    """Return why the run ends after the last of `failures`, or "" if another attempt may start.

    `failures` contains all failed attempts of the run, the latest last. The run ends after more than
    `max_failures` failures. It also ends after two failures in a row at the same
    step, or before the first step and within `QUICK_S` seconds of the start. A third attempt would fail in
    the same way.
    """
    if len(failures) > max_failures:
        reason = f"--max-failures {max_failures}"
        if max_failures == 0:
            return reason
        return f"{reason}: the run survives {count_text(max_failures, 'failure')}"
    if len(failures) < 2:
        return ""
    previous, last = failures[-2:]
    if previous.step != last.step:  # they failed at different places, so another attempt may get further
        return ""
    if last.step is not None:
        return f"two failures in a row at step {last.step}; a new attempt would fail there as well"
    # Without a step, only the time suggests whether both attempts failed at the same place.
    if max(previous.after_s, last.after_s) >= QUICK_S:
        return ""
    return (
        f"two failures in a row before the first step, {previous.after_s:.0f} s and {last.after_s:.0f} s "
        "after the start"
    )


def describe_cause(lost: Mapping[str, str], codes: Mapping[str, int]) -> str:
    """Return the cause of a failure: all lost nodes with the reasons, or else the first failed node.

    If a node is lost, exit codes are not mentioned. They are consequences: workers of other nodes fail
    because they wait for the workers of the lost node.

    Parameters
    ----------
    lost : reason for each lost node, by its name, such as ``{"n3": "no heartbeat for 30 s"}``.
    codes : exit code of each failed node, by its name. The first failure comes first.
    """
    if lost:
        return "; ".join(f"lost {node}: {reason}" for node, reason in lost.items())
    node, code = next(iter(codes.items()))
    try:  # 137 is 128 + 9: the command was killed by SIGKILL
        return f"{node} ended with exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"{node} ended with exit code {code}"
