"""The result of a check of dist-doctor, and the facts that all checks get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from imgkit_entrypoints.fabric.fabric_plan import FabricPlan
from imgkit_entrypoints.facts import HostFacts, Reader
from imgkit_entrypoints.system import SystemFacts

Verdict = Literal["ok", "warn", "unknown", "fail"]
"""The possible results of a check, in the order of the report's last line.

``unknown`` means that the check could not decide, because a fact is missing.
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One result of a check, which is shown as one line of the report."""

    name: str
    verdict: Verdict
    evidence: str
    """What was found and where, such as a path with its content, or a variable."""
    fix: str = ""
    """What the user can do next; empty if the verdict is ok."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNode:
    """All facts about a node that the checks need."""

    facts: HostFacts
    has_recipe: bool
    """False if the image was not built by imgkit."""
    system: SystemFacts
    """What the recipe says about the cluster. Without a recipe, the defaults, which expect no hardware."""
    env: dict[str, str]
    """The environment without the variables that the node agent (imgkit's process on each node) has set."""
    plan: FabricPlan
    """The network settings for a run on several nodes, even if this run has only one."""
    has_several_nodes: bool
    """True if this run has several nodes. Problems between nodes are then failures instead of warnings."""
    reader: Reader
    """Reads the files that only dist-doctor needs. They are not part of `facts`."""

    @property
    def uses_rdma(self) -> bool:
        """Return whether traffic between nodes uses RDMA. Every fabric except TCP does."""
        return self.plan.kind != "tcp"

    @property
    def network_verdict(self) -> Verdict:
        """Return the verdict for a problem that only affects traffic between nodes."""
        return "fail" if self.has_several_nodes else "warn"
