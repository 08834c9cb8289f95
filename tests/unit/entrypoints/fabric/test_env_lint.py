"""Harmful variables that somebody set: a warning names each with its value and its remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from imgkit_entrypoints import fabric
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.system import SystemFacts

Machine = Callable[..., HostFacts]

DANGERS = {
    "efa on slingshot": ("cxi4", {"FI_PROVIDER": "efa"}, "Set FI_PROVIDER=cxi"),
    "gid on infiniband": ("ib4_ndr200", {"NCCL_IB_GID_INDEX": "3"}, "on InfiniBand"),
    "gid with newer nccl": ("roce_pod", {"NCCL_IB_GID_INDEX": "9"}, "NCCL 2.27.3 finds the GID itself"),
    "gid of an empty slot": (
        "roce_pod",
        {"NCCL_IB_GID_INDEX": "2"},
        "gids/2 is empty; mlx5_bond_0:1 needs 9",
    ),
    "gid of version 1": ("roce_pod", {"NCCL_IB_GID_INDEX": "8"}, "is RoCE v1"),
    "gid that is link-local": ("roce_single_v2", {"NCCL_IB_GID_INDEX": "0"}, "is link-local"),
    "gid of one nic only": ("roce_two_nics_diff", {"NCCL_IB_GID_INDEX": "3"}, "mlx5_1:1 needs 5"),
    "gid that is text": ("roce_pod", {"NCCL_IB_GID_INDEX": "RoCE v2"}, "NCCL silently reads 0"),
    "gid of two lines": ("roce_pod", {"NCCL_IB_GID_INDEX": "7\n9"}, "NCCL silently reads 7"),
    "too many sockets": (
        "none",
        {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"},
        "16 x 8 = 128",
    ),
    "too many threads": ("none", {"NCCL_SOCKET_NTHREADS": "32"}, "above the maximum of 16"),
    "threads that are text": ("none", {"NCCL_SOCKET_NTHREADS": "four"}, "is not a number"),
    "sockets beside rdma": ("roce_pod", {"NCCL_SOCKET_NTHREADS": "4"}, "only affects TCP"),
    "verbs off and chosen": (
        "ib4_ndr200",
        {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5"},
        "switches NCCL_IB_HCA='mlx5' (yours) off",
    ),
    "plugin named twice": (
        "cxi4",
        {"NCCL_NET": "AWS Libfabric", "NCCL_NET_PLUGIN": "ofi"},
        "set only one of them",
    ),
    "prefix takes more": ("ib4_ndr200", {"NCCL_IB_HCA": "mlx5"}, "also selects mlx5_4:1"),
    "no such device": ("ib4_ndr200", {"NCCL_IB_HCA": "=mlx5_9"}, "selects no ACTIVE port"),
    "rail for older nccl": ("ib4_ndr200", {"NCCL_IB_HCA": "=mlx5_0:1:0:0"}, "only NCCL 2.30.7 and later"),
    "unknown gdr level": ("ib4_ndr200", {"NCCL_NET_GDR_LEVEL": "phb"}, "silently ignores it"),
    "no such interface": ("none", {"NCCL_SOCKET_IFNAME": "ib0"}, "selects no interface"),
    "gloo takes no prefix": ("none", {"GLOO_SOCKET_IFNAME": "eth"}, "selects no interface"),
    "loopback between nodes": ("none", {"GLOO_SOCKET_IFNAME": "lo"}, "other nodes cannot reach lo"),
    "rendezvous not zero": ("cxi4", {"FI_CXI_RDZV_THRESHOLD": "16384"}, "needs 0 for correct results"),
    "old spelling": ("none", {"NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT"),
    "removed variable": ("none", {"NCCL_IB_CUDA_SUPPORT": "1"}, "removed in NCCL 2.4"),
    "debugging left on": ("none", {"CUDA_LAUNCH_BLOCKING": "1"}, "for debugging"),
    "traces left on": ("none", {"NCCL_DEBUG": "TRACE"}, "for debugging"),
}

HARMLESS = {
    "exact devices": ("ib4_ndr200", {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}),
    "excluded device": ("ib4_ndr200", {"NCCL_IB_HCA": "^mlx5_4"}),
    "gid by nccl's own": ("roce_pod", {"NCCL_IB_GID_INDEX": "-1"}),
    "known gdr level": ("ib4_ndr200", {"NCCL_NET_GDR_LEVEL": "PHB"}),
    "numbered gdr level": ("ib4_ndr200", {"NCCL_NET_GDR_LEVEL": "3"}),
    "tutorial's sockets": ("none", {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "8"}),
    "information": ("none", {"NCCL_DEBUG": "INFO"}),
    "prefix of an interface": ("none", {"NCCL_SOCKET_IFNAME": "eth"}),
    "verbs on": ("ib4_ndr200", {"NCCL_IB_DISABLE": "0"}),
}


@pytest.mark.parametrize("danger", DANGERS)
def test_danger_is_named_with_remedy(machine: Machine, danger: str):
    tree, env, words = DANGERS[danger]
    plan = fabric.choose(machine(tree), None, env, nnodes=2)
    assert any(words in text for text in plan.warnings), plan.warnings
    assert not set(env) & set(plan.env)


@pytest.mark.parametrize("case", HARMLESS)
def test_right_values_pass_in_silence(machine: Machine, case: str):
    tree, env = HARMLESS[case]
    assert fabric.choose(machine(tree), None, env, nnodes=2).warnings == ()


def test_gid_that_older_nccl_needs_passes(machine: Machine):
    plan = fabric.choose(machine("roce_pod", "2.20.5"), None, {"NCCL_IB_GID_INDEX": "9"}, nnodes=2)
    assert plan.warnings == ()


def test_plugin_on_one_node_is_named(machine: Machine):
    plan = fabric.choose(machine("cxi4"), None, {"NCCL_NET": "AWS Libfabric"}, nnodes=1)
    assert any("on one node" in text for text in plan.warnings)


def test_recipes_values_are_checked_too(machine: Machine):
    system = SystemFacts(env={"FI_PROVIDER": "efa"})
    plan = fabric.choose(machine("cxi4"), system, {}, nnodes=2)
    assert any("FI_PROVIDER='efa' (from the recipe)" in text for text in plan.warnings)
