"""The order of the stages, and who measures with whom: each node alone, pairs with changing partners, all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["alone", "pair", "all"]
ROUNDS = 3
"""Rounds of pairs: with three partners, a slow node differs from a slow link."""
START_S, ALONE_S, PAIR_S, ALL_S = 22, 6, 6, 8
"""Limits of the stages, 54 s together. The first includes the start of the measuring processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the preflight."""

    number: int
    """Counts the stages of a start from 0."""
    kind: Kind
    groups: tuple[tuple[int, ...], ...]
    """Node ranks that measure together; a group's first node leads it."""
    limit_s: int
    """Seconds after which a node that has not answered is out."""


def stage(
    number: int, nodes: Sequence[int], *, absent: Collection[int] = (), suspects: Collection[int] = ()
) -> Stage | None:
    """Return the stage with this number for node ranks `nodes`; None after the last one.

    Parameters
    ----------
    absent : nodes that hang or are gone. They keep their seats, so that no two nodes meet twice.
    suspects : nodes that measure alone a second time: a busy moment seldom comes twice.
    """
    present = tuple(node for node in nodes if node not in absent)
    if number < 2:
        alone = tuple((node,) for node in present if number == 0 or node in suspects)
        return Stage(number=number, kind="alone", groups=alone, limit_s=ALONE_S if number else START_S)
    turn, rounds = number - 2, min(ROUNDS, len(nodes) + len(nodes) % 2 - 1) if len(nodes) > 1 else 0
    if turn < rounds:
        met = (tuple(nodes[seat] for seat in seats) for seats in pairs(len(nodes), turn))
        groups = tuple(pair for pair in met if not set(pair) & set(absent))
        return Stage(number=number, kind="pair", groups=groups, limit_s=PAIR_S)
    if turn == rounds and len(present) > 1:
        return Stage(number=number, kind="all", groups=(present,), limit_s=ALL_S)
    return None


def pairs(nodes: int, turn: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of one round among nodes 0 to `nodes` - 1; with an odd number, one rests.

    The circle method: one seat stays, the others turn. All rounds together pair each two nodes once.
    """
    wheel = nodes + nodes % 2 - 1
    if wheel < 1:
        return ()
    turned = turn % wheel
    steps = range(1, (wheel + 1) // 2)
    met = [(turned, wheel), *(((turned + step) % wheel, (turned - step) % wheel) for step in steps)]
    return tuple((min(pair), max(pair)) for pair in met if max(pair) < nodes)
