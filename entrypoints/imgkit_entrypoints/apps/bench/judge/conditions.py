"""The nodes' conditions before and after a run, as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from imgkit_entrypoints.apps.bench.measure.node_conditions import NodeConditions


def sentences(nodes: Sequence[NodeConditions]) -> tuple[str, ...]:
    """Report the clocks of all GPUs, GPUs that are slowed down, and error counters that rose."""
    return (*_clocks(nodes), *(text for node in nodes for text in (*_slowed(node), *_errors(node))))


def _clocks(nodes: Sequence[NodeConditions]) -> Iterator[str]:
    ranges = []
    for when in ("before", "after"):
        gpus = [gpu for node in nodes for gpu in getattr(node, when).gpus]
        clocks = [gpu.sm_MHz for gpu in gpus if gpu.sm_MHz is not None]
        if clocks:
            ranges.append(f"{min(clocks)} to {max(clocks)} MHz {when}")
            most = max((gpu.most_MHz or 0 for gpu in gpus), default=0)
    if ranges:
        yield f"GPU clocks: {', '.join(ranges)}, of {most} MHz."


def _slowed(node: NodeConditions) -> Iterator[str]:
    for when in ("before", "after"):
        for gpu in getattr(node, when).gpus:
            if gpu.slowed_by:
                warm = "" if gpu.temperature_C is None else f" at {gpu.temperature_C} C"
                by = " and ".join(gpu.slowed_by)
                yield f"{node.host}: GPU {gpu.index} was slowed down by {by}{warm}, {when} the run."


def _errors(node: NodeConditions) -> Iterator[str]:
    for name, now in node.after.errors.items():
        before = node.before.errors.get(name, now)
        if now > before:
            yield f"{node.host}: {name} rose from {before} to {now} during the run."
