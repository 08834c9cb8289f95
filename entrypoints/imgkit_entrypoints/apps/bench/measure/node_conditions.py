"""The condition of a node: GPU clocks, the reasons that hold them down, and the ports' error counters."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints.apps.bench.measure import port_counters
from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.facts import Reader

QUERY = ("index", "clocks.sm", "clocks.max.sm", "temperature.gpu")
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The field's name since driver 535, and its older name. nvidia-smi refuses a query with an unknown name."""
SLOWED: Mapping[int, str] = {
    0x4: "the power cap (software)",
    0x8: "a hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake (hardware)",
}
"""Bits of nvmlClocksEventReasons (nvml.h) that cost speed; idle and user-set clocks are not among them."""
QUERY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClocks:
    """One GPU at one moment; None where the driver reports no value."""

    index: int
    sm_MHz: int | None
    most_MHz: int | None
    """Largest possible `sm_MHz`."""
    temperature_C: int | None
    slowed_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One node at one moment."""

    gpus: tuple[GpuClocks, ...]
    errors: Mapping[str, int]
    """``mlx5_0:1 symbol_error`` and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConditions:
    """One node's condition before the first size and after the last."""

    host: str
    before: Condition
    after: Condition


def read(reader: Reader, *, gpus: bool) -> Condition:
    """Read this node's condition now; runs nvidia-smi only if `gpus`."""
    return Condition(gpus=_gpus() if gpus else (), errors=port_counters.errors(reader))


def _gpus() -> tuple[GpuClocks, ...]:
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


def parsed(text: str) -> tuple[GpuClocks, ...]:
    """Parse the CSV lines of nvidia-smi; skips lines of any other form."""
    found = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(QUERY) + 1 or digits(values[0]) is None:
            continue
        sm, most, temperature = map(digits, values[1:4])
        try:
            bits = int(values[4], 16)
        except ValueError:
            bits = 0
        slowed = tuple(name for bit, name in SLOWED.items() if bits & bit)
        found.append(
            GpuClocks(
                index=int(values[0]), sm_MHz=sm, most_MHz=most, temperature_C=temperature, slowed_by=slowed
            )
        )
    return tuple(found)
