"""What the figures mean, in plain sentences. Pure: everything known goes in, nothing is measured here."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from imgkit_entrypoints.apps.bench import sizes
from imgkit_entrypoints.apps.bench.judge import conditions, counters, fit, nccl_log
from imgkit_entrypoints.apps.bench.judge.stragglers import LEAST_S, Late
from imgkit_entrypoints.apps.bench.measure import collectives

SLOW = 0.5
"""Below this share of the line rate something is wrong, not only inefficient."""
WANTED_Gbps = 400.0
"""Between nodes for sharded training of large models (S. Bekman, Machine Learning Engineering, network)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The batch of one collective at its largest size, and the times of all sizes."""

    op: str
    size_bytes: int
    seconds: float
    """Of one operation."""
    batch_s: float
    busbw_GBps: float
    ports: tuple[Mapping[str, counters.Count], ...] = ()
    """Of each node, during the whole batch."""
    times: tuple[tuple[int, float], ...] = ()
    """(bytes, seconds) of every size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where it was measured."""

    hosts: tuple[str, ...]
    """Name of each node."""
    ranks: int
    group: str
    together: int
    """Ranks of one group."""
    device: str
    fabric: str
    line_rate_Gbps: float | None
    late_from_s: float = LEAST_S
    """Nobody is called late who is late by less."""
    carried_by: tuple[str, ...] = ()
    """What the library's own log says of its transport."""
    decided: Mapping[str, nccl_log.Decision] = field(default_factory=dict)
    """Of each collective at its largest size, how NCCL does it."""
    conditions: tuple[conditions.Node, ...] = ()

    @property
    def nodes(self) -> int:
        """How many."""
        return len(self.hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Gbps (1e9 bit/s) through the busiest node, one direction, and in percent of the line rate."""

    op: str
    size_bytes: int
    least_Gbps: float
    """Were the algorithm hierarchical."""
    ring_Gbps: float
    """Were it one flat ring."""
    measured_Gbps: float | None
    """By the ports' own counters; None where none could be read, or none counted."""
    least_percent: float | None = None
    ring_percent: float | None = None
    measured_percent: float | None = None

    @property
    def best_percent(self) -> float | None:
        """The measured one, or the least that it must have been."""
        return self.least_percent if self.measured_percent is None else self.measured_percent


def traffic(largest: Largest, setting: Setting) -> Traffic | None:
    """What crossed the network; None where nothing had to."""
    if setting.nodes < 2 or setting.group == "node":
        return None
    op = collectives.named(largest.op)
    per_node = setting.together // setting.nodes
    algbw_Gbps = 8 * largest.size_bytes / largest.seconds / 1e9
    algbw_Gbps *= setting.ranks // setting.together  # all groups at once
    counted = [counters.busiest(ports) for ports in largest.ports]
    measured = 8 * max(counted) / largest.batch_s / 1e9 if any(counted) else None
    least = algbw_Gbps * op.least_traffic(setting.nodes, per_node)
    # Ports of another network namespace, or NICs that count elsewhere, would show next to nothing.
    if measured is not None and measured < 0.5 * least:
        measured = None
    made = Traffic(
        op=largest.op,
        size_bytes=largest.size_bytes,
        least_Gbps=least,
        ring_Gbps=algbw_Gbps * op.ring_traffic(setting.nodes, per_node),
        measured_Gbps=measured,
    )
    rate = setting.line_rate_Gbps
    if not rate:
        return made
    return dataclasses.replace(
        made,
        least_percent=100 * made.least_Gbps / rate,
        ring_percent=100 * made.ring_Gbps / rate,
        measured_percent=None if measured is None else 100 * measured / rate,
    )


def judge(
    largest: Sequence[Largest], setting: Setting, late: Sequence[Late], hosts_by_rank: Sequence[str]
) -> dict[str, Any]:
    """The verdict as it stands in the file; ``sentences`` are what is printed."""
    found = [traffic(item, setting) for item in largest]
    lines = [(item.op, fit.fit(item.times)) for item in largest]
    ports = _ports(largest, setting)
    sentences = [*_where(setting)]
    for crossed in found:
        sentences += _share(crossed, setting) if crossed else []
    sentences += _carriers(ports, setting)
    for item in largest:
        sentences += _decided(item, setting)
    for op, line in lines:
        sentences += _line(op, line, next(item for item in largest if item.op == op))
    sentences += _late(late, hosts_by_rank, setting) if setting.ranks > 1 else []
    sentences += conditions.sentences(setting.conditions)
    return {
        "sentences": sentences,
        "traffic": [dataclasses.asdict(crossed) for crossed in found if crossed],
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
        "decided": [{"op": op, **dataclasses.asdict(how)} for op, how in setting.decided.items()],
        "conditions": [dataclasses.asdict(node) for node in setting.conditions],
    }  # fmt: skip


def _where(setting: Setting) -> list[str]:
    if setting.together == 1:
        who = "One rank" if setting.ranks == 1 else f"--group {setting.group} leaves each rank alone"
        return [
            f"{who}: bandwidth between ranks needs two of them. Give --nproc 2, or start it on two nodes."
        ]
    if setting.nodes == 1:
        return [
            f"All {setting.ranks} ranks are on {setting.hosts[0]}: this is the inside of one node, not the "
            "network."
        ]
    return []


def _share(crossed: Traffic, setting: Setting) -> list[str]:
    size = sizes.both(crossed.size_bytes)
    said = f"{crossed.op} of {size}: {_range(crossed.least_Gbps, crossed.ring_Gbps)} Gbps through each node"
    if crossed.measured_Gbps is not None:
        said += f" by the algorithm, {crossed.measured_Gbps:.3g} Gbps by the ports' counters"
    if crossed.least_percent is None or crossed.ring_percent is None:
        return [f"{said}; the line rate is unknown here (--line-rate Gbps)."]
    shown = f"{_range(crossed.least_percent, crossed.ring_percent)} %"
    if crossed.measured_percent is not None:
        shown = f"{crossed.measured_percent:.0f} % (by the algorithm {shown})"
    said += f": {shown} of the line rate of {setting.line_rate_Gbps:g} Gbps."
    told = [said]
    best = crossed.best_percent or 0.0
    if crossed.op in ("all_reduce", "all_gather", "reduce_scatter", "alltoall") and best < 100 * SLOW:
        told.append(
            f"That is {_part(best)} of this fabric's line rate: dist-doctor says why, --matrix which link."
        )
    if setting.device == "cuda" and crossed.ring_Gbps < WANTED_Gbps:
        told.append(f"Below the ~{WANTED_Gbps:.0f} Gbps that sharded training across nodes wants.")
    return told


def _range(least: float, most: float) -> str:
    one, other = f"{least:.3g}", f"{most:.3g}"
    return one if one == other else f"{one} to {other}"


def _part(percent: float) -> str:
    for limit, words in ((7.5, "less than a tenth"), (15, "about a tenth"), (22, "about a fifth")):
        if percent < limit:
            return words
    return "about a quarter" if percent < 29 else "about a third" if percent < 41 else "less than half"


def _ports(
    largest: Sequence[Largest], setting: Setting
) -> tuple[tuple[str, str, counters.Count], ...]:  # fmt: skip
    """(host, port, count) over the batches of all collectives."""
    totals: dict[tuple[str, str], list[counters.Count]] = {}
    for item in largest:
        for host, ports in zip(setting.hosts, item.ports, strict=False):
            for name, count in counters.carriers(ports).items():
                totals.setdefault((host, name), []).append(count)
    return tuple(
        (
            host,
            name,
            counters.Count(
                sent_bytes=sum(count.sent_bytes for count in counts),
                received_bytes=sum(count.received_bytes for count in counts),
            ),
        )
        for (host, name), counts in totals.items()
    )


def _carriers(ports: Sequence[tuple[str, str, counters.Count]], setting: Setting) -> list[str]:
    told = list(setting.carried_by)
    first = [(name, count) for host, name, count in ports if host == setting.hosts[0]]
    if first:
        first.sort(key=lambda item: -item[1].sent_bytes)
        shown = ", ".join(f"{sizes.decimal(count.sent_bytes)} through {name}" for name, count in first)
        rdma = counters.is_rdma(first[0][0])
        told.append(f"{'RDMA is' if rdma else 'Sockets are'} in use: {shown} left {setting.hosts[0]}.")
        if not rdma and setting.fabric not in ("", "tcp"):
            told.append(f"This node has {setting.fabric}, and it is not what carried the data: dist-doctor.")
    return told


def _decided(item: Largest, setting: Setting) -> list[str]:
    how = setting.decided.get(item.op)
    if how is None:
        return []
    by = f", {how.channels} channels" if how.channels else ""
    return [
        f"{item.op} of {sizes.both(item.size_bytes)}: NCCL's algorithm is {how.algorithm}, its protocol "
        f"{how.protocol}{by}."
    ]


def _line(op: str, line: fit.Fit | None, largest: Largest) -> list[str]:
    if len(largest.times) < 3:
        return []
    if line is None or not line.trusted:
        far = "" if line is None else f" (off by up to {100 * line.residual:.0f} %)"
        return [f"{op}: its times do not follow latency + size/bandwidth{far}, so neither is named."]
    return [
        f"{op}: latency {1e6 * line.latency_s:.3g} us and {line.bytes_per_s / 1e9:.3g} GBps describe all "
        f"sizes within {100 * line.residual:.0f} %; half of that from {sizes.both(int(line.half_bytes))} on."
    ]


def _late(late: Sequence[Late], hosts: Sequence[str], setting: Setting) -> list[str]:
    if not late:
        return [f"No rank comes late by {1e3 * setting.late_from_s:.1g} ms or more."]
    told = []
    for host in dict.fromkeys(hosts[item.rank] for item in late):
        mine = [item for item in late if hosts[item.rank] == host]
        all_of_host = len(mine) > 1 and len(mine) == sum(1 for name in hosts if name == host)
        ranks = ", ".join(str(item.rank) for item in sorted(mine, key=lambda item: item.rank))
        seconds = statistics.median(item.seconds for item in mine)
        who = f"All ranks of {host} come" if all_of_host else f"Rank {ranks} on {host} comes"
        if len(mine) > 1 and not all_of_host:
            who = f"Ranks {ranks} on {host} come"
        told.append(
            f"{who} {1e3 * seconds:.3g} ms late to collectives of 8 bytes: a slow process, not a slow link."
        )
    return told
