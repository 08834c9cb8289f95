"""Decide the variables of Slingshot 11.

NCCL reaches Slingshot through the aws-ofi-nccl plug-in and the cxi provider of libfabric, without InfiniBand
verbs. The settings come from HPE's guide (HewlettPackard/shs-ccl-docs, with ccl_env.sh). The guide has a
column of values for each site. This module uses the column that the documentation of Olivia follows (Sigma2,
"PyTorch multi-node", May 2026). CSCS and Isambard-AI use other buffer sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_entrypoints.fabric import plugin as plugins
from imgkit_entrypoints.fabric.fabric_plan import FabricPlanBuilder
from imgkit_entrypoints.facts import HostFacts

OFI_NETWORK = "AWS Libfabric"
"""The name of aws-ofi-nccl's network in NCCL_NET."""
# Rate of one Slingshot 11 NIC in each direction.
NIC_Gbps = 200.0
# HPE's guide and the sites recommend different buffer sizes, so each reason names the source of the value.
_COLUMN = "HPE's guide (shs-ccl-docs), Olivia's column"
# Variable, value, and the first part of the reason that reports show.
SETTINGS: tuple[tuple[str, str, str], ...] = (
    ("NCCL_NET_GDR_LEVEL", "PHB", _COLUMN),
    ("NCCL_CROSS_NIC", "1", _COLUMN),
    ("FI_MR_CACHE_MONITOR", "userfaultfd", f"{_COLUMN}; other monitors can deadlock with CUDA's allocator"),
    ("FI_CXI_DISABLE_HOST_REGISTER", "1", _COLUMN),
    ("FI_CXI_DEFAULT_CQ_SIZE", "131072", _COLUMN),
    ("FI_CXI_DEFAULT_TX_SIZE", "2048", _COLUMN),
    ("FI_CXI_RX_MATCH_MODE", "hybrid", _COLUMN),
    ("FI_CXI_RDZV_PROTO", "alt_read", f"{_COLUMN}; the job also needs --network=disable_rdzv_get"),
    # These three are for correct results. Without them, GH200 nodes with NCCL 2.27.3 and later had wrong
    # results in about 30 % of the runs (NVIDIA/nccl#2001).
    ("FI_CXI_RDZV_EAGER_SIZE", "0", f"{_COLUMN}; for correct results, not for speed"),
    ("FI_CXI_RDZV_GET_MIN", "0", f"{_COLUMN}; for correct results, not for speed"),
    ("FI_CXI_RDZV_THRESHOLD", "0", f"{_COLUMN}; for correct results, not for speed"),
)


def find_plugin(facts: HostFacts, links: Mapping[str, str]) -> str:
    """Return the path of the aws-ofi-nccl plug-in, or an empty text if there is none.

    If the host's file is linked into the container (`links`), it takes precedence over the file on the
    image's library path.
    """
    library = facts.library("libnccl-net-ofi.so") or facts.library("libnccl-net.so")
    return links.get("libnccl-net.so") or (library.path if library else "")


def nics_text(facts: HostFacts) -> str:
    """Return the NICs of the node with their folder, for a message: ``/sys/class/cxi: cxi0 cxi1``."""
    folder = facts.cxi[0].path.rpartition("/")[0]
    return f"{folder}: {' '.join(device.name for device in facts.cxi)}"


def set_variables(plan: FabricPlanBuilder) -> None:
    """Set the variables of libfabric and NCCL for Slingshot.

    On Slingshot, NCCL needs the plug-in aws-ofi-nccl. If the image selects another plug-in in
    NCCL_NET_PLUGIN, or one that has no file, the image's value is dropped.
    """
    names = nics_text(plan.facts)
    for variable, value, reason in SETTINGS:
        plan.set_variable(variable, value, f"{reason} ({names})")
    # If NCCL_NET_PLUGIN names a plug-in, NCCL does not look for any other, such as the host's aws-ofi-nccl.
    preset = plan.image_preset(plugins.VARIABLE)
    if preset is not None:
        is_ofi = plugins.is_ofi(preset.value)
        if not is_ofi or not plugins.plugin_files(plan.facts, preset.value):
            plan.drop_variable(plugins.VARIABLE, f"Slingshot needs aws-ofi-nccl ({names})")
    _set_network(plan)


def _set_network(plan: FabricPlanBuilder) -> None:
    """Set NCCL_NET for a run on several nodes, so that NCCL stops instead of falling back to TCP.

    On one node, NCCL uses no network. The variable is not set in this case, because the plug-in would
    allocate memory that is never used. It is not set either if NCCL_NET_PLUGIN already selects the plug-in.
    """
    if not plan.has_several_nodes:
        # Drop a value of the recipe or the image first, because `leave_variable` would keep it for the
        # workers. Both calls add a line to the report.
        plan.drop_variable("NCCL_NET", "on one node the plugin allocates memory for nothing (HPE's guide)")
        reason = "one node needs no network; it is set only between nodes"
        plan.leave_variable("NCCL_NET", reason, right_value=OFI_NETWORK)
        return
    plugin_preset = plan.preset(plugins.VARIABLE)  # the value of NCCL_NET_PLUGIN, if somebody has set it
    if plugin_preset is not None:
        evidence = f"{plugins.VARIABLE}={plugin_preset.value} ({plugin_preset.source})"
        reason = f"{evidence} names the plugin; CSCS advises against setting both"
        plan.leave_variable("NCCL_NET", reason, right_value=OFI_NETWORK)
        return
    plugin_path = find_plugin(plan.facts, plan.links)
    evidence = f"plugin: {plugin_path or 'not found'}"
    reason = f"{nics_text(plan.facts)}: NCCL stops instead of using TCP; {evidence}"
    plan.set_variable("NCCL_NET", OFI_NETWORK, reason)
    if not plugin_path:
        _warn_missing_plugin(plan)


def _warn_missing_plugin(plan: FabricPlanBuilder) -> None:
    """Warn that NCCL will stop, because NCCL_NET requires aws-ofi-nccl and this plug-in was not found."""
    # The user or the recipe may have chosen another network. Versions of aws-ofi-nccl after 1.11 also accept
    # the names "Libfabric" and "OFI".
    if plan.worker_value("NCCL_NET") not in (OFI_NETWORK, "Libfabric", "OFI"):
        return
    plan.add_warning(
        "aws-ofi-nccl (libnccl-net-ofi.so, libnccl-net.so) is not on the library path: NCCL will stop "
        f'with "network {OFI_NETWORK} not found"',
        "bind the site's plugin and libfabric and put them on LD_LIBRARY_PATH, or accept TCP, about 20 "
        "times slower: NCCL_NET=Socket",
    )
