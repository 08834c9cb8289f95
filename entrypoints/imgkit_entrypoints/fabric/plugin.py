"""The network plug-in that ``NCCL_NET_PLUGIN`` names: its files, and what NCCL does without them.

NCCL opens the name as it is, then ``libnccl-net-NAME.so``, and goes on with its own networks if there is
neither (user guide, NCCL_NET_PLUGIN).
"""

from __future__ import annotations

from imgkit_entrypoints.fabric.fabric_plan import PlanDraft
from imgkit_entrypoints.facts import HostFacts, software
from imgkit_entrypoints.system import FabricKind

VARIABLE = software.NET_PLUGIN
UNOPENED = "cannot be opened, there is no"
"""Part of the warning about a plug-in that is not there."""


def is_ofi(value: str) -> bool:
    """Whether a value names aws-ofi-nccl."""
    return "ofi" in value.rpartition("/")[2].lower()


def files(facts: HostFacts, value: str) -> tuple[str, ...]:
    """Paths of the plug-ins that a value names, without those that are absent."""
    found = (facts.library(name) for word in software.plugins(value) for name in software.plugin_files(word))
    return tuple(library.path for library in found if library)


def absent(facts: HostFacts, value: str) -> tuple[str, ...]:
    """Plug-ins that a value names without a file on the library path."""
    return tuple(
        word
        for word in software.plugins(value)
        if not any(facts.library(name) for name in software.plugin_files(word))
    )


def decide(draft: PlanDraft, kind: FabricKind) -> None:
    """Leave out a plug-in of the image that is not there, and warn about one of the user or the recipe."""
    known = draft.given(VARIABLE)
    lacking = [
        word
        for word in (absent(draft.facts, known.value) if known else ())
        if not any(name in draft.links for name in software.plugin_files(word))
    ]
    if known is None or not lacking:
        return
    sought = " or ".join(dict.fromkeys(name for word in lacking for name in software.plugin_files(word)))
    if known.by == "image":
        draft.refuse(VARIABLE, f"{sought} is not on the library path")
        return
    draft.warn(
        f"{draft.said(VARIABLE)} {UNOPENED} {sought} on the library path: NCCL ignores it"
        + (" and uses TCP" if kind == "slingshot" else ""),
        f"put its folder on LD_LIBRARY_PATH, or {draft.unsetting(VARIABLE)}",
    )
