"""The network decisions of a node, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from imgkit_entrypoints.system import FabricKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One variable: its value, or why it is not set."""

    variable: str
    value: str
    reason: str
    """One sentence with its evidence: a path and its content, or a variable."""
    used: bool = True
    """False if the value is only reported, and workers do not get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A setting or a part of this machine that is slow, dangerous or useless."""

    what: str
    """Finding with its evidence."""
    fix: str
    """The variable, the file or the command that mends it."""

    def __str__(self) -> str:
        return f"{self.what}. {self.fix[:1].upper()}{self.fix[1:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricPlan:
    """Network of a launch on this node."""

    kind: FabricKind
    reason: str
    """Why it is this kind."""
    env: Mapping[str, str]
    """Variables to set, without those that the user has set."""
    decisions: tuple[Decision, ...]
    unset: tuple[str, ...] = ()
    """Variables of the recipe that must not be applied on this node."""
    warnings: tuple[Finding, ...] = ()
    """Settings that are slow or dangerous; the run may go on."""
    blockers: tuple[Finding, ...] = ()
    """Reasons why NCCL would fail or hang between nodes; they do not matter on one node or with gloo."""
    devices: tuple[str, ...] = ()
    """Devices that carry the traffic: ``mlx5_0:1``, ``cxi0``, ``eth0``."""
    line_rate_Gbps: float | None = None
    """Rate of all `devices` together, in 1e9 bit/s; None if one rate is unknown."""
