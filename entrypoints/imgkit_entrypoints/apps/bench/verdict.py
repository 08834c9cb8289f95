"""The verdict on a run, in plain sentences, and the reasons for which a finished run ends with exit code 1.

Pure functions: nothing is measured here.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from imgkit_entrypoints.apps.bench import collectives, nccl_log, node_state, sizes
from imgkit_entrypoints.apps.bench.matrix import Matrix, slow
from imgkit_entrypoints.apps.bench.node_state import NodeConditions
from imgkit_entrypoints.apps.bench.options import Requirement
from imgkit_entrypoints.apps.bench.record import percentile

LATE_FROM_S = 0.4e-3
"""Median lead of the other ranks from which a rank counts as late."""
LATE_FROM_SHARED_S = 4e-3
"""The same where ranks share processors: a rank that waits for its processor is late but not slow."""
LATE_FROM_SHARE = 0.3
"""Least lead as a share of the others' wait: in slow collectives, small differences mean nothing."""
USUALLY = 0.25
"""Share of the iterations that may show less than half of the least lead. Strong noise fails this test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRank:
    """A rank that the others wait for."""

    rank: int
    seconds: float
    """Median lead of the other ranks over the iterations."""


def late_ranks(waits: Sequence[Sequence[float]], least_s: float = LATE_FROM_S) -> tuple[LateRank, ...]:
    """The ranks that are at least `least_s` late, the latest first; ``waits[rank][iteration]`` in seconds."""
    if len(waits) < 2:
        return ()
    found = []
    for rank, mine in enumerate(waits):
        others = [row for other, row in enumerate(waits) if other != rank]
        theirs = [statistics.median(turn) for turn in zip(*others, strict=True)]
        lead = sorted(other - own for other, own in zip(theirs, mine, strict=True))
        middle = percentile(lead, 0.5)
        enough = max(least_s, LATE_FROM_SHARE * statistics.median(theirs))
        if middle >= enough and percentile(lead, USUALLY) >= enough / 2:
            found.append(LateRank(rank=rank, seconds=middle))
    return tuple(sorted(found, key=lambda item: -item.seconds))


SLOW = 0.5
"""Share of the line rate below which something is wrong, not merely inefficient."""
NEEDED_Gbps = 400.0
"""Bandwidth between nodes that sharded training of large models needs (S. Bekman, Machine Learning
Engineering, network)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The batches of one collective at its largest size, and the times of all its sizes."""

    op: collectives.Collective
    size_bytes: int
    seconds: float
    """Time of one operation: the median of the batches."""
    batch_s: float
    """Time of all batches together."""
    busbw_GBps: float
    ports: tuple[Mapping[str, node_state.Count], ...] = ()
    """Growth of each node's port counters during all batches."""
    times: tuple[tuple[int, float], ...] = ()
    """(bytes, seconds) of every size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The ranks, nodes and network that a run was measured on."""

    hosts: tuple[str, ...]
    """Name of each node."""
    ranks: int
    group: str
    together: int
    """Ranks per group."""
    device: str
    fabric: str
    line_rate_Gbps: float | None
    late_from_s: float = LATE_FROM_S
    """Ranks that are late by less are not reported."""
    carried_by: tuple[str, ...] = ()
    """Sentences about the transports in NCCL's log."""
    decided: Mapping[str, nccl_log.NcclChoice] = field(default_factory=dict)
    """NCCL's algorithm and protocol of each collective at its largest size."""
    conditions: tuple[NodeConditions, ...] = ()
    communicators: int = 1
    """Communicators that run each operation at once."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Traffic through the busiest node in one direction, in Gbps (1e9 bit/s) and percent of the line rate."""

    op: str
    size_bytes: int
    least_Gbps: float
    """The traffic of a hierarchical algorithm."""
    ring_Gbps: float
    """The traffic of one flat ring."""
    measured_Gbps: float | None
    """The traffic that the ports counted; None if no counter could be read, or none grew."""
    least_percent: float | None = None
    ring_percent: float | None = None
    measured_percent: float | None = None

    @property
    def best_percent(self) -> float | None:
        """The measured percentage, or else the least possible one."""
        return self.least_percent if self.measured_percent is None else self.measured_percent


def traffic(largest: Largest, context: RunContext) -> Traffic | None:
    """The traffic that crossed the network; None if none had to."""
    if context.nodes < 2 or context.group == "node":
        return None
    op = largest.op
    per_node = context.together // context.nodes
    algbw_Gbps = 8 * largest.size_bytes / largest.seconds / 1e9
    algbw_Gbps *= context.ranks // context.together * context.communicators  # all groups at once
    counted = [node_state.busiest(ports) for ports in largest.ports]
    measured = 8 * max(counted) / largest.batch_s / 1e9 if any(counted) else None
    least = algbw_Gbps * op.least_traffic(context.nodes, per_node)
    # Ports in another network namespace, and NICs that count elsewhere, show next to nothing.
    if measured is not None and measured < 0.5 * least:
        measured = None
    made = Traffic(
        op=op.name,
        size_bytes=largest.size_bytes,
        least_Gbps=least,
        ring_Gbps=algbw_Gbps * op.ring_traffic(context.nodes, per_node),
        measured_Gbps=measured,
    )
    rate = context.line_rate_Gbps
    if not rate:
        return made
    return dataclasses.replace(
        made,
        least_percent=100 * made.least_Gbps / rate,
        ring_percent=100 * made.ring_Gbps / rate,
        measured_percent=None if measured is None else 100 * measured / rate,
    )


def judge(
    largest: Sequence[Largest], context: RunContext, late: Sequence[LateRank], hosts_by_rank: Sequence[str]
) -> dict[str, Any]:
    """The verdict in the form of the saved file; its ``sentences`` are printed."""
    crossings = [traffic(item, context) for item in largest]
    lines = [(item.op.name, fit_line(item.times)) for item in largest]
    ports = _ports(largest, context)
    sentences = [*_where(context)]
    for crossed in crossings:
        sentences += _share(crossed, context) if crossed else []
    sentences += _carriers(ports, context)
    for item in largest:
        sentences += _decided(item, context)
    for op, line in lines:
        sentences += _line(op, line, next(item for item in largest if item.op.name == op))
    sentences += _late(late, hosts_by_rank, context) if context.ranks > 1 else []
    sentences += node_state.sentences(context.conditions)
    return {
        "sentences": sentences,
        "traffic": [dataclasses.asdict(crossed) for crossed in crossings if crossed],
        "fits": [
            {"op": op, **dataclasses.asdict(line), "trusted": line.trusted} for op, line in lines if line
        ],
        "late": [
            {"rank": item.rank, "host": hosts_by_rank[item.rank], "late_us": item.seconds * 1e6}
            for item in late
        ],
        "ports": [
            {"host": host, "port": name, **dataclasses.asdict(count)} for host, name, count in ports
        ],
        "decided": [{"op": op, **dataclasses.asdict(how)} for op, how in context.decided.items()],
        "conditions": [dataclasses.asdict(node) for node in context.conditions],
    }  # fmt: skip


def _where(context: RunContext) -> list[str]:
    if context.together == 1:
        who = "One rank" if context.ranks == 1 else f"--group {context.group} leaves each rank alone"
        return [
            f"{who}: bandwidth between ranks needs two ranks. Give --nproc 2, or start dist-bench on "
            "two nodes."
        ]
    if context.nodes == 1:
        return [
            f"All {context.ranks} ranks are on {context.hosts[0]}: these figures measure one node, not the "
            "network."
        ]
    return []


def _share(crossed: Traffic, context: RunContext) -> list[str]:
    size = sizes.both(crossed.size_bytes)
    text = f"{crossed.op} of {size}: {_range(crossed.least_Gbps, crossed.ring_Gbps)} Gbps through each node"
    if crossed.measured_Gbps is not None:
        text += f" by the algorithm, {crossed.measured_Gbps:.3g} Gbps by the ports' counters"
    if crossed.least_percent is None or crossed.ring_percent is None:
        return [f"{text}; the line rate is unknown here (--line-rate Gbps)."]
    shown = f"{_range(crossed.least_percent, crossed.ring_percent)} %"
    if crossed.measured_percent is not None:
        shown = f"{crossed.measured_percent:.0f} % (by the algorithm {shown})"
    text += f": {shown} of the line rate of {context.line_rate_Gbps:g} Gbps."
    sentences = [text]
    best = crossed.best_percent or 0.0
    if collectives.named(crossed.op).fills_network and best < 100 * SLOW:
        sentences.append(
            f"That is {_part(best)} of this fabric's line rate. Run dist-doctor to see why, or "
            "dist-bench --matrix to find a slow link."
        )
    if context.device == "cuda" and crossed.ring_Gbps < NEEDED_Gbps:
        sentences.append(
            f"That is below the ~{NEEDED_Gbps:.0f} Gbps that sharded training across nodes needs."
        )
    return sentences


def _range(least: float, most: float) -> str:
    one, other = f"{least:.3g}", f"{most:.3g}"
    return one if one == other else f"{one} to {other}"


def _part(percent: float) -> str:
    for limit, words in ((7.5, "less than a tenth"), (15, "about a tenth"), (22, "about a fifth")):
        if percent < limit:
            return words
    return "about a quarter" if percent < 29 else "about a third" if percent < 41 else "less than half"


def _ports(
    largest: Sequence[Largest], context: RunContext
) -> tuple[tuple[str, str, node_state.Count], ...]:  # fmt: skip
    """(host, port, count) of every port, summed over the batches of all collectives."""
    totals: dict[tuple[str, str], list[node_state.Count]] = {}
    for item in largest:
        for host, ports in zip(context.hosts, item.ports, strict=False):
            for name, count in node_state.carriers(ports).items():
                totals.setdefault((host, name), []).append(count)
    return tuple(
        (
            host,
            name,
            node_state.Count(
                sent_bytes=sum(count.sent_bytes for count in counts),
                received_bytes=sum(count.received_bytes for count in counts),
            ),
        )
        for (host, name), counts in totals.items()
    )


def _carriers(ports: Sequence[tuple[str, str, node_state.Count]], context: RunContext) -> list[str]:
    sentences = list(context.carried_by)
    first = [(name, count) for host, name, count in ports if host == context.hosts[0]]
    if first:
        first.sort(key=lambda item: -item[1].sent_bytes)
        shown = ", ".join(f"{sizes.decimal(count.sent_bytes)} through {name}" for name, count in first)
        rdma = node_state.is_rdma(first[0][0])
        sentences.append(f"{'RDMA is' if rdma else 'Sockets are'} in use: {shown} left {context.hosts[0]}.")
        if not rdma and context.fabric not in ("", "tcp"):
            sentences.append(
                f"This node has {context.fabric}, but it did not carry the data. Run dist-doctor to see why."
            )
    return sentences


def _decided(item: Largest, context: RunContext) -> list[str]:
    how = context.decided.get(item.op.name)
    if how is None:
        return []
    by = f", {how.channels} channels" if how.channels else ""
    return [
        f"{item.op.name} of {sizes.both(item.size_bytes)}: NCCL uses algorithm {how.algorithm}, protocol "
        f"{how.protocol}{by}."
    ]


def _line(op: str, line: Fit | None, largest: Largest) -> list[str]:
    if len(largest.times) < 3:
        return []
    if line is None or not line.trusted:
        far = "" if line is None else f" (off by up to {100 * line.residual:.0f} %)"
        return [f"{op}: the times do not fit latency + size/bandwidth{far}, so neither is reported."]
    return [
        f"{op}: latency {1e6 * line.latency_s:.3g} us and {line.bytes_per_s / 1e9:.3g} GBps describe all "
        f"sizes within {100 * line.residual:.0f} %; half of that bandwidth is reached at "
        f"{sizes.both(int(line.half_bytes))}."
    ]


def _late(late: Sequence[LateRank], hosts: Sequence[str], context: RunContext) -> list[str]:
    if not late:
        return [f"No rank comes late by {1e3 * context.late_from_s:.1g} ms or more."]
    sentences = []
    for host in dict.fromkeys(hosts[item.rank] for item in late):
        mine = [item for item in late if hosts[item.rank] == host]
        all_of_host = len(mine) > 1 and len(mine) == sum(1 for name in hosts if name == host)
        ranks = ", ".join(str(item.rank) for item in sorted(mine, key=lambda item: item.rank))
        seconds = statistics.median(item.seconds for item in mine)
        who = f"All ranks of {host} come" if all_of_host else f"Rank {ranks} on {host} comes"
        if len(mine) > 1 and not all_of_host:
            who = f"Ranks {ranks} on {host} come"
        sentences.append(
            f"{who} {1e3 * seconds:.3g} ms late to collectives of 8 bytes. The cause is a slow process, "
            "not a slow link."
        )
    return sentences


MOST_NAMED = 4
"""Most names in the line; the sentences above it have all of them."""


def failed_line(reasons: Sequence[str]) -> str:
    """The last line of a run that failed."""
    return f"FAILED: {'; '.join(reasons)}."


def wrong_values(count: int) -> Iterator[str]:
    """Yield the reason if elements were wrong."""
    if count:
        yield f"{count} elements were wrong, so run dist-doctor before you train here"


def slow_parts(rails: Sequence[Matrix], hosts: Sequence[str]) -> Iterator[str]:
    """Yield the reason if ``--matrix`` found something slow."""
    names = [part.name for part in slow(rails, hosts)]
    if names:
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        yield f"slow, by --matrix: {', '.join(names[:MOST_NAMED])}{more}"


def missed(asked: Requirement | None, largest: Sequence[Largest], context: RunContext) -> Iterator[str]:
    """Yield a reason for each collective that misses `asked` at its largest size.

    A percentage is what the ports counted, or else the least that the algorithm can have sent.
    """
    if asked is None:
        return
    if not largest:
        yield f"nothing was measured that could reach the {asked} of --require"
    for item in largest:
        at = f"{item.op.name} of {sizes.both(item.size_bytes)} reached"
        if asked.GBps is not None and item.busbw_GBps < asked.GBps:
            yield f"{at} {item.busbw_GBps:.4g} GBps of busbw, --require asks for {asked}"
        if asked.percent is None:
            continue
        crossed = traffic(item, context)
        reached = crossed.best_percent if crossed else None
        if reached is None or reached < asked.percent:
            yield f"{at} {reached or 0.0:.3g} % of the line rate, --require asks for {asked}"


def slow_exchanges(asked: Requirement | None, rails: Sequence[Matrix], hosts: Sequence[str]) -> Iterator[str]:
    """Yield the reason if links of ``--matrix`` are below `asked`."""
    if asked is None or asked.GBps is None:
        return
    links = [
        (matrix[one][other], f"{hosts[one]} - {hosts[other]}")
        for matrix in rails
        for one in range(len(hosts))
        for other in range(one + 1, len(hosts))
    ]
    below = sorted(link for link in links if link[0] < asked.GBps)
    if below:
        value, name = below[0]
        slowest = f"the slowest is {name} with {value:.3g}"
        yield f"{len(below)} of {len(links)} links are below the {asked} of --require, {slowest}"


TRUSTED_RESIDUAL = 0.30
"""Largest relative residual of a usable fit; beyond it, latency and bandwidth are not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted line and its largest residual."""

    latency_s: float
    bytes_per_s: float
    residual: float
    """Largest relative difference between a time and the line."""

    @property
    def trusted(self) -> bool:
        """True if the line describes the times."""
        return self.residual <= TRUSTED_RESIDUAL

    @property
    def half_bytes(self) -> float:
        """The size at which half of the bandwidth is reached."""
        return self.latency_s * self.bytes_per_s


def fit_line(times: Sequence[tuple[int, float]]) -> Fit | None:
    """Least squares over (bytes, seconds), weighted by 1/t^2; None if no line with a, B >= 0 exists.

    Without weights the largest size alone would decide the line, and the latency would be noise.
    """
    if len({size for size, _ in times}) < 3:
        return None  # two points fit any line
    # Minimise the sum of (a/t + S b/t - 1)^2.
    rows = [(1.0 / seconds, size / seconds) for size, seconds in times]
    one = sum(u * u for u, _ in rows)
    mixed = sum(u * v for u, v in rows)
    two = sum(v * v for _, v in rows)
    left, right = sum(u for u, _ in rows), sum(v for _, v in rows)
    determinant = one * two - mixed * mixed
    if determinant <= 0:
        return None
    latency = (left * two - right * mixed) / determinant
    per_byte = (one * right - mixed * left) / determinant
    if latency < 0 or per_byte <= 0:
        return None
    residual = max(abs(latency * u + per_byte * v - 1.0) for u, v in rows)
    return Fit(latency_s=latency, bytes_per_s=1.0 / per_byte, residual=residual)
