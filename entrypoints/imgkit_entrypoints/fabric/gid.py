"""The GID that NCCL uses on a RoCE port, and whether NCCL_IB_GID_INDEX must name it.

NCCL 2.21 and later find the GID themselves (net_ib/connect.cc: NCCL_IB_ADDR_FAMILY,
NCCL_IB_ROCE_VERSION_NUM), and their guide advises against NCCL_IB_GID_INDEX. Earlier
versions use index 0, which is link-local.
"""

from __future__ import annotations

from collections.abc import Sequence

from imgkit_entrypoints.fabric.precedence import PlanDraft
from imgkit_entrypoints.facts import Gid, Port

FINDS_GID: tuple[int, ...] = (2, 21)
"""First version of NCCL that finds the GID itself."""
VARIABLE = "NCCL_IB_GID_INDEX"
SEARCH = ("NCCL_IB_ADDR_FAMILY", "NCCL_IB_ADDR_RANGE", "NCCL_IB_ROCE_VERSION_NUM")
"""Variables with which a user changes NCCL's search."""


def pick(gids: Sequence[Gid]) -> Gid | None:
    """GID that NCCL's search finds; None if there is no IPv4 GID and the search stays at index 0.

    The result is the first IPv4-mapped GID of type RoCE v2, else the first IPv4-mapped one. NCCL's own loop
    looks different; a test compares both.
    """
    mapped = sorted((gid for gid in gids if gid.ipv4), key=lambda gid: gid.index)
    return next((gid for gid in mapped if gid.kind == "RoCE v2"), mapped[0] if mapped else None)


def evidence(port: Port, gid: Gid) -> str:
    """Slot of /sys with its content."""
    return f"{port.path}/gids/{gid.index}: {gid.value} ({gid.ipv4 or 'no IPv4'}), {gid.kind or 'no type'}"


def decide(draft: PlanDraft, ports: Sequence[Port]) -> None:
    """Decide the GID index for these RoCE ports; it is set only for a version of NCCL that needs it."""
    asked = next((name for name in SEARCH if draft.given(name)), None)
    if asked:
        draft.note(
            VARIABLE,
            "",
            f"{asked}={draft.value(asked)} changes NCCL's search, so its result is not predicted",
        )
        return
    picked = [(port, pick(port.gids)) for port in ports]
    bare = [port for port, gid in picked if gid is None]
    for port in bare:
        _without_ipv4(draft, port)
    found = [(port, gid) for port, gid in picked if gid is not None]
    if not found or bare:
        return
    shown = "; ".join(evidence(port, gid) for port, gid in found)
    indices = {gid.index for _, gid in found}
    text = ", ".join(f"{gid.index} on {port.name}" for port, gid in found)
    version = draft.facts.nccl
    named = f"{draft.facts.nccl_version} ({draft.facts.nccl_source})"
    if version is not None and version >= FINDS_GID:
        value = str(found[0][1].index) if len(indices) == 1 else text
        draft.note(VARIABLE, value, f"NCCL {named} finds {text} itself: {shown}")
    elif version is None:
        draft.note(VARIABLE, text, f"NCCL's version is unknown; 2.21 and later find this themselves: {shown}")
        if draft.given(VARIABLE) is None:
            draft.warn(
                f"the image's NCCL version is unknown. Below 2.21, RoCE needs {VARIABLE} ({text})",
                "set the version, for example IMGKIT_NCCL_VERSION=2.20.5",
            )
    elif len(indices) == 1:
        reason = f"NCCL {named} uses index 0 by default (2.21 and later search): {shown}"
        draft.set(VARIABLE, str(indices.pop()), reason)
    else:
        _differing(draft, found[0][0], text, shown)


def _without_ipv4(draft: PlanDraft, port: Port) -> None:
    slots = ", ".join(f"{gid.index}: {gid.value} {gid.kind}".strip() for gid in port.gids) or "all empty"
    netdev = next((gid.netdev for gid in port.gids if gid.netdev), "its interface")
    reason = f"{port.name} has no IPv4 GID, so NCCL uses index 0; {port.path}/gids: {slots}"
    draft.note(VARIABLE, "", reason)
    if draft.given(VARIABLE) is None:
        draft.block(
            f"{port.name} has no IPv4 GID because {netdev} has no IPv4 address ({port.path}/gids: {slots})",
            f"give {netdev} an address (in a pod: add the RoCE network's annotation), or use TCP: "
            "NCCL_IB_DISABLE=1",
        )


def _differing(draft: PlanDraft, first: Port, text: str, shown: str) -> None:
    version = draft.facts.nccl_version
    draft.note(VARIABLE, text, f"the NICs need different indices, so none is set: {shown}")
    if draft.given(VARIABLE) is None:
        draft.block(
            f"NCCL {version} has one {VARIABLE} for all NICs, but they need different ones ({text})",
            f"use an image with NCCL 2.21 or later, or one NIC: NCCL_IB_HCA=={first.name}",
        )
