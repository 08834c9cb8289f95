"""Warn about variables that are dangerous, useless, misspelled, or meant for another version of NCCL.

Every rule is a function that yields its findings. The rules check the values of the user, of nccl.conf files,
of the recipe and of the image. They are based on NCCL's user guide (env.rst) and its code, unless a rule
names another source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from imgkit_entrypoints.fabric import ports, slingshot, sockets
from imgkit_entrypoints.fabric.fabric_plan import INTERFACES, FabricPlanBuilder, Finding
from imgkit_entrypoints.facts.host_facts import Port

# Values of NCCL_NET_GDR_LEVEL: the largest distance between GPU and NIC at which NCCL uses GPUDirect. They
# are in order, from the same device to the whole system (env.rst).
GDR_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
# Largest product of NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD, which is the sockets of one connection.
MAX_SOCKETS = 64
Findings = Iterator[Finding]


def check_variables(plan: FabricPlanBuilder) -> tuple[Finding, ...]:
    """Apply every rule to the variables of the plan, and return the findings."""
    return (
        *_check_visible_gpus(plan),
        *_check_rdma_off(plan),
        *_check_socket_counts(plan),
        *_check_gid_index(plan),
        *_check_hcas(plan),
        *_check_gdr_level(plan),
        *_check_interfaces(plan),
        *_check_names(plan),
        *_check_values(plan),
    )


def _check_visible_gpus(plan: FabricPlanBuilder) -> Findings:
    """Check that CUDA_VISIBLE_DEVICES names only GPUs that exist, and none of them twice."""
    if not plan.facts.gpus_problem:
        return
    fix = "unset CUDA_VISIBLE_DEVICES"
    count = len(plan.facts.gpu_devices)
    if count:
        indices = ",".join(map(str, range(count)))
        fix = f"set CUDA_VISIBLE_DEVICES={indices}, or unset it"
    yield Finding(plan.facts.gpus_problem, fix)


def _check_rdma_off(plan: FabricPlanBuilder) -> Findings:
    """Warn if a variable of the user turns RDMA off on a node where RDMA works.

    The warning compares the rate of RDMA with the rate of TCP.
    """
    variable = _find_rdma_off_variable(plan)
    if not variable:
        return
    # Such a variable makes TCP the fabric of the node. The exception is NCCL_IB_DISABLE on a node with
    # Slingshot, where it has no effect.
    if plan.kind != "tcp":
        return
    facts = plan.facts
    if facts.cxi:  # Slingshot's NICs
        rate_Gbps: float | None = slingshot.NIC_Gbps * len(facts.cxi)
        nics = slingshot.nics_text(facts)
    else:
        usable = ports.choose_ports(plan).selected
        rate_Gbps = ports.line_rate_Gbps(facts, usable)  # None: unknown
        nics = ", ".join(port.name for port in usable)
    if not nics:  # RDMA does not work here anyway
        return
    rdma_rate = f"{rate_Gbps:g} Gbit/s" if rate_Gbps else "more"
    rdma_text = f"{nics} would carry {rdma_rate}"  # "mlx5_0:1 would carry 400 Gbit/s"
    tcp_text = _describe_tcp(plan, rate_Gbps)  # "eth0 carries 25 Gbit/s at most (16 times less)"
    problem = f"{plan.describe(variable)} turns RDMA off: {rdma_text}, and TCP over {tcp_text}"
    yield Finding(problem, plan.unset_hint(variable))


def _find_rdma_off_variable(plan: FabricPlanBuilder) -> str:
    """Return the name of the variable with which the user has turned RDMA off, or "" if RDMA is on."""
    # The recipe may turn RDMA off on purpose for the whole cluster, so only the user's values count.
    network = plan.preset("NCCL_NET")
    if network is not None and network.is_from_user and network.value.lower() == "socket":
        return "NCCL_NET"
    disable = plan.preset("NCCL_IB_DISABLE")
    if disable is not None and disable.is_from_user and disable.value.strip() not in ("", "0"):
        return "NCCL_IB_DISABLE"
    return ""


def _describe_tcp(plan: FabricPlanBuilder, rdma_rate_Gbps: float | None) -> str:
    """Return the end of a sentence about the rate of TCP on this node.

    For example ``eth0 carries 25 Gbit/s at most (16 times less)``. The comparison with the rate of RDMA is
    left out if either rate is unknown.
    """
    # The same choice as for a run that uses TCP: the interfaces of Slingshot and InfiniBand come first.
    fabric_interfaces = sockets.usable_names(plan.facts, prefixes=sockets.FABRIC_PREFIXES)
    best = sockets.best_interface(plan, preferred=fabric_interfaces)
    if best is None:  # the words "no interface" stand where the sentence otherwise names the interface
        return "no interface carries less, at an unknown rate"
    interface = best.interface
    if not interface.speed_Mbps:
        return f"{interface.name} carries less, at an unknown rate"
    rate_Gbps = interface.speed_Mbps / 1000
    sentence_end = f"{interface.name} carries {rate_Gbps:g} Gbit/s at most"
    if rdma_rate_Gbps and rdma_rate_Gbps > rate_Gbps:
        sentence_end += f" ({rdma_rate_Gbps / rate_Gbps:.3g} times less)"
    return sentence_end


def _check_socket_counts(plan: FabricPlanBuilder) -> Findings:
    """Check the two variables that set how many sockets NCCL opens for a TCP connection.

    Both values must be numbers, and NCCL limits their product (`MAX_SOCKETS`).
    """
    counts = []  # in the order of SOCKET_COUNTS: threads, and sockets for each thread
    for name in sockets.SOCKET_COUNTS:
        count_text = plan.worker_value(name)
        if count_text is None:
            continue
        if re.fullmatch(r"\s*\d+\s*", count_text):
            counts.append(int(count_text))
        else:
            problem = f"{name}={count_text!r} is not a number: NCCL reads 0"
            yield Finding(problem, f"set a number, or {plan.unset_hint(name)}")
    if len(counts) < 2:  # a number is wrong, or NCCL chooses it itself
        return
    threads, sockets_each = counts
    total = threads * sockets_each
    if total > MAX_SOCKETS:
        yield Finding(
            f"{' x '.join(sockets.SOCKET_COUNTS)} = {threads} x {sockets_each} = {total} sockets per "
            f"connection, but NCCL allows {MAX_SOCKETS}: it lowers your value",
            f"choose values whose product is {MAX_SOCKETS} or less, such as 4 and 4",
        )


# A text that the C function strtoll(text, NULL, 0), which NCCL calls, reads to the end: "3", "-1", "0x1f".
_C_NUMBER = re.compile(r"\s*[-+]?(0[xX][0-9a-fA-F]+|\d+)\s*")


def _check_gid_index(plan: FabricPlanBuilder) -> Findings:
    """Check that NCCL_IB_GID_INDEX is a number, and that it is right for every RoCE port in use.

    On RoCE (RDMA over Ethernet), the number is the index of an address (GID) in the table of each port. On
    InfiniBand, NCCL does not use the variable, so any number is accepted.
    """
    preset = plan.preset(ports.GID_INDEX)
    # A preset is a value that the user, the recipe or the image has set. imgkit's own values are right.
    if preset is None or preset.value == "" or plan.kind not in ("infiniband", "roce"):
        return
    if not _C_NUMBER.fullmatch(preset.value):
        yield _report_no_number(plan, preset.value)
        return
    index = int(preset.value, 0)
    if plan.kind != "roce" or index < 0:  # -1 lets NCCL search for the address
        return
    description, unset = plan.describe(ports.GID_INDEX), plan.unset_hint(ports.GID_INDEX)
    for port in ports.ports_in_use(plan):
        problem = _find_gid_problem(index, port)
        if problem:
            right_gid = ports.pick_gid(port.gids)  # the GID that NCCL's own search would find
            fix = f"set {ports.GID_INDEX}={right_gid.index}, or {unset}" if right_gid else unset
            yield Finding(f"{description}: {problem}", fix)


def _report_no_number(plan: FabricPlanBuilder, index_text: str) -> Finding:
    """Return the finding about a value of NCCL_IB_GID_INDEX that is not a number.

    NCCL reads the number at the beginning, and 0 if there is none. For example, a script that reads the wrong
    file may set the value ``RoCE v2``, which NCCL takes for index 0.
    """
    leading_number = re.match(r"\s*[-+]?\d+", index_text)
    index_read = int(leading_number[0]) if leading_number else 0
    right_gids = [ports.pick_gid(port.gids) for port in ports.ports_in_use(plan)]
    right_indices = [gid.index for gid in right_gids if gid is not None]
    fix = plan.unset_hint(ports.GID_INDEX)
    if right_indices:
        fix += f"; the right index here is {right_indices[0]}"
    problem = f"{plan.describe(ports.GID_INDEX)} is not a number, and NCCL silently reads {index_read}"
    return Finding(problem, fix)


def _find_gid_problem(index: int, port: Port) -> str:
    """Return why the address at this index of a port's GID table is wrong, or "" if it is right.

    A GID is an address for RDMA. The right GID is an IPv4 address of type RoCE v2, which routers forward. It
    must not be link-local.
    """
    right_gid = ports.pick_gid(port.gids)
    advice = f"{port.name} needs {right_gid.index}" if right_gid else f"{port.name} has no IPv4 GID at all"
    gid = next((gid for gid in port.gids if gid.index == index), None)
    if gid is None:
        return f"slot {port.path}/gids/{index} is empty; {advice}"
    evidence = ports.gid_evidence(port, gid)
    if gid.link_local:  # such an address is only valid on one link, so routers do not forward it either
        return f"{evidence} is link-local; {advice}"
    if gid.kind == "IB/RoCE v1":
        return f"{evidence} is RoCE v1, which routers do not forward; {advice}"
    if right_gid is not None and right_gid.index != index:
        return f"{evidence}; {advice}: {ports.gid_evidence(port, right_gid)}"
    return ""


def _check_hcas(plan: FabricPlanBuilder) -> Findings:
    """Check that NCCL_IB_HCA, the list of RDMA ports, does not select unintended ports.

    A name in the value may also be a prefix of other devices' names. The value may also select ports that
    NCCL should not use, such as those of a storage NIC.
    """
    preset = plan.preset(ports.HCA)
    if preset is None or not preset.value or plan.kind not in ("infiniband", "roce"):
        return
    description, used = plan.describe(ports.HCA), ports.ports_in_use(plan)
    for prefix, devices in _ambiguous_prefixes(preset.value, used):
        problem = f"{description}: {prefix} is a prefix and selects {', '.join(devices)}"
        yield Finding(problem, f"begin the value with = to make it exact: {ports.HCA}=={preset.value}")
    # Compare the value with imgkit's own choice, which has a reason against each port that it leaves out.
    choice = ports.choose_ports(plan)
    fix = f"set {ports.HCA}={ports.format_hcas(choice.selected)}, or {plan.unset_hint(ports.HCA)}"
    reasons = {unused_port.port.name: unused_port.reason for unused_port in choice.unused}
    for port in used:
        if port.name in reasons:
            yield Finding(f"{description} also selects {port.name} ({reasons[port.name]})", fix)


def _ambiguous_prefixes(value: str, used: Iterable[Port]) -> Iterator[tuple[str, list[str]]]:
    """Yield each name in a value of NCCL_IB_HCA that selects several devices, and the names of the devices.

    If the value does not begin with ``=``, each name is a prefix: mlx5_1 also selects mlx5_10 to mlx5_19.
    """
    selection = ports.parse_selection(value)
    if selection.excludes or selection.is_exact:
        return
    for name in selection.names:
        prefix, _, _ = name.partition(":")  # the rest is the port's number
        devices = sorted({port.device for port in used if port.device.startswith(prefix)})
        # If no device has exactly this name, such as "mlx5", the user meant it as a prefix.
        if prefix in devices and len(devices) > 1:
            yield prefix, devices


def _check_gdr_level(plan: FabricPlanBuilder) -> Findings:
    """Check that NCCL_NET_GDR_LEVEL is a level that NCCL knows."""
    preset = plan.preset("NCCL_NET_GDR_LEVEL")
    # NCCL still accepts the numbers 0 to 5 of its earlier versions.
    if preset and preset.value not in (*GDR_LEVELS, *"012345"):
        problem = f"{plan.describe('NCCL_NET_GDR_LEVEL')} is unknown, and NCCL silently ignores it"
        yield Finding(problem, f"use one of {', '.join(GDR_LEVELS)}, in capitals")


def _check_interfaces(plan: FabricPlanBuilder) -> Findings:
    """Check that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME select an interface that works.

    The interface must be up and have an address. In a run on several nodes, other nodes must be able to reach
    it. For example, they cannot reach ``lo`` or ``docker0``.
    """
    interfaces = plan.facts.interfaces
    for variable in INTERFACES:
        preset = plan.preset(variable)
        # Without interfaces, /sys is not visible, so nothing is known about the value.
        if preset is None or not preset.value or not interfaces:
            continue
        # NCCL and Gloo read the value in different ways: NCCL accepts prefixes, and Gloo only an exact name.
        selected = sockets.MATCHING[variable](preset.value, interfaces)
        names = [interface.name for interface in selected if interface.running and interface.addresses]
        local_names = [name for name in names if name == "lo" or name.startswith("docker")]
        description, unset = plan.describe(variable), plan.unset_hint(variable)
        if not names:
            usable = ", ".join(sockets.usable_names(plan.facts)) or "none but lo"
            problem = f"{description} selects no interface that is up with an address"
            yield Finding(problem, f"{unset}, or name one of: {usable}")
        elif plan.has_several_nodes and local_names == names:  # all selected interfaces are local
            yield Finding(f"{description}: other nodes cannot reach {', '.join(names)}", unset)


# Names with other prefixes belong to other programs and are not checked.
_CHECKED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_")
OLD_NAMES = ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG", "NCCL_IB_CUDA_SUPPORT")
"""Names that only earlier versions read. They are not misspelled. known_issues.json has their new names."""
SIMILARITY = 0.85
"""How similar a misspelled name must be to a correct name (``difflib.get_close_matches``). 1 means equal."""
# NCCL_ALGO and NCCL_PROTO can have a separate value for each function: "allreduce:tree;broadcast:ring".
FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
LISTS = {
    "NCCL_ALGO": ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"),
    "NCCL_PROTO": ("LL", "LL128", "Simple"),
}
"""The items that the value of each variable may list, in upper or lower case.

The format is ``[function:][^]item,...;...`` (parseList in NCCL's tuning.cc), for example ``^LL128`` or
``allreduce:tree,ring;broadcast:ring``.
"""
REFUSES_FROM = "2.24"
"""First version of NCCL that exits with an error at an unknown item. Earlier versions ignore the item."""
NETS = (
    *("IB", "Socket", "AWS Libfabric", "Libfabric", "OFI", "IBext", "UCX", "GPUDirectTCPX", "FasTrak"),
    "gIB",
)
"""NCCL's own networks, and the names of known plug-ins without their version (``IBext_v8`` is ``IBext``)."""


def unknown_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that look like variables of NCCL, Gloo or torch, but that none of them reads.

    For example, NCCL_SOCKET_IFACE is unknown, because the variable's name is NCCL_SOCKET_IFNAME. Variables of
    plug-ins and of torch's compiler have prefixes of their own and are not checked.
    """
    unknown = []
    for name in names:
        if not name.startswith(_CHECKED_PREFIXES) or name.startswith(_PLUGIN_PREFIXES):
            continue
        if name not in KNOWN_NAMES and name not in OLD_NAMES:
            unknown.append(name)
    return tuple(unknown)


def _find_closest_choice(text: str, choices: Iterable[str], similarity: float = SIMILARITY) -> str:
    """Return the choice that is most similar to a misspelled `text`, or "" if none is similar enough.

    The comparison ignores case. `similarity` is the smallest ratio that counts as similar, from 0 (nothing in
    common) to 1 (equal).
    """
    from difflib import get_close_matches  # here, so that only runs with a misspelled name spend the time

    spellings = {choice.lower(): choice for choice in choices}
    matches = get_close_matches(text.lower(), spellings, n=1, cutoff=similarity)
    return spellings[matches[0]] if matches else ""


def similar_name(name: str) -> str:
    """Return the known variable that is most similar to `name`, or an empty text if none is similar.

    Only variables of the same library, such as NCCL, are compared.
    """
    library, _, _ = name.partition("_")
    return _find_closest_choice(
        name, [known_name for known_name in KNOWN_NAMES if known_name.startswith(library)]
    )


def _check_names(plan: FabricPlanBuilder) -> Findings:
    """Report names of variables that are probably misspelled.

    These are unknown names that are similar to a known name. Other unknown names may belong to a plug-in.
    """
    for name in unknown_names(plan.variable_names()):
        known_name = similar_name(name)
        if known_name:
            problem = f"{plan.describe(name)}: no library reads this variable; did you mean {known_name}?"
            yield Finding(problem, f"rename it to {known_name}")


def _check_values(plan: FabricPlanBuilder) -> Findings:
    """Check that the values of NCCL_ALGO, NCCL_PROTO and NCCL_NET are known to NCCL.

    For example, ``NCCL_ALGO=Rign`` is reported, because the algorithm is called Ring.
    """
    for variable, choices in LISTS.items():
        preset = plan.preset(variable)
        if preset is None:
            continue
        for rule in preset.value.split(";"):
            # "allreduce:^tree,ring" -> function "allreduce", items "tree" and "ring"
            function, _, items = rule.rpartition(":")
            for item in items.strip().removeprefix("^").split(","):
                yield from _check_choice(plan, variable, item.strip(), choices)
            if function:
                yield from _check_choice(plan, variable, function.strip(), FUNCTIONS)
    yield from _check_network(plan)


def _check_network(plan: FabricPlanBuilder) -> Findings:
    """Check that NCCL_NET names one of NCCL's own networks or the network of a known plug-in."""
    preset = plan.preset("NCCL_NET")
    if preset is None or not preset.value.strip():
        return
    name, _, _ = preset.value.partition("_v")  # "IBext_v8" is IBext
    if name.lower() in map(str.lower, NETS):
        return
    problem = (
        f"{plan.describe('NCCL_NET')} is neither IB nor Socket nor a known plug-in's name: NCCL ends with "
        '"network not found" or "Failed to initialize any NET plugin" unless a plug-in has this name'
    )
    similar = _find_closest_choice(preset.value, NETS, 0.6)
    yield Finding(problem, f"set NCCL_NET={similar}" if similar else plan.unset_hint("NCCL_NET"))


def _check_choice(plan: FabricPlanBuilder, variable: str, item: str, choices: tuple[str, ...]) -> Findings:
    """Report `item`, which is part of the value of `variable`, if it is not one of `choices`.

    The finding suggests the value with the most similar choice instead of the item.
    """
    if item.lower() in map(str.lower, choices):
        return
    problem = (
        f"{plan.describe(variable)}: {item!r} is none of {', '.join(choices)}. NCCL {REFUSES_FROM} and later "
        'end with "invalid usage", earlier versions ignore it'
    )
    fix = plan.unset_hint(variable)
    # A short item with one wrong letter differs more than a long one, so less similarity is required.
    similar = _find_closest_choice(item, choices, 0.5)
    if similar:
        # Replace the complete item only: in "Tree,Tre" the item "Tre" must not change "Tree" to "Treee".
        corrected_value = re.sub(
            rf"(?<!\w){re.escape(item)}(?!\w)", similar, plan.worker_value(variable) or ""
        )
        fix = f"set {variable}='{corrected_value}', or {fix}"
    yield Finding(problem, fix)


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
"""Variables of NCCL 2.10 to 2.30 without the prefix, from its user guide, NCCL_PARAM and ncclGetEnv."""
_GLOO = """
DEVICE_TRANSPORT DISABLE_CONNECTION_RETRIES ENABLE_RANK_AS_SEQUENCE_NUMBER ENABLE_STORE_V2_API LOG_LEVEL
SOCKET_FAMILY SOCKET_IFNAME
"""
"""Variables of the Gloo in torch 2.13, without the prefix."""
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
"""Variables of torch 2.3 to 2.13 that users set, without the prefix."""
_BUILD = "DIR HOME INCLUDE_DIR INCLUDE_DIRS INCLUDE_PATH LIB LIBRARY LIB_DIR PATH ROOT ROOT_DIR"
"""Ends of names such as ``NCCL_HOME``, which environment modules and builds set. NCCL does not read them."""
KNOWN_NAMES = frozenset(
    f"{prefix}{name}"
    for prefix, names in (("NCCL_", f"{_NCCL} {_BUILD}"), ("GLOO_", f"{_GLOO} {_BUILD}"), ("TORCH_", _TORCH))
    for name in names.split()
)
_PLUGIN_PREFIXES = (
    *("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_INSPECTOR_", "NCCL_OFI_", "NCCL_PLUGIN_"),
    *("NCCL_PROFILER_", "NCCL_SHARP_", "NCCL_SHIMNET_", "NCCL_TESTS_", "NCCL_TUNER_", "NCCL_UCX_"),
    *("TORCH_COMPILE_", "TORCH_DYNAMO_", "TORCH_FAKE_TENSOR_"),
)
"""Prefixes of variables that plug-ins and torch's compiler read."""
