"""Who takes part in the next attempt, and whether there is one. Pure functions of what the head knows.

A node has a number from the roll call, which never changes, and a node rank in an attempt. The head is number
0, and rank 0 of every attempt.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.schedulers.placement import Size

QUICK_S = 60.0
"""A second failure so soon after a start ends the run, where no worker has noted its progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """The end of an attempt that did not finish."""

    cause: str
    """The node, and what the head has seen of it: a lost connection, silence, or an exit code."""
    place: int | None
    """Furthest place of a worker (launch/hang_watch.py); None: no worker has noted one."""
    after_s: float
    """Seconds from the attempt's start."""

    @property
    def step(self) -> int | None:
        """The step at which the furthest worker was; None where none is known, or before the first step."""
        return None if self.place is None or self.place < 0 else (self.place + 1) // 2


def assigned(
    alive: Sequence[int], size: Size, counts: Collection[int] = (), before: Mapping[int, int] | None = None
) -> Mapping[int, int]:
    """Return the node ranks of the next attempt by number; empty where too few nodes are there.

    A node keeps its rank of the attempt before. A rank that is free goes to a node whose own rank no longer
    exists, else to a spare. So with a spare all other ranks stay as they were.

    Parameters
    ----------
    alive : numbers of the nodes that are there, in order.
    counts : numbers of nodes that the program can go on with; empty: any.
    before : node ranks by number of the attempt before; None: this is the first one.
    """
    allowed = [
        count for count in range(size.least, min(size.most, len(alive)) + 1) if not counts or count in counts
    ]
    if not allowed:
        return {}
    nnodes = allowed[-1]
    kept = {number: rank for number, rank in (before or {}).items() if number in alive and rank < nnodes}
    free = sorted(set(range(nnodes)) - set(kept.values()))
    # Nodes that have trained come first: their host memory and caches hold the data.
    waiting = sorted(set(alive) - kept.keys(), key=lambda number: (number not in (before or {}), number))
    return kept | dict(zip(waiting, free, strict=False))


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
