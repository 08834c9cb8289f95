"""Every machine of the table, and the network that is chosen for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import pytest

from imgkit_entrypoints import fabric, facts
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.system import Fabric, SystemFacts

Machine = Callable[..., HostFacts]
Recipes = Mapping[str, SystemFacts]


def choose(facts: HostFacts, system: SystemFacts | None = None, nnodes: int = 2, **env: str):
    return fabric.choose_fabric(facts, system, env, nnodes=nnodes)


def decision(plan: fabric.FabricPlan, variable: str, value: str | None = None) -> fabric.Decision:
    decisions = [item for item in plan.decisions if item.variable == variable]
    return next(item for item in decisions if value is None or item.value == value)


def assert_env(env: Mapping[str, str], expected: Mapping[str, str | None]) -> None:
    assert {name: env.get(name) for name in expected} == expected


def assert_blockers(plan: fabric.FabricPlan, messages: Sequence[str]) -> None:
    """Assert that the plan has one blocker for each message, in the same order."""
    for message, blocker in zip(messages, plan.blockers, strict=True):
        assert message in str(blocker)


def test_tree_yields_its_decision(machine, tree, row):
    plan, expect = choose(machine(tree)), row.expect
    rate = plan.line_rate_Gbps and f"{plan.line_rate_Gbps:g}"
    assert f"{plan.kind} {rate} {' '.join(plan.devices)}" == expect.fabric
    assert_env(plan.env, expect.env)
    for value, reason in expect.reported.items():
        assert any(item.value == value and reason in item.reason for item in plan.decisions), plan.decisions
    for message in expect.warns:
        assert any(message in str(warning) for warning in plan.warnings), plan.warnings
    assert bool(plan.warnings) == bool(expect.warns), plan.warnings
    assert_blockers(plan, expect.blocks)


def test_older_nccl_is_told_more(machine, tree, row):
    plan, expect = choose(machine(tree, nccl="2.20.5")), row.expect
    assert_env(plan.env, {**expect.env, **expect.old_env})
    assert_blockers(plan, expect.old_blocks)


def test_reasons_quote_what_was_read(machine, tree, row):
    host = machine(tree)
    for item in choose(host).decisions:
        assert re.search(r"(/sys/class|/proc)/[\w/]+", item.reason), item


def test_reasons_name_no_test_folder(machine, tree, row, tmp_path):
    plan = choose(machine(tree))
    assert str(tmp_path) not in repr(plan)


def test_users_variables_are_never_replaced(machine, tree, row):
    host = machine(tree)
    names = {item.variable for item in choose(host).decisions if item.used and item.variable != "fabric"}
    for name in names:
        plan = choose(host, None, 2, **{name: "mine"})
        assert name not in plan.env
        assert "set by the user" in decision(plan, name, "mine").reason


def test_empty_value_counts_as_set(machine):
    plan = choose(machine("ib4_ndr200"), NCCL_IB_HCA="")
    assert "NCCL_IB_HCA" not in plan.env
    assert decision(plan, "NCCL_IB_HCA").reason.startswith("set by the user")


def test_recipe_yields_to_user_only(machine):
    system = SystemFacts(env={"NCCL_IB_HCA": "=mlx5_1:1", "NCCL_CROSS_NIC": "1"})
    host = machine("ib4_ndr200")
    plan = choose(host, system)
    assert plan.env["NCCL_IB_HCA"] == "=mlx5_1:1"
    assert plan.devices == ("mlx5_1:1",)
    assert plan.env["NCCL_CROSS_NIC"] == "1"
    users_plan = choose(host, system, NCCL_CROSS_NIC="0", NCCL_IB_HCA="=mlx5_2:1")
    assert not {"NCCL_IB_HCA", "NCCL_CROSS_NIC"} & set(users_plan.env)
    assert users_plan.devices == ("mlx5_2:1",)


def test_nccl_conf_counts_as_users(planted, machine):
    root = planted("ib4_ndr200")
    (root / "etc/nccl.conf").write_text("# site\nNCCL_IB_HCA==mlx5_3:1\nNCCL_CROSS_NIC=0\n")
    plan = choose(facts.gather(root, {"IMGKIT_NCCL_VERSION": "2.27.3"}))
    assert "NCCL_IB_HCA" not in plan.env
    assert plan.devices == ("mlx5_3:1",)
    assert "/etc/nccl.conf" in decision(plan, "NCCL_IB_HCA", "=mlx5_3:1").reason
    assert decision(plan, "NCCL_CROSS_NIC").value == "0"


def test_recipe_can_switch_verbs_off(machine, recipes):
    plan = choose(machine("ib4_ndr200"), recipes["lambda"])
    assert plan.kind == "tcp"
    assert plan.env["NCCL_IB_DISABLE"] == "1"
    assert "from the recipe" in plan.reason
    assert not plan.warnings


def test_user_can_ask_for_sockets(machine, recipes):
    plan = choose(machine("ib4_ndr200"), recipes["mn5"], NCCL_NET="Socket")
    assert plan.kind == "tcp"
    assert not plan.blockers


def test_sockets_use_the_fabrics_interface(machine):
    on_ib = choose(machine("ib4_ndr200"), NCCL_IB_DISABLE="1")
    assert on_ib.env["NCCL_SOCKET_IFNAME"] == "ib0"
    assert "TCP is requested" in decision(on_ib, "NCCL_IB_DISABLE").reason
    host = machine("cxi4")
    on_cxi = choose(host, NCCL_NET="Socket")
    assert on_cxi.env["GLOO_SOCKET_IFNAME"] == "hsn0"
    assert on_cxi.env["NCCL_SOCKET_NTHREADS"] == "4"  # a fast interface needs several sockets between nodes
    assert "NCCL_SOCKET_NTHREADS" not in choose(host, nnodes=1, NCCL_NET="Socket").env


def test_slingshot_nic_that_is_down_warns(planted):
    root = planted("cxi4")
    (root / "sys/class/net/hsn2/operstate").write_text("down\n")
    plan = choose(facts.gather(root, {"IMGKIT_NCCL_VERSION": "2.27.3"}))
    assert plan.line_rate_Gbps == 600
    assert any("hsn2 is down" in str(text) for text in plan.warnings)
    assert plan.env["NCCL_SOCKET_IFNAME"] == "hsn0,hsn1,hsn3"


def test_recipe_is_confirmed_by_machine(machine, recipes):
    assert choose(machine("ib4_ndr200"), recipes["mn5"]).warnings == ()


def test_missing_fabric_blocks_gpu_nodes(machine, recipes, planted):
    root = planted("ports_down")
    for number in range(4):
        (root / f"dev/nvidia{number}").touch()
    plan = choose(facts.gather(root, {}), recipes["mn5"])
    assert "the recipe says infiniband, but this machine has tcp" in str(plan.blockers[0])
    users_plan = choose(facts.gather(root, {}), recipes["mn5"], NCCL_IB_DISABLE="1")
    assert not users_plan.blockers


def test_missing_fabric_only_warns_elsewhere(machine, recipes):
    plan = choose(machine("none"), recipes["mn5"])
    assert not plan.blockers
    assert "the recipe says infiniband" in str(plan.warnings[0])


def test_nics_of_recipe_are_all_kept(machine):
    system = SystemFacts(fabric=Fabric(kind="roce", nics=4))
    plan = choose(machine("roce_storage"), system)
    assert plan.devices == ("mlx5_0:1", "mlx5_1:1", "mlx5_5:1", "mlx5_7:1")


def test_lower_rate_than_recipe_warns(machine, recipes):
    plan = choose(machine("two_ports"), recipes["mn5"])
    assert any("this node has 400 of its 800 Gbit/s" in str(text) for text in plan.warnings)


def test_socket_numbers_are_for_tcp(machine, recipes):
    plan = choose(machine("roce_pod"), recipes["rcp"])
    assert "NCCL_SOCKET_NTHREADS" not in plan.env
    assert set(plan.unset) == {"NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"}
    by_tcp = choose(machine("none"), recipes["rcp"])
    assert by_tcp.env["NCCL_NSOCKS_PERTHREAD"] == "8"


def test_unknown_nccl_exports_no_gid(machine):
    plan = choose(machine("roce_pod", nccl=""), NCCL_SOCKET_IFNAME="eth0")
    assert "NCCL_IB_GID_INDEX" not in plan.env
    assert any("IMGKIT_NCCL_VERSION" in str(text) for text in plan.warnings)


def test_own_search_is_not_foretold(machine):
    plan = choose(machine("roce_no_ipv4"), NCCL_IB_ADDR_FAMILY="AF_INET6")
    assert not plan.blockers
    assert not decision(plan, "NCCL_IB_GID_INDEX").used


def test_plugin_is_pinned_between_nodes(machine):
    host = machine("cxi4")
    assert choose(host, nnodes=2).env["NCCL_NET"] == "AWS Libfabric"
    assert "NCCL_NET" not in choose(host, nnodes=1).env
    assert "NCCL_NET" not in choose(host, nnodes=2, NCCL_NET_PLUGIN="ofi").env


def test_recipe_interfaces_absent_are_dropped(machine, recipes):
    plan = choose(machine("none"), recipes["olivia"])
    assert plan.env["NCCL_SOCKET_IFNAME"] == "eth0"
    assert (
        "this machine has no such interface"
        in decision(plan, "NCCL_SOCKET_IFNAME", "hsn0,hsn1,hsn2,hsn3").reason
    )


@pytest.mark.parametrize(
    ("nccl", "guarded"), [("2.26.6", False), ("2.27.3", True), ("2.30.7", True), ("", True)]
)
def test_ll128_guard_follows_version(machine, nccl, guarded):
    assert (choose(machine("cxi4", nccl=nccl)).env.get("NCCL_PROTO") == "^LL128") == guarded


@pytest.mark.parametrize("protocols", ["Simple", "LL,Simple", "^LL128", "^LL128,LL"])
def test_clean_protocol_is_accepted(machine, protocols):
    plan = choose(machine("cxi4"), NCCL_PROTO=protocols)
    assert not any("wrong sums" in str(text) for text in plan.warnings)


def test_heads_network_decides_interface(machine):
    host = machine("ib4_ndr200")
    plan = fabric.choose_fabric(host, None, {}, nnodes=2, head="10.0.0.9")
    assert plan.env["GLOO_SOCKET_IFNAME"] == "eno1"


def test_loopback_head_means_loopback(machine):
    plan = fabric.choose_fabric(machine("none"), None, {}, nnodes=2, head="127.0.0.1")
    assert plan.env["GLOO_SOCKET_IFNAME"] == "lo"


def test_machine_without_network_blocks_nodes(planted):
    root = planted("none")
    (root / "sys/class/net/eth0/operstate").write_text("down\n")
    plan = choose(facts.gather(root, {}))
    assert "nodes cannot connect" in str(plan.blockers[0])


def test_one_node_needs_no_interface(machine):
    plan = choose(machine("none"), nnodes=1)
    assert "NCCL_SOCKET_IFNAME" not in plan.env
    assert decision(plan, "NCCL_SOCKET_IFNAME").value == "eth0"
