"""What a node's GPUs and ports say before and after a run: clocks, what holds them down, errors."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench.judge import counters
from imgkit_entrypoints.facts import Reader

QUERY = ("index", "clocks.sm", "clocks.max.sm", "temperature.gpu")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The same by its name since driver 535 and before; an unknown name makes nvidia-smi refuse the query."""
SLOWED: Mapping[int, str] = {
    0x4: "the power cap (software)",
    0x8: "a hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake (hardware)",
}
"""Bits of nvmlClocksEventReasons (nvml.h) that cost speed; idle and chosen clocks are none."""
QUERY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU at one moment; None where the driver does not tell."""

    index: int
    sm_MHz: int | None
    most_MHz: int | None
    """What `sm_MHz` may be at most."""
    temperature_C: int | None
    slowed_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One node at one moment."""

    gpus: tuple[Gpu, ...]
    errors: Mapping[str, int]
    """``mlx5_0:1 symbol_error`` and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, before the first size and after the last."""

    host: str
    before: Condition
    after: Condition


def read(reader: Reader, *, gpus: bool) -> Condition:
    """This node now; nvidia-smi is asked only for `gpus`."""
    return Condition(gpus=_gpus() if gpus else (), errors=counters.errors(reader))


def _gpus() -> tuple[Gpu, ...]:
    for reasons in REASONS:
        query = ("nvidia-smi", f"--query-gpu={','.join((*QUERY, reasons))}", "--format=csv,noheader,nounits")
        try:
            done = subprocess.run(
                query,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=QUERY_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return ()
        if done.returncode == 0:
            return parsed(done.stdout)
    return ()


def parsed(text: str) -> tuple[Gpu, ...]:
    """The lines of nvidia-smi's csv; a line that is none is left out."""
    found = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(QUERY) + 1 or not values[0].isdigit():
            continue
        sm, most, temperature = (int(value) if value.isdigit() else None for value in values[1:4])
        try:
            bits = int(values[4], 16)
        except ValueError:
            bits = 0
        slowed = tuple(name for bit, name in SLOWED.items() if bits & bit)
        found.append(
            Gpu(index=int(values[0]), sm_MHz=sm, most_MHz=most, temperature_C=temperature, slowed_by=slowed)
        )
    return tuple(found)


def sentences(nodes: Sequence[Node]) -> tuple[str, ...]:
    """What is worth knowing: clocks of all GPUs, those that something slows down, errors that have come."""
    return (*_clocks(nodes), *(text for node in nodes for text in (*_slowed(node), *_errors(node))))


def _clocks(nodes: Sequence[Node]) -> Iterator[str]:
    told = []
    for when in ("before", "after"):
        gpus = [gpu for node in nodes for gpu in getattr(node, when).gpus]
        clocks = [gpu.sm_MHz for gpu in gpus if gpu.sm_MHz is not None]
        if clocks:
            told.append(f"{min(clocks)} to {max(clocks)} MHz {when}")
            most = max((gpu.most_MHz or 0 for gpu in gpus), default=0)
    if told:
        yield f"GPU clocks: {', '.join(told)}, of {most} MHz."


def _slowed(node: Node) -> Iterator[str]:
    for when in ("before", "after"):
        for gpu in getattr(node, when).gpus:
            if gpu.slowed_by:
                warm = "" if gpu.temperature_C is None else f" at {gpu.temperature_C} C"
                by = " and ".join(gpu.slowed_by)
                yield f"{node.host}: GPU {gpu.index} is slowed down by {by}{warm}, {when} the run."


def _errors(node: Node) -> Iterator[str]:
    for name, now in node.after.errors.items():
        before = node.before.errors.get(name, now)
        if now > before:
            yield f"{node.host}: {name} rose from {before} to {now} during the run."
