"""What a preflight found, as a table for people and as JSON for scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from imgkit_entrypoints import __version__
from imgkit_entrypoints.launch.preflight.judge import LEAST_NODES, METRICS, JudgedNode, Judgement
from imgkit_entrypoints.schedulers import hostlist

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
            return f"{said}; reported only, since fewer than {LEAST_NODES} nodes do not show what is usual"
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
