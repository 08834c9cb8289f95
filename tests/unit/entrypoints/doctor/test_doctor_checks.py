"""Verdicts of dist-doctor on machines that are given as values."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_files

from imgkit_entrypoints import facts
from imgkit_entrypoints.doctor import node
from imgkit_entrypoints.doctor.checks import Check
from imgkit_entrypoints.facts import Reader
from imgkit_entrypoints.facts.host_facts import (
    CxiDevice,
    Gid,
    Gpu,
    HostFacts,
    Interface,
    Library,
    Limit,
    Port,
    RdmaDevice,
    Setting,
)
from imgkit_entrypoints.system import Fabric, Node, SystemFacts

GOOD = HostFacts(
    hostname="n1",
    arch="x86_64",
    python="3.11.2",
    cpus=80,
    gpus=0,
    gpus_source="/dev: no nvidia device",
    cpus_source="/proc/self/status: Cpus_allowed_list 0-79",
    kernel="6.1.0",
    memlock=Limit(unlimited=True),
    stack=Limit(value=8 << 20),
    open_files=Limit(value=4096),
    shm_bytes=16 << 30,
    ephemeral_ports=(32768, 60999),
    interfaces=(
        Interface(name="lo", state="unknown", speed_Mbps=None, addresses=("127.0.0.1",), physical=False),
        Interface(name="eth0", state="up", speed_Mbps=25000, addresses=("10.0.0.5",), physical=True),
    ),
)
PORT = Port(
    device="mlx5_0",
    number=1,
    path="/sys/class/infiniband/mlx5_0/ports/1",
    state="4: ACTIVE",
    phys_state="5: LinkUp",
    link_layer="InfiniBand",
    rate="200 Gb/sec (2X NDR)",
    lid="0x1f3",
)
NIC = RdmaDevice(
    name="mlx5_0",
    path="/sys/class/infiniband/mlx5_0",
    node_type="1: CA",
    pci="pci0000:16/0000:16:01.0/0000:17:00.0",
    numa_node=0,
    vendor="0x15b3",
    physical="",
    netdevs=("ib0",),
    verbs="/dev/infiniband/uverbs0",
    verbs_opens=True,
    ports=(PORT,),
)
GPU = Gpu(
    model="NVIDIA H100", address="0000:18:00.0", pci="pci0000:16/0000:16:01.0/0000:18:00.0", numa_node=0
)
FAR = dataclasses.replace(NIC, pci="pci0000:f0/0000:f1:00.0", numa_node=1)
OLD_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 23:14:13 UTC 2021"
LIBRARY = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"
IB = dataclasses.replace(
    GOOD,
    gpus=4,
    gpus_source="/dev: nvidia0 nvidia1 nvidia2 nvidia3",
    gpu_devices=(GPU,) * 4,
    driver="NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
    rdma=(NIC,),
    rdma_cm=True,
    peermem="/sys/module/nvidia_peermem/version: 550.54.15",
    libraries=(Library(name="libibverbs.so.1", path=LIBRARY, target=LIBRARY + ".14"),),
    verbs_providers=("mlx5",),
    nccl_version="2.20.5",
    nccl_source="libnccl.so.2",
)
CXI = dataclasses.replace(
    IB,
    rdma=(),
    cxi=(CxiDevice(name="cxi0", path="/sys/class/cxi/cxi0", numa_node=None, pci="", opens=True),),
    libraries=tuple(
        Library(name=name, path=f"/opt/{name}", target=f"/opt/{name}")
        for name in ("libfabric.so.1", "libcxi.so.1", "libnccl-net.so")
    ),
)
MN5 = SystemFacts(
    title="MareNostrum 5",
    node=Node(gpus=4, gpu_model="H100", cpus=80, cpus_per_gpu=20),
    fabric=Fabric(kind="infiniband", nics=1, line_rate_Gbps=200),
)
CUDA = {"CUDA_VERSION": "12.4.0.041"}


def examine(
    host: HostFacts,
    system: SystemFacts | None = None,
    env: dict[str, str] | None = None,
    *,
    root: Path = Path("/nonexistent"),
    nnodes: int = 1,
    **changed: object,
) -> tuple[Check, ...]:
    host = dataclasses.replace(host, **changed)  # type: ignore[arg-type]
    return node.examine(host, system, env or {}, reader=Reader(root=root), has_several_nodes=nnodes > 1)


def results(name: str, host: HostFacts, *args: Any, **options: Any) -> list[Check]:
    """The results of one check. The arguments are those of `examine`."""
    return [check for check in examine(host, *args, **options) if check.name == name]


def verdicts(checks: Iterable[Check], name: str) -> list[str]:
    return [check.verdict for check in checks if check.name == name]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Root of an image for this machine."""
    return write_files(tmp_path, {"opt/imgkit/manifest.json": '{"platform": "linux/amd64"}'})


def test_good_node_is_all_ok(image):
    checks = examine(IB, MN5, CUDA, root=image, nnodes=2)
    assert {check.verdict for check in checks} == {"ok"}, [*node.table(checks)]
    assert {"gpus", "memlock", "rdma ports", "rdma devices", "libibverbs", "gpudirect"} <= {
        check.name for check in checks
    }


def test_good_slingshot_node_has_no_failure(image):
    checks = examine(CXI, None, CUDA, root=image, nnodes=2)
    assert node.passed(checks), [*node.table(checks)]
    assert verdicts(checks, "libfabric") == ["ok"]


def test_laptop_is_fine_without_anything():
    checks = examine(GOOD)
    assert node.passed(checks)
    assert verdicts(checks, "memlock") == []
    assert verdicts(checks, "image") == ["unknown"]


@pytest.mark.parametrize(
    ("changed", "name", "verdict", "fix"),
    [
        ({"memlock": Limit(value=65536)}, "memlock", "fail", "ulimit memlock=-1"),
        ({"memlock": Limit(value=64 << 30)}, "memlock", "warn", "ulimit memlock=-1"),
        ({"memlock": Limit()}, "memlock", "unknown", "ulimit -l"),
        ({"shm_bytes": 64 << 20}, "/dev/shm", "fail", "--shm-size"),
        ({"shm_bytes": 512 << 20}, "/dev/shm", "warn", "--shm-size"),
        ({"shm_bytes": None}, "/dev/shm", "unknown", "df -h"),
        ({"gpus": 0}, "gpus", "fail", "--nv"),
        ({"gpus": 2}, "gpus", "warn", "--gres=gpu:4"),
        ({"cpus": 1}, "processors", "warn", "--cpus-per-task=80"),
        ({"stack": Limit(value=2 << 20)}, "stack", "warn", "ulimit -s"),
        ({"open_files": Limit(value=256)}, "open files", "warn", "ulimit -n"),
        ({"processes": Limit(value=512)}, "processes", "warn", "ulimit -u 1024"),
        ({"ephemeral_ports": (1024, 65535)}, "ports", "warn", "--port"),
        ({"rdma_cm": False}, "rdma devices", "warn", "rdma/rdma=1"),
        ({"rdma": (dataclasses.replace(NIC, verbs_opens=False),)}, "rdma devices", "fail", "--device"),
        ({"libraries": ()}, "libibverbs", "fail", "image.apt"),
        ({"verbs_providers": ()}, "libibverbs", "fail", "ibverbs-providers"),
        ({"verbs_providers": ("efa",)}, "libibverbs", "fail", "ibverbs-providers"),
        ({"peermem": "", "dmabuf": False}, "gpudirect", "warn", "nvidia_peermem"),
        ({"rdma": (FAR,)}, "affinity", "warn", "topo -m"),
        ({"rdma": (dataclasses.replace(NIC, pci="", numa_node=None),)}, "affinity", "unknown", "topo -m"),
        ({"nccl_version": ""}, "nccl", "unknown", "IMGKIT_NCCL_VERSION"),
        ({"driver": OLD_DRIVER}, "known issue", "fail", "older base"),
        ({"driver": ""}, "driver", "unknown", "nvidia-smi"),
        ({"arch": "aarch64"}, "image", "fail", "--platform"),
        ({"interfaces": ()}, "interface", "unknown", "--contain"),
    ],
)  # fmt: skip
def test_one_fault_is_named_with_its_fix(changed, name, verdict, fix, image):
    checks = examine(IB, MN5, CUDA, root=image, nnodes=2, **changed)
    hits = [check for check in checks if check.name == name and check.verdict == verdict]
    assert len(hits) == 1, [*node.table(checks)]
    assert fix in hits[0].fix
    assert hits[0].evidence
    assert "dist-env" not in hits[0].fix
    assert node.passed(checks) == (verdict != "fail")


def nic(number: int, *, card: int | None = None, function: int = 0, state: str = PORT.state) -> RdmaDevice:
    """A NIC with one port. Those with one `card` are on the same card."""
    name, card = f"mlx5_{number}", number if card is None else card
    port = dataclasses.replace(PORT, device=name, path=PORT.path.replace("mlx5_0", name), state=state)
    return dataclasses.replace(
        NIC, name=name, ports=(port,), pci=f"pci0000:{card}0/0000:{card}1:00.{function}"
    )


def test_dead_ports_fail_where_the_recipe_wants_them(image):
    hit, *_ = results("rdma ports", IB, MN5, CUDA, root=image, rdma=(nic(0, state="2: INIT"),))
    assert hit.verdict == "fail"
    assert "state: 2: INIT" in hit.evidence
    assert "no subnet manager" in hit.evidence


DOWN = "1: DOWN"
UNPLUGGED = dataclasses.replace(PORT, number=2, state=DOWN, path=PORT.path[:-1] + "2")


@pytest.mark.parametrize(
    ("system", "nics", "expected"),
    [
        (None, [nic(0), nic(1), nic(2), nic(4, state=DOWN)], ["ok", "warn"]),
        (None, [nic(0), nic(4, state=DOWN)], ["ok"]),
        (None, [nic(0), nic(1), nic(2), nic(3, card=0, function=1, state=DOWN)], ["ok"]),
        (None, [nic(0), nic(1), nic(9, state=DOWN)], ["ok", "warn"]),
        (MN5, [nic(0), nic(1), nic(9, state=DOWN)], ["ok"]),
        (MN5, [dataclasses.replace(NIC, ports=(PORT, UNPLUGGED))], ["ok"]),
    ],
    ids=[
        "the fourth card has failed",
        "nobody plugged in half of the cards",
        "the second port of a working card has no cable",
        "the third card has failed",
        "the recipe counts fewer cards",
        "the second port of a NIC has no cable",
    ],
)
def test_port_without_a_link_is_a_fault_if_its_card_has_failed(system, nics, expected):
    assert verdicts(examine(IB, system, rdma=tuple(nics)), "rdma ports") == expected


NO_PLUGIN = {**CUDA, "NCCL_NET_PLUGIN": "spcx"}
RUNAI = dataclasses.replace(MN5, scheduler="runai")


@pytest.mark.parametrize(
    ("name", "system", "env", "changed", "expected"),
    [
        ("gpus", MN5, {"IMGKIT_DEVICE": "cpu"}, {"gpus": 0}, ["warn"]),
        ("gpus", None, {}, {"gpus": 0}, ["fail"]),
        ("gpus", None, {"CUDA_VISIBLE_DEVICES": ""}, {"gpus": 0}, ["ok"]),
        ("known issue", MN5, CUDA, {"driver": OLD_DRIVER, "has_cuda_compat": True}, ["warn"]),
        ("scheduler", RUNAI, {}, {}, []),
        ("plug-in", MN5, NO_PLUGIN, {"image_env": NO_PLUGIN}, []),
        ("plug-in", MN5, CUDA, {}, []),
    ],
    ids=[
        "CPUs are requested",
        "hidden GPUs without a recipe",
        "GPUs that the user hides",
        "CUDA's forward compatibility softens an old driver",
        "a pod alone is no hidden job",
        "a plug-in of the image without file is left out",
        "no plug-in",
    ],
)
def test_circumstances_change_the_verdict(
    name,
    system,
    env,
    changed,
    expected,
):
    assert verdicts(examine(IB, system, env, **changed), name) == expected


@pytest.mark.parametrize("name", ["NCCL_TOPO_FILE", "NCCL_GRAPH_FILE"])
def test_file_of_a_variable_has_to_exist(tmp_path, name):
    (tmp_path / "topo.xml").write_text("<system/>")
    assert results("variables", GOOD, None, {name: "/topo.xml"}, root=tmp_path) == []
    for setting in ({"env": {name: "/gone.xml"}}, {"system": SystemFacts(env={name: "/gone.xml"})}):
        (hit,) = results("variables", GOOD, root=tmp_path, **setting)
        assert (hit.verdict, f"{name}=/gone.xml" in hit.evidence) == ("warn", True)
        assert "--bind /gone.xml" in hit.fix


def test_variable_like_no_other_is_unknown_not_wrong():
    (hit,) = results("variables", GOOD, None, {"NCCL_SITE_X": "1"})
    assert (hit.verdict, hit.fix.startswith("unset NCCL_SITE_X")) == ("unknown", True)


def test_roce_without_ipv4_fails_between_nodes_only():
    gid = Gid(index=0, value="fe80:0000:0000:0000:b226:28ff:fed3:b0f0", kind="RoCE v2", netdev="net1")
    port = dataclasses.replace(PORT, link_layer="Ethernet", gids=(gid,))
    nics = (dataclasses.replace(NIC, ports=(port,)),)
    assert "fail" in verdicts(examine(IB, rdma=nics, nnodes=2), "network")
    alone = examine(IB, rdma=nics)
    assert node.passed(alone)
    assert any("no IPv4" in check.evidence for check in alone if check.verdict == "warn")


@pytest.mark.parametrize("gone", ["libfabric.so.1", "libcxi.so.1", "libnccl-net.so"])
def test_lacking_slingshot_library_is_named(gone):
    libraries = tuple(item for item in CXI.libraries if item.name != gone)
    (hit,) = results("libfabric", CXI, libraries=libraries, nnodes=2)
    assert (hit.verdict, hit.evidence.endswith(gone)) == ("fail", True)


def test_slingshot_device_that_does_not_open_is_named():
    closed = (dataclasses.replace(CXI.cxi[0], opens=False),)
    (hit,) = results("slingshot", CXI, cxi=closed, nnodes=2)
    assert (hit.verdict, hit.evidence) == ("fail", "cannot be opened: cxi0")


def test_what_the_launcher_set_is_nobodys_wish(image):
    env = {"NCCL_IB_DISABLE": "1", **CUDA}
    checks = examine(GOOD, MN5, env, root=image, nnodes=2)
    assert not any("the recipe says infiniband" in check.evidence for check in checks)
    checks = examine(GOOD, MN5, {**env, node.DECIDED: "NCCL_IB_DISABLE"}, root=image, nnodes=2)
    assert any("the recipe says infiniband" in check.evidence for check in checks)


def test_hidden_nccl_settings_are_shown():
    setting = Setting(name="NCCL_ALGO", value="Ring", path="/etc/nccl.conf")
    (hit,) = results("nccl.conf", GOOD, nccl_settings=(setting,))
    assert hit.evidence == "NCCL_ALGO=Ring (/etc/nccl.conf)"


def test_iommu_is_unknown_not_a_failure(image):
    (image / "sys/class/iommu/dmar0").mkdir(parents=True)
    assert verdicts(examine(IB, root=image), "iommu") == ["unknown"]


@pytest.mark.parametrize(
    ("env", "verdict", "evidence"),
    [
        ({}, "warn", "the recipe says slurm"),
        ({"SLURM_JOB_NODELIST": "n1"}, "ok", "SLURM_JOB_NODELIST"),
        ({"PBS_JOBID": "7.pbs"}, "ok", "PBS_JOBID"),
    ],
)
def test_hidden_job_is_told(env, verdict, evidence):
    (hit,) = results("scheduler", IB, dataclasses.replace(MN5, scheduler="slurm"), env)
    assert (hit.verdict, evidence in hit.evidence) == (verdict, True)


@pytest.mark.parametrize(
    ("host_glibc", "image_glibc", "verdict"),
    [(34, 36, "ok"), (36, 36, "ok"), (38, 36, "fail"), (100, 99, "fail")],
)
def test_host_library_needs_the_images_glibc(host_glibc, image_glibc, verdict, tmp_path):
    minor_versions = {LIBRARY + ".14": host_glibc, "/usr/lib/x86_64-linux-gnu/libc.so.6": image_glibc}
    for path, minor in minor_versions.items():
        library = b"\x7fELF\xff\0GLIBC_2.2.5\0GLIBC_2.%d\0GLIBC_PRIVATE\0" % minor
        write_files(tmp_path, {path: library})
    (hit,) = results("glibc", IB, root=tmp_path, nnodes=2)
    assert hit.verdict == verdict
    assert (f"needs GLIBC_2.{host_glibc}" in hit.evidence) == (verdict == "fail")


PROCESSES = {"self": "python3 90", "90": "starter 80", "80": "starter 1", "91": "squashfuse_ll 80"}


@pytest.mark.parametrize(
    ("changed", "env", "expected"),
    [
        ({}, {"SLURM_JOB_ID": "7"}, ["warn"]),
        ({}, {}, []),  # no scheduler that signals all processes
        ({"91": "squashfuse_ll 70"}, {"SLURM_JOB_ID": "7"}, []),  # serves another container
        ({"91": "bash 80"}, {"SLURM_JOB_ID": "7"}, []),
    ],
)
def test_image_that_a_process_mounts_is_told(changed, env, expected, tmp_path):
    for number, text in {**PROCESSES, **changed}.items():
        name, parent = text.split()
        write_files(tmp_path / "proc" / number, {"comm": name, "status": f"Name:\t{name}\nPPid:\t{parent}"})
    assert verdicts(examine(GOOD, None, env, root=tmp_path), "image mount") == expected


def test_broken_manifest_is_unknown(image):
    for text in ("{", "[]", "{}", '{"platform": 3}'):
        (image / "opt/imgkit/manifest.json").write_text(text)
        assert verdicts(examine(GOOD, SystemFacts(), root=image), "image") == ["unknown"]


# The version line of a machine with an H200.
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)"


@pytest.mark.parametrize(
    ("driver", "env", "version", "cuda"),
    [
        (OPEN_DRIVER, CUDA, "580.159.04", "CUDA 12.4.0.041 (CUDA_VERSION)"),
        (IB.driver, {}, "550.54.15", "CUDA_VERSION is not set"),
        ("", {}, "unknown", "CUDA_VERSION is not set"),
    ],
)
def test_driver_is_its_version_alone(driver, env, version, cuda):
    (hit,) = results("driver", IB, None, env, driver=driver)
    assert hit.evidence == f"{version} (/proc/driver/nvidia/version), {cuda}"


@pytest.mark.parametrize("args", [["--strict"], ["--strict", "--json"]])
def test_strict_makes_a_warning_a_failure(args, tmp_path, capsys):
    env = {"IMGKIT_ROOT": str(tmp_path), "NCCL_BLOCKING_WAIT": "1"}
    assert node.main(args, {"IMGKIT_ROOT": str(tmp_path)}) == 0
    assert node.main(args[1:], env) == 0
    assert node.main(args, env) == 1
    text = capsys.readouterr().out
    assert '"passed": false' in text if "--json" in args else "FAILED: --strict counts warnings" in text


@pytest.fixture
def rdma_env(tmp_path: Path) -> dict[str, str]:
    """The environment for a tree of an InfiniBand node that locks too little memory."""
    port = {"state": "4: ACTIVE", "link_layer": "InfiniBand", "rate": "100 Gb/sec (4X EDR)"}
    write_files(tmp_path / "sys/class/infiniband/mlx5_0/ports/1", port)
    limits = "Max locked memory         65536  65536  bytes"
    return {"IMGKIT_ROOT": str(write_files(tmp_path, {"proc/self/limits": limits}))}


def test_json_has_all_checks(rdma_env, capsys):
    assert node.main(["--json"], rdma_env) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["passed"]) == (1, False)
    assert "memlock" in {check["name"] for check in report["checks"] if check["verdict"] == "fail"}
    assert set(report["checks"][0]) == {"name", "verdict", "evidence", "fix"}


def test_table_puts_fixes_below(rdma_env, capsys):
    node.main([], rdma_env)
    text = capsys.readouterr().out
    assert re.search(r"^fail     memlock .*\n +-> docker: --ulimit memlock=-1", text, re.MULTILINE)
    assert text.endswith("fail\n")


def test_wrong_option_exits_with_two(capsys):
    with pytest.raises(SystemExit) as caught:
        node.main(["--jsno"], {})
    assert caught.value.code == 2
    assert "--jsno" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("system", "file", "verdict"),
    [(MN5, "kfd", "fail"), (None, "kfd", "fail"), (MN5, "accel", "fail"), (None, "accel", "ok")],
)
def test_gpus_of_others_end_with_the_reason(image, system, file, verdict):
    (image / "dev").mkdir()
    (image / "dev" / file).touch()
    seen = facts.gather(image, {})
    changes = {"gpu_devices": (), "gpus_source": seen.gpus_source, "amd_gpus": seen.amd_gpus}
    (check,) = results("gpus", IB, system, root=image, gpus=0, **changes)
    assert check.verdict == verdict
    assert ("NVIDIA GPUs" in check.fix) == (verdict != "ok")
    assert "--nv" not in check.fix


def test_plugin_without_file_fails(image):
    checks = examine(IB, MN5, NO_PLUGIN, root=image)
    (hit,) = (check for check in checks if check.name == "plug-in")
    assert hit.verdict == "fail"
    text = "NCCL_NET_PLUGIN='spcx' (set by the user) cannot be opened, there is no spcx or libnccl-net"
    assert text in hit.evidence
    assert verdicts(checks, "network") == ["ok"]


@pytest.mark.parametrize("works", [True, False])
def test_plugin_fails_if_the_linker_refuses_it(tmp_path, works):
    path = Path("libc.so.6")
    if not works:
        path = tmp_path / "libnccl-net-x.so"
        path.write_text("no library")
    plug = Library(name=path.name, path=str(path), target=str(path))
    env = {"NCCL_NET_PLUGIN": path.name}
    (check,) = results("plug-in", IB, MN5, env, root=Path("/"), libraries=(*IB.libraries, plug))
    assert check.verdict == ("ok" if works else "fail")
    assert (f"{path} cannot be opened: OSError: {path}" in check.evidence) != works


@pytest.mark.parametrize("args", [[], ["--json"]])
def test_known_issues_are_listed_with_their_reasons(args, tmp_path, capsys):
    env = {"IMGKIT_ROOT": str(tmp_path), "OPENUCX_VERSION": "1.19.0", "NCCL_NET": "OFI"}
    assert node.main(["--known-issues", *args], env) == 0
    text = capsys.readouterr().out
    if args:
        rows = {row["id"]: row for row in json.loads(text)["known_issues"]}
        assert (rows["ucx-error-handlers"]["state"], rows["cuda-driver"]["state"]) == ("match", "no match")
        assert rows["ucx-error-handlers"]["env"] == {"UCX_HANDLE_ERRORS": "none"}
        return
    assert re.search(r"^match +ucx-error-handlers +set: UCX .*UCX version 1.19.0", text, re.MULTILINE)
    assert re.search(r"^no match +nccl-of-torch +needs gpus >= 1 \(number of GPUs 0\)$", text, re.MULTILINE)
    assert re.search(r"^unknown +ofi-network-name +unknown: aws-ofi-nccl version$", text, re.MULTILINE)
