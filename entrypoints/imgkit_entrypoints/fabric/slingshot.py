"""Slingshot 11: NCCL uses libfabric's cxi provider through the aws-ofi-nccl plugin, and no verbs.

The settings come from HewlettPackard/shs-ccl-docs (ccl_env.sh and guide), in the column that Olivia's
documentation follows (Sigma2, "PyTorch multi-node", May 2026). CSCS and Isambard-AI use other buffer sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_entrypoints.fabric import plugin as plugins
from imgkit_entrypoints.fabric.fabric_plan import PlanDraft
from imgkit_entrypoints.facts import HostFacts

NIC_Gbps = 200.0
_COLUMN = "HPE's guide (shs-ccl-docs), Olivia's column"
SETTINGS: tuple[tuple[str, str, str], ...] = (
    ("NCCL_NET_GDR_LEVEL", "PHB", _COLUMN),
    ("NCCL_CROSS_NIC", "1", _COLUMN),
    ("FI_MR_CACHE_MONITOR", "userfaultfd", f"{_COLUMN}; other monitors can deadlock with CUDA's allocator"),
    ("FI_CXI_DISABLE_HOST_REGISTER", "1", _COLUMN),
    ("FI_CXI_DEFAULT_CQ_SIZE", "131072", _COLUMN),
    ("FI_CXI_DEFAULT_TX_SIZE", "2048", _COLUMN),
    ("FI_CXI_RX_MATCH_MODE", "hybrid", _COLUMN),
    ("FI_CXI_RDZV_PROTO", "alt_read", f"{_COLUMN}; the job also needs --network=disable_rdzv_get"),
    ("FI_CXI_RDZV_EAGER_SIZE", "0", f"{_COLUMN}; for correct results, not for speed"),
    ("FI_CXI_RDZV_GET_MIN", "0", f"{_COLUMN}; for correct results, not for speed"),
    ("FI_CXI_RDZV_THRESHOLD", "0", f"{_COLUMN}; for correct results, not for speed"),
)
CORRUPTS_FROM = (2, 27, 3)
"""NVIDIA/nccl issue 2001: LL128 between nodes gives wrong sums on GH200 with Slingshot; 2.26.6 is correct."""


def plugin(facts: HostFacts, links: Mapping[str, str]) -> str:
    """Path of the plugin, the host's or the one on the library path; empty if there is none."""
    found = facts.library("libnccl-net-ofi.so") or facts.library("libnccl-net.so")
    return links.get("libnccl-net.so") or (found.path if found else "")


def nics(facts: HostFacts) -> str:
    """NICs as /sys shows them: ``/sys/class/cxi: cxi0 cxi1``."""
    folder = facts.cxi[0].path.rpartition("/")[0]
    return f"{folder}: {' '.join(device.name for device in facts.cxi)}"


def settings(draft: PlanDraft) -> None:
    """Decide the libfabric and NCCL settings of this fabric."""
    for variable, value, reason in SETTINGS:
        draft.set(variable, value, f"{reason} ({nics(draft.facts)})")


def provider(draft: PlanDraft) -> None:
    """Replace a provider of libfabric that the image names, for example that of a cloud."""
    if draft.from_image("FI_PROVIDER"):
        draft.set("FI_PROVIDER", "cxi", f"the provider of Slingshot ({nics(draft.facts)})")


def _drop_other_plugin(draft: PlanDraft) -> None:
    """Leave out a plug-in of the image for other fabrics: NCCL would look for no other one."""
    known = draft.from_image(plugins.VARIABLE)
    if known is None or (plugins.is_ofi(known.value) and plugins.files(draft.facts, known.value)):
        return
    draft.refuse(plugins.VARIABLE, f"Slingshot needs aws-ofi-nccl ({nics(draft.facts)})")


def net(draft: PlanDraft) -> None:
    """Decide NCCL_NET between nodes, so that NCCL stops instead of silently falling back to TCP."""
    found = plugin(draft.facts, draft.links)
    _drop_other_plugin(draft)
    if not draft.several:
        draft.refuse("NCCL_NET", "on one node the plugin allocates memory for nothing (HPE's guide)")
        draft.note("NCCL_NET", "AWS Libfabric", "one node needs no network; it is set only between nodes")
        return
    pinned = draft.given("NCCL_NET_PLUGIN")
    if pinned is not None:
        reason = (
            f"NCCL_NET_PLUGIN={pinned.value} ({pinned.origin}) names the plugin; CSCS advises against "
            "setting both"
        )
        draft.note("NCCL_NET", "AWS Libfabric", reason)
    else:
        reason = f"{nics(draft.facts)}: NCCL stops instead of using TCP; plugin: {found or 'not found'}"
        draft.set("NCCL_NET", "AWS Libfabric", reason)
    if not found and not pinned and draft.value("NCCL_NET") in ("AWS Libfabric", "Libfabric", "OFI"):
        draft.warn(
            "aws-ofi-nccl (libnccl-net-ofi.so, libnccl-net.so) is not on the library path: NCCL will stop "
            'with "network AWS Libfabric not found"',
            "bind the site's plugin and libfabric and put them on LD_LIBRARY_PATH, or accept TCP, about 20 "
            "times slower: NCCL_NET=Socket",
        )


def guard(draft: PlanDraft, expected: str) -> None:
    """Decide the guard against LL128's wrong sums; an unknown version of NCCL counts as affected.

    `expected` is the recipe's GPU model, which counts if the driver shows no GPU.
    """
    version = draft.facts.nccl
    seen = next((gpu for gpu in draft.facts.gpu_devices if "GH200" in gpu.model), None)
    if seen:
        model = f"/proc/driver/nvidia/gpus/{seen.address}/information: {seen.model}"
    elif "GH200" in expected and not draft.facts.gpu_devices:
        model = f"the recipe's {expected}"
    else:
        return
    named = f"{draft.facts.nccl_version} ({draft.facts.nccl_source})" if version else "of unknown version"
    said = f"NCCL {named}, {model}"
    if version is not None and version < CORRUPTS_FROM:
        draft.note(
            "NCCL_PROTO",
            "^LL128",
            f"{said}: not affected by NVIDIA/nccl issue 2001, which begins with 2.27.3",
        )
        return
    draft.set(
        "NCCL_PROTO", "^LL128", f"{said}: LL128 gives wrong sums over Slingshot (NVIDIA/nccl issue 2001)"
    )
    if allows_ll128(draft.value("NCCL_PROTO") or "") and draft.value("NCCL_LL128_C2C") != "0":
        draft.warn(
            f"NCCL_PROTO={draft.value('NCCL_PROTO')} allows LL128, which silently gives wrong sums here "
            f"({said}, NVIDIA/nccl issue 2001)",
            f"{draft.unsetting('NCCL_PROTO')}, or set NCCL_PROTO=^LL128",
        )


def allows_ll128(protocols: str) -> bool:
    """True if a value of NCCL_PROTO allows LL128."""
    names = [name.strip().upper() for name in protocols.removeprefix("^").split(",") if name.strip()]
    return ("LL128" in names) != protocols.startswith("^") if names else True
