"""The result of a check, and the facts that checks read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from imgkit_entrypoints.fabric.fabric_plan import FabricPlan
from imgkit_entrypoints.facts import HostFacts, Reader
from imgkit_entrypoints.system import SystemFacts

Verdict = Literal["ok", "warn", "unknown", "fail"]
"""In the order of the summary."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check."""

    name: str
    verdict: Verdict
    evidence: str
    """Finding with its source: a path with its content, or a variable."""
    fix: str = ""
    """Next step, if the verdict is not ok."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Facts of the node that the checks read."""

    facts: HostFacts
    system: SystemFacts | None
    env: dict[str, str]
    plan: FabricPlan
    """Network plan of a run on several nodes."""
    several: bool
    """True if this run has several nodes: a problem between nodes is then a failure instead of a warning."""
    reader: Reader

    @property
    def rdma(self) -> bool:
        """True if traffic between nodes uses RDMA."""
        return self.plan.kind != "tcp"

    @property
    def between(self) -> Verdict:
        """Verdict of a problem that only affects traffic between nodes."""
        return "fail" if self.several else "warn"
