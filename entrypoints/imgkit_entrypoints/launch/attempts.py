"""The head's decisions about attempts: when one is over, whether another one starts, and with which nodes.

Nodes report to the head, and nobody else decides. `Attempts` keeps the state; `assign_ranks`, `end_reason`
and `describe_cause` are the rules, pure functions of what the head knows. A node has a number from the roll
call, which never changes, and a node rank in an attempt. The head is number 0, and rank 0 of every attempt.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.errors import EXIT_SAVED, EXIT_TOOL_FAILED
from imgkit_entrypoints.rollcall.messages import CONNECTING, RENDEZVOUS, STARTING, EndAttempt, EndRun
from imgkit_entrypoints.rollcall.session import HeadSession
from imgkit_entrypoints.schedulers.placement import Size

GOOD = (0, EXIT_SAVED)
MAX_NAMED = 8
"""Most nodes that one message names."""
MIN_START_S = 10.0
"""Least time of a rendezvous: a node that finds no store yet calls again after seconds."""
PEER_FAILED_S = 10.0
"""Time that the head waits for the cause where the first workers failed because a rank elsewhere is gone.

With --per-node, it is also the time in which the head's command may end after that of another node: `ray
symmetric-run` ends its cluster, and with it the commands of the others, before it returns its exit code.
"""
QUICK_S = 60.0
"""A second failure so soon after a start ends the run, where no worker has noted its progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """The end of an attempt that did not finish."""

    cause: str
    """The node, and what the head has seen of it: a lost connection, silence, or an exit code."""
    position: int | None
    """Furthest position of a worker (launch/watchdog.py); None: no worker has noted one."""
    after_s: float
    """Seconds from the attempt's start."""
    code: int = EXIT_TOOL_FAILED
    """Exit code of the run if this failure ends it."""

    @property
    def step(self) -> int | None:
        """The step at which the furthest worker was; None where none is known, or before the first step."""
        return None if self.position is None or self.position < 0 else (self.position + 1) // 2


class Attempts:
    """All attempts of a run, as the head starts and ends them."""

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
        """`fence` is called with an attempt's number before it starts.

        With `is_per_node`, the nodes run commands of their own, and the exit code of the head's is the run's.
        """
        self._session, self._size, self._max_failures = session, size, max_failures
        self._log, self._fence, self._is_per_node = log, fence, is_per_node
        self._number = 0
        self._ranks: Mapping[int, int] = {}
        self._started_at = 0.0
        self._failures: list[FailedAttempt] = []
        self._failure: FailedAttempt | None = None
        """The first sign that the current attempt fails."""
        self._is_cancelled = False
        self._excluded: set[int] = set()
        self._logged_losses: set[int] = set()
        self._is_over = False
        self.failed_at = 0.0
        """Time at which the last failure was noticed, on the monotonic clock."""

    def start(self, excluded: Collection[int] = ()) -> None:
        """Start the next attempt with the nodes that are there, from now on without those in `excluded`.

        Raises
        ------
        NoPlan : no port is free.
        """
        self._excluded |= set(excluded)
        alive = [number for number in self._session.alive if number not in self._excluded]
        ranks = assign_ranks(alive, self._size.training, self._ranks or None)
        code = self._failure.code if self._failure else EXIT_TOOL_FAILED
        if not ranks:
            self._end_run(f"{_nodes_text(len(alive))} left, and the run needs {self._size.training}", code)
            return
        if self._failures and (reason := end_reason(self._failures, self._max_failures)):
            causes = "; before that: ".join(failure.cause for failure in self._failures[:-3:-1])
            self._end_run(f"{reason} ({causes})", code)
            return
        self._number += 1
        if self._number > 1:
            self._log(
                f"attempt {self._number} starts with {_nodes_text(len(ranks))}{self._rank_changes(ranks)}"
            )
        elif spares := [self._session.node_name(number) for number in alive if number not in ranks]:
            self._log(f"{_nodes_text(len(ranks))} train; {', '.join(spares)} wait{'s' * (len(spares) == 1)}")
        self._ranks, self._started_at = ranks, time.monotonic()
        self._failure, self._is_cancelled = None, False
        self._fence(self._number)
        self._session.start_attempt(self._number, ranks)

    def check(self, *, stopped: bool) -> None:
        """React to what the nodes have reported; `stopped`: the run was asked to save and end."""
        session = self._session
        if self._is_over or not self._ranks:
            return
        if not session.reports and len(session.lost) == len(self._logged_losses) and self._failure is None:
            return  # no news; the rest costs work for every node
        self._log_losses()
        members = self._ranks.keys()
        # In the order of their arrival: the first failure decides about the exit code.
        codes = {number: report.code for number, report in session.reports.items() if number in members}
        lost = {number for number in members & session.lost.keys() if codes.get(number) not in GOOD}
        bad = {number: code for number, code in codes.items() if code not in GOOD}
        was_ended = self._failure is not None and self._is_cancelled
        if self._is_per_node and codes.get(0) in GOOD and not was_ended:
            self._end_after_head(lost, bad)
        elif (lost or bad) and self._failure is None:
            self.failed_at = time.monotonic()
            self._failure = FailedAttempt(
                cause=self._cause(lost, bad),
                position=session.run_positions[1] if session.run_positions else None,
                after_s=self.failed_at - self._started_at,
                code=EXIT_TOOL_FAILED if lost else next(iter(bad.values())),
            )
        if self._is_per_node and self._failure and 0 in bad and not self._is_cancelled:
            self._failure = dataclasses.replace(self._failure, code=bad[0])
        # Asked to stop, a node whose neighbour failed may still save.
        if self._failure and not self._is_cancelled and (lost or (not stopped and self._has_cause(bad))):
            self._is_cancelled = True
            session.send_all(EndAttempt(attempt=self._number, reason=self._failure.cause))
        if codes.keys() | lost != members:
            return
        if self._failure is None:
            code = EXIT_SAVED if EXIT_SAVED in codes.values() else 0
            session.send_all(EndRun(code=codes[0] if self._is_per_node else code))
            self._is_over = True
            return
        self._close_attempt(self._failure, lost, codes, stopped=stopped)

    def _end_after_head(self, lost: Collection[int], bad: Mapping[int, int]) -> None:
        """End the commands of the other nodes, since the head's has succeeded and its code counts."""
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
        """Start another attempt or end the run, now that this one is over on all nodes."""
        reported = [self._session.reports[number].position for number in codes]
        positions = [position for position in (failure.position, *reported) if position is not None]
        # A node that is lost meanwhile explains why the workers of others have failed.
        cause = self._cause(lost, {}) if lost else failure.cause
        last = dataclasses.replace(failure, cause=cause, position=max(positions, default=None))
        self._failures.append(last)
        if not stopped:
            self.start()
        elif EXIT_SAVED in codes.values():
            self._end_run("a stop was requested", EXIT_SAVED)
        else:
            code = codes[0] if self._is_per_node else max(codes.values())
            self._end_run("a stop was requested", failure.code if lost else code)

    def _has_cause(self, bad: Collection[int]) -> bool:
        """Return False for some seconds while the failed nodes only report that a rank elsewhere is gone."""
        failures = [self._session.reports[number].failure for number in bad]
        is_consequence = all(failure is not None and failure.after_peer for failure in failures)
        if self._is_per_node and 0 not in bad:
            is_consequence = True
        return not is_consequence or time.monotonic() - self.failed_at > PEER_FAILED_S

    def _log_losses(self) -> None:
        for number in self._session.lost.keys() - self._logged_losses:
            self._logged_losses.add(number)
            role = "" if number in self._ranks else ", a spare"
            self._log(f"lost {self._session.node_name(number)}{role}: {self._session.lost[number]}")

    def _cause(self, lost: Collection[int], bad: Mapping[int, int]) -> str:
        name, reasons = self._session.node_name, self._session.lost
        return describe_cause(
            {name(number): reasons[number] for number in sorted(lost)},
            {name(number): code for number, code in bad.items()},
        )

    def _end_run(self, reason: str, code: int) -> None:
        if self._max_failures or self._size.spares:  # else nobody expects another attempt
            self._log(f"no further attempt: {reason}")
        self._session.send_all(EndRun(code=code))
        self._is_over = True

    def _rank_changes(self, ranks: Mapping[int, int]) -> str:
        """Name the nodes that take another rank than before."""
        changed = [(rank, number) for number, rank in ranks.items() if self._ranks.get(number) != rank]
        return "".join(
            f"; {self._session.node_name(number)} takes rank {rank}" for rank, number in sorted(changed)
        )


class StartWatch:
    """The start of one attempt until all ranks are connected, as the head sees it.

    Nodes wait in torchrun's rendezvous, and ranks in init_process_group, for each other's keys in torch's
    store. Everybody who reaches its port can delete them, and torch would wait for up to 30 minutes.
    """

    def __init__(self, session: HeadSession, limit_s: float) -> None:
        self._session, self._limit_s = session, max(limit_s, MIN_START_S)
        self._phase = ""
        self._since = 0.0

    def stalled(self) -> str:
        """Return why the attempt has to end; empty: it has not, or not yet.

        The time counts while every node is in the rendezvous or past it: torchrun of a node that is not may
        still be read from a slow file system. In the same way, it counts while every rank tries to connect.
        """
        phases = self._session.phases
        phase = ""
        if RENDEZVOUS in phases.values() and STARTING not in phases.values():
            phase = RENDEZVOUS
        elif all(value == CONNECTING for value in phases.values()):
            phase = CONNECTING
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._since = phase, now
        if not phase or now - self._since < self._limit_s:
            return ""
        waiting = [self._session.node_name(number) for number, value in phases.items() if value == phase]
        names = ", ".join(waiting[:MAX_NAMED])
        if len(waiting) > MAX_NAMED:
            names += f" and {len(waiting) - MAX_NAMED} more"
        problem = (
            f"the ranks did not connect within {self._limit_s:g} s (--rollcall-timeout); all of them are in "
            f"init_process_group: {names}"
        )
        if phase == RENDEZVOUS:
            problem = (
                f"torchrun's rendezvous did not complete within {self._limit_s:g} s (--rollcall-timeout); "
                f"without workers: {names}"
            )
        return (
            f"{problem}. They wait for torch's store on port {self._session.port} of the head: a firewall "
            "blocks it, or another program deletes its keys, since the store has no authentication. Start "
            "the job again: a new job gets another port"
        )


def assign_ranks(
    alive: Sequence[int], nnodes: int, previous: Mapping[int, int] | None = None
) -> Mapping[int, int]:
    """Return the node ranks of the next attempt by number; empty where too few nodes are there.

    A node keeps its rank of the attempt before, and a rank that is free goes to a spare.

    Parameters
    ----------
    alive : numbers of the nodes that are there, in order.
    nnodes : nodes that train.
    previous : node ranks by number of the attempt before; None: this is the first one.
    """
    if len(alive) < nnodes:
        return {}
    ranks = {number: rank for number, rank in (previous or {}).items() if number in alive}
    free = sorted(set(range(nnodes)) - set(ranks.values()))
    return ranks | dict(zip(sorted(set(alive) - ranks.keys()), free, strict=False))


def end_reason(failures: Sequence[FailedAttempt], max_failures: int) -> str:
    """Return why the run ends after the last of `failures`; empty: a further attempt may help."""
    if len(failures) > max_failures:
        number = f"{max_failures} failure" + ("s" if max_failures != 1 else "")
        return f"--max-failures {max_failures}" + (f": the run survives {number}" if max_failures else "")
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
    """Return the cause of a failure: nodes that are lost with the reason, else the first code of a node.

    A node whose connection has closed explains the failures of the others, whose workers waited for its own.
    """
    if lost:
        return "; ".join(f"lost {node}: {reason}" for node, reason in lost.items())
    node, code = next(iter(codes.items()))
    try:
        return f"{node} ended with exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"{node} ended with exit code {code}"


def _nodes_text(nodes: int) -> str:
    return f"{nodes} node" + ("s" if nodes != 1 else "")
