"""Warnings about variables that are dangerous, useless, misspelled, or spelled for another version of NCCL.

Every rule is a function ``(draft, kind)`` that yields pairs: what it found, and the remedy. It checks
values that the user, an nccl.conf or the recipe set. Sources: NCCL's user guide (env.rst) and source,
unless a rule names another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from imgkit_entrypoints.fabric import ports, slingshot, sockets
from imgkit_entrypoints.fabric.fabric_plan import Finding, PlanDraft
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
        draft.unsetting(name),
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
    if draft.given("NCCL_NET") and draft.request("NCCL_NET_PLUGIN"):
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
    known = draft.given(ports.GID_INDEX)
    if known is None or known.value == "" or kind not in ("infiniband", "roce"):
        return
    said, version = draft.said(ports.GID_INDEX), draft.facts.nccl
    if not re.fullmatch(r"\s*[-+]?(0[xX][0-9a-fA-F]+|\d+)\s*", known.value):
        first = re.match(r"\s*[-+]?\d+", known.value)
        needed = [found.index for port in ports.in_use(draft) if (found := ports.pick_gid(port.gids))]
        right = f"; the right index here is {needed[0]}" if needed else ""
        yield (
            f"{said} is not a number, and NCCL silently reads {int(first[0]) if first else 0}",
            f"{draft.unsetting(ports.GID_INDEX)}{right}",
        )
        return
    if kind == "infiniband":
        what = f"{said} on InfiniBand: NCCL 2.22.3 and later ignore it, and older versions may fail"
        yield what, draft.unsetting(ports.GID_INDEX)
        return
    index = int(known.value, 0)
    if index < 0:
        return
    if version is not None and version >= ports.FINDS_GID:
        what = f"{said}: NCCL {draft.facts.nccl_version} finds the GID itself on every NIC and node"
        yield what, draft.unsetting(ports.GID_INDEX)
    for port in ports.in_use(draft):
        best = ports.pick_gid(port.gids)
        fix = f"set {ports.GID_INDEX}={best.index}, or " if best else ""
        for text in _slot(said, index, port):
            yield text, fix + draft.unsetting(ports.GID_INDEX)


def _slot(said: str, index: int, port: Port) -> Iterator[str]:
    slot: Gid | None = next((item for item in port.gids if item.index == index), None)
    best = ports.pick_gid(port.gids)
    advice = f"{port.name} needs {best.index}" if best else f"{port.name} has no IPv4 GID at all"
    if slot is None:
        yield f"{said}: slot {port.path}/gids/{index} is empty; {advice}"
    elif slot.link_local:
        yield f"{said}: {ports.gid_evidence(port, slot)} is link-local; {advice}"
    elif slot.kind == "IB/RoCE v1":
        yield f"{said}: {ports.gid_evidence(port, slot)} is RoCE v1, which routers do not forward; {advice}"
    elif best is not None and best.index != index:
        yield f"{said}: {ports.gid_evidence(port, slot)}; {advice}: {ports.gid_evidence(port, best)}"


def _hca(draft: PlanDraft, kind: FabricKind) -> Found:
    known = draft.given(ports.HCA)
    if known is None or kind not in ("infiniband", "roce") or not known.value:
        return
    words = [word.split(":") for word in known.value.lstrip("^=").split(",")]
    version = draft.facts.nccl
    if any(len(word) > 2 for word in words) and version is not None and version < (2, 30, 7):
        what = f"{draft.said(ports.HCA)}: only NCCL 2.30.7 and later know rail and plane"
        yield what, f"set {ports.HCA}={ports.spell(ports.choose(draft.facts, draft.nics)[0])}"
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
                    f"{draft.said(ports.HCA)}: {word[0]} is a prefix and selects {taken}",
                    f"begin the value with = to make it exact: {ports.HCA}=={known.value}",
                )
    for port in extra:
        yield (
            f"{draft.said(ports.HCA)} also selects {port.name} ({reasons[port.name]})",
            f"set {ports.HCA}={ports.spell(chosen)}, or {draft.unsetting(ports.HCA)}",
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


_PREFIXES = ("NCCL_", "GLOO_", "TORCH_")
OLD_NAMES = ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_IB_CUDA_SUPPORT")
"""Names that earlier versions read; `RENAMED` has the present ones."""
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


def _unknown(names: Iterable[str]) -> tuple[str, ...]:
    """Names of NCCL, Gloo or torch that none of their versions up to now reads."""
    return tuple(
        name
        for name in names
        if name.startswith(_PREFIXES)
        and not name.startswith(_FAMILIES)
        and name not in KNOWN_NAMES
        and name not in OLD_NAMES
    )


def nearest(word: str, known: Iterable[str], alike: float = ALIKE) -> str:
    """Return the known word that is most like `word`; empty if none is like it."""
    from difflib import get_close_matches  # a start without misspelled words does without it

    spellings = {item.lower(): item for item in known}
    matches = get_close_matches(word.lower(), spellings, n=1, cutoff=alike)
    return spellings[matches[0]] if matches else ""


def meant(name: str) -> str:
    """Return the known variable that is most like `name`; empty if none is like it."""
    return nearest(name, (known for known in KNOWN_NAMES if known.startswith(name.partition("_")[0])))


def _misspelled_names(draft: PlanDraft, kind: FabricKind) -> Found:
    """Unknown names that are like a known one; a name that is like none may belong to a plug-in."""
    for name in _unknown(draft.names()):
        if right := meant(name):
            yield (
                f"{draft.said(name)}: no library reads this variable; did you mean {right}?",
                f"rename it to {right}",
            )


def _misspelled_values(draft: PlanDraft, kind: FabricKind) -> Found:
    """Values of NCCL_ALGO, NCCL_PROTO and NCCL_NET that NCCL does not know."""
    for variable, allowed in LISTS.items():
        known = draft.given(variable)
        for part in known.value.split(";") if known else ():
            function, _, listed = part.rpartition(":")
            bad = [(word, allowed) for word in listed.strip().removeprefix("^").split(",")]
            bad += [(function, FUNCTIONS)] if function else []
            for word, choice in bad:
                if word.strip().lower() not in {item.lower() for item in choice}:
                    yield _misspelled(draft, variable, word.strip(), choice)
    net = draft.given("NCCL_NET")
    if (
        net
        and net.value.strip()
        and net.value.partition("_v")[0].lower() not in {item.lower() for item in NETS}
    ):
        right = nearest(net.value, NETS, 0.6)
        yield (
            f"{draft.said('NCCL_NET')} is neither IB nor Socket nor a known plug-in's name: NCCL ends with "
            '"network not found" or "Failed to initialize any NET plugin" unless a plug-in has this name',
            f"set NCCL_NET={right}" if right else draft.unsetting("NCCL_NET"),
        )


def _misspelled(draft: PlanDraft, variable: str, word: str, choice: tuple[str, ...]) -> tuple[str, str]:
    """Return the finding that `word` of the variable's value is not in `choice`, and its remedy."""
    right = nearest(word, choice, 0.5)
    what = (
        f"{draft.said(variable)}: {word!r} is none of {', '.join(choice)}. NCCL {REFUSES_FROM} and later end "
        'with "invalid usage", earlier versions ignore it'
    )
    if not right:
        return what, draft.unsetting(variable)
    # Only the whole word: Tree,Tre must not become Treee,Tree.
    corrected = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", right, draft.value(variable) or "")
    return what, f"set {variable}='{corrected}', or {draft.unsetting(variable)}"


_NCCL = """
AGG_ALLOC_MODE AGG_CHANNEL_SIZE ALGO ALLGATHERV_ENABLE ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE
CHECK_MODE CHECK_POINTERS CHUNK_SIZE COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID
COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES CONF_FILE CONNECT_ROUND_MAX_PEERS
CREATE_THREAD_CONTEXT CROSS_NIC CTA_POLICY CUDA_PATH CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_FILE
DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS DEV_API_JIT DISABLE_MEM_MANAGER DMABUF_ENABLE
ELASTIC_BUFFER_REGISTER ENABLE_VERSION_CHECK ENV_PLUGIN GDAKI_USE_RELIABLE_DB GDRCOPY_ENABLE
GDRCOPY_FIFO_ENABLE GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE GDRCOPY_TAIL_ENABLE GDR_FLUSH_DISABLE
GIN_COUNTER_POOL_SIZE GIN_ENABLE GIN_ERROR_QUERY_SEC GIN_EXCLUSIVE_CONTEXTS GIN_GDAKI_MAX_DEST_RD_ATOMIC
GIN_GDAKI_MAX_QP_RD_ATOMIC GIN_GDAKI_NIC_HANDLER GIN_GDAKI_QP_DEPTH GIN_IB_TC GIN_NCONNECTIONS
GIN_NCONTEXTS GIN_PLUGIN GIN_PLUGIN_REF_COUNT GIN_PROXY_QUEUE_SIZE GIN_SIGNAL_POOL_SIZE GIN_TYPE
GRAPH_DUMP_FILE GRAPH_DUMP_FILE_RANK GRAPH_FILE GRAPH_HELPER_DISABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER
GRAPH_STREAM_ORDERING GROUP_CUDA_STREAM HOSTID IBVERBS_LIB IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY
IB_ADDR_RANGE IB_AR_THRESHOLD IB_DATA_DIRECT IB_DEVICE_PCI_ORDER IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC
IB_GDR_LEVEL IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_MERGE_VFS IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT
IB_MQP_RETRY_SLEEP_MSEC IB_OOO_RQ IB_PCI_RELAXED_ORDERING IB_PKEY IB_PREPOST_RECEIVE_WORK_REQUESTS
IB_QPS_PER_CONNECTION IB_QUERY_PORT_SPEED IB_RECEIVER_SIDE_MATCHING_SCHEME IB_RESILIENCY_PORT_FAILOVER
IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY
IB_RESILIENCY_PORT_RECOVERY IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT
IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE
IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT
IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX IB_RESILIENCY_PORT_RECOVERY_START_DELAY IB_RETRY_CNT
IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_ROUTABLE_FLID_GID_INDEX IB_SL IB_SPLIT_DATA_ON_QPS
IB_SUBNET_AWARE_ROUTING IB_SUBNET_PREFIX_LEN IB_TC IB_TIMEOUT IB_USE_INLINE IB_WARN_RAIL_LOCAL
IGNORE_COLLNET_MISMATCH IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P IGNORE_NET_MISMATCH
IPC_USE_ABSTRACT_SOCKET L1_SHARED_MEMORY_CARVEOUT LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL
LEGACY_CUDA_REGISTER LL128_BUFFSIZE LL128_C2C LL128_NTHREADS LL_BUFFSIZE LL_THRESHOLD LOCAL_REGISTER
LSA_TEAM_SIZE MAX_CTAS MAX_NCHANNELS MAX_NRINGS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS
MIN_NRINGS MIN_P2P_NCHANNELS MLOPART_RDMA_ENABLE MNNVL MNNVL_CLIQUE_ID MNNVL_CROSS_CLIQUE MNNVL_ENABLE
MNNVL_RAIL_PER_HOST MNNVL_SCATTER_NETS_ENABLE MNNVL_UUID MULTI_RANK_GPU_ENABLE MULTI_SEGMENT_REGISTER
NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY NET_DISABLE_INTRA NET_FORCE_FLUSH NET_FORCE_MERGE NET_GDR_C2C
NET_GDR_LEVEL NET_GDR_MLOPART NET_GDR_READ NET_MERGE_LEVEL NET_MERGE_POLICY NET_OPTIONAL_RECV_COMPLETION
NET_OVERHEAD NET_PLUGIN NET_PLUGIN_REF_COUNT NET_SHARED_BUFFERS NET_SHARED_COMMS NO_CACHE NSOCKS_PERTHREAD
NTHREADS NUM_RMA_CTX NVB_DISABLE NVB_PRECONNECT NVLINK_UTIL_CENTRIC_SCHED_ENABLE NVLSTREE_MAX_CHUNKSIZE
NVLS_CHUNKSIZE NVLS_ENABLE NVLS_NCHANNELS NVTX_DISABLE OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE
P2P_DISABLE P2P_EPOCH_ENABLE P2P_LEVEL P2P_LL_THRESHOLD P2P_MAX_PEERS P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE
P2P_PCI_CHUNKSIZE P2P_PER_CHANNEL_NET_BW P2P_PXN_LEVEL P2P_READ_ENABLE P2P_SCHEDULE_GROUP_SIZE
P2P_USE_CUDA_MEMCPY PARAM_DUMP_ALL PAT_ENABLE PROFILER_PLUGIN PROGRESS_APPENDOP_FREQ PROTO
PROXY_APPEND_BATCH_SIZE PROXY_CPUSET PROXY_DUMP_SIGNAL PROXY_PROFILE PXN_C2C PXN_DISABLE RAS_ADDR
RAS_ENABLE RAS_TIMEOUT_FACTOR REPORT_CONNECT_PROGRESS RMA_DISABLE RMA_PLUGIN RMA_PLUGIN_REF_COUNT
RMA_PROXY_DUMP_SIGNAL RMA_PROXY_QUEUE_SIZE RUNTIME_CONNECT SET_CPU_STACK_SIZE SET_STACK_SIZE
SET_THREAD_NAME SHADOW_MEMPOOL_MAX_SIZE SHM_DISABLE SHM_LOCALITY SHM_MEMCPY_MODE SHM_USE_CUDA_MEMCPY
SINGLE_PROC_MEM_REG_ENABLE SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME SOCKET_INLINE SOCKET_MAGIC
SOCKET_MIN_TASKSIZE SOCKET_NTHREADS SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_RETRY_CNT
SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF SYM_CE_THRESHOLD SYM_CTAS SYM_GIN_KERNELS_ENABLE SYM_KERNEL
SYM_NOWIN_ENABLE SYM_REUSE_SYSMEM_HANDLES SYM_RS_GIN_CHUNK_SIZE SYM_TMA_ENABLE THREAD_THRESHOLDS
TOPO_DUMP_FILE TOPO_DUMP_FILE_RANK TOPO_FILE TOPO_SPLIT_MLOPART TREE_THRESHOLD TUNER_PLUGIN
UID_STAGGER_RATE UID_STAGGER_THRESHOLD UNPACK_DOUBLE_NCHANNELS VERSION WARN_ENABLE_DEBUG_INFO WIN_ENABLE
WIN_STRIDE WORK_ARGS_BYTES WORK_FIFO_BYTES WORK_FIFO_DEPTH
"""
"""NCCL 2.10 to 2.30: its calls of NCCL_PARAM and ncclGetEnv, and its user guide."""
_GLOO = """
DEVICE_TRANSPORT DISABLE_CONNECTION_RETRIES ENABLE_RANK_AS_SEQUENCE_NUMBER ENABLE_STORE_V2_API LOG_LEVEL
SOCKET_FAMILY SOCKET_IFNAME
"""
"""Gloo as in torch 2.13."""
_TORCH = """
ADDR2LINE_BINARY ALLOW_TF32_CUBLAS_OVERRIDE AUTOGRAD_SHUTDOWN_WAIT_LIMIT BLAS_PREFER_CUBLASLT
BLAS_PREFER_HIPBLASLT CACHING_PRECOMPILE COMPILER_COLLECTIVES COMPILE_DEBUG COMPILE_DISABLE CPP_LOG_LEVEL
CUDAGRAPH_GC CUDA_ARCH_LIST CUDA_SANITIZER CUDNN_USE_HEURISTIC_MODE_B CUDNN_V8_API_DEBUG
CUDNN_V8_API_DISABLED CUDNN_V8_API_ENABLED CUSTOM_TERMINATE DEVICE_BACKEND_AUTOLOAD DISABLE_ADDR2LINE
DISABLE_NATIVE_JIT DISABLE_SHARE_RDZV_TCP_STORE DISTRIBUTED_COMPILE_ON_ONE_RANK DISTRIBUTED_DEBUG
DISTRIBUTED_USE_TORCHCOMMS DIST_INIT_BARRIER DONT_CHECK_COMPILER_ABI ELASTIC_SHUTDOWN_TIMEOUT
ELASTIC_WORKER_IDENTICAL EXTENSIONS_DIR FORCE_NO_WEIGHTS_ONLY_LOAD FORCE_WEIGHTS_ONLY_LOAD FR_BUFFER_SIZE
FR_CPP_STACK FR_DUMP_DYNAMIC_FILE_NAME FR_DUMP_TEMP_FILE GLOO_LAZY_INIT HOME HUB INCLUDE_ONLY_ACTIVE
INCLUDE_STACK_TRACE LINALG_PREFER_CUSOLVER LINALG_PREFER_HIPSOLVER LOGS LOGS_FORMAT LOGS_OUT
MKLDNN_MATMUL_MIN_DIM MODEL_ZOO NCCL_ASYNC_ERROR_HANDLING NCCL_AVOID_RECORD_STREAMS NCCL_BCAST_UNIQUEID
NCCL_BLOCKING_WAIT NCCL_COORD_CHECK_MILSEC NCCL_CUDA_EVENT_CACHE NCCL_DEBUG_INFO_PIPE_FILE
NCCL_DEBUG_INFO_TEMP_FILE NCCL_DESYNC_DEBUG NCCL_DUMP_ON_TIMEOUT NCCL_ENABLE_MONITORING NCCL_ENABLE_TIMING
NCCL_EXTRA_DUMP_ON_EXEC NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_HIGH_PRIORITY
NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NCCL_NAN_CHECK NCCL_NONBLOCKING_TIMEOUT NCCL_PROPAGATE_ERROR
NCCL_RANKS_PER_ROOT NCCL_RETHROW_CUDA_ERRORS NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING
NCCL_TRACE_BUFFER_SIZE NCCL_TRACE_CPP_STACK NCCL_USE_COMM_NONBLOCKING
NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK NCCL_WAIT_TIMEOUT_DUMP_MILSEC PROFILER_ENABLE_COLLECTIVE_PROFILING
SERIALIZATION_DEBUG SHOW_CPP_STACKTRACES SHOW_DISPATCH_TRACE SYMBOLIZE_MODE SYMMMEM_IMPLICIT_POOL TRACE
USE_RTLD_GLOBAL VERSION WARM_POOL XPU_ARCH_LIST
"""
"""Variables of torch 2.3 to 2.13 that users set."""
_BUILD = "DIR HOME INCLUDE_DIR INCLUDE_DIRS INCLUDE_PATH LIB LIBRARY LIB_DIR PATH ROOT ROOT_DIR"
"""Paths that modules and builds set; NCCL does not read them."""
KNOWN_NAMES = frozenset(
    f"{prefix}{name}"
    for prefix, names in (("NCCL_", f"{_NCCL} {_BUILD}"), ("GLOO_", f"{_GLOO} {_BUILD}"), ("TORCH_", _TORCH))
    for name in names.split()
)
_FAMILIES = (
    "NCCL_FASTRAK_",
    "NCCL_GPUDIRECTTCPX_",
    "NCCL_INSPECTOR_",
    "NCCL_OFI_",
    "NCCL_PLUGIN_",
    "NCCL_PROFILER_",
    "NCCL_SHARP_",
    "NCCL_SHIMNET_",
    "NCCL_TESTS_",
    "NCCL_TUNER_",
    "NCCL_UCX_",
    "TORCH_COMPILE_",
    "TORCH_DYNAMO_",
    "TORCH_FAKE_TENSOR_",
)
"""Prefixes of variables that plug-ins and torch's compiler read."""


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
    _misspelled_names,
    _misspelled_values,
)
