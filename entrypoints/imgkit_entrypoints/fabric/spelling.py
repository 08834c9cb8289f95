"""Misspelled variables of NCCL, Gloo and torch, and words that NCCL does not know as their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from imgkit_entrypoints.fabric.names import FAMILIES, KNOWN
from imgkit_entrypoints.fabric.precedence import PlanDraft
from imgkit_entrypoints.system import FabricKind

Found = Iterator[tuple[str, str]]

PREFIXES = ("NCCL_", "GLOO_", "TORCH_")
OLD = ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_IB_CUDA_SUPPORT")
"""Names of earlier versions; lint.py has the present ones."""
ALIKE = 0.85
"""Least likeness of a misspelled name to the one that is meant, by difflib's measure."""
FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
LISTS = {
    "NCCL_ALGO": ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"),
    "NCCL_PROTO": ("LL", "LL128", "Simple"),
}
"""Words of a list (``[function:][^]word,...;...``), in any case: parseList in NCCL's tuning.cc."""
REFUSES_FROM = "2.24"
"""First version of NCCL that stops at an unknown word; earlier ones ignore it."""
NETS = (
    "IB",
    "Socket",
    "AWS Libfabric",
    "Libfabric",
    "OFI",
    "IBext",
    "UCX",
    "GPUDirectTCPX",
    "FasTrak",
    "gIB",
)
"""NCCL's own networks, and the names by which known plug-ins answer; ``IBext_v8`` and the like count too."""


def unknown(names: Iterable[str]) -> tuple[str, ...]:
    """Names of NCCL, Gloo or torch that none of their versions up to now reads."""
    return tuple(
        name
        for name in names
        if name.startswith(PREFIXES)
        and not name.startswith(FAMILIES)
        and name not in KNOWN
        and name not in OLD
    )


def nearest(word: str, known: Iterable[str], alike: float = ALIKE) -> str:
    """Return the known word that is most like `word`; empty if none is like it."""
    from difflib import get_close_matches  # a start without misspelled words does without it

    words = {item.lower(): item for item in known}
    return next((words[found] for found in get_close_matches(word.lower(), words, 1, alike)), "")


def meant(name: str) -> str:
    """Return the known variable that is most like `name`; empty if none is like it."""
    return nearest(name, (known for known in KNOWN if known.startswith(name.partition("_")[0])))


def names(draft: PlanDraft, kind: FabricKind) -> Found:
    """Unknown names that are like a known one; a name that is like none may belong to a plug-in."""
    for name in unknown(draft.names()):
        if right := meant(name):
            yield f"{draft.said(name)}: nothing reads this variable; {right} exists", f"rename it to {right}"


def words(draft: PlanDraft, kind: FabricKind) -> Found:
    """Values of NCCL_ALGO, NCCL_PROTO and NCCL_NET that NCCL does not know."""
    for variable, allowed in LISTS.items():
        known = draft.given(variable)
        for part in known.value.split(";") if known else ():
            function, _, listed = part.rpartition(":")
            bad = [(word, allowed) for word in listed.strip().removeprefix("^").split(",")]
            bad += [(function, FUNCTIONS)] if function else []
            for word, choice in bad:
                if word.strip().lower() not in {item.lower() for item in choice}:
                    yield _bad(draft, variable, word.strip(), choice)
    net = draft.given("NCCL_NET")
    if (
        net
        and net.value.strip()
        and net.value.partition("_v")[0].lower() not in {item.lower() for item in NETS}
    ):
        right = nearest(net.value, NETS, 0.6)
        yield (
            f"{draft.said('NCCL_NET')} is neither IB nor Socket nor a known plug-in's name: NCCL ends with "
            '"network not found" or "Failed to initialize any NET plugin" unless a plug-in bears it',
            f"set NCCL_NET={right}" if right else draft.unsetting("NCCL_NET"),
        )


def _bad(draft: PlanDraft, variable: str, word: str, choice: tuple[str, ...]) -> tuple[str, str]:
    right = nearest(word, choice, 0.5)
    correct = draft.value(variable) or ""
    what = (
        f"{draft.said(variable)}: {word!r} is none of {', '.join(choice)}. NCCL {REFUSES_FROM} and later end "
        'with "invalid usage", earlier versions ignore it'
    )
    if right:
        return what, f"set {variable}='{correct.replace(word, right)}', or {draft.unsetting(variable)}"
    return what, draft.unsetting(variable)
