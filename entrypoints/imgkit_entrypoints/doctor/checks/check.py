"""The result of a check, and the input of the checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from imgkit_entrypoints.fabric.fabric_plan import FabricPlan
from imgkit_entrypoints.facts import HostFacts, Reader
from imgkit_entrypoints.system import SystemFacts

Verdict = Literal["ok", "warn", "unknown", "fail"]
"""The verdicts in the order of the summary line. ``unknown`` means that a fact is missing."""


@dataclass(frozen=True, slots=True)
class Check:
    """One result of a check, which is a line of the report."""

    name: str
    verdict: Verdict
    evidence: str
    """What was found and where, such as a path with its content, or a variable."""
    fix: str = ""
    """What the user can do next; empty if the verdict is ok."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNode:
    """Everything that the checks read about the node."""

    facts: HostFacts
    has_recipe: bool
    """False in an image of another tool."""
    system: SystemFacts
    """Facts of the recipe. Without a recipe, the defaults, which expect nothing."""
    env: dict[str, str]
    """The environment without the variables that the node agent has set."""
    plan: FabricPlan
    """Network plan for several nodes, even if this run has only one."""
    has_several_nodes: bool
    """True if this run has several nodes. Then a problem between nodes is a failure and not a warning."""
    reader: Reader
    """Reads the few files that are not among the facts of a launch."""

    @property
    def uses_rdma(self) -> bool:
        """Return whether traffic between nodes uses RDMA."""
        return self.plan.kind != "tcp"

    @property
    def network_verdict(self) -> Verdict:
        """Return the verdict for a problem that only affects traffic between nodes."""
        return "fail" if self.has_several_nodes else "warn"
