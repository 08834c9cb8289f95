"""The software of the nodes of a run: what each has, and what may differ between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.rollcall.messages import Caller, Identity
from imgkit_entrypoints.rollcall.session import node_name
from imgkit_entrypoints.schedulers.placement import Placement

MANIFEST = "opt/imgkit/manifest.json"
GROUPS = 8
"""Groups of different nodes that one message names: it must fit into a line."""


def identity(*, torch: str, nccl: str, root: Path = Path("/")) -> Identity:
    """Return this image's identity."""
    import hashlib

    try:
        image = hashlib.sha256(files.read_bytes(root / MANIFEST)).hexdigest()[:12]
    except OSError:
        image = ""
    return Identity(image=image, torch=torch, nccl=nccl)


def compare(place: Placement, callers: Mapping[int, Caller]) -> tuple[str, ...]:
    """Refuse nodes with different software; return differences that torchrun supports as warnings."""
    versions = (
        _groups(place, callers, "image", lambda caller: caller.identity.image),
        _groups(place, callers, "torch", lambda caller: caller.identity.torch),
        _groups(place, callers, "NCCL", lambda caller: caller.identity.nccl),
    )
    if differing := [text for text in versions if text]:
        raise NoPlan(
            "the nodes do not run the same software: " + "; ".join(differing),
            hint="start the same .sif on every node; compare: sha256sum IMAGE.sif, dist-env --json",
        )
    found = (
        _groups(place, callers, "workers per node", lambda caller: str(caller.nproc)),
        _groups(place, callers, "GPU", lambda caller: caller.gpu),
    )
    return tuple(f"the nodes differ in {text}" for text in found if text)


def _groups(
    place: Placement, callers: Mapping[int, Caller], label: str, value: Callable[[Caller], str]
) -> str:
    """Return "torch 2.3 on node 0 of 2 (a), 2.4 on node 1 of 2 (b)"; empty if all are the same."""
    groups: dict[str, list[str]] = {}
    for rank in sorted(callers):
        groups.setdefault(value(callers[rank]), []).append(node_name(place, rank, callers[rank].host))
    if len(groups) < 2:
        return ""
    parts = (
        f"{found or 'none'} on {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for found, names in list(groups.items())[:GROUPS]
    )
    more = f" and {len(groups) - GROUPS} more" if len(groups) > GROUPS else ""
    return f"{label} " + ", ".join(parts) + more
