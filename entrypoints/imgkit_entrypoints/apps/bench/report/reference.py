"""Published bandwidths of all_reduce: context for a measurement, never a baseline (no spread, few payloads).

Figures are given as published, in their own unit. Where a source gives both columns, they must satisfy
busbw = algbw * 2(n-1)/n (nccl-tests, doc/PERFORMANCE.md), which reveals the unit and typing errors.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from imgkit_entrypoints.errors import UsageError

PAYLOAD_BYTES = 4_000_000_000
"""Payload of both tutorials' script: 500000 x 2000 float32, which their logs call "4.0GB payload"."""
KIB = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published figure of an all_reduce of float32."""

    nodes: int
    ranks: int
    size_bytes: int | None
    """None: not published, so the row cannot be drawn over sizes."""
    algbw: float | None
    busbw: float
    arm: str = ""
    """Name of the variant, where a table compares two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The rows of one source."""

    name: str
    """Name for ``--reference``."""
    title: str
    unit: Literal["Gbps", "GBps"]
    """Unit of `algbw` and `busbw` in the rows: 1e9 bit/s or 1e9 B/s."""
    source: str
    note: str
    rows: tuple[Row, ...]
    line_rate_Gbps: int | None = None
    """Sum over a node's network ports; None: not published."""

    def GBps(self, figure: float) -> float:
        """Convert a figure of this table to 1e9 B/s."""
        return figure / 8 if self.unit == "Gbps" else figure


def find(name: str) -> Table:
    """Return the table with this name.

    Raises
    ------
    UsageError : there is no such table; names the nearest.
    """
    known = {table.name: table for table in TABLES}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    guess = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"unknown reference {name!r}",
        where="--reference",
        hint=f"{guess}Known tables: {', '.join(sorted(known))}",
    )


def _payload(arm: str, ranks_per_node: int, *figures: tuple[int, float, float]) -> tuple[Row, ...]:
    """Rows of the tutorials: ranks, algbw, busbw, all with the same payload."""
    return tuple(
        Row(
            nodes=-(-ranks // ranks_per_node),
            ranks=ranks,
            size_bytes=PAYLOAD_BYTES,
            algbw=algbw,
            busbw=busbw,
            arm=arm,
        )
        for ranks, algbw, busbw in figures
    )


def _sweep(arm: str, nodes: int, first_bytes: int, *figures: tuple[float, float]) -> tuple[Row, ...]:
    """Rows of a sweep over 8 ranks whose size doubles from `first_bytes`: algbw, busbw."""
    return tuple(
        Row(nodes=nodes, ranks=8, size_bytes=first_bytes << step, algbw=algbw, busbw=busbw, arm=arm)
        for step, (algbw, busbw) in enumerate(figures)
    )


TABLES: tuple[Table, ...] = (
    Table(
        name="mn5",
        title="MareNostrum 5 ACC: 4 H100 and 4 NDR200 ports a node",
        unit="Gbps",  # the README states none; benchmark/reports/*.out have "87.915 GBps (703.3 Gbps)"
        source="https://github.com/TJ-Solergibert/MN5-Distributed-PyTorch#nccl-network-benchmark",
        note="April 2024, mean of 5 trials, no spread published",
        line_rate_Gbps=800,
        rows=_payload(
            "",
            4,
            (4, 1752.5, 2628.8),
            (8, 703.3, 1230.8),
            (16, 349.9, 656.0),
            (32, 339.6, 657.9),
            (64, 335.4, 660.4),
        ),
    ),
    Table(
        name="rcp",
        title="EPFL RCP: 8 GPUs a node, RoCE",
        unit="Gbps",
        source="https://github.com/epfml/getting-started/tree/main/utils/distributed_pytorch/benchmark",
        note="April 2024, mean of 10 trials, no spread published; up to 8 GPUs share a node and use NVLink",
        rows=(
            *_payload("NVLink", 8, (2, 1687.1, 1687.1), (4, 1081.0, 1621.5), (8, 949.9, 1662.4)),
            *_payload("RDMA", 8, (16, 65.2, 122.3), (32, 39.3, 76.2)),
            *_payload("TCP", 8, (16, 15.5, 29.1), (32, 15.6, 30.1)),
        ),
    ),
    Table(
        name="cscs",
        title="CSCS Alps: 4 GH200 and 4 Slingshot-11 ports a node",
        unit="GBps",
        source="https://github.com/eth-cscs/cscs-docs/blob/main/docs/software/container-engine/"
        "guidelines-images/image-nccl-tests.md",
        note="nccl-tests 2.17.1, out of place, from 64 KiB, with and without the libfabric plugin of NCCL",
        line_rate_Gbps=800,
        rows=(
            *_sweep(
                "libfabric",
                2,
                64 * KIB,
                (1.07, 1.88),
                (1.61, 2.82),
                (2.06, 3.61),
                (3.08, 5.39),
                (6.38, 11.17),
                (11.51, 20.15),
                (14.33, 25.08),
                (24.35, 42.61),
                (36.34, 63.59),
                (48.88, 85.54),
                (61.54, 107.69),
                (70.04, 122.57),
            ),
            *_sweep(
                "no plugin",
                2,
                64 * KIB,
                (0.20, 0.35),
                (0.22, 0.39),
                (0.28, 0.49),
                (0.46, 0.80),
                (0.70, 1.22),
                (2.28, 3.98),
                (2.91, 5.09),
                (3.44, 6.02),
                (3.33, 5.83),
                (1.93, 3.38),
                (3.16, 5.53),
                (3.10, 5.43),
            ),
        ),
    ),
    Table(
        name="hpe",
        title="HPE blancapeak: 4 GH200 and 4 Slingshot-11 ports a node",
        unit="GBps",
        source="https://github.com/HewlettPackard/shs-ccl-docs/pull/26",
        note="NCCL 2.27.7, aws-ofi-nccl 1.19.0; its payload is not recorded here, so listed and not drawn",
        line_rate_Gbps=800,
        rows=(
            Row(nodes=2, ranks=8, size_bytes=None, algbw=None, busbw=152.0),
            Row(nodes=5, ranks=20, size_bytes=None, algbw=None, busbw=91.0),
        ),
    ),
    Table(
        name="h200",
        title="One node of 8 H200, NVLink 4 with switches",
        unit="GBps",
        source="https://github.com/stas00/ml-engineering/blob/master/network/benchmarks/results/"
        "all-reduce-8xH200.md",
        note="torch 2.9.1, NCCL 2.27.7, 20 trials; above NVLink 4's 450 GBps because the switches reduce",
        rows=_sweep(
            "",
            1,
            32 * KIB,
            (0.82, 1.44),
            (1.67, 2.93),
            (3.27, 5.73),
            (6.71, 11.74),
            (13.68, 23.94),
            (22.82, 39.93),
            (36.87, 64.53),
            (61.23, 107.16),
            (88.87, 155.53),
            (125.65, 219.89),
            (157.62, 275.84),
            (198.01, 346.51),
            (229.67, 401.93),
            (249.23, 436.15),
            (257.31, 450.29),
            (264.90, 463.58),
            (268.10, 469.17),
            (270.34, 473.10),
            (272.83, 477.45),
            (275.58, 482.26),
        ),
    ),
)
