"""Harmful variables that somebody set: a warning names each with its value and its remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from imgkit_entrypoints import fabric
from imgkit_entrypoints.fabric import lint
from imgkit_entrypoints.facts.host_facts import HostFacts, Setting
from imgkit_entrypoints.system import SystemFacts

Machine = Callable[..., HostFacts]

DANGERS = {
    "gid of an empty slot": (
        "roce_pod",
        {"NCCL_IB_GID_INDEX": "2"},
        "gids/2 is empty; mlx5_bond_0:1 needs 9",
    ),
    "gid of version 1": ("roce_pod", {"NCCL_IB_GID_INDEX": "8"}, "is RoCE v1"),
    "gid that is link-local": ("roce_single_v2", {"NCCL_IB_GID_INDEX": "0"}, "is link-local"),
    "gid of another address": ("roce_idx10", {"NCCL_IB_GID_INDEX": "10"}, "mlx5_bond_0:1 needs 2"),
    "gid of one nic only": ("roce_two_nics_diff", {"NCCL_IB_GID_INDEX": "3"}, "mlx5_1:1 needs 5"),
    "gid that is text": ("roce_pod", {"NCCL_IB_GID_INDEX": "RoCE v2"}, "NCCL silently reads 0"),
    "gid of two lines": ("roce_pod", {"NCCL_IB_GID_INDEX": "7\n9"}, "NCCL silently reads 7"),
    "too many sockets": (
        "none",
        {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"},
        "16 x 8 = 128",
    ),
    "threads that are text": ("none", {"NCCL_SOCKET_NTHREADS": "four"}, "is not a number"),
    "prefix takes more": ("ib4_ndr200", {"NCCL_IB_HCA": "mlx5"}, "also selects mlx5_4:1"),
    "no such device": ("ib4_ndr200", {"NCCL_IB_HCA": "=mlx5_9"}, "selects no ACTIVE port"),
    "unknown gdr level": ("ib4_ndr200", {"NCCL_NET_GDR_LEVEL": "phb"}, "silently ignores it"),
    "no such interface": ("none", {"NCCL_SOCKET_IFNAME": "ib0"}, "selects no interface"),
    "gloo takes no prefix": ("none", {"GLOO_SOCKET_IFNAME": "eth"}, "selects no interface"),
    "loopback between nodes": ("none", {"GLOO_SOCKET_IFNAME": "lo"}, "other nodes cannot reach lo"),
    "rdma off": ("ib4_ndr200", {"NCCL_IB_DISABLE": "1"}, "mlx5_3:1 would carry 800 Gbit/s, and TCP over ib0"),
    "sockets instead of rdma": ("roce_single_v2", {"NCCL_NET": "Socket"}, "25 Gbit/s at most (4 times less)"),
    "sockets on slingshot": ("cxi4", {"NCCL_NET": "Socket"}, "would carry 800 Gbit/s, and TCP over hsn0"),
    "misspelled name": ("none", {"NCCL_SOKET_IFNAME": "eth0"}, "Rename it to NCCL_SOCKET_IFNAME"),
    "misspelled gloo": ("none", {"GLOO_SOCKET_IFNAMES": "eth0"}, "Rename it to GLOO_SOCKET_IFNAME"),
    "misspelled torch": ("none", {"TORCH_NCCL_BLOCKNG_WAIT": "1"}, "did you mean TORCH_NCCL_BLOCKING_WAIT?"),
    "misspelled algorithm": ("none", {"NCCL_ALGO": "Tree,Rign"}, "Set NCCL_ALGO='Tree,Ring'"),
    "start of a right word": ("none", {"NCCL_ALGO": "Tree,Tre"}, "Set NCCL_ALGO='Tree,Tree'"),
    "algorithm of no function": ("none", {"NCCL_ALGO": "allreducer:ring"}, "'allreducer' is none of"),
    "misspelled protocol": ("none", {"NCCL_PROTO": "^LL129"}, "Set NCCL_PROTO='^LL128'"),
    "unknown network": ("none", {"NCCL_NET": "foo"}, "is neither IB nor Socket"),
    "misspelled network": ("none", {"NCCL_NET": "Sockets"}, "Set NCCL_NET=Socket"),
    "gpu named twice": ("cxi4", {"CUDA_VISIBLE_DEVICES": "0,0,9"}, "names 0 twice, so CUDA shows no GPU"),
    "gpu that is not there": ("cxi4", {"CUDA_VISIBLE_DEVICES": "0,1,9"}, "names 9, but there are 4 GPUs"),
}

HARMLESS = {
    "exact devices": ("ib4_ndr200", {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}),
    "excluded device": ("ib4_ndr200", {"NCCL_IB_HCA": "^mlx5_4"}),
    "gid by nccl's own": ("roce_pod", {"NCCL_IB_GID_INDEX": "-1"}),
    "known gdr level": ("ib4_ndr200", {"NCCL_NET_GDR_LEVEL": "PXB"}),
    "numbered gdr level": ("ib4_ndr200", {"NCCL_NET_GDR_LEVEL": "3"}),
    "tutorial's sockets": ("none", {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "8"}),
    "information": ("none", {"NCCL_DEBUG": "INFO"}),
    "prefix of an interface": ("none", {"NCCL_SOCKET_IFNAME": "eth"}),
    "algorithms by function": ("none", {"NCCL_ALGO": "ring,collnetdirect;allreduce:^Tree;broadcast:ring"}),
    "protocol left out": ("none", {"NCCL_PROTO": "^LL128;allreduce:LL128"}),
    "network of a plug-in": ("none", {"NCCL_NET": "IBext_v8"}),
    "path of a build": ("none", {"NCCL_ROOT": "/opt/nccl", "NCCL_LIB_DIR": "/opt/nccl/lib"}),
    "variable of a plug-in": ("none", {"NCCL_TUNER_CONFIG_FILE": "/x"}),
    "name that is like none": ("none", {"NCCL_OUR_SITES_OWN": "1"}),
    "verbs on": ("ib4_ndr200", {"NCCL_IB_DISABLE": "0"}),
}


@pytest.mark.parametrize("danger", DANGERS)
def test_danger_is_named_with_remedy(machine, danger):
    tree, env, message = DANGERS[danger]
    plan = fabric.choose_fabric(machine(tree, env=env), None, env, nnodes=2)
    assert any(message in str(text) for text in plan.warnings), plan.warnings
    assert not set(env) & set(plan.env)
    for warning in plan.warnings:
        assert warning.fix
        assert "dist-env" not in str(warning)


@pytest.mark.parametrize("case", HARMLESS)
def test_right_values_pass_in_silence(machine, case):
    tree, env = HARMLESS[case]
    assert fabric.choose_fabric(machine(tree, env=env), None, env, nnodes=2).warnings == ()


def test_gid_that_older_nccl_needs_passes(machine):
    plan = fabric.choose_fabric(machine("roce_pod", "2.20.5"), None, {"NCCL_IB_GID_INDEX": "9"}, nnodes=2)
    assert plan.warnings == ()


def test_remedy_names_the_file_of_a_value(machine):
    facts = replace(
        machine("none"), nccl_settings=(Setting(name="NCCL_ALGO", value="Rin", path="/etc/nccl.conf"),)
    )
    (warning,) = fabric.choose_fabric(facts, None, {}, nnodes=2).warnings
    assert warning.fix.endswith("remove NCCL_ALGO from /etc/nccl.conf")


def test_recipe_that_turns_rdma_off_is_right(machine):
    system = SystemFacts(env={"NCCL_IB_DISABLE": "1"})
    assert fabric.choose_fabric(machine("ib4_ndr200"), system, {}, nnodes=2).warnings == ()


def test_unknown_names_are_found():
    names = ("NCCL_DEBUG", "NCCL_FOO", "GLOO_FOO", "TORCHELASTIC_RUN_ID", "PATH", "NCCL_UCX_TLS")
    assert lint.unknown_names(names) == ("NCCL_FOO", "GLOO_FOO")


def test_recipes_values_are_checked_too(machine):
    system = SystemFacts(env={"FI_PROVIDER": "efa"})
    plan = fabric.choose_fabric(machine("cxi4"), system, {}, nnodes=2)
    assert any("FI_PROVIDER='efa' (from the recipe)" in str(text) for text in plan.warnings)


@pytest.mark.parametrize(
    ("value", "ambiguous"),
    [("mlx5_1", ["mlx5_1"]), ("mlx5_1:1", ["mlx5_1"]), ("=mlx5_1", []), ("^mlx5_1", []), ("mlx5", [])],
)
def test_name_that_is_a_prefix_of_another_device_is_ambiguous(machine, value, ambiguous):
    port = machine("ib4_ndr200").rdma[0].ports[0]
    used = [replace(port, device="mlx5_1"), replace(port, device="mlx5_10")]
    assert list(lint._ambiguous_prefixes(value, used)) == [
        (name, ["mlx5_1", "mlx5_10"]) for name in ambiguous
    ]
