"""The head's decisions about attempts: when one is over, whether another one starts, and with which nodes.

All nodes report to the head, and only the head decides. `Attempts` keeps the state. `assign_ranks`,
`end_reason` and `describe_cause` are the rules: pure functions of what the head knows.

A node has a number from the roll call, which never changes, and a node rank, which may differ between
attempts. The head is number 0, and rank 0 of every attempt.
"""

from __future__ import annotations

import dataclasses
import operator
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.errors import EXIT_SAVED, EXIT_TOOL_FAILED
from imgkit_entrypoints.rollcall.messages import CONNECTING, RENDEZVOUS, STARTING, EndAttempt, EndRun
from imgkit_entrypoints.rollcall.session import HeadSession
from imgkit_entrypoints.schedulers.placement import Size

# Exit codes of a node that has done its part of an attempt: its command succeeded, or has saved its state.
GOOD = (0, EXIT_SAVED)
# Largest number of nodes that one message names. It only counts the rest.
MAX_NAMED = 8
MIN_START_S = 10.0
"""Shortest limit for a rendezvous in seconds.

A node that finds no store yet tries again some seconds later.
"""
PEER_FAILED_S = 10.0
"""Seconds that the head waits for the cause if the first workers failed because another rank is gone.

With --per-node, it is also the time in which the head's command may end after that of another node: `ray
symmetric-run` ends its cluster, and with it the commands of the others, before it returns its exit code.
"""
QUICK_S = 60.0
"""Two failures in a row end the run if both came within so many seconds of a start, before any step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """The end of an attempt that did not finish."""

    cause: str
    """The node and what the head has seen of it, such as ``n3 ended with exit code 1``."""
    position: int | None
    """Position of the furthest worker (launch/watchdog.py), or None if no worker has noted a position."""
    after_s: float
    """Seconds from the attempt's start to the failure."""
    code: int = EXIT_TOOL_FAILED
    """Exit code of the run if this failure ends it."""

    @property
    def step(self) -> int | None:
        """Return the step at which the furthest worker was, or None before the first step or if unknown.

        Positions 1 and 2, within step 1 and after it, both mean step 1.
        """
        if self.position is None or self.position < 0:
            return None
        return (self.position + 1) // 2


class Attempts:
    """The attempts of a run. The head starts and ends them, and in the end the run."""

    def __init__(
        self,
        session: HeadSession,
        size: Size,
        *,
        max_failures: int,
        log: Callable[[str], None],
        fence: Callable[[int], None],
        is_per_node: bool = False,
    ) -> None:
        """Prepare a run of `size`. `start` begins its first attempt.

        Parameters
        ----------
        max_failures : number of failures after which the run still starts another attempt.
        fence : called with an attempt's number before the attempt starts.
        is_per_node : the nodes run the user's own commands, and the exit code of the head's command is that
            of the run.
        """
        self._session, self._size, self._max_failures = session, size, max_failures
        self._log, self._fence, self._is_per_node = log, fence, is_per_node
        self._number = 0
        """Number of the current attempt, from 1."""
        self._ranks: Mapping[int, int] = {}
        """Node ranks of the nodes that take part in it, by number."""
        self._started_at = 0.0
        self._failures: list[FailedAttempt] = []
        self._failure: FailedAttempt | None = None
        """The first sign that the current attempt fails. None while all is well."""
        self._is_cancelled = False
        """True once the head has told all nodes to end the current attempt."""
        self._excluded: set[int] = set()
        self._logged_losses: set[int] = set()
        self._is_over = False
        self.failed_at = 0.0
        """Time at which the last failure was noticed, on the monotonic clock."""

    def start(self, excluded: Collection[int] = ()) -> None:
        """Start the next attempt with the nodes that are alive, or end the run if that makes no sense.

        The nodes in `excluded` take no part in this attempt and all later ones.

        Raises
        ------
        NoPlan : no port is free.
        """
        self._excluded |= set(excluded)
        alive = [number for number in self._session.alive if number not in self._excluded]
        # Before the first attempt there are no ranks to keep, hence None.
        ranks = assign_ranks(alive, self._size.training, self._ranks or None)
        code = self._failure.code if self._failure else EXIT_TOOL_FAILED
        if not ranks:
            self._end_run(f"{_nodes_text(len(alive))} left, and the run needs {self._size.training}", code)
            return
        reason = end_reason(self._failures, self._max_failures)
        if reason:
            last_causes = [failure.cause for failure in self._failures[-2:]]
            causes = "; before that: ".join(reversed(last_causes))
            self._end_run(f"{reason} ({causes})", code)
            return
        self._number += 1
        if self._number == 1:
            self._log_spares([number for number in alive if number not in ranks])
        else:
            changes = self._rank_changes(ranks)
            self._log(f"attempt {self._number} starts with {_nodes_text(len(ranks))}{changes}")
        self._ranks, self._started_at = ranks, time.monotonic()
        self._failure, self._is_cancelled = None, False
        self._fence(self._number)
        self._session.start_attempt(self._number, ranks)

    def check(self, *, stopped: bool) -> None:
        """React to the reports of the nodes: end the attempt, start the next one, or end the run.

        `stopped` is True if the run was asked to save and end. The agent calls this at every tick.
        """
        session = self._session
        if self._is_over or not self._ranks:
            return
        if not session.reports and len(session.lost) == len(self._logged_losses) and self._failure is None:
            return  # nothing is new, and what follows takes time for every node
        self._log_losses()
        members = self._ranks.keys()
        # The reports are in the order of their arrival, so the first bad code is that of the first failure.
        codes = {number: report.code for number, report in session.reports.items() if number in members}
        lost = {number for number in members & session.lost.keys() if codes.get(number) not in GOOD}
        bad = {number: code for number, code in codes.items() if code not in GOOD}
        was_ended = self._failure is not None and self._is_cancelled
        if self._is_per_node and codes.get(0) in GOOD and not was_ended:
            self._end_after_head(lost, bad)
        elif (lost or bad) and self._failure is None:
            self._failure = self._first_failure(lost, bad)
        if self._failure and not self._is_cancelled:
            if self._is_per_node and 0 in bad:
                self._failure = dataclasses.replace(self._failure, code=bad[0])
            # During a stop request the others go on after a failure, since they may still save. During normal
            # work they are ended, but not before the cause of the failure is known.
            if lost or (not stopped and self._has_cause(bad)):
                self._is_cancelled = True
                session.send_all(EndAttempt(attempt=self._number, reason=self._failure.cause))
        if codes.keys() | lost != members:
            return
        if self._failure:
            self._close_attempt(self._failure, lost, codes, stopped=stopped)
            return
        code = EXIT_SAVED if EXIT_SAVED in codes.values() else 0
        session.send_all(EndRun(code=codes[0] if self._is_per_node else code))
        self._is_over = True

    def _first_failure(self, lost: Collection[int], bad: Mapping[int, int]) -> FailedAttempt:
        """Return the failure that the head has just noticed, and set `failed_at`.

        Parameters
        ----------
        lost : numbers of the lost nodes.
        bad : exit codes of the failed nodes by number, the first failure first.
        """
        self.failed_at = time.monotonic()
        positions = self._session.run_positions
        return FailedAttempt(
            cause=self._cause(lost, bad),
            position=positions[1] if positions else None,
            after_s=self.failed_at - self._started_at,
            code=EXIT_TOOL_FAILED if lost else next(iter(bad.values())),
        )

    def _end_after_head(self, lost: Collection[int], bad: Mapping[int, int]) -> None:
        """End the commands of the other nodes after the head's has succeeded, whose exit code is the run's.

        A failure of another node until now is printed, but no longer counts.
        """
        if self._is_cancelled:
            return
        if lost or bad:
            self._log(f"{self._cause(lost, bad)}; the head's command has succeeded, and its code counts")
        self._failure, self._is_cancelled = None, True
        self._session.send_all(EndAttempt(attempt=self._number, reason="the head's command has ended"))

    def have_others_ended(self) -> bool:
        """Return whether the attempt is over on all nodes but the head."""
        members = self._ranks.keys() - {0}
        return bool(members) and members <= self._session.reports.keys() | self._session.lost.keys()

    def _close_attempt(
        self, failure: FailedAttempt, lost: Collection[int], codes: Mapping[int, int], *, stopped: bool
    ) -> None:
        """Start another attempt or end the run, now that this one is over on all nodes.

        A stopped run ends: with `EXIT_SAVED` if any node has saved, else with the code of a failure.
        """
        if lost:  # a node that was lost in the meantime explains why the workers of others have failed
            failure = dataclasses.replace(failure, cause=self._cause(lost, {}))
        reported = [self._session.reports[number].position for number in codes]
        positions = [position for position in (failure.position, *reported) if position is not None]
        furthest = max(positions, default=None)
        self._failures.append(dataclasses.replace(failure, position=furthest))
        if not stopped:
            self.start()
            return
        if EXIT_SAVED in codes.values():
            code = EXIT_SAVED
        elif lost:
            code = failure.code
        elif self._is_per_node:
            code = codes[0]
        else:
            code = max(codes.values())
        self._end_run("a stop was requested", code)

    def _has_cause(self, bad: Collection[int]) -> bool:
        """Return whether the cause of the failure is among the reports of the failed nodes `bad`.

        If they only report that a rank elsewhere is gone, return False until `PEER_FAILED_S` have passed.
        With --per-node, the head's command counts as the cause, so that its exit code can still arrive.
        """
        failures = [self._session.reports[number].failure for number in bad]
        is_consequence = all(failure is not None and failure.after_peer for failure in failures)
        if self._is_per_node and 0 not in bad:
            is_consequence = True
        return not is_consequence or time.monotonic() - self.failed_at > PEER_FAILED_S

    def _log_spares(self, spares: Sequence[int]) -> None:
        """Print which nodes wait as spares at the start of the run, if any."""
        if not spares:
            return
        names = ", ".join(self._session.node_name(number) for number in spares)
        verb = "waits" if len(spares) == 1 else "wait"
        self._log(f"{_nodes_text(self._size.training)} train; {names} {verb}")

    def _log_losses(self) -> None:
        """Print each lost node once."""
        for number in self._session.lost.keys() - self._logged_losses:
            self._logged_losses.add(number)
            role = "" if number in self._ranks else ", a spare"
            self._log(f"lost {self._session.node_name(number)}{role}: {self._session.lost[number]}")

    def _cause(self, lost: Collection[int], bad: Mapping[int, int]) -> str:
        """Return `describe_cause` for nodes by number: `lost` ones, and the exit codes in `bad`."""
        name, reasons = self._session.node_name, self._session.lost
        return describe_cause(
            {name(number): reasons[number] for number in sorted(lost)},
            {name(number): code for number, code in bad.items()},
        )

    def _end_run(self, reason: str, code: int) -> None:
        """End the run on all nodes with `code`, and print the reason why no attempt follows."""
        # A run that never has a second attempt needs no message about it.
        if self._max_failures or self._size.spares:
            self._log(f"no further attempt: {reason}")
        self._session.send_all(EndRun(code=code))
        self._is_over = True

    def _rank_changes(self, ranks: Mapping[int, int]) -> str:
        """Return the end of a message about the nodes with a new rank: ``; n4 takes rank 1``, or nothing."""
        text = ""
        for number, rank in sorted(ranks.items(), key=operator.itemgetter(1)):
            if self._ranks.get(number) != rank:
                text += f"; {self._session.node_name(number)} takes rank {rank}"
        return text


class StartWatch:
    """The head's watch over the start of one attempt, until all ranks are connected.

    Nodes wait in torchrun's rendezvous, and ranks in init_process_group, for each other's keys in torch's
    store. Anyone who can reach its port can delete them, and torch would then wait for up to 30 minutes.
    """

    def __init__(self, session: HeadSession, limit_s: float) -> None:
        self._session, self._limit_s = session, max(limit_s, MIN_START_S)
        self._phase = ""
        """Phase to which the limit applies now. Empty while it applies to none."""
        self._since = 0.0
        """Time of the last change of `_phase`, on the monotonic clock."""

    def stall_reason(self) -> str:
        """Return why the attempt must end. Empty while its start is in order or within the limit.

        The limit applies while every node is in the rendezvous or past it. A node that is not there yet may
        still be reading torchrun from a slow file system. In the same way, the limit applies while every rank
        tries to connect.
        """
        node_phases = self._session.phases
        phase = ""
        if RENDEZVOUS in node_phases.values() and STARTING not in node_phases.values():
            phase = RENDEZVOUS
        elif all(node_phase == CONNECTING for node_phase in node_phases.values()):
            phase = CONNECTING
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._since = phase, now
        if not phase or now - self._since < self._limit_s:
            return ""
        waiting = [number for number, node_phase in node_phases.items() if node_phase == phase]
        names = ", ".join(self._session.node_name(number) for number in waiting[:MAX_NAMED])
        if len(waiting) > MAX_NAMED:
            names += f" and {len(waiting) - MAX_NAMED} more"
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


def assign_ranks(
    alive: Sequence[int], nnodes: int, previous: Mapping[int, int] | None = None
) -> Mapping[int, int]:
    """Return the node rank of each node that trains in the next attempt, by the node's number.

    A node keeps its rank of the attempt before, and a free rank goes to a spare: with nodes 0, 2 and 3 alive,
    2 ranks and ``{0: 0, 1: 1}`` before, the result is ``{0: 0, 2: 1}``. It is empty if fewer than `nnodes`
    nodes are alive.

    Parameters
    ----------
    alive : numbers of the nodes that are alive, in ascending order.
    nnodes : number of nodes that train.
    previous : node ranks of the attempt before, by number. None before the first attempt.
    """
    if len(alive) < nnodes:
        return {}
    previous = previous or {}
    kept_ranks = {number: rank for number, rank in previous.items() if number in alive}
    free_ranks = sorted(set(range(nnodes)) - set(kept_ranks.values()))
    unranked = sorted(set(alive) - kept_ranks.keys())
    return kept_ranks | dict(zip(unranked, free_ranks, strict=False))  # the last ones stay spares


def end_reason(failures: Sequence[FailedAttempt], max_failures: int) -> str:
    """Return why the run ends after the last of `failures`.

    The result is empty if there are none, or if another attempt may help. The reasons are more than
    `max_failures` failures, two in a row at the same step, or two soon after a start.
    """
    if len(failures) > max_failures:
        reason = f"--max-failures {max_failures}"
        if max_failures:
            plural = "s" if max_failures > 1 else ""
            reason += f": the run survives {max_failures} failure{plural}"
        return reason
    if len(failures) < 2:
        return ""
    first, last = failures[-2:]
    if first.step is not None and first.step == last.step:
        return f"two failures in a row at step {last.step}; a new attempt would fail there as well"
    if first.step is None and last.step is None and max(first.after_s, last.after_s) < QUICK_S:
        return (
            f"two failures in a row before the first step, {first.after_s:.0f} s and {last.after_s:.0f} s "
            "after the start"
        )
    return ""


def describe_cause(lost: Mapping[str, str], codes: Mapping[str, int]) -> str:
    """Return the cause of a failure: all lost nodes with the reasons, or else the first exit code of a node.

    A lost node explains why other nodes failed: their workers waited for those of the lost node.

    Parameters
    ----------
    lost : reason by the name of each lost node.
    codes : exit code by the name of each failed node, the first failure first.
    """
    if lost:
        return "; ".join(f"lost {node}: {reason}" for node, reason in lost.items())
    node, code = next(iter(codes.items()))
    try:  # 137 is 128 + 9: the command was killed by SIGKILL
        return f"{node} ended with exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"{node} ended with exit code {code}"


def _nodes_text(nodes: int) -> str:
    return f"{nodes} node" + ("s" if nodes != 1 else "")
