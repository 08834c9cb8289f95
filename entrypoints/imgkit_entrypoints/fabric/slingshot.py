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
    """Return the path of the plugin, the host's or the one on the library path; empty if there is none."""
    library = facts.library("libnccl-net-ofi.so") or facts.library("libnccl-net.so")
    return links.get("libnccl-net.so") or (library.path if library else "")


def nics(facts: HostFacts) -> str:
    """Return the NICs as /sys shows them: ``/sys/class/cxi: cxi0 cxi1``."""
    folder = facts.cxi[0].path.rpartition("/")[0]
    return f"{folder}: {' '.join(device.name for device in facts.cxi)}"


def decide(draft: PlanDraft, gpu_model: str) -> None:
    """Decide the libfabric and NCCL settings of this fabric; `gpu_model` is that of the recipe."""
    names = nics(draft.facts)
    for variable, value, reason in SETTINGS:
        draft.set(variable, value, f"{reason} ({names})")
    if draft.image_preset("FI_PROVIDER"):  # for example that of a cloud
        draft.set("FI_PROVIDER", "cxi", f"the provider of Slingshot ({names})")
    # NCCL would look for no other plug-in than the image's.
    preset = draft.image_preset(plugins.VARIABLE)
    if preset and not (plugins.is_ofi(preset.value) and plugins.files(draft.facts, preset.value)):
        draft.refuse(plugins.VARIABLE, f"Slingshot needs aws-ofi-nccl ({names})")
    _decide_net(draft)
    _guard_ll128(draft, gpu_model)


def _decide_net(draft: PlanDraft) -> None:
    """Decide NCCL_NET between nodes, so that NCCL stops instead of silently falling back to TCP."""
    path = plugin(draft.facts, draft.links)
    if not draft.several:
        draft.refuse("NCCL_NET", "on one node the plugin allocates memory for nothing (HPE's guide)")
        draft.note("NCCL_NET", "AWS Libfabric", "one node needs no network; it is set only between nodes")
        return
    pinned = draft.preset(plugins.VARIABLE)
    if pinned is not None:
        reason = f"{plugins.VARIABLE}={pinned.value} ({pinned.source}) names the plugin; "
        draft.note("NCCL_NET", "AWS Libfabric", f"{reason}CSCS advises against setting both")
    else:
        reason = f"{nics(draft.facts)}: NCCL stops instead of using TCP; plugin: {path or 'not found'}"
        draft.set("NCCL_NET", "AWS Libfabric", reason)
    if not path and not pinned and draft.value("NCCL_NET") in ("AWS Libfabric", "Libfabric", "OFI"):
        draft.warn(
            "aws-ofi-nccl (libnccl-net-ofi.so, libnccl-net.so) is not on the library path: NCCL will stop "
            'with "network AWS Libfabric not found"',
            "bind the site's plugin and libfabric and put them on LD_LIBRARY_PATH, or accept TCP, about 20 "
            "times slower: NCCL_NET=Socket",
        )


def _guard_ll128(draft: PlanDraft, gpu_model: str) -> None:
    """Decide the guard against LL128's wrong sums; an unknown version of NCCL counts as affected.

    `gpu_model` of the recipe counts if the driver shows no GPU.
    """
    facts = draft.facts
    gpu = next((gpu for gpu in facts.gpu_devices if "GH200" in gpu.model), None)
    if gpu:
        model = f"/proc/driver/nvidia/gpus/{gpu.address}/information: {gpu.model}"
    elif "GH200" in gpu_model and not facts.gpu_devices:
        model = f"the recipe's {gpu_model}"
    else:
        return
    version = f"{facts.nccl_version} ({facts.nccl_source})" if facts.nccl else "of unknown version"
    evidence = f"NCCL {version}, {model}"
    if facts.nccl is not None and facts.nccl < CORRUPTS_FROM:
        reason = f"{evidence}: not affected by NVIDIA/nccl issue 2001, which begins with 2.27.3"
        draft.note("NCCL_PROTO", "^LL128", reason)
        return
    reason = f"{evidence}: LL128 gives wrong sums over Slingshot (NVIDIA/nccl issue 2001)"
    draft.set("NCCL_PROTO", "^LL128", reason)
    value = draft.value("NCCL_PROTO")
    if allows_ll128(value or "") and draft.value("NCCL_LL128_C2C") != "0":
        draft.warn(
            f"NCCL_PROTO={value} allows LL128, which silently gives wrong sums here "
            f"({evidence}, NVIDIA/nccl issue 2001)",
            f"{draft.how_to_unset('NCCL_PROTO')}, or set NCCL_PROTO=^LL128",
        )


def allows_ll128(protocols: str) -> bool:
    """Return True if a value of NCCL_PROTO allows LL128."""
    names = [name.strip().upper() for name in protocols.removeprefix("^").split(",") if name.strip()]
    return ("LL128" in names) != protocols.startswith("^") if names else True
