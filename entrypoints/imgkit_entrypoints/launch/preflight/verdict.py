"""Which measurements a preflight takes, in which order, and the verdict on their figures.

`stage` orders the measurements: each node alone, pairs with changing partners, all nodes together. `judge`
says which node is an outlier, and which link between two good nodes; `Report` prints it. Pure functions.

A figure is an outlier if its cost is above the median of all nodes in two ways: by more than `DEVIATIONS`
median absolute deviations, and by the metric's least share. The first keeps the usual spread of a machine
out, the second keeps out what is exact but does not matter. The cost of a rate is its inverse, a time: a rate
cannot fall below 0, so it could never be far from a median with a wide spread.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from imgkit_entrypoints import __version__
from imgkit_entrypoints.schedulers import hostlist

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


DEVIATIONS = 5.0
LEAST_NODES = 4
"""No median of fewer nodes says what is usual, so a preflight only reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure that every node has."""

    name: str
    unit: str
    share: float
    """Least share of the median cost by which an outlier is worse."""
    higher: bool = True
    """Higher is better."""

    def cost(self, value: float) -> float:
        """Return `value` so that lower is better."""
        if not self.higher:
            return value
        return 1 / value if value > 0 else math.inf


COMPUTE, NETWORK, STORAGE = 0.10, 0.25, 0.50
"""Least shares: others also use the network, and the speed of a disk depends on what is on it."""
NODE_METRICS = (
    Metric(name="matmul", unit="TFLOP/s", share=COMPUTE),
    Metric(name="memory", unit="GB/s", share=COMPUTE),
    Metric(name="disk", unit="MB/s", share=STORAGE),
)
PAIR_METRICS = (
    Metric(name="latency", unit="us", share=NETWORK, higher=False),
    Metric(name="bandwidth", unit="GB/s", share=NETWORK),
)
METRICS = NODE_METRICS + PAIR_METRICS


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFigures:
    """What one node has measured alone."""

    rank: int
    host: str
    figures: Mapping[str, float] = field(default_factory=dict)
    """Values by the name of their metric; what could not be measured is absent."""
    broken: str = ""
    """Why the node is out without any figure: it hangs, its measuring process ended, or it is gone."""
    gone: bool = False
    """Its node agent has left: it cannot take part, whatever the others measure."""
    failed: tuple[str, ...] = ()
    """Checks of dist-doctor that failed."""
    notes: tuple[str, ...] = ()
    """What is worth a line, and condemns nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigures:
    """What two nodes have measured together."""

    nodes: tuple[int, int]
    figures: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    """Why there are no figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedNode:
    """A node with its figures; of a pair's metric, the best with any partner."""

    rank: int
    host: str
    figures: Mapping[str, float]
    reasons: tuple[str, ...]
    """Why it is an outlier; empty for a good node."""
    loss: float
    """How much worse it is than the others: 2 is half as fast; infinite: no figure says."""
    gone: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict of a preflight."""

    nodes: tuple[JudgedNode, ...]
    links: tuple[str, ...]
    """Slow links between nodes that are not slow themselves, as sentences."""
    medians: Mapping[str, float]

    @property
    def outliers(self) -> tuple[JudgedNode, ...]:
        """The bad nodes, the worst first."""
        bad = [node for node in self.nodes if node.reasons]
        return tuple(sorted(bad, key=lambda node: (-node.loss, node.rank)))

    @property
    def condemned(self) -> tuple[JudgedNode, ...]:
        """The outliers that must not take part: none where too few nodes were compared."""
        return tuple(node for node in self.outliers if node.gone or len(self.nodes) >= LEAST_NODES)


def judge(nodes: Sequence[NodeFigures], pairs: Sequence[PairFigures]) -> Judgement:
    """Judge all nodes and pairs of a preflight."""
    whole = {node.rank: _finite({**node.figures, **_best(node.rank, pairs)}) for node in nodes}
    limits = {
        metric.name: limit
        for metric in METRICS
        if (limit := _Limit.of(metric, [found.get(metric.name) for found in whole.values()]))
    }
    judged = []
    for node in nodes:
        found = whole[node.rank]
        reasons, loss = [node.broken] if node.broken else [], math.inf
        if not node.broken:
            reasons += [f"dist-doctor: {text}" for text in node.failed]
            slow = [limit for limit in limits.values() if limit.exceeded(found.get(limit.metric.name))]
            reasons += [limit.sentence(found[limit.metric.name]) for limit in slow]
            reasons += _missing(node.rank, found, limits, pairs)
            if len(reasons) == len(slow):
                losses = (limit.loss(found[limit.metric.name]) for limit in slow)
                loss = max(losses, default=1.0)
        one = JudgedNode(
            rank=node.rank,
            host=node.host,
            figures=found,
            reasons=tuple(reasons),
            loss=loss,
            gone=node.gone,
            notes=node.notes,
        )
        judged.append(one)
    hosts = {one.rank: one.host for one in judged}
    good = {one.rank for one in judged if not one.reasons}
    between = [pair for pair in pairs if good.issuperset(pair.nodes)]
    return Judgement(
        nodes=tuple(judged),
        links=tuple(_links(between, hosts)),
        medians={name: limit.median for name, limit in limits.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """What is usual for one metric."""

    metric: Metric
    median: float
    cost: float
    """The median cost."""
    deviation: float
    """Median absolute deviation of the costs."""

    @classmethod
    def of(cls, metric: Metric, values: Sequence[float | None]) -> _Limit | None:
        """Return the limit; None where fewer than half of the nodes have a value, or most have nothing."""
        known = [value for value in values if value is not None]
        if not known or 2 * len(known) < len(values):
            return None
        costs = [metric.cost(value) for value in known]
        cost = statistics.median(costs)
        if not 0 < cost < math.inf:
            return None
        deviation = statistics.median(abs(one - cost) for one in costs)
        return cls(metric=metric, median=statistics.median(known), cost=cost, deviation=deviation)

    def exceeded(self, value: float | None) -> bool:
        """Whether `value` is an outlier."""
        if value is None:
            return False
        above = self.metric.cost(value) - self.cost
        return above > DEVIATIONS * self.deviation and above > self.metric.share * self.cost

    def loss(self, value: float) -> float:
        """Return the factor between the cost of `value` and the median cost."""
        return self.metric.cost(value) / self.cost

    def sentence(self, value: float) -> str:
        """Say how bad `value` is."""
        loss, unit = self.loss(value), self.metric.unit
        times = f"{loss:.3g} times worse" if math.isfinite(loss) else "nothing"
        return f"{self.metric.name} {value:.3g} {unit}, {times} than the median of {self.median:.3g}"


def better(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the better value of each metric, where both have some."""
    found = {**one, **other}
    for metric in METRICS:
        if metric.name in one and metric.name in other:
            found[metric.name] = min(one[metric.name], other[metric.name], key=metric.cost)
    return found


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _best(rank: int, pairs: Iterable[PairFigures]) -> dict[str, float]:
    """Return the best that node `rank` reached with a partner: only one that is slow with all is slow."""
    mine = [pair.figures for pair in pairs if rank in pair.nodes]
    found: dict[str, float] = {}
    for figures in mine:
        found = better(found, figures)
    return found


def _missing(
    rank: int, found: Mapping[str, float], limits: Mapping[str, _Limit], pairs: Sequence[PairFigures]
) -> Iterator[str]:
    """Say what most nodes have measured and this one could not."""
    for metric in NODE_METRICS:
        if metric.name in limits and metric.name not in found:
            yield f"{metric.name}: it could not be measured"
    errors = [pair.error for pair in pairs if rank in pair.nodes]
    if len(errors) > 1 and all(errors):
        yield f"it exchanges data with none of {len(errors)} partners: {errors[0]}"


def _links(pairs: Sequence[PairFigures], hosts: Mapping[int, str]) -> Iterator[str]:
    """Name the links between good nodes that are slow, or carry nothing."""
    usual = [
        limit
        for metric in PAIR_METRICS
        if (limit := _Limit.of(metric, [pair.figures.get(metric.name) for pair in pairs]))
    ]
    for pair in pairs:
        name = " - ".join(hosts[rank] for rank in pair.nodes)
        if pair.error:
            yield f"{name}: {pair.error}"
        for limit in usual:
            value = pair.figures.get(limit.metric.name)
            if value is not None and limit.exceeded(value):
                yield f"{name}: {limit.sentence(value)} of all links"


SCHEMA = 1
MOST_ROWS = 64
"""Nodes up to which the table has a row for each; beyond, only for outliers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A finished preflight."""

    judgement: Judgement
    seconds: float
    all_reduce_GBps: float | None
    """Bus bandwidth of all nodes together; None where it could not be measured."""
    left_out: tuple[int, ...]
    """Node ranks that take no part in the run."""
    passed: bool
    scheduler: str

    @property
    def exclude(self) -> str:
        """The hosts of all outliers, in the words of the scheduler."""
        hosts = [node.host for node in self.judgement.outliers]
        folded = hostlist.folded(hosts) if hosts else ""
        return f"--exclude={folded}" if folded and self.scheduler == "slurm" else folded

    @property
    def way(self) -> str:
        """The same as the end of a sentence that begins with "start again with"."""
        return self.exclude if self.exclude.startswith("--") else f"other hosts than {self.exclude}"

    def table(self) -> list[str]:
        """Return the lines with the figures of all nodes, and below them what is wrong."""
        nodes = self.judgement.nodes
        shown = nodes if len(nodes) <= MOST_ROWS else [node for node in nodes if node.reasons]
        rows = [("node", *(metric.name for metric in METRICS)), ("", *(metric.unit for metric in METRICS))]
        rows += [
            (_name(node, shown), *_cells(node.figures.get(metric.name) for metric in METRICS))
            for node in shown
        ]
        medians = self.judgement.medians
        rows.append((f"median of {len(nodes)}", *_cells(medians.get(metric.name) for metric in METRICS)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]
        lines += [
            f"OUTLIER {_name(node, shown)}: {why}" for node in self.judgement.outliers for why in node.reasons
        ]
        lines += [f"SLOW LINK {text}" for text in self.judgement.links]
        lines += self._notes()
        if self.all_reduce_GBps is not None:
            lines.append(
                f"all nodes together: all_reduce with {self.all_reduce_GBps:.3g} GB/s (bus bandwidth)"
            )
        return [*lines, self.summary]

    def _notes(self) -> list[str]:
        """Return each note once, with the nodes that have it."""
        found: dict[str, list[str]] = {}
        for node in self.judgement.nodes:
            for note in node.notes:
                found.setdefault(note, []).append(node.host)
        nodes = len(self.judgement.nodes)
        return [
            f"note: {'all nodes' if len(hosts) == nodes > 1 else hostlist.folded(hosts)}: {note}"
            for note, hosts in found.items()
        ]

    @property
    def summary(self) -> str:
        """The result in one line."""
        nodes, outliers = len(self.judgement.nodes), self.judgement.outliers
        said = f"preflight of {nodes} node{'s' * (nodes > 1)} in {self.seconds:.0f} s: "
        if not outliers:
            return said + "no outlier"
        said += f"{len(outliers)} outlier{'s' * (len(outliers) > 1)}, {self.exclude}"
        if self.left_out:
            return f"{said}; the run starts without {'them' if len(outliers) > 1 else 'it'}"
        if self.passed:
            return f"{said}; reported only: fewer than {LEAST_NODES} nodes have no meaningful median"
        return said

    def to_json(self) -> str:
        """Return the content of ``preflight.json``."""
        found = {
            "schema": SCHEMA,
            "imgkit": __version__,
            "seconds": round(self.seconds, 1),
            "passed": self.passed,
            "units": {metric.name: metric.unit for metric in METRICS},
            "medians": dict(self.judgement.medians),
            "all_reduce_GBps": self.all_reduce_GBps,
            "nodes": [
                {
                    "node_rank": node.rank,
                    "host": node.host,
                    "outlier": bool(node.reasons),
                    "left_out": node.rank in self.left_out,
                    "figures": dict(node.figures),
                    "reasons": list(node.reasons),
                    "loss": node.loss if math.isfinite(node.loss) else None,
                    "notes": list(node.notes),
                }
                for node in self.judgement.nodes
            ],
            "slow_links": list(self.judgement.links),
            "exclude": self.exclude,
        }
        return json.dumps(found, indent=2, allow_nan=False) + "\n"


def _name(node: JudgedNode, nodes: Sequence[JudgedNode]) -> str:
    """Return the host, with the node's rank where several nodes have its name."""
    twice = sum(other.host == node.host for other in nodes) > 1
    return f"{node.host} (node {node.rank})" if twice or not node.host else node.host


def _cells(values: Iterable[float | None]) -> list[str]:
    return ["-" if value is None else f"{value:.3g}" for value in values]
