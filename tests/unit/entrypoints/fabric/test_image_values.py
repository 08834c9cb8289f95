"""Variables that an image brings: the facts of a machine replace them, and users and recipes win.

`NCCL_NET_PLUGIN=spcx` is what newer NGC images set for every fabric. The other rows are variables of bases
for clouds and other clusters; their values are chosen so that they are wrong on at least one machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from imgkit_entrypoints import fabric, facts
from imgkit_entrypoints.facts.host_facts import HostFacts, Library, Setting
from imgkit_entrypoints.system import Partition, SystemFacts

Machine = Callable[..., HostFacts]

MACHINES = ("ib4_ndr200", "roce_pod", "cxi4", "none")
KEPT, GONE = "kept", "gone"
"""The image's value reaches the workers; the variable does not."""

TABLE: Mapping[tuple[str, str], tuple[str, str, str, str]] = {
    # What workers get on InfiniBand, RoCE, Slingshot and TCP.
    ("NCCL_NET_PLUGIN", "spcx"): (KEPT, KEPT, GONE, KEPT),
    ("NCCL_NET_PLUGIN", "lost"): (GONE, GONE, GONE, GONE),
    ("NCCL_NET_PLUGIN", "none"): (KEPT, KEPT, GONE, KEPT),
    ("NCCL_NET_PLUGIN", "ofi"): (KEPT, KEPT, KEPT, KEPT),
    ("NCCL_NET", "IB"): (KEPT, KEPT, "AWS Libfabric", GONE),
    ("NCCL_NET", "Socket"): (GONE, GONE, "AWS Libfabric", KEPT),
    ("NCCL_NET", "AWS Libfabric"): (GONE, GONE, KEPT, GONE),
    ("NCCL_IB_HCA", "mlx5"): ("=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1", "=mlx5_bond_0:1", KEPT, KEPT),
    ("NCCL_IB_HCA", "=mlx5_4:1"): ("=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1", "=mlx5_bond_0:1", KEPT, KEPT),
    ("NCCL_IB_DISABLE", "1"): (GONE, GONE, KEPT, KEPT),
    ("NCCL_IB_DISABLE", "0"): (GONE, GONE, KEPT, "1"),
    ("NCCL_IB_GID_INDEX", "3"): (GONE, GONE, KEPT, KEPT),
    ("NCCL_SOCKET_IFNAME", "eth1"): ("ib0", "eth0", "hsn0,hsn1,hsn2,hsn3", "eth0"),
    ("GLOO_SOCKET_IFNAME", "eth0"): ("ib0", KEPT, "hsn0", KEPT),
    ("NCCL_SOCKET_NTHREADS", "8"): (GONE, GONE, GONE, KEPT),
    ("NCCL_PROTO", "Simple"): (KEPT, KEPT, "^LL128", KEPT),
    ("NCCL_CROSS_NIC", "0"): (KEPT, KEPT, "1", KEPT),
    ("NCCL_NET_GDR_LEVEL", "SYS"): (KEPT, KEPT, "PHB", KEPT),
    ("FI_PROVIDER", "efa"): (KEPT, KEPT, "cxi", KEPT),
    ("FI_CXI_RDZV_THRESHOLD", "16384"): (KEPT, KEPT, "0", KEPT),
    ("FI_MR_CACHE_MONITOR", "memhooks"): (KEPT, KEPT, "userfaultfd", KEPT),
    ("UCX_NET_DEVICES", "mlx5_0:1"): (KEPT, KEPT, KEPT, KEPT),
    ("UCX_TLS", "rc,cuda"): (KEPT, KEPT, KEPT, KEPT),
    ("OMPI_MCA_coll_hcoll_enable", "0"): (KEPT, KEPT, KEPT, KEPT),
    ("OMPI_MCA_btl_tcp_if_include", "eth0"): (KEPT, KEPT, KEPT, KEPT),
}
PLUGINS = tuple(
    Library(name=name, path=f"/opt/plugins/{name}", target=f"/opt/plugins/{name}")
    for name in ("libnccl-net-spcx.so", "libnccl-net-ofi.so")
)


class Case(NamedTuple):
    host: HostFacts
    """A machine with both plug-ins, whose environment has the variable."""
    name: str
    value: str
    expected: str

    def choose(
        self, image: Mapping[str, str] | None, system: SystemFacts | None = None, value: str | None = None
    ) -> fabric.FabricPlan:
        """Return the plan for an image with these variables, with `value` in the environment."""
        env = {} if value is None else {self.name: value}
        return choose(replace(self.host, image_env=image), system, env)

    def worker_value(self, plan: fabric.FabricPlan, value: str | None) -> str | None:
        """The value that a worker gets, as the launch composes it."""
        if self.name in plan.unset:
            value = None
        return plan.env.get(self.name, value)


def choose(host: HostFacts, system: SystemFacts | None = None, env: Mapping[str, str] = MappingProxyType({})):
    return fabric.choose_fabric(host, system, env, nnodes=2)


@pytest.fixture(
    params=[
        pytest.param((tree, *variable, expected), id=f"{tree}-{'='.join(variable)}")
        for variable, row in TABLE.items()
        for tree, expected in zip(MACHINES, row, strict=True)
    ]
)
def case(request: pytest.FixtureRequest, machine: Machine) -> Case:
    tree, name, value, expected = request.param
    host = machine(tree, env={name: value})
    return Case(replace(host, libraries=(*host.libraries, *PLUGINS)), name, value, expected)


def test_facts_correct_the_image(case):
    image = {"PATH": "/bin", case.name: case.value}
    plan, bare = case.choose(image, value=case.value), case.choose({})
    expected = {KEPT: case.value, GONE: None}.get(case.expected, case.expected)
    assert case.worker_value(plan, case.value) == expected
    assert (plan.kind, plan.devices) == (bare.kind, bare.devices)
    decisions = [item for item in plan.decisions if item.variable == case.name]
    assert not any("set by the user" in str(text) for text in (*decisions, *plan.warnings))
    if expected != case.value:
        assert any("the image" in item.reason for item in decisions), decisions


def test_other_value_than_the_images_is_the_users(case):
    plan = case.choose({"PATH": "/bin", case.name: "another"}, value=case.value)
    assert case.worker_value(plan, case.value) == case.value
    decisions = [item for item in plan.decisions if item.variable == case.name and item.value == case.value]
    assert {item.origin for item in decisions} <= {"user"}


def test_recipe_replaces_the_image(case):
    image, system = {"PATH": "/bin", case.name: "of the image"}, SystemFacts(env={case.name: case.value})
    plan, bare = case.choose(image, system, "of the image"), case.choose(image, system)
    assert case.worker_value(plan, "of the image") == case.worker_value(bare, None)
    assert dict(plan.env) == dict(bare.env)


def test_without_manifest_all_values_are_the_users(case):
    plan = case.choose(None, value=case.value)
    assert case.worker_value(plan, case.value) == case.value
    assert "no variables of an image" in plan.image


def test_interface_of_the_partition_is_that_of_the_recipe(machine):
    partitions = {"a": Partition(interfaces=("eno1", "ib0")), "b": Partition(interfaces=("eth9",))}
    system = SystemFacts(env={"NCCL_SOCKET_IFNAME": "ib0"}, partitions=partitions)
    host = machine("ib4_ndr200")
    plans = {name: choose(host, system, {"SLURM_JOB_PARTITION": name}) for name in ("a", "b", "c")}
    assert plans["a"].env["NCCL_SOCKET_IFNAME"].lstrip("=") == "eno1,ib0"
    assert plans["a"].env["GLOO_SOCKET_IFNAME"] == "eno1"
    (decision,) = (item for item in plans["a"].decisions if item.variable == "NCCL_SOCKET_IFNAME")
    assert decision.origin == "recipe"
    assert decision.reason.startswith("from the recipe, for SLURM_JOB_PARTITION=a; ")
    # A name that the machine does not have is left out, with the reason.
    assert plans["b"].env["NCCL_SOCKET_IFNAME"] == "ib0"
    assert any("eth9" in item.value and "not used" in item.reason for item in plans["b"].decisions)
    assert plans["c"].env["NCCL_SOCKET_IFNAME"] == "ib0"
    user = {"SLURM_JOB_PARTITION": "a", "NCCL_SOCKET_IFNAME": "ib0"}
    assert "NCCL_SOCKET_IFNAME" not in choose(host, system, user).env


@pytest.mark.parametrize("image", [{}, {"NCCL_SOCKET_IFNAME": "ib0"}])
def test_recipes_value_in_the_environment_is_the_recipes(machine, image):
    """A shell or a script that ``imgkit run`` has started has the recipe's variables."""
    env = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_NET_GDR_LEVEL": "PHB"}
    found = replace(machine("none", env=env), image_env=image)
    started, alone = choose(found, SystemFacts(env=env), env), choose(found, SystemFacts(env=env))
    assert started.decisions == alone.decisions
    assert (started.env, started.unset) == (alone.env, alone.unset)
    assert started.env["NCCL_SOCKET_IFNAME"] == "eth0"  # this machine has no ib0


def test_images_plugin_keeps_slingshots_guard_and_warning(machine):
    env = {"NCCL_NET_PLUGIN": "spcx"}
    host = machine("cxi4", env=env)
    of_image = choose(replace(host, image_env=env), None, env)
    assert of_image.env["NCCL_NET"] == "AWS Libfabric"
    assert of_image.unset == ("NCCL_NET_PLUGIN",)
    assert any("aws-ofi-nccl" in str(text) for text in of_image.warnings)
    (decision,) = (item for item in of_image.decisions if item.variable == "NCCL_NET_PLUGIN")
    assert (decision.origin, decision.used) == ("image", False)
    assert decision.reason.startswith("from the image, not used: ")
    of_user = choose(replace(host, image_env={"PATH": "/bin"}), None, env)
    assert "NCCL_NET" not in of_user.env
    assert of_user.unset == ()


def test_images_ofi_plugin_that_is_absent_is_dropped(machine):
    env = {"NCCL_NET_PLUGIN": "ofi"}
    plan = choose(replace(machine("cxi4", env=env), image_env=env), None, env)
    assert (plan.env["NCCL_NET"], plan.unset) == ("AWS Libfabric", ("NCCL_NET_PLUGIN",))


def test_decision_names_who_made_it(machine):
    env = {"NCCL_CROSS_NIC": "0", "NCCL_PROTO": "^LL128", "NCCL_NET_GDR_LEVEL": "SYS"}
    image = {"NCCL_PROTO": "^LL128", "NCCL_NET_GDR_LEVEL": "SYS"}
    system = SystemFacts(env={"FI_CXI_DEFAULT_TX_SIZE": "512"})
    plan = choose(replace(machine("cxi4", env=env), image_env=image), system, env)
    origins = {item.variable: item.origin for item in plan.decisions}
    assert origins["NCCL_CROSS_NIC"] == "user"
    assert origins["FI_CXI_DEFAULT_TX_SIZE"] == "recipe"
    assert origins["NCCL_PROTO"] == "image"
    assert origins["NCCL_NET_GDR_LEVEL"] == "facts"
    (level,) = (item for item in plan.decisions if item.variable == "NCCL_NET_GDR_LEVEL")
    assert level.reason.endswith("replaces the image's 'SYS'")


def test_nccl_conf_is_not_hidden_by_the_image(machine):
    env = {"NCCL_CROSS_NIC": "0"}
    setting = Setting(name="NCCL_CROSS_NIC", value="2", path="/home/u/.nccl.conf")
    host = replace(machine("none", env=env), image_env=env, nccl_settings=(setting,))
    plan = choose(host, None, env)
    assert plan.env["NCCL_CROSS_NIC"] == "2"
    (decision,) = (item for item in plan.decisions if item.variable == "NCCL_CROSS_NIC")
    assert decision.origin == "user"
    assert decision.reason == "set by the user in /home/u/.nccl.conf; replaces the image's '0'"


def test_user_insists_by_nccl_conf(machine):
    env = {"NCCL_NET_PLUGIN": "spcx"}
    setting = Setting(name="NCCL_NET_PLUGIN", value="spcx", path="/home/u/.nccl.conf")
    host = machine("cxi4", env=env)
    libraries = (*host.libraries, *PLUGINS)
    host = replace(host, image_env=env, libraries=libraries, nccl_settings=(setting,))
    plan = choose(host, None, env)
    assert plan.env["NCCL_NET_PLUGIN"] == "spcx"
    assert "NCCL_NET" not in plan.env


@pytest.mark.parametrize("setter", ["user", "recipe"])
@pytest.mark.parametrize("on", MACHINES)
def test_named_plugin_without_file_is_warned_about(machine, on, setter):
    env = {"NCCL_NET_PLUGIN": "spcx"}
    system = SystemFacts(env=env) if setter == "recipe" else None
    env_of_user = env if setter == "user" else {}
    plan = choose(replace(machine(on), image_env={"PATH": "/bin"}), system, env_of_user)
    (warning,) = (str(text) for text in plan.warnings if "spcx" in str(text))
    assert "cannot be opened, there is no spcx or libnccl-net-spcx.so on the library path" in warning
    assert ("uses TCP" in warning) == (on == "cxi4")


@pytest.mark.parametrize(
    "value", ["none", "STATIC_PLUGIN", "spcx", "/opt/mine.so", "ofi,spcx", "lib/own.so", ""]
)
def test_plugin_that_is_there_is_not_warned_about(planted, value):
    root: Path = planted("ib4_ndr200")
    folder = root / "opt/hpcx"
    folder.mkdir(parents=True)
    for name in ("libnccl-net-spcx.so", "libnccl-net-ofi.so"):
        (folder / name).touch()
    (root / "opt/mine.so").touch()
    env = {"NCCL_NET_PLUGIN": value, "LD_LIBRARY_PATH": "/opt/hpcx", "IMGKIT_NCCL_VERSION": "2.27.3"}
    plan = choose(facts.gather(root, env), None, env)
    assert plan.warnings == ()


def test_manifest_and_recipe_are_read(planted):
    root: Path = planted("cxi4")
    baked = root / "opt/imgkit"
    baked.mkdir(parents=True)
    manifest = {"base": {"env": {"NCCL_NET_PLUGIN": "spcx", "A": "1"}}, "env": {"A": "2"}}
    (baked / "manifest.json").write_text(json.dumps(manifest))
    (baked / "system.json").write_text(json.dumps({"env": {"NCCL_NET_PLUGIN": "/opt/mine.so"}}))
    (root / "opt/mine.so").touch()
    host = facts.gather(root, {})
    assert host.image_env == {"NCCL_NET_PLUGIN": "spcx", "A": "2"}
    assert host.library("/opt/mine.so")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"base": {}}', '{"base": {"env": {}}}', '{"base": 3}'])
def test_image_without_variables_is_unknown(planted, text):
    root: Path = planted("none")
    (root / "opt/imgkit").mkdir(parents=True)
    (root / "opt/imgkit/manifest.json").write_text(text)
    assert facts.gather(root, {}).image_env is None
