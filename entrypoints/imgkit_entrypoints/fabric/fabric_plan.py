"""What is decided about the network, with the reason of every decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints.system import FabricKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One variable: what it will be, or why it is left alone."""

    variable: str
    value: str
    reason: str
    """One sentence that quotes its evidence: path and content, or the variable that says so."""
    used: bool = True
    """False: reported only, the worker does not get this value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricPlan:
    """The network of a launch on this node."""

    kind: FabricKind
    reason: str
    """Why it is this kind."""
    env: Mapping[str, str]
    """Variables to set; never one that the user has set."""
    decisions: tuple[Decision, ...]
    unset: tuple[str, ...] = ()
    """Variables of the recipe that must not be applied on this node."""
    warnings: tuple[str, ...] = ()
    """Right but slow, or dangerous: the run may go on."""
    blockers: tuple[str, ...] = ()
    """NCCL between nodes would fail or hang; of no concern on one node or with gloo."""
    devices: tuple[str, ...] = ()
    """What carries the traffic: ``mlx5_0:1``, ``cxi0``, ``eth0``."""
    line_rate_Gbps: float | None = None
    """Sum over `devices`, in 1e9 bit/s; None if the rate of one is unknown."""
