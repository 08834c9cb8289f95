"""The verdict on the figures of a preflight: which nodes and which links are slow. Pure functions.

A node is an outlier if it hangs, if a check of dist-doctor fails, if its matrix products are more than
`TOLERANCE` slower than the median of all nodes, or if it reaches none of its partners. A slow link does not
say which of its two nodes is slow, so it is reported, and no node is left out for it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import count_text
from imgkit_entrypoints.schedulers import hostlist

TOLERANCE = 0.25
"""Part of the median by which a node or a link may be slower: 25 %."""
MIN_NODES = 4
"""With fewer nodes, the median does not show what is usual, so a preflight only reports outliers."""
MAX_ROWS = 64
"""Largest number of nodes for which the table has a row for each.

With more nodes, it has only the outliers.
"""
# Version of the JSON document.
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """The measurements of one node, and its errors."""

    rank: int
    host: str
    matmul_TFLOPs: float | None = None
    """Speed of matrix products, or None if it was not measured."""
    error: str = ""
    """Why the node takes no further part: it hangs, its measuring process has ended, or it is lost."""
    is_gone: bool = False
    """True if the node agent is lost, so that the node cannot take part in the run at all."""
    failed: tuple[str, ...] = ()
    """Checks of dist-doctor that failed."""
    notes: tuple[str, ...] = ()
    """Findings that are printed, but do not make the node an outlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkResult:
    """The measurement of the link between two nodes."""

    nodes: tuple[int, int]
    """Ranks of the two nodes."""
    GBps: float | None = None
    """Bandwidth, or None if there was an error."""
    error: str = ""
    """Why there is no bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outliers among all nodes, and the slow links."""

    nodes: Sequence[NodeResult]
    links: Sequence[LinkResult]
    median_TFLOPs: float | None
    reasons: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Reasons why a node is an outlier, by its rank. The slowest node comes first."""
    slow_links: tuple[str, ...] = ()
    """A line for each slow link, such as ``n1 - n2: 3.1 GB/s, 40 % below the median of 5.2``."""

    @property
    def outliers(self) -> tuple[NodeResult, ...]:
        """Return the outliers, the slowest first."""
        by_rank = {node.rank: node for node in self.nodes}
        return tuple(by_rank[rank] for rank in self.reasons)

    @property
    def excluded(self) -> tuple[NodeResult, ...]:
        """Return the outliers that must not take part. With few nodes, these are only the lost ones."""
        return tuple(node for node in self.outliers if node.is_gone or len(self.nodes) >= MIN_NODES)


def judge(nodes: Sequence[NodeResult], links: Sequence[LinkResult]) -> Verdict:
    """Judge all nodes and links of a preflight: find the outliers and the slow links.

    Links of outliers are left out, because a slow node makes its links slow as well.
    """
    median = _median_TFLOPs(nodes)
    reasons = {}
    for node in sorted(nodes, key=lambda node: (node.matmul_TFLOPs or 0.0, node.rank)):
        node_reasons = tuple(_outlier_reasons(node, median, links))
        if node_reasons:
            reasons[node.rank] = node_reasons
    links_between_good_nodes = [link for link in links if reasons.keys().isdisjoint(link.nodes)]
    hosts = {node.rank: node.host for node in nodes}
    return Verdict(
        nodes=nodes,
        links=links,
        median_TFLOPs=median,
        reasons=reasons,
        slow_links=tuple(_slow_links(links_between_good_nodes, hosts)),
    )


def _median_TFLOPs(nodes: Sequence[NodeResult]) -> float | None:
    """Return the median speed of the nodes, or None if most of them could not measure it.

    A few measured nodes do not show what is usual, so no node can be compared with their median.
    """
    rates = [node.matmul_TFLOPs for node in nodes if node.matmul_TFLOPs is not None]
    # Fewer than half of the nodes could measure it.
    if not rates or 2 * len(rates) < len(nodes):
        return None
    return statistics.median(rates)


def _outlier_reasons(node: NodeResult, median: float | None, links: Sequence[LinkResult]) -> Iterator[str]:
    """Yield the reasons why `node` is an outlier. If there is no reason, the node is not an outlier.

    `median` is the median speed of all nodes, or None if it is unknown.
    """
    if node.error:
        yield node.error
        return
    yield from (f"dist-doctor: {text}" for text in node.failed)
    if median and node.matmul_TFLOPs is None:
        yield "matrix products could not be measured"
    elif median and node.matmul_TFLOPs is not None and _is_slow(node.matmul_TFLOPs, median):
        yield f"matmul {node.matmul_TFLOPs:.3g} TFLOP/s, {_compare_with_median(node.matmul_TFLOPs, median)}"
    # One broken link does not show which of its nodes is at fault, but several without a good one do.
    errors = [link.error for link in links if node.rank in link.nodes]
    if len(errors) > 1 and all(errors):
        yield f"it exchanges data with none of {len(errors)} partners: {errors[0]}"


def _slow_links(links: Sequence[LinkResult], hosts: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each link that is broken, or slower than the median by more than `TOLERANCE`.

    `hosts` has the host of each node by rank, since a link only names the ranks of its two nodes.
    """
    rates = [link.GBps for link in links if link.GBps is not None]
    median = statistics.median(rates) if rates else 0.0
    for link in links:
        name = " - ".join(hosts[rank] for rank in link.nodes)
        if link.error:
            yield f"{name}: {link.error}"
        elif link.GBps is not None and _is_slow(link.GBps, median):
            yield f"{name}: {link.GBps:.3g} GB/s, {_compare_with_median(link.GBps, median)}"


def _is_slow(rate: float, median: float) -> bool:
    return rate < (1 - TOLERANCE) * median


def _compare_with_median(rate: float, median: float) -> str:
    return f"{100 * (1 - rate / median):.0f} % below the median of {median:.3g}"


def pair_up(nodes: int, turn: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of nodes that measure together in round number `turn`, among nodes 0 to `nodes` - 1.

    This is the circle method of tournaments: one seat stays, and the others turn around it. All rounds
    together pair each two nodes once. With four nodes, round 0 is ``(0, 3), (1, 2)`` and round 1 is ``(1, 3),
    (0, 2)``. With an odd number of nodes, one node has no partner in each round.
    """
    if nodes < 2:
        return ()
    turning_seats = nodes if nodes % 2 else nodes - 1
    first = turn % turning_seats
    pairs = [(first, turning_seats)]  # the seat that stays has the number after theirs
    for step in range(1, (turning_seats + 1) // 2):
        pairs.append(((first + step) % turning_seats, (first - step) % turning_seats))
    # With an odd number of nodes, nobody has the seat that stays.
    return tuple((min(pair), max(pair)) for pair in pairs if max(pair) < nodes)


class _FigureRow(NamedTuple):
    """A row of the report's table, as texts."""

    name: str
    matmul: str
    bandwidth: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of a finished preflight, as a table for people and as JSON."""

    verdict: Verdict
    seconds: float
    """Time that the preflight took."""
    left_out: tuple[int, ...]
    """Ranks of the nodes that take no part in the run."""
    passed: bool
    """True if the run starts."""
    scheduler: str

    @property
    def exclude(self) -> str:
        """Return the hosts of all outliers: under Slurm ``--exclude=n[3-4]``, else ``n[3-4]``."""
        hosts = [node.host for node in self.verdict.outliers]
        folded = hostlist.fold_hosts(hosts) if hosts else ""
        if folded and self.scheduler == "slurm":
            return f"--exclude={folded}"
        return folded

    def table(self) -> list[str]:
        """Return the lines of the report: a table with all figures, then outliers, slow links and notes.

        An outlier is a node that is broken, or much slower than the median.
        """
        verdict = self.verdict
        lines = self._figure_lines()
        for node in verdict.outliers:
            lines += [f"OUTLIER {self._name(node)}: {reason}" for reason in verdict.reasons[node.rank]]
        lines += [f"SLOW LINK {text}" for text in verdict.slow_links]
        # Nodes with the same note share a line.
        hosts_by_note: dict[str, list[str]] = {}
        for node in verdict.nodes:
            for note in node.notes:
                hosts_by_note.setdefault(note, []).append(node.host)
        lines += [f"note: {hostlist.fold_hosts(hosts)}: {note}" for note, hosts in hosts_by_note.items()]
        return [*lines, self._summary()]

    def _figure_lines(self) -> list[str]:
        """Return the lines of the table with the figures of each node.

        The figures are the speed of matrix products, and the best bandwidth to any partner.

        With more than `MAX_ROWS` nodes, the table has only the outliers.
        """
        verdict = self.verdict
        nodes = verdict.nodes if len(verdict.nodes) <= MAX_ROWS else verdict.outliers
        rows = [_FigureRow("node", "matmul", "bandwidth"), _FigureRow("", "TFLOP/s", "GB/s")]
        for node in nodes:
            bandwidth = _cell(best_GBps(node.rank, verdict.links))
            rows.append(_FigureRow(self._name(node), _cell(node.matmul_TFLOPs), bandwidth))
        rows.append(_FigureRow(f"median of {len(verdict.nodes)}", _cell(verdict.median_TFLOPs), ""))
        name_width = max(len(row.name) for row in rows)
        matmul_width = max(len(row.matmul) for row in rows)
        bandwidth_width = max(len(row.bandwidth) for row in rows)
        lines = []
        for row in rows:
            figures = f"{row.matmul:>{matmul_width}}  {row.bandwidth:>{bandwidth_width}}"
            lines.append(f"{row.name:<{name_width}}  {figures}".rstrip())
        return lines

    def _summary(self) -> str:
        """Return the result in one line, which names the outliers and says whether the run starts."""
        nodes, outliers = len(self.verdict.nodes), len(self.verdict.outliers)
        text = f"preflight of {count_text(nodes, 'node')} in {self.seconds:.0f} s: "
        if outliers == 0:
            return f"{text}no outlier"
        text += f"{count_text(outliers, 'outlier')}, {self.exclude}"
        if self.left_out:
            pronoun = "them" if len(self.left_out) > 1 else "it"
            return f"{text}; the run starts without {pronoun}"
        if self.passed:
            return f"{text}; reported only: fewer than {MIN_NODES} nodes have no meaningful median"
        return text

    def to_json(self) -> str:
        """Return the content of ``preflight.json``."""
        document = {
            "schema": SCHEMA,
            "imgkit": __version__,
            "seconds": round(self.seconds, 1),
            "passed": self.passed,
            "median_TFLOPs": self.verdict.median_TFLOPs,
            "nodes": [
                {
                    **asdict(node),
                    "outlier": node.rank in self.verdict.reasons,
                    "left_out": node.rank in self.left_out,
                    "reasons": list(self.verdict.reasons.get(node.rank, ())),
                }
                for node in self.verdict.nodes
            ],
            "links": [asdict(link) for link in self.verdict.links],
            "slow_links": list(self.verdict.slow_links),
            "exclude": self.exclude,
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def _name(self, node: NodeResult) -> str:
        """Return the host. Add the node's rank if several nodes have this name, or if the name is empty."""
        is_ambiguous = sum(peer.host == node.host for peer in self.verdict.nodes) > 1
        return f"{node.host} (rank {node.rank})" if is_ambiguous or not node.host else node.host


def best_GBps(rank: int, links: Iterable[LinkResult]) -> float | None:
    """Return the best bandwidth that a node reached with any partner, or None if it has none."""
    return max((link.GBps for link in links if rank in link.nodes and link.GBps is not None), default=None)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
