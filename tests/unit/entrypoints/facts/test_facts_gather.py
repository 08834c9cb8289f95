"""Facts of a machine, and that no file outside the given root is read."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from file_tree import write_files
from shared_object import shared_object

from imgkit_entrypoints import fabric, facts
from imgkit_entrypoints.errors import UsageError

Planted = Callable[[str], Path]


STATUS = {"/proc/self/status": "Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-3,8,10-12"}


@pytest.mark.parametrize(
    ("files", "cpus", "evidence"),
    [
        ({}, 8, "Cpus_allowed_list 0-3,8,10-12"),
        (
            {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "350000 100000"},
            3,
            "cpu.max: 350000 100000",
        ),
        (
            {"/proc/self/cgroup": "0::/a/b", "/sys/fs/cgroup/a/cpu.max": "200000 100000"},
            2,
            "/cgroup/a/cpu.max",
        ),
        (
            {
                "/proc/self/cgroup": "0::/a",
                "/sys/fs/cgroup/a/cpu.max": "600000 100000",
                "/sys/fs/cgroup/cpu.max": "400000 100000",
            },
            4,
            "/cgroup/cpu.max: 400000",
        ),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "max 100000"}, 8, "Cpus_allowed_list"),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "50000 100000"}, 1, "cpu.max"),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "garbage"}, 8, "Cpus_allowed_list"),
        (
            # Docker with cgroup v1: the path is the host's, the mount's top is the container's own.
            {
                "/proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            4,
            "cpu.cfs_quota_us: 400000 of 100000",
        ),
        (
            {
                "/proc/self/cgroup": "4:cpu:/",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            8,
            "Cpus_allowed_list",
        ),
    ],
)
def test_cpus_are_those_allowed(tmp_path, files, cpus, evidence):
    host = facts.gather(write_files(tmp_path, {**STATUS, **files}), {})
    assert host.cpus == cpus
    assert evidence in host.cpus_source


@pytest.mark.parametrize(
    ("line", "limit"),
    [
        ("Max locked memory         unlimited            unlimited            bytes", (None, True)),
        ("Max locked memory         65536                65536                bytes", (65536, False)),
        ("Max open files            1024                 4096                 files", (None, False)),
    ],
)
def test_memory_lock_limit_is_read(tmp_path, line, limit):
    host = facts.gather(write_files(tmp_path, {"/proc/self/limits": line}), {})
    assert (host.memlock.value, host.memlock.unlimited) == limit


def test_driver_without_device_files_shows(planted):
    root = planted("cxi4")
    for path in (root / "dev").glob("nvidia*"):
        path.unlink()
    (root / "dev/nvidiactl").touch()  # it is no GPU
    assert facts.gather(root, {"CUDA_VISIBLE_DEVICES": "0,1"}).gpus == 0
    host = facts.gather(root, {})
    assert host.gpus == 0
    assert "the driver has 4" in host.gpus_source
    assert host.gpu_devices[0].model == "NVIDIA GH200 120GB"


@pytest.mark.parametrize(
    ("visible", "count", "problem"),
    [
        ("0,1", 2, ""),
        ("3,2", 2, ""),
        ("-1", 0, ""),
        ("0,1,-1,2", 2, ""),  # the list ends at -1
        ("0,0,9", 0, "names 0 twice"),
        ("1,9,2", 1, "names 9, but there are 4 GPUs"),
        ("GPU-1f2a,GPU-77cd", 2, ""),
        ("GPU-1f2a,GPU-1f2a", 0, "names GPU-1f2a twice"),
        ("", 0, ""),
    ],
)
def test_mistakes_in_visible_gpus_count_as_cuda_counts(planted, visible, count, problem):
    host = facts.gather(planted("cxi4"), {"CUDA_VISIBLE_DEVICES": visible})
    assert host.gpus == count
    assert problem in host.gpus_problem
    assert bool(problem) == bool(host.gpus_problem)


@pytest.mark.parametrize(
    ("files", "limit", "source"),
    [
        (
            {"proc/self/limits": "Max processes  512  4096  processes"},
            512,
            "/proc/self/limits: Max processes 512",
        ),
        ({"proc/self/limits": "Max processes  unlimited  unlimited  processes"}, None, "unlimited"),
        (
            {
                "proc/self/cgroup": "0::/pod",
                "sys/fs/cgroup/pod/pids.max": "max",
                "sys/fs/cgroup/pids.max": "600",
            },
            600,
            "/sys/fs/cgroup/pids.max: 600",
        ),
        (
            {
                "proc/self/cgroup": "9:pids:/x",
                "sys/fs/cgroup/pids/pids.max": "512",
                "proc/self/limits": "Max processes 900",
            },
            512,
            "/sys/fs/cgroup/pids/pids.max: 512",
        ),
        ({}, None, ""),
    ],
)
def test_most_processes_are_those_of_the_tightest_limit(tmp_path, files, limit, source):
    host = facts.gather(write_files(tmp_path, files), {})
    assert host.processes.value == limit
    assert source in host.processes_source


@pytest.mark.parametrize(
    ("files", "env", "version", "source"),
    [
        ({}, {"IMGKIT_NCCL_VERSION": "2.20.5"}, "2.20.5", "IMGKIT_NCCL_VERSION=2.20.5"),
        ({}, {"NCCL_VERSION": "2.18.3-1"}, "2.18.3", "NCCL_VERSION=2.18.3-1"),
        ({"/usr/lib64/libnccl.so.2.22.3": ""}, {}, "2.22.3", "/usr/lib64/libnccl.so.2"),
        ({"/opt/nccl/libnccl.so.2.27.7": ""}, {"LD_LIBRARY_PATH": "/opt/nccl"}, "2.27.7", "/opt/nccl"),
        ({}, {}, "", ""),
    ],
)
def test_nccl_version_without_torch(tmp_path, files, env, version, source):
    write_files(tmp_path, files)
    for path in files:
        library = tmp_path / path.lstrip("/")
        library.with_name("libnccl.so.2").symlink_to(library.name)
    host = facts.gather(tmp_path, env)
    assert host.nccl_version == version
    assert source in host.nccl_source


SITE_PACKAGES = next(path for path in sys.path if path.endswith("site-packages"))


@pytest.mark.parametrize(
    ("rpath", "version", "owner"),
    [
        ("$ORIGIN/../../nvidia/nccl/lib", "2.21.5", "torch"),
        ("$ORIGIN", "2.18.3", "image"),  # NGC's torch, and a wheel that another package brought
        (None, "2.21.5", "torch"),
    ],
)
def test_nccl_wheel_counts_if_torch_is_linked_to_it(tmp_path, rpath, version, owner):
    version_py = "__version__ = '2.9.0'\ncuda: Optional[str] = '13.0'"
    write_files(tmp_path, {f"{SITE_PACKAGES}/torch/version.py": version_py})
    folder = tmp_path / SITE_PACKAGES.lstrip("/")
    (folder / "nvidia_nccl_cu12-2.21.5.dist-info").mkdir()
    if rpath is not None:
        (folder / "torch/lib").mkdir()
        (folder / "torch/lib/libtorch_cuda.so").write_bytes(shared_object("libtorch_cuda.so", rpath=rpath))
    host = facts.gather(tmp_path, {"NCCL_VERSION": "2.18.3"})
    assert (host.nccl_version, host.nccl_of, host.image_nccl) == (version, owner, "2.18.3")
    assert host.torch_cuda == "13.0"


@pytest.mark.parametrize(
    ("path", "content", "version", "opens"),
    [
        ("/opt/cray/libfabric/1.22.0/lib64/libfabric.so.1", "", "1.22.0", ""),
        ("/opt/lib/libfabric.so.1", "", "", ""),
        ("/opt/lib/libnccl-net.so", "NCCL RDMA SHARP", "", ""),
        ("/opt/lib/libnccl-net.so", "Initializing aws-ofi-nccl 1.14.0\0", "1.14.0", ""),
        (
            "/opt/lib/libnccl-net-ofi.so",
            "Initializing aws-ofi-nccl 1.19.2\0libcudart.so\0",
            "1.19.2",
            "libcudart.so",
        ),
    ],
)
def test_version_of_a_fabric_library_is_read(tmp_path, path, content, version, opens):
    folder, _, name = path.rpartition("/")
    library = facts.gather(write_files(tmp_path, {path: content}), {"LD_LIBRARY_PATH": folder}).library(name)
    assert library is not None
    assert (library.version, library.opens) == (version, opens)


def test_version_of_libfabric_is_that_of_pkg_config(tmp_path):
    pkg_config = {"/usr/lib64/pkgconfig/libfabric.pc": "Version: 2.3.1amzn4.0"}
    write_files(tmp_path, {"/usr/lib64/libfabric.so.1": "", **pkg_config})
    library = facts.gather(tmp_path, {}).library("libfabric.so.1")
    assert library is not None
    assert library.version == "2.3.1amzn4.0"


DOCKER = "CapEff:\t00000000a80425fb\nSeccomp:\t2"


@pytest.mark.parametrize(
    ("status", "is_refused"),
    [
        (DOCKER, True),
        (DOCKER.replace("a80425fb", "a88425fb"), False),  # --cap-add SYS_NICE
        (DOCKER.replace("\t2", "\t0"), False),
        ("", False),
    ],
)
def test_numa_calls_need_a_capability_in_docker(tmp_path, status, is_refused):
    host = facts.gather(write_files(tmp_path, {"/proc/self/status": status}), {})
    assert host.numa_fault.startswith("/proc/self/status: Seccomp: 2, CapEff") == is_refused


@pytest.mark.parametrize(
    ("text", "version"),
    [("debug = False\n__version__ = '2.3.0a0+40ec155e58.nv24.3'\n", "2.3.0a0+40ec155e58.nv24.3"), ("", "")],
)
def test_torch_version_without_torch(tmp_path, text, version):
    folder = next(path for path in sys.path if path.endswith("site-packages"))
    write_files(tmp_path, {f"{folder}/torch/version.py": text})
    assert facts.gather(tmp_path, {}).torch_version == version


def test_wrong_nccl_version_is_refused(tmp_path):
    with pytest.raises(UsageError, match="not an NCCL version"):
        facts.gather(tmp_path, {"IMGKIT_NCCL_VERSION": "newest"})


def test_root_that_is_missing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="IMGKIT_ROOT"):
        facts.gather(env={"IMGKIT_ROOT": str(tmp_path / "none")})


def test_empty_slots_are_left_out(planted):
    port = facts.gather(planted("roce_pod"), {}).rdma[0].ports[0]
    assert [(gid.index, gid.kind, gid.netdev) for gid in port.gids] == [
        (8, "IB/RoCE v1", "net1"),
        (9, "RoCE v2", "net1"),
    ]


def test_slots_are_in_numeric_order(planted):
    port = facts.gather(planted("roce_idx10"), {}).rdma[0].ports[0]
    assert [gid.index for gid in port.gids] == [2, 10]


def test_route_of_loopback_does_not_repeat_its_address(tmp_path):
    files = {
        "/sys/class/net/lo/operstate": "unknown",
        "/proc/net/fib_trie": "Main:\n  +-- 127.0.0.0/8 2 0 2\n     |-- 127.0.0.1\n        /32 host LOCAL",
        "/proc/net/route": "Iface\nlo 0000007F 00000000 0001 0 0 0 000000FF 0 0 0",
    }
    write_files(tmp_path, files)
    (lo,) = facts.gather(tmp_path, {}).interfaces
    assert lo.addresses == ("127.0.0.1",)


def test_rails_of_one_network_each_have_address(planted):
    interfaces = facts.gather(planted("cxi4"), {}).interfaces
    assert {item.name: item.ipv4 for item in interfaces if item.name.startswith("hsn")} == {
        f"hsn{number}": f"10.30.0.{number + 1}" for number in range(4)
    }


@pytest.mark.parametrize("garbage", ["", "x " * 12, "0 " * 12, "-1", "a:b:c\n::\n: \n=\n,"])
def test_garbled_files_are_no_error(planted, garbage):
    """Each file of a machine in turn gets other content."""
    root = planted("roce_storage")
    files_to_garble = {
        **STATUS,
        "/proc/self/limits": "",
        "/proc/self/cgroup": "0::/",
        "/etc/nccl.conf": "A=1",
        "/sys/fs/cgroup/cpu.max": "1 1",
        "/proc/net/if_inet6": "",
        "/etc/ld.so.conf.d/a.conf": "/x",
    }
    write_files(root, files_to_garble)
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    for path in files:
        before = path.read_text()
        path.write_text(garbage)
        fabric.choose_fabric(facts.gather(root, {}), None, {}, nnodes=2)
        path.write_text(before)


def test_facts_are_json(planted, tree, row):
    assert json.loads(json.dumps(dataclasses.asdict(facts.gather(planted(tree), {}))))["hostname"]


def test_system_facts_follow_the_root(tmp_path):
    write_files(tmp_path, {"/opt/imgkit/system.json": '{"schema": 1, "title": "here"}'})
    system = facts.system_facts(env={"IMGKIT_ROOT": str(tmp_path)})
    assert system is not None
    assert system.title == "here"


def test_nothing_is_read_beside_root(planted):
    """An audit hook in a separate interpreter records every file and folder that Python opens."""
    root = planted("roce_storage")
    program = (
        "import sys, os, json\n"
        "from imgkit_entrypoints import facts, fabric, system\n"
        "seen = []\n"
        "names = ('open', 'os.listdir', 'os.scandir')\n"
        "sys.addaudithook(lambda name, args: seen.append(str(args[0])) if name in names else None)\n"
        "facts.gather()\n"
        "facts.system_facts()\n"
        "paths = list(seen)\n"
        "print(json.dumps(paths))\n"
    )
    env = {**os.environ, "IMGKIT_ROOT": str(root), "HOME": "/root", "LD_LIBRARY_PATH": "/opt/lib"}
    process = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    seen = json.loads(process.stdout)
    assert len(seen) > 50
    assert [path for path in seen if not path.startswith(str(root))] == []


def test_long_proc_files_are_whole():
    """The kernel returns such files page by page."""
    text = facts.Reader(root=Path("/")).text("/proc/self/smaps")
    assert text is not None
    assert text.count("VmFlags") == Path("/proc/self/maps").read_text().count("\n")


def test_addresses_agree_with_the_kernel():
    """Addresses from files on this machine equal those of the system call that NCCL relies on."""
    host = facts.gather(Path("/"), {})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel_socket:
        for item in host.interfaces:
            try:
                answer = fcntl.ioctl(kernel_socket, 0x8915, struct.pack("256s", item.name.encode()[:15]))
            except OSError:
                assert not item.ipv4, item
            else:
                assert socket.inet_ntoa(answer[20:24]) in item.addresses, item


ON_BUS = {
    "AMD, some of them hidden": ((*[("0x120000", "0x1002")] * 3, ("0x030000", "0x1a03")), "kfd", "3 of AMD"),
    "AMD": ([("0x038000", "0x1002")] * 2, "", "2 of AMD"),
    "Intel": ((("0x038000", "0x8086"), ("0x030000", "0x8086")), "dri/card0", "1 of Intel"),
    "Gaudi": ([("0x120000", "0x1da3")] * 8, "accel/accel0", "8 of Habana"),
    "others": ((("0x120000", "0x19e5"), ("0x038000", "0x1af4")), "davinci0", "1 of vendor 0x19e5"),
}


@pytest.mark.parametrize("env", [{}, {"CUDA_VISIBLE_DEVICES": "0,1"}])
@pytest.mark.parametrize("maker", ON_BUS)
def test_gpus_of_others_are_evidence_and_no_gpus(tmp_path, maker, env):
    devices, file, gpus_on_bus = ON_BUS[maker]
    for number, (kind, vendor) in enumerate(devices):
        folder = f"sys/bus/pci/devices/0000:{number:02}:00.0"
        write_files(tmp_path, {f"{folder}/class": kind, f"{folder}/vendor": vendor})
    if file:
        write_files(tmp_path, {f"dev/{file}": ""})
    host = facts.gather(root=tmp_path, env=env)
    assert host.gpus == 0
    files = f"; /dev: {Path(file).parts[0]}" if file else ""
    evidence = (
        f"/dev: no nvidia device{files}; /sys/bus/pci/devices: {gpus_on_bus}; imgkit uses NVIDIA GPUs only"
    )
    assert evidence in host.gpus_source
    (tmp_path / "dev").mkdir(exist_ok=True)
    (tmp_path / "dev/nvidia0").touch()
    assert gpus_on_bus not in facts.gather(root=tmp_path, env=env).gpus_source


def test_hidden_gpus_of_nvidia_are_evidence(tmp_path):
    folder = "sys/bus/pci/devices/0000:17:00.0"
    write_files(tmp_path, {f"{folder}/class": "0x030200", f"{folder}/vendor": "0x10de"})
    source = facts.gather(root=tmp_path, env={}).gpus_source
    assert source == "/dev: no nvidia device; /sys/bus/pci/devices: 1 of NVIDIA"


def test_display_of_a_processor_is_no_gpu(tmp_path):
    folder = "sys/bus/pci/devices/0000:00:02.0"
    write_files(tmp_path, {f"{folder}/class": "0x030000", f"{folder}/vendor": "0x8086", "dev/dri/card0": ""})
    assert "NVIDIA GPUs only" not in facts.gather(root=tmp_path, env={}).gpus_source
