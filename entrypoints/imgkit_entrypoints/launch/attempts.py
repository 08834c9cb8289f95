"""The head's decisions about attempts: when one is over, whether another one starts, and with which nodes.

Nodes report to the head, and nobody else decides. `Attempts` keeps the state; `assigned`, `verdict` and
`cause` are the rules, pure functions of what the head knows. A node has a number from the roll call,
which never changes, and a node rank in an attempt. The head is number 0, and rank 0 of every attempt.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.errors import EXIT_SAVED, EXIT_TOOL_FAILED
from imgkit_entrypoints.rollcall.messages import RENDEZVOUS, STARTING
from imgkit_entrypoints.rollcall.session import HeadSession
from imgkit_entrypoints.schedulers.placement import Size

GOOD = (0, EXIT_SAVED)
NAMED = 8
"""Most nodes that one message names."""
LEAST_S = 10.0
"""Least time of a rendezvous: a node that finds no store yet calls again after seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trouble:
    """The first sign that an attempt fails."""

    cause: str
    after_s: float
    """Seconds from the attempt's start."""
    place: int | None
    code: int
    """Exit code of the run if this failure ends it."""


class Attempts:
    """All attempts of a run, as the head starts and ends them."""

    def __init__(
        self,
        roll: HeadSession,
        size: Size,
        *,
        max_failures: int,
        say: Callable[[str], None],
        fence: Callable[[int], None],
    ) -> None:
        """`fence` is called with an attempt's number before it starts."""
        self._roll, self._size, self._most = roll, size, max_failures
        self._say, self._fence = say, fence
        self._number = 0
        self._ranks: Mapping[int, int] = {}
        self._began = 0.0
        self._failures: list[FailedAttempt] = []
        self._trouble: _Trouble | None = None
        self._left_out: set[int] = set()
        self._told: set[int] = set()
        """Lost nodes that are reported."""
        self._over = False
        self.noticed = 0.0
        """Time at which the last failure was noticed, on the monotonic clock."""

    def start(self, but: Collection[int] = ()) -> None:
        """Start the next attempt with the nodes that are there, from now on without the numbers in `but`.

        Raises
        ------
        NoPlan : no port is free.
        """
        self._left_out |= set(but)
        alive = [number for number in self._roll.alive if number not in self._left_out]
        ranks = assigned(alive, self._size.training, self._ranks or None)
        if not ranks:
            code = self._trouble.code if self._trouble else EXIT_TOOL_FAILED
            self._end(f"{_nodes(len(alive))} left, and the run needs {self._size.training}", code)
            return
        if self._failures and (why := verdict(self._failures, self._most)):
            causes = "; before that: ".join(one.cause for one in self._failures[:-3:-1])
            self._end(f"{why} ({causes})", self._trouble.code if self._trouble else EXIT_TOOL_FAILED)
            return
        self._number += 1
        if self._number > 1:
            self._say(f"attempt {self._number} starts with {_nodes(len(ranks))}{self._changes(ranks)}")
        elif waiting := [number for number in alive if number not in ranks]:
            self._say(f"{_nodes(len(ranks))} train; {self._named(waiting)} wait{'s' * (len(waiting) == 1)}")
        self._ranks, self._began, self._trouble = ranks, time.monotonic(), None
        self._fence(self._number)
        self._roll.start_attempt(self._number, ranks)

    def look(self, *, stopped: bool) -> None:
        """React to what the nodes have reported; `stopped`: the run was asked to save and end."""
        if self._over or not self._ranks:
            return
        if not self._roll.reports and len(self._roll.lost) == len(self._told) and self._trouble is None:
            return  # no news; the rest costs work for every node
        lost = {number: why for number, why in self._roll.lost.items() if number not in self._told}
        for number, why in lost.items():
            self._told.add(number)
            who = "" if number in self._ranks else ", a spare"
            self._say(f"lost {self._roll.node_name(number)}{who}: {why}")
        members = self._ranks.keys()
        codes = {
            number: self._roll.reports[number].code for number in members if number in self._roll.reports
        }
        gone = {number for number in members & self._roll.lost.keys() if codes.get(number) not in GOOD}
        bad = {number: code for number, code in codes.items() if code not in GOOD}
        if (gone or bad) and self._trouble is None:
            self._note(gone, bad, stopped=stopped)
        if codes.keys() | gone != members:
            return
        if self._trouble is None:
            self._roll.end_run(EXIT_SAVED if EXIT_SAVED in codes.values() else 0)
            self._over = True
        else:
            self._decide(gone, codes, stopped=stopped)

    def _note(self, gone: Collection[int], bad: Mapping[int, int], *, stopped: bool) -> None:
        everyone, self.noticed = self._roll.run_positions, time.monotonic()
        self._trouble = _Trouble(
            cause=self._cause(gone, bad),
            after_s=self.noticed - self._began,
            place=everyone[1] if everyone else None,
            code=EXIT_TOOL_FAILED if gone else next(iter(bad.values())),
        )
        if gone or not stopped:  # a node that saves may still end well
            self._roll.end_attempt(self._trouble.cause)

    def _decide(self, gone: Collection[int], codes: Mapping[int, int], *, stopped: bool) -> None:
        """Start another attempt or end the run, now that this one is over on all nodes."""
        assert self._trouble is not None  # noqa: S101 - the caller branches on it
        reports = [self._roll.reports[number] for number in codes]
        places = [one.position for one in reports if one.position is not None]
        if self._trouble.place is not None:
            places.append(self._trouble.place)
        # A node that is lost meanwhile explains why the workers of others have failed.
        cause = self._cause(gone, {}) if gone else self._trouble.cause
        place = max(places, default=None)
        self._failures.append(FailedAttempt(cause=cause, place=place, after_s=self._trouble.after_s))
        if stopped:
            saved = EXIT_SAVED in codes.values()
            self._end("a stop was requested", EXIT_SAVED if saved else self._trouble.code)
        else:
            self.start()

    def _cause(self, gone: Collection[int], bad: Mapping[int, int]) -> str:
        named, why = self._roll.node_name, self._roll.lost
        return cause(
            {named(number): why[number] for number in sorted(gone)},
            {named(number): code for number, code in bad.items()},
        )

    def _end(self, why: str, code: int) -> None:
        self._say(f"no further attempt: {why}")
        self._roll.end_run(code)
        self._over = True

    def _changes(self, ranks: Mapping[int, int]) -> str:
        """Say which nodes take part in another place than before."""
        changed = [(rank, number) for number, rank in ranks.items() if self._ranks.get(number) != rank]
        parts = [f"{self._roll.node_name(number)} takes rank {rank}" for rank, number in sorted(changed)]
        return "".join(f"; {part}" for part in parts)

    def _named(self, numbers: Collection[int]) -> str:
        return ", ".join(self._roll.node_name(number) for number in numbers)


class RendezvousWatch:
    """Torchrun's rendezvous of one attempt (start_up.py), as the head sees it."""

    def __init__(self, roll: HeadSession, limit_s: float) -> None:
        self._roll, self._limit_s = roll, max(limit_s, LEAST_S)
        self._since: float | None = None

    def stalled(self) -> str:
        """Return why the attempt has to end; empty: it has not, or not yet.

        The time counts while every node is in the rendezvous or past it: torchrun of a node that is not may
        still be read from a slow file system.
        """
        phases = self._roll.phases
        waiting = [number for number, phase in phases.items() if phase == RENDEZVOUS]
        if not waiting or STARTING in phases.values():
            self._since = None
            return ""
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since < self._limit_s:
            return ""
        names = ", ".join(self._roll.node_name(number) for number in waiting[:NAMED])
        more = f" and {len(waiting) - NAMED} more" if len(waiting) > NAMED else ""
        return (
            f"torchrun's rendezvous did not complete within {self._limit_s:g} s (--rollcall-timeout); "
            f"without workers: {names}{more}. They wait for torch's store on port {self._roll.port} of the "
            "head: a firewall blocks it, or another program deletes its keys, since the store has no "
            "authentication. Start the job again: a new job gets another port"
        )


def _nodes(count: int) -> str:
    return f"{count} node" + ("s" if count != 1 else "")


QUICK_S = 60.0
"""A second failure so soon after a start ends the run, where no worker has noted its progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """The end of an attempt that did not finish."""

    cause: str
    """The node, and what the head has seen of it: a lost connection, silence, or an exit code."""
    place: int | None
    """Furthest place of a worker (launch/watchdog.py); None: no worker has noted one."""
    after_s: float
    """Seconds from the attempt's start."""

    @property
    def step(self) -> int | None:
        """The step at which the furthest worker was; None where none is known, or before the first step."""
        return None if self.place is None or self.place < 0 else (self.place + 1) // 2


def assigned(alive: Sequence[int], nnodes: int, before: Mapping[int, int] | None = None) -> Mapping[int, int]:
    """Return the node ranks of the next attempt by number; empty where too few nodes are there.

    A node keeps its rank of the attempt before, and a rank that is free goes to a spare.

    Parameters
    ----------
    alive : numbers of the nodes that are there, in order.
    nnodes : nodes that train.
    before : node ranks by number of the attempt before; None: this is the first one.
    """
    if len(alive) < nnodes:
        return {}
    kept = {number: rank for number, rank in (before or {}).items() if number in alive}
    free = sorted(set(range(nnodes)) - set(kept.values()))
    return kept | dict(zip(sorted(set(alive) - kept.keys()), free, strict=False))


def verdict(failures: Sequence[FailedAttempt], most: int) -> str:
    """Return why the run ends after the last of `failures`; empty: a further attempt may help.

    Parameters
    ----------
    most : failures that the run survives (``--max-failures``).
    """
    if len(failures) > most:
        times = f"{most} failure" + ("s" if most != 1 else "")
        return f"--max-failures {most}: the run survives {times}" if most else "--max-failures 0"
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


def cause(lost: Mapping[str, str], codes: Mapping[str, int]) -> str:
    """Return the cause of a failure: nodes that are lost with the reason, else the first code of a node.

    A node whose connection has closed explains the failures of the others, whose workers waited for its own.
    """
    if lost:
        return "; ".join(f"lost {node}: {why}" for node, why in lost.items())
    node, code = next(iter(codes.items()))
    return f"{node} ended with {_code(code)}"


def _code(code: int) -> str:
    try:
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    except ValueError:
        return f"exit code {code}"
