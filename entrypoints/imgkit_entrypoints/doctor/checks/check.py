"""A check's answer, and what the checks look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from imgkit_entrypoints.fabric.fabric_plan import FabricPlan
from imgkit_entrypoints.facts import HostFacts, Reader
from imgkit_entrypoints.system import SystemFacts

Verdict = Literal["ok", "warn", "fail", "unknown"]

_RDMA = ("infiniband", "roce", "slingshot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    evidence: str
    """What was seen and where: a path with its content, a variable."""
    fix: str = ""
    """What to do, where the verdict is not ok."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the checks look at."""

    facts: HostFacts
    system: SystemFacts | None
    env: dict[str, str]
    plan: FabricPlan
    """As it would be for a run on several nodes."""
    several: bool
    """This run has several nodes: what only breaks the way between them is a failure, not a warning."""
    reader: Reader

    @property
    def rdma(self) -> bool:
        """True if traffic between nodes goes by RDMA here."""
        return self.plan.kind in _RDMA

    @property
    def between(self) -> Verdict:
        """The verdict on what concerns the way between nodes only."""
        return "fail" if self.several else "warn"
