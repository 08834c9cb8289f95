"""Warnings about variables that are dangerous, useless, or spelled for another version of NCCL.

Every rule is a function ``(draft, kind) -> warnings``. It checks values that the user, an nccl.conf or the
recipe set. Sources: NCCL's user guide (env.rst) and source, unless a rule names another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from imgkit_entrypoints.fabric import gid, ports, slingshot, sockets
from imgkit_entrypoints.fabric.precedence import PlanDraft
from imgkit_entrypoints.facts import Gid, Port
from imgkit_entrypoints.system import FabricKind

GDR_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
MOST_SOCKETS = 64
MOST_THREADS = 16
RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL (removed in NCCL 2.4)",
}
LEFT_ON = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "NCCL_DEBUG": ("TRACE",),
    "NCCL_P2P_DISABLE": ("1",),
    "NCCL_SHM_DISABLE": ("1",),
    "NCCL_CHECK_POINTERS": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "TORCH_NCCL_BLOCKING_WAIT": ("1",),
    "TORCH_SHOW_CPP_STACKTRACES": (),
    "TORCH_NCCL_NAN_CHECK": ("1",),
}


def check(draft: PlanDraft, kind: FabricKind) -> tuple[str, ...]:
    """One sentence per dangerous variable, with its value, its origin and the remedy."""
    return tuple(text for rule in _RULES for text in rule(draft, kind))


def _said(draft: PlanDraft, name: str) -> str:
    known = draft.given(name)
    return f"{name}={known.value if known else ''!r}" + (f" ({known.origin})" if known else "")


def _on(draft: PlanDraft, name: str) -> bool:
    known = draft.given(name)
    return known is not None and known.value.strip() not in ("", "0")


def _verbs_off(draft: PlanDraft, kind: FabricKind) -> Iterator[str]:
    if _on(draft, "NCCL_IB_DISABLE") and draft.given("NCCL_IB_HCA"):
        yield (
            f"{_said(draft, 'NCCL_IB_DISABLE')} switches {_said(draft, 'NCCL_IB_HCA')} off: unset the one "
            "that you do not want"
        )


def _provider(draft: PlanDraft, kind: FabricKind) -> Iterator[str]:
    known = draft.given("FI_PROVIDER")
    if known and draft.facts.cxi and known.value != "cxi":
        yield (
            f"{_said(draft, 'FI_PROVIDER')}, but the NICs here are Slingshot ({draft.facts.cxi[0].path}): "
            "libfabric finds no provider. Set FI_PROVIDER=cxi, or unset it"
        )


def _socket_numbers(draft: PlanDraft, kind: FabricKind) -> Iterator[str]:
    numbers = []
    for name in sockets.THREADS:
        text = draft.value(name)
        if text is not None and not re.fullmatch(r"\s*\d+\s*", text):
            yield f"{name}={text!r} is not a number: NCCL reads 0"
        numbers.append(int(text) if text and re.fullmatch(r"\s*\d+\s*", text) else None)
    threads, each = numbers
    if threads is not None and threads > MOST_THREADS:
        yield f"NCCL_SOCKET_NTHREADS={threads} is above the maximum of {MOST_THREADS}"
    if threads is not None and each is not None and threads * each > MOST_SOCKETS:
        yield (
            f"{' x '.join(sockets.THREADS)} = {threads} x {each} = {threads * each} sockets per "
            f"connection, but NCCL allows {MOST_SOCKETS}: it lowers your value"
        )
    if kind != "tcp":
        for name in sockets.THREADS:
            if draft.given(name):
                yield f"{_said(draft, name)} only affects TCP, but the data uses {kind}"


def _plugin_twice(draft: PlanDraft, kind: FabricKind) -> Iterator[str]:
    if draft.given("NCCL_NET") and draft.given("NCCL_NET_PLUGIN"):
        yield (
            f"{_said(draft, 'NCCL_NET')} together with {_said(draft, 'NCCL_NET_PLUGIN')}: set only "
            'one of them (CSCS, "Communication libraries": NCCL)'
        )


def _net_on_one_node(draft: PlanDraft, kind: FabricKind) -> Iterator[str]:
    known = draft.given("NCCL_NET")
    if known and not draft.several and known.value.lower() in ("aws libfabric", "libfabric", "ofi"):
        yield f"{_said(draft, 'NCCL_NET')} on one node allocates memory for nothing (HPE's guide): unset it"


def _gid(draft: PlanDraft, kind: FabricKind) -> Iterator[str]:
    known = draft.given(gid.VARIABLE)
    if known is None or known.value == "" or kind not in ("infiniband", "roce"):
        return
    said, version = _said(draft, gid.VARIABLE), draft.facts.nccl
    if not re.fullmatch(r"\s*[-+]?(0[xX][0-9a-fA-F]+|\d+)\s*", known.value):
        first = re.match(r"\s*[-+]?\d+", known.value)
        yield (
            f"{said} is not a number, and NCCL silently reads {int(first[0]) if first else 0}. Unset it; "
            "dist-env shows the right index"
        )
        return
    if kind == "infiniband":
        yield f"{said} on InfiniBand: NCCL 2.22.3 and later ignore it, and older versions may fail. Unset it"
        return
    index = int(known.value, 0)
    if index < 0:
        return
    if version is not None and version >= gid.FINDS_GID:
        yield f"{said}: NCCL {draft.facts.nccl_version} finds the GID itself on every NIC and node. Unset it"
    for port in ports.in_use(draft):
        yield from _slot(said, index, port)


def _slot(said: str, index: int, port: Port) -> Iterator[str]:
    slot: Gid | None = next((item for item in port.gids if item.index == index), None)
    best = gid.pick(port.gids)
    advice = f"{port.name} needs {best.index}" if best else f"{port.name} has no IPv4 GID at all"
    if slot is None:
        yield f"{said}: slot {port.path}/gids/{index} is empty; {advice}"
    elif slot.link_local:
        yield f"{said}: {gid.evidence(port, slot)} is link-local; {advice}"
    elif slot.kind == "IB/RoCE v1":
        yield f"{said}: {gid.evidence(port, slot)} is RoCE v1, which routers do not forward; {advice}"
    elif best is not None and best.index != index:
        yield f"{said}: {gid.evidence(port, slot)}; {advice}: {gid.evidence(port, best)}"


def _hca(draft: PlanDraft, kind: FabricKind) -> Iterator[str]:
    known = draft.given(ports.VARIABLE)
    if known is None or kind not in ("infiniband", "roce") or not known.value:
        return
    words = [word.split(":") for word in known.value.lstrip("^=").split(",")]
    version = draft.facts.nccl
    if any(len(word) > 2 for word in words) and version is not None and version < (2, 30, 7):
        yield f"{_said(draft, ports.VARIABLE)}: only NCCL 2.30.7 and later know rail and plane"
    chosen, left = ports.choose(draft.facts, draft.nics)
    used = ports.in_use(draft)
    reasons = {item.port.name: item.reason for item in left}
    extra = [port for port in used if port.name in reasons]
    if not known.value.lstrip("^").startswith("="):
        for word in words:
            caught = sorted({port.device for port in used if port.device.startswith(word[0])})
            if not known.value.startswith("^") and word[0] in caught and len(caught) > 1:
                taken = ", ".join(caught)
                yield (
                    f"{_said(draft, ports.VARIABLE)}: {word[0]} is a prefix and selects {taken}. To "
                    "make it exact, begin the value with ="
                )
    for port in extra:
        yield (
            f"{_said(draft, ports.VARIABLE)} also selects {port.name} ({reasons[port.name]}). To leave it "
            f"out: {ports.VARIABLE}={ports.spell(chosen)}"
        )


def _gdr_level(draft: PlanDraft, kind: FabricKind) -> Iterator[str]:
    known = draft.given("NCCL_NET_GDR_LEVEL")
    if known and known.value not in (*GDR_LEVELS, *"012345"):
        yield (
            f"{_said(draft, 'NCCL_NET_GDR_LEVEL')} is unknown, and NCCL silently ignores it. Use one of "
            f"{', '.join(GDR_LEVELS)}, in capitals"
        )


def _interfaces(draft: PlanDraft, kind: FabricKind) -> Iterator[str]:
    for name in (sockets.NCCL, sockets.GLOO):
        known = draft.given(name)
        if known is None or not known.value or not draft.facts.interfaces:
            continue
        exact = "=" if name == sockets.GLOO else ""
        found = sockets.matching(exact + known.value, draft.facts.interfaces)
        running = [item for item in found if item.running and item.addresses]
        if not running:
            there = ", ".join(item.name for item in sockets.usable(draft.facts)) or "none but lo"
            yield f"{_said(draft, name)} selects no interface that is up with an address. Available: {there}"
        elif draft.several and all(item.name == "lo" or item.name.startswith("docker") for item in running):
            yield f"{_said(draft, name)}: other nodes cannot reach {', '.join(item.name for item in running)}"


def _protocols(draft: PlanDraft, kind: FabricKind) -> Iterator[str]:
    zeros = ("FI_CXI_RDZV_EAGER_SIZE", "FI_CXI_RDZV_GET_MIN", "FI_CXI_RDZV_THRESHOLD")
    for name in zeros if kind == "slingshot" else ():
        known = draft.given(name)
        if known and known.value != "0":
            yield f"{_said(draft, name)}: Slingshot needs 0 for correct results (HPE's guide)"
    known = draft.given("NCCL_PROTO")
    if known and kind != "slingshot" and slingshot.allows_ll128(known.value) and known.value[:1] != "^":
        yield f"{_said(draft, 'NCCL_PROTO')} overrides NCCL's choice of protocol: set it only for debugging"


def _spellings(draft: PlanDraft, kind: FabricKind) -> Iterator[str]:
    for old, new in RENAMED.items():
        if draft.given(old):
            yield f"{_said(draft, old)} is an old name that current torch and NCCL ignore. Use {new}"


def _debugging(draft: PlanDraft, kind: FabricKind) -> Iterator[str]:
    for name, values in LEFT_ON.items():
        known = draft.given(name)
        if known and (known.value in values or (not values and known.value)):
            yield f"{_said(draft, name)} is for debugging and slows down or changes the run. Unset it"


_RULES = (
    _verbs_off,
    _provider,
    _socket_numbers,
    _plugin_twice,
    _net_on_one_node,
    _gid,
    _hca,
    _gdr_level,
    _interfaces,
    _protocols,
    _spellings,
    _debugging,
)
