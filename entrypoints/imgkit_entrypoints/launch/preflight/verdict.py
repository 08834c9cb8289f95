"""Decide from the figures of a preflight which nodes and which links between nodes are slow.

A node is an outlier (too slow or broken) if it hangs, if a check of dist-doctor fails, if its matrix products
are more than `TOLERANCE` slower than the median of all nodes, or if it reaches none of its partners. A slow
link does not show which of its two nodes is slow. So the link is only reported, and no node is excluded
because of it. All functions are pure.
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
"""Fraction of the median by which a node or a link may be slower than the median: 25 %."""
MIN_NODES = 4
"""Smallest number of nodes whose median shows what is usual. With fewer nodes, outliers are only reported."""
MAX_ROWS = 64
"""Largest number of nodes for which the table has a row for each node.

With more nodes, the table contains only the outliers.
"""
# Version of the JSON document.
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """The measurements of one node and its errors."""

    rank: int
    host: str
    matmul_TFLOPs: float | None = None
    """Speed of matrix products, or None if it was not measured."""
    error: str = ""
    """Why the node dropped out: it hangs, its measuring process has ended, or it is lost. Otherwise empty."""
    is_gone: bool = False
    """True if the node agent is lost, so that the node cannot take part in the run at all."""
    failed: tuple[str, ...] = ()
    """Checks of dist-doctor that failed."""
    notes: tuple[str, ...] = ()
    """Findings that are printed but do not make the node an outlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkResult:
    """The measurement of the link between two nodes."""

    nodes: tuple[int, int]
    """Ranks of the two nodes."""
    GBps: float | None = None
    """Bandwidth, or None if there was an error."""
    error: str = ""
    """Why the bandwidth could not be measured. Empty if it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outliers among all nodes, which are broken or much slower than the median, and the slow links."""

    nodes: Sequence[NodeResult]
    links: Sequence[LinkResult]
    median_TFLOPs: float | None
    reasons: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The reasons for each outlier, by its rank. The slowest node comes first."""
    slow_links: tuple[str, ...] = ()
    """One line for each slow link, such as ``n1 - n2: 3.1 GB/s, 40 % below the median of 5.2``."""

    @property
    def outliers(self) -> tuple[NodeResult, ...]:
        """Return the outliers, the slowest first."""
        by_rank = {node.rank: node for node in self.nodes}
        return tuple(by_rank[rank] for rank in self.reasons)

    @property
    def excluded(self) -> tuple[NodeResult, ...]:
        """Return the outliers that must not take part in the run.

        With fewer than `MIN_NODES` nodes, these are only the lost ones.
        """
        return tuple(node for node in self.outliers if node.is_gone or len(self.nodes) >= MIN_NODES)


def judge(nodes: Sequence[NodeResult], links: Sequence[LinkResult]) -> Verdict:
    """Return the verdict on a preflight: the outliers among `nodes`, and the slow links.

    Links of outliers are ignored, because a slow node makes its links slow as well.
    """
    median = _compute_median_TFLOPs(nodes)
    reasons = {}
    # The slowest node comes first, and a node that could not measure counts as the slowest. The order of
    # `reasons` is kept: the report and the error message name the outliers in this order.
    for node in sorted(nodes, key=lambda node: (node.matmul_TFLOPs or 0.0, node.rank)):
        node_reasons = tuple(_find_outlier_reasons(node, median, links))
        if node_reasons:
            reasons[node.rank] = node_reasons
    links_between_good_nodes = [link for link in links if reasons.keys().isdisjoint(link.nodes)]
    hosts = {node.rank: node.host for node in nodes}
    return Verdict(
        nodes=nodes,
        links=links,
        median_TFLOPs=median,
        reasons=reasons,
        slow_links=tuple(_describe_slow_links(links_between_good_nodes, hosts)),
    )


def _compute_median_TFLOPs(nodes: Sequence[NodeResult]) -> float | None:
    """Return the median speed of the nodes, or None if fewer than half of them could measure it.

    If only a few nodes were measured, their median does not show what is usual.
    """
    rates = [node.matmul_TFLOPs for node in nodes if node.matmul_TFLOPs is not None]
    if not rates or 2 * len(rates) < len(nodes):
        return None
    return statistics.median(rates)


def _find_outlier_reasons(
    node: NodeResult, median: float | None, links: Sequence[LinkResult]
) -> Iterator[str]:
    """Yield the reasons why `node` is an outlier, or nothing if it is not one.

    An outlier is a node that is broken, or much slower than the median. `median` is the median speed of all
    nodes, or None if it is unknown. `links` are the results for all pairs of nodes.
    """
    if node.error:  # the node has dropped out, so it has no further results
        yield node.error
        return
    yield from (f"dist-doctor: {failed_check}" for failed_check in node.failed)
    rate = node.matmul_TFLOPs
    if median and rate is None:
        yield "matrix products could not be measured"
    elif median and rate is not None and _is_slow(rate, median):
        yield f"matmul {rate:.3g} TFLOP/s, {_compare_with_median(rate, median)}"
    # A single broken link does not show which of its two nodes is at fault. If all links of a node are
    # broken, it is this node.
    errors = [link.error for link in links if node.rank in link.nodes]  # "" for a link that works
    if len(errors) > 1 and all(errors):
        yield f"it exchanges data with none of {len(errors)} partners: {errors[0]}"


def _describe_slow_links(links: Sequence[LinkResult], hosts: Mapping[int, str]) -> Iterator[str]:
    """Yield one line for each link that is broken, or more than `TOLERANCE` slower than the median.

    `links` are the links between nodes that are no outliers. `hosts` contains the host name of each node by
    rank, because a link only names the ranks of its two nodes.
    """
    rates = [link.GBps for link in links if link.GBps is not None]
    median = statistics.median(rates) if rates else 0.0  # 0: no link has a rate, so none can be slow
    for link in links:
        name = " - ".join(hosts[rank] for rank in link.nodes)
        if link.error:
            yield f"{name}: {link.error}"
        elif link.GBps is not None and _is_slow(link.GBps, median):
            yield f"{name}: {link.GBps:.3g} GB/s, {_compare_with_median(link.GBps, median)}"


def _is_slow(rate: float, median: float) -> bool:
    """Return whether `rate` is more than `TOLERANCE` below the median."""
    return rate < (1 - TOLERANCE) * median


def _compare_with_median(rate: float, median: float) -> str:
    """Return a text about a rate below the median, such as ``40 % below the median of 5.2``."""
    return f"{100 * (1 - rate / median):.0f} % below the median of {median:.3g}"


def pair_up(node_count: int, round_index: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of nodes that measure together in the round `round_index`, which counts from 0.

    The nodes are numbered from 0 to `node_count` - 1. The rounds follow the circle method of tournaments: one
    seat stays in its place, and the others rotate. In all rounds together, every node meets every other node
    once. With four nodes, round 0 is ``(0, 3), (1, 2)`` and round 1 is ``(1, 3), (0, 2)``. With an odd number
    of nodes, one node has no partner in each round.
    """
    if node_count < 2:
        return ()
    # Seats 0, 1, ... rotate, and the last seat is fixed. With an odd number of nodes, the fixed seat is
    # empty, because its number is that of no node. Its pair is then left out below.
    fixed_seat = node_count if node_count % 2 else node_count - 1
    rotating_count = fixed_seat
    first = round_index % rotating_count
    pairs = [(first, fixed_seat)]
    for step in range(1, (rotating_count + 1) // 2):
        pairs.append(((first + step) % rotating_count, (first - step) % rotating_count))
    return tuple((min(pair), max(pair)) for pair in pairs if max(pair) < node_count)


class _FigureRow(NamedTuple):
    """A row of the report's table. All values are texts."""

    name: str
    matmul: str
    bandwidth: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of a finished preflight, as a table for people and as JSON."""

    verdict: Verdict
    seconds: float
    """Duration of the preflight in seconds."""
    left_out: tuple[int, ...]
    """Ranks of the nodes that take no part in the run."""
    passed: bool
    """True if the run starts."""
    scheduler: str

    @property
    def exclude_option(self) -> str:
        """Return the hosts of all outliers as one text, with which the user can exclude them from a job.

        Under Slurm, it is an option such as ``--exclude=n[3-4]``. Otherwise, it is only ``n[3-4]``.
        """
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
        lines = self._format_figures()
        for node in verdict.outliers:
            lines += [f"OUTLIER {self._name(node)}: {reason}" for reason in verdict.reasons[node.rank]]
        lines += [f"SLOW LINK {text}" for text in verdict.slow_links]
        # A note is a finding about a node that does not make it an outlier. The same note often applies to
        # many nodes, so print each note once, with all nodes that have it.
        hosts_by_note: dict[str, list[str]] = {}
        for node in verdict.nodes:
            for note in node.notes:
                hosts_by_note.setdefault(note, []).append(node.host)
        lines += [f"note: {hostlist.fold_hosts(hosts)}: {note}" for note, hosts in hosts_by_note.items()]
        return [*lines, self._summarize()]

    def _format_figures(self) -> list[str]:
        """Return the lines of the table with the figures of each node.

        The figures are the speed of matrix products, and the best bandwidth to any partner. With more than
        `MAX_ROWS` nodes, the table contains only the outliers.
        """
        verdict = self.verdict
        nodes = verdict.nodes if len(verdict.nodes) <= MAX_ROWS else verdict.outliers
        # The first two rows are the heading: the names of the columns, and their units.
        rows = [_FigureRow("node", "matmul", "bandwidth"), _FigureRow("", "TFLOP/s", "GB/s")]
        for node in nodes:
            bandwidth = _cell(best_GBps(node.rank, verdict.links))
            rows.append(_FigureRow(self._name(node), _cell(node.matmul_TFLOPs), bandwidth))
        rows.append(_FigureRow(f"median of {len(verdict.nodes)}", _cell(verdict.median_TFLOPs), ""))
        # Names are aligned to the left, and numbers to the right.
        name_width = max(len(row.name) for row in rows)
        matmul_width = max(len(row.matmul) for row in rows)
        bandwidth_width = max(len(row.bandwidth) for row in rows)
        lines = []
        for row in rows:
            figures = f"{row.matmul:>{matmul_width}}  {row.bandwidth:>{bandwidth_width}}"
            lines.append(f"{row.name:<{name_width}}  {figures}".rstrip())
        return lines

    def _summarize(self) -> str:
        """Return the result in one line. It names the outliers, and says whether the run starts."""
        nodes, outliers = len(self.verdict.nodes), len(self.verdict.outliers)
        summary = f"preflight of {count_text(nodes, 'node')} in {self.seconds:.0f} s: "
        if outliers == 0:
            return f"{summary}no outlier"
        summary += f"{count_text(outliers, 'outlier')}, {self.exclude_option}"
        if self.left_out:
            pronoun = "them" if len(self.left_out) > 1 else "it"
            return f"{summary}; the run starts without {pronoun}"
        # The run starts with its outliers: with few nodes, only lost nodes are excluded.
        if self.passed:
            return f"{summary}; reported only: fewer than {MIN_NODES} nodes have no meaningful median"
        return summary

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
            "exclude": self.exclude_option,
        }
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def _name(self, node: NodeResult) -> str:
        """Return the host name of `node`.

        If several nodes have the same name, or the name is empty, add the node's rank.
        """
        is_ambiguous = sum(peer.host == node.host for peer in self.verdict.nodes) > 1
        return f"{node.host} (rank {node.rank})" if is_ambiguous or not node.host else node.host


def best_GBps(rank: int, links: Iterable[LinkResult]) -> float | None:
    """Return the best bandwidth of a node with any partner, or None if none was measured."""
    return max((link.GBps for link in links if rank in link.nodes and link.GBps is not None), default=None)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
