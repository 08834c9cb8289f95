"""Warnings about variables that are dangerous, useless, or spelled for another version of NCCL.

Every rule is a function ``(draft, kind)`` that yields pairs: what it found, and the remedy. It checks values
that the user, an nccl.conf or the recipe set; spelling.py checks names and words. Sources: NCCL's user guide
(env.rst) and source, unless a rule names another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from imgkit_entrypoints.fabric import gid, ports, slingshot, sockets, spelling
from imgkit_entrypoints.fabric.fabric_plan import Finding
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


Found = Iterator[tuple[str, str]]


def check(draft: PlanDraft, kind: FabricKind) -> tuple[Finding, ...]:
    """One finding per dangerous variable, with its value and its origin."""
    return tuple(Finding(what=what, fix=fix) for rule in _RULES for what, fix in rule(draft, kind))


def _on(draft: PlanDraft, name: str) -> bool:
    known = draft.given(name)
    return known is not None and known.value.strip() not in ("", "0")


def _verbs_off(draft: PlanDraft, kind: FabricKind) -> Found:
    if _on(draft, "NCCL_IB_DISABLE") and draft.given("NCCL_IB_HCA"):
        yield (
            f"{draft.said('NCCL_IB_DISABLE')} switches {draft.said('NCCL_IB_HCA')} off",
            f"{draft.unsetting('NCCL_IB_DISABLE')} or NCCL_IB_HCA, whichever you do not want",
        )


def _rdma_off(draft: PlanDraft, kind: FabricKind) -> Found:
    """Price of TCP where RDMA works: the ports' rate against the interface's."""
    net, off = draft.given("NCCL_NET"), draft.given("NCCL_IB_DISABLE")
    socket = net is not None and net.mine and net.value.lower() == "socket"
    disabled = off is not None and off.mine and _on(draft, "NCCL_IB_DISABLE") and not draft.facts.cxi
    if kind != "tcp" or not (socket or disabled):
        return
    used, _ = ports.choose(draft.facts, draft.nics)
    rate, names = ports.line_rate_Gbps(draft.facts, used), ", ".join(port.name for port in used)
    if draft.facts.cxi:
        rate, names = slingshot.NIC_Gbps * len(draft.facts.cxi), slingshot.nics(draft.facts)
    if not names:
        return
    own = [item.name for item in sockets.usable(draft.facts) if item.name.startswith(("hsn", "ib"))]
    best = sockets.best(draft.facts, draft.head, own)
    interface, speed = (best[0].name, best[0].speed_Mbps) if best else ("no interface", None)
    fast = f"{rate:g} Gbit/s" if rate else "more"
    slow = f"{speed / 1000:g} Gbit/s at most" if speed else "less, at an unknown rate"
    times = f" ({rate * 1000 / speed:.3g} times less)" if rate and speed and rate * 1000 > speed else ""
    name = "NCCL_NET" if socket else "NCCL_IB_DISABLE"
    yield (
        f"{draft.said(name)} turns RDMA off: {names} would carry {fast}, and TCP over {interface} carries "
        f"{slow}{times}",
        f"{draft.unsetting(name)}. To measure both: dist-bench --compare rdma,tcp",
    )


def _provider(draft: PlanDraft, kind: FabricKind) -> Found:
    known = draft.given("FI_PROVIDER")
    if known and draft.facts.cxi and known.value != "cxi":
        yield (
            f"{draft.said('FI_PROVIDER')}, but the NICs here are Slingshot ({draft.facts.cxi[0].path}): "
            "libfabric finds no provider",
            f"set FI_PROVIDER=cxi, or {draft.unsetting('FI_PROVIDER')}",
        )


def _socket_numbers(draft: PlanDraft, kind: FabricKind) -> Found:
    numbers = []
    for name in sockets.THREADS:
        text = draft.value(name)
        if text is not None and not re.fullmatch(r"\s*\d+\s*", text):
            yield (
                f"{name}={text!r} is not a number: NCCL reads 0",
                f"set a number, or {draft.unsetting(name)}",
            )
        numbers.append(int(text) if text and re.fullmatch(r"\s*\d+\s*", text) else None)
    threads, each = numbers
    if threads is not None and threads > MOST_THREADS:
        what = f"NCCL_SOCKET_NTHREADS={threads} is above the maximum of {MOST_THREADS}"
        yield what, f"set NCCL_SOCKET_NTHREADS={MOST_THREADS} or less"
    if threads is not None and each is not None and threads * each > MOST_SOCKETS:
        yield (
            f"{' x '.join(sockets.THREADS)} = {threads} x {each} = {threads * each} sockets per "
            f"connection, but NCCL allows {MOST_SOCKETS}: it lowers your value",
            f"choose values whose product is {MOST_SOCKETS} or less, such as 4 and 4",
        )
    if kind != "tcp":
        for name in sockets.THREADS:
            if draft.given(name):
                yield f"{draft.said(name)} only affects TCP, but the data uses {kind}", draft.unsetting(name)


def _plugin_twice(draft: PlanDraft, kind: FabricKind) -> Found:
    if draft.given("NCCL_NET") and draft.given("NCCL_NET_PLUGIN"):
        yield (
            f"{draft.said('NCCL_NET')} together with {draft.said('NCCL_NET_PLUGIN')}: set only "
            'one of them (CSCS, "Communication libraries": NCCL)',
            draft.unsetting("NCCL_NET_PLUGIN"),
        )


def _net_on_one_node(draft: PlanDraft, kind: FabricKind) -> Found:
    known = draft.given("NCCL_NET")
    if known and not draft.several and known.value.lower() in ("aws libfabric", "libfabric", "ofi"):
        what = f"{draft.said('NCCL_NET')} on one node allocates memory for nothing (HPE's guide)"
        yield what, draft.unsetting("NCCL_NET")


def _gid(draft: PlanDraft, kind: FabricKind) -> Found:
    known = draft.given(gid.VARIABLE)
    if known is None or known.value == "" or kind not in ("infiniband", "roce"):
        return
    said, version = draft.said(gid.VARIABLE), draft.facts.nccl
    if not re.fullmatch(r"\s*[-+]?(0[xX][0-9a-fA-F]+|\d+)\s*", known.value):
        first = re.match(r"\s*[-+]?\d+", known.value)
        needed = [found.index for port in ports.in_use(draft) if (found := gid.pick(port.gids))]
        right = f"; the right index here is {needed[0]}" if needed else ""
        yield (
            f"{said} is not a number, and NCCL silently reads {int(first[0]) if first else 0}",
            f"{draft.unsetting(gid.VARIABLE)}{right}",
        )
        return
    if kind == "infiniband":
        what = f"{said} on InfiniBand: NCCL 2.22.3 and later ignore it, and older versions may fail"
        yield what, draft.unsetting(gid.VARIABLE)
        return
    index = int(known.value, 0)
    if index < 0:
        return
    if version is not None and version >= gid.FINDS_GID:
        what = f"{said}: NCCL {draft.facts.nccl_version} finds the GID itself on every NIC and node"
        yield what, draft.unsetting(gid.VARIABLE)
    for port in ports.in_use(draft):
        best = gid.pick(port.gids)
        fix = f"set {gid.VARIABLE}={best.index}, or " if best else ""
        for text in _slot(said, index, port):
            yield text, fix + draft.unsetting(gid.VARIABLE)


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


def _hca(draft: PlanDraft, kind: FabricKind) -> Found:
    known = draft.given(ports.VARIABLE)
    if known is None or kind not in ("infiniband", "roce") or not known.value:
        return
    words = [word.split(":") for word in known.value.lstrip("^=").split(",")]
    version = draft.facts.nccl
    if any(len(word) > 2 for word in words) and version is not None and version < (2, 30, 7):
        what = f"{draft.said(ports.VARIABLE)}: only NCCL 2.30.7 and later know rail and plane"
        yield what, f"set {ports.VARIABLE}={ports.spell(ports.choose(draft.facts, draft.nics)[0])}"
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
                    f"{draft.said(ports.VARIABLE)}: {word[0]} is a prefix and selects {taken}",
                    f"begin the value with = to make it exact: {ports.VARIABLE}=={known.value}",
                )
    for port in extra:
        yield (
            f"{draft.said(ports.VARIABLE)} also selects {port.name} ({reasons[port.name]})",
            f"set {ports.VARIABLE}={ports.spell(chosen)}, or {draft.unsetting(ports.VARIABLE)}",
        )


def _gdr_level(draft: PlanDraft, kind: FabricKind) -> Found:
    known = draft.given("NCCL_NET_GDR_LEVEL")
    if known and known.value not in (*GDR_LEVELS, *"012345"):
        yield (
            f"{draft.said('NCCL_NET_GDR_LEVEL')} is unknown, and NCCL silently ignores it",
            f"use one of {', '.join(GDR_LEVELS)}, in capitals",
        )


def _interfaces(draft: PlanDraft, kind: FabricKind) -> Found:
    for name in (sockets.NCCL, sockets.GLOO):
        known = draft.given(name)
        if known is None or not known.value or not draft.facts.interfaces:
            continue
        exact = "=" if name == sockets.GLOO else ""
        found = sockets.matching(exact + known.value, draft.facts.interfaces)
        running = [item for item in found if item.running and item.addresses]
        if not running:
            there = ", ".join(item.name for item in sockets.usable(draft.facts)) or "none but lo"
            what = f"{draft.said(name)} selects no interface that is up with an address"
            yield what, f"{draft.unsetting(name)}, or name one of: {there}"
        elif draft.several and all(item.name == "lo" or item.name.startswith("docker") for item in running):
            what = f"{draft.said(name)}: other nodes cannot reach {', '.join(item.name for item in running)}"
            yield what, draft.unsetting(name)


def _protocols(draft: PlanDraft, kind: FabricKind) -> Found:
    zeros = ("FI_CXI_RDZV_EAGER_SIZE", "FI_CXI_RDZV_GET_MIN", "FI_CXI_RDZV_THRESHOLD")
    for name in zeros if kind == "slingshot" else ():
        known = draft.given(name)
        if known and known.value != "0":
            yield f"{draft.said(name)}: Slingshot needs 0 for correct results (HPE's guide)", f"set {name}=0"
    known = draft.given("NCCL_PROTO")
    if known and kind != "slingshot" and slingshot.allows_ll128(known.value) and known.value[:1] != "^":
        what = f"{draft.said('NCCL_PROTO')} overrides NCCL's choice of protocol: set it only for debugging"
        yield what, draft.unsetting("NCCL_PROTO")


def _spellings(draft: PlanDraft, kind: FabricKind) -> Found:
    for old, new in RENAMED.items():
        if draft.given(old):
            yield f"{draft.said(old)} is an old name that current torch and NCCL ignore", f"use {new}"


def _debugging(draft: PlanDraft, kind: FabricKind) -> Found:
    for name, values in LEFT_ON.items():
        known = draft.given(name)
        if known and (known.value in values or (not values and known.value)):
            yield (
                f"{draft.said(name)} is for debugging and slows down or changes the run",
                draft.unsetting(name),
            )


def _visible_gpus(draft: PlanDraft, kind: FabricKind) -> Found:
    if draft.facts.gpus_problem:
        count = len(draft.facts.gpu_devices)
        every = ",".join(map(str, range(count))) or "0"
        fix = f"set CUDA_VISIBLE_DEVICES={every}, or unset it" if count else "unset CUDA_VISIBLE_DEVICES"
        yield draft.facts.gpus_problem, fix


_RULES = (
    _visible_gpus,
    _rdma_off,
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
    spelling.names,
    spelling.words,
)
