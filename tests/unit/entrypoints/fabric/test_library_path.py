"""Libraries of the host, and CUDA's forward compatibility: used by rule, else refused with the reason.

The libraries and the drivers' files are fakes: names and versions that the dynamic linker would compare.
`tests/lab/launch/test_host_libs_real.py` loads compiled ones in a container.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_files
from shared_object import shared_object

from imgkit_entrypoints import fabric, facts
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.fabric import library_path

Planted = Callable[[str], Path]
HOST, LIB = "/run/imgkit/host", "/usr/lib64"
AUTO = {"IMGKIT_HOST_LIBS": "auto"}
LIBC = "libc.so.6"


def put_library(root: Path, path: str, **properties: Any) -> None:
    """Write a library of the machine, for its processor unless `properties` name another."""
    properties = {"soname": Path(path).name, "machine": "aarch64", **properties}
    write_files(root, {path: shared_object(**properties)})


def put_host_library(root: Path, name: str, folder: str = LIB, **properties: Any) -> None:
    put_library(root, f"{HOST}{folder}/{name}", **properties)


@pytest.fixture
def root(planted: Planted) -> Path:
    """A node with Slingshot, whose host has the three libraries and whose image has glibc 2.35."""
    root = planted("cxi4")
    put_library(root, f"{LIB}/{LIBC}", defines=("GLIBC_2.17", "GLIBC_2.34", "GLIBC_2.35"))
    put_host_library(root, "libcxi.so.1", needs={LIBC: ("GLIBC_2.34",)})
    put_host_library(root, "libfabric.so.1", needed=("libcxi.so.1",), defines=("FABRIC_1.0", "FABRIC_1.7"))
    put_host_library(
        root, "libnccl-net-ofi.so", needs={"libfabric.so.1": ("FABRIC_1.7",), LIBC: ("GLIBC_2.17",)}
    )
    return root


def choose(root: Path, env: Mapping[str, str] | None = None, nnodes: int = 2) -> fabric.FabricPlan:
    env = {**(AUTO if env is None else env), "IMGKIT_ROOT": str(root), "IMGKIT_NCCL_VERSION": "2.27.3"}
    return fabric.choose_fabric(facts.gather(env=env), None, env, nnodes=nnodes)


def reason(plan: fabric.FabricPlan, name: str) -> str:
    (decision,) = (item for item in plan.decisions if item.variable == name)
    is_used = (
        f"{COMPAT}/lib.real" in plan.env.get("LD_LIBRARY_PATH", "")
        if name == "cuda_compat"
        else name in plan.links
    )
    assert decision.used == is_used
    return decision.reason


def host_warnings(plan: fabric.FabricPlan) -> Sequence[str]:
    return [str(warning) for warning in plan.warnings if "host" in warning.what]


def test_fitting_libraries_are_used(root):
    plan = choose(root)
    assert dict(plan.links) == {
        "libcxi.so.1": f"{HOST}{LIB}/libcxi.so.1",
        "libfabric.so.1": f"{HOST}{LIB}/libfabric.so.1",
        "libnccl-net-ofi.so": f"{HOST}{LIB}/libnccl-net-ofi.so",
        "libnccl-net.so": f"{HOST}{LIB}/libnccl-net-ofi.so",
    }
    assert plan.env["LD_LIBRARY_PATH"] == library_path.links_folder(plan.links)
    assert "needs GLIBC_2.34, the image has 2.35 (/usr/lib64/libc.so.6)" in reason(plan, "libcxi.so.1")
    assert plan.env["NCCL_NET"] == "AWS Libfabric"
    assert not any("not on the library path" in str(warning) for warning in plan.warnings)


def test_plug_in_of_the_host_can_be_named(root):
    plan = choose(root, {**AUTO, "NCCL_NET_PLUGIN": "ofi"})
    assert not any("NCCL_NET_PLUGIN" in warning.what for warning in plan.warnings), plan.warnings
    plan = choose(root, {"NCCL_NET_PLUGIN": "ofi"})
    assert any("NCCL_NET_PLUGIN" in warning.what for warning in plan.warnings)


def test_nothing_happens_unless_asked(root):
    for env in ({}, {"IMGKIT_HOST_LIBS": "none"}):
        plan = choose(root, env)
        assert not plan.links
        assert "LD_LIBRARY_PATH" not in plan.env
        assert not any("libcxi" in item.variable for item in plan.decisions)


def test_newer_glibc_is_refused_by_name(root):
    put_host_library(root, "libcxi.so.1", needs={LIBC: ("GLIBC_2.34", "GLIBC_2.38")})
    plan = choose(root)
    assert not plan.links
    text = "libcxi.so.1 needs GLIBC_2.38, the image has 2.35 (/usr/lib64/libc.so.6)"
    assert reason(plan, "libcxi.so.1") == text
    assert reason(plan, "libfabric.so.1") == "libfabric.so.1 needs libcxi.so.1, which is not used"
    (warning,) = host_warnings(plan)
    assert text in warning
    assert "Use a newer base image" in warning


@pytest.mark.parametrize(
    ("name", "properties", "text"),
    [
        (
            "libcxi.so.1",
            {"needs": {LIBC: ("GLIBC_ABI_DT_RELR",)}},
            "needs GLIBC_ABI_DT_RELR, which the image's",
        ),
        ("libcxi.so.1", {"soname": "libcxi.so.2"}, "libcxi.so.1 has the SONAME libcxi.so.2"),
        ("libcxi.so.1", {"machine": "x86_64"}, "is for x86_64, the image is for aarch64"),
        (
            "libnccl-net-ofi.so",
            {"needed": ("libcudart.so.13", "libfabric.so.1")},
            "libnccl-net-ofi.so needs libcudart.so.13, which neither the image nor the host has",
        ),
    ],
)
def test_library_that_cannot_be_loaded_is_refused(root, name, properties, text):
    put_host_library(root, name, **properties)
    assert text in reason(choose(root), name)


def test_damaged_library_is_refused_by_name(root):
    library = root / f"{HOST}{LIB}/libcxi.so.1".lstrip("/")
    library.write_bytes(library.read_bytes()[:100])
    assert "libcxi.so.1 of the host is truncated: bytes" in reason(choose(root), "libcxi.so.1")


def test_second_name_of_the_plug_in_is_reported_alone(root):
    folder = root / f"{HOST}{LIB}".lstrip("/")
    (folder / "libnccl-net-ofi.so").unlink()
    put_host_library(root, "libnccl-net.so", needed=("libcudart.so.13",))
    assert "libnccl-net.so needs libcudart.so.13" in host_warnings(choose(root))[0]


def test_needs_come_along_from_the_host(root):
    put_host_library(root, "libcxi.so.1", needs={"libjson-c.so.3": ("JSONC_1",), LIBC: ("GLIBC_2.17",)})
    put_host_library(root, "libjson-c.so.3", defines=("JSONC_1",))
    assert choose(root).links["libjson-c.so.3"] == f"{HOST}{LIB}/libjson-c.so.3"
    # The image's own is taken as soon as it can serve.
    put_library(root, f"{LIB}/libjson-c.so.3", defines=("JSONC_1", "JSONC_2"))
    assert "libjson-c.so.3" not in choose(root).links


def test_need_that_would_break_the_image_is_refused(root):
    put_host_library(root, "libcxi.so.1", needs={"libjson-c.so.3": ("JSONC_2",)})
    put_host_library(root, "libjson-c.so.3", defines=("JSONC_2",))
    put_library(root, f"{LIB}/libjson-c.so.3", defines=("JSONC_1",))
    text = reason(choose(root), "libcxi.so.1")
    assert "needs JSONC_2, and the host's libjson-c.so.3 lacks JSONC_1, which the image's has" in text


def test_compilers_library_never_comes_from_the_host(root):
    put_host_library(
        root, "libfabric.so.1", needs={"libstdc++.so.6": ("GLIBCXX_3.4.32",)}, defines=("FABRIC_1.7",)
    )
    put_host_library(root, "libstdc++.so.6", defines=("GLIBCXX_3.4.30", "GLIBCXX_3.4.32"))
    assert "libstdc++.so.6, which the image does not have" in reason(choose(root), "libfabric.so.1")
    put_library(root, f"{LIB}/libstdc++.so.6", defines=("GLIBCXX_3.4.30",))
    assert "needs GLIBCXX_3.4.32, the image has 3.4.30" in reason(choose(root), "libfabric.so.1")


def test_older_library_does_not_replace_the_images(root):
    put_library(root, f"{LIB}/libfabric.so.1", defines=("FABRIC_1.0", "FABRIC_1.7", "FABRIC_1.8"))
    plan = choose(root)
    assert "lacks FABRIC_1.8, which the image's has" in reason(plan, "libfabric.so.1")
    # The plug-in of the host can use the image's.
    assert "libnccl-net-ofi.so" in plan.links


def test_rpath_into_the_image_is_refused(root):
    put_library(root, f"{LIB}/libcxi.so.1")
    put_host_library(root, "libfabric.so.1", needed=("libcxi.so.1",), rpath=LIB, defines=("FABRIC_1.7",))
    assert "has the RPATH /usr/lib64, where the image has another" in reason(choose(root), "libfabric.so.1")


def test_listed_folders_are_searched_first(root):
    put_host_library(root, "libcxi.so.1", "/cluster/ofi/lib", needs={LIBC: ("GLIBC_2.17",)})
    put_host_library(root, "libfabric.so.1", "/opt/cray/libfabric/1.22.0/lib64", defines=("FABRIC_1.7",))
    put_host_library(root, "libfabric.so.1", "/opt/cray/libfabric/1.9.0/lib64", defines=("FABRIC_1.7",))
    links = choose(root, {"IMGKIT_HOST_LIBS": "auto:/cluster/ofi/lib"}).links
    assert links["libcxi.so.1"] == f"{HOST}/cluster/ofi/lib/libcxi.so.1"
    assert links["libfabric.so.1"] == f"{HOST}/opt/cray/libfabric/1.22.0/lib64/libfabric.so.1"


def test_links_are_followed_as_on_the_host(root):
    folder = root / f"{HOST}{LIB}".lstrip("/")
    (folder / "libcxi.so.1").rename(folder / "libcxi.so.1.5.0")
    (folder / "libcxi.so.1").symlink_to("/usr/lib64/libcxi.so.1.5.0")
    assert choose(root).links["libcxi.so.1"] == f"{HOST}{LIB}/libcxi.so.1.5.0"
    (folder / "libcxi.so.1").unlink()
    (folder / "libcxi.so.1").symlink_to("/etc/alternatives/libcxi.so.1")
    assert "is a link out of what is bound (/usr, /opt)" in reason(choose(root), "libcxi.so.1")
    (folder / "libcxi.so.1").unlink()
    (folder / "libcxi.so.1").symlink_to("libcxi.so.1")  # a circle ends
    assert "is a link out of what is bound" in reason(choose(root), "libcxi.so.1")


def test_users_library_comes_first(root):
    put_library(root, "/mine/libcxi.so.1")
    (root / "opt/imgkit").mkdir(parents=True, exist_ok=True)
    image = {"base": {"env": {"PATH": "/bin", "LD_LIBRARY_PATH": "/of/image"}}}
    (root / "opt/imgkit/manifest.json").write_text(json.dumps(image))
    plan = choose(root, {**AUTO, "LD_LIBRARY_PATH": "/mine:/of/image:/.singularity.d/libs"})
    assert "libcxi.so.1" not in plan.links
    (decision,) = (item for item in plan.decisions if item.variable == "libcxi.so.1")
    assert (decision.value, decision.origin) == ("/mine/libcxi.so.1", "user")
    links_folder = library_path.links_folder(plan.links)
    assert plan.env["LD_LIBRARY_PATH"] == f"/mine:{links_folder}:/of/image:/.singularity.d/libs"


def test_launch_within_a_run_decides_the_same(root, planted):
    outer = choose(root, {**AUTO, "LD_LIBRARY_PATH": "/mine"})
    stale = "/tmp/imgkit-host-libs-0-0123456789ab"
    put_library(root, f"{stale}/libcxi.so.1")
    inner = choose(root, {**AUTO, "LD_LIBRARY_PATH": f"{outer.env['LD_LIBRARY_PATH']}:{stale}"})
    assert (inner.links, inner.env) == (outer.links, outer.env)
    gpu = driver_tree(planted, "550.54.15", "NVIDIA H100 80GB HBM3")
    first = compat(gpu, "12.9.0", LD_LIBRARY_PATH="/mine")
    second = compat(gpu, "12.9.0", LD_LIBRARY_PATH=first.env["LD_LIBRARY_PATH"])
    assert second.env == first.env


def test_users_own_driver_comes_first(planted):
    root = driver_tree(planted, "550.54.15", "NVIDIA H100 80GB HBM3")
    (root / "mine").mkdir()
    (root / "mine/libcuda.so.1").touch()
    plan = compat(root, "12.9.0", LD_LIBRARY_PATH="/mine")
    assert "LD_LIBRARY_PATH names /mine, which has a libcuda.so.1 as well" in reason(plan, "cuda_compat")


def test_other_fabric_needs_none(root):
    plan = choose(root, {**AUTO, "NCCL_NET": "Socket"})
    assert not plan.links
    assert reason(plan, "host_libs").startswith("the fabric is tcp, which needs none of them")


def test_container_without_the_hosts_folders_says_so(planted):
    plan = choose(planted("cxi4"))
    assert "/run/imgkit/host does not exist" in reason(plan, "host_libs")
    assert "--bind /usr:/run/imgkit/host/usr:ro,/opt:/run/imgkit/host/opt:ro" in host_warnings(plan)[0]


def test_host_without_any_says_so(planted):
    root = planted("cxi4")
    (root / "run/imgkit/host/usr").mkdir(parents=True)
    assert "system.runtime.host_libs" in host_warnings(choose(root))[0]


def test_recipe_asks_and_the_user_declines(root):
    (root / "opt/imgkit").mkdir(parents=True, exist_ok=True)
    baked = {"fabric": {"host_libs": "auto"}, "runtime": {"host_libs": ["/cluster/lib"]}}
    (root / "opt/imgkit/system.json").write_text(json.dumps(baked))
    put_host_library(root, "libcxi.so.1", "/cluster/lib")
    assert choose(root, {}).links["libcxi.so.1"] == f"{HOST}/cluster/lib/libcxi.so.1"
    assert not choose(root, {"IMGKIT_HOST_LIBS": "none"}).links


@pytest.mark.parametrize("value", ["on", "auto:lib", "none:", "/usr/lib64"])
def test_other_value_is_refused(root, value):
    with pytest.raises(UsageError, match="neither none nor auto"):
        choose(root, {"IMGKIT_HOST_LIBS": value})
    with pytest.raises(UsageError, match="is none of none, major, auto"):
        choose(root, {"IMGKIT_CUDA_COMPAT": value})


COMPAT = "/usr/local/cuda/compat"


def driver_tree(planted: Planted, driver: str, model: str, file: str = "libcuda.so.575.57.08") -> Path:
    """A FAKE tree of NVIDIA's driver beside an image's real layout of the compat folder."""
    root = planted("none")
    files = {
        "proc/driver/nvidia/gpus/0000:17:00.0/information": f"Model: \t\t {model}",
        "proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue",
        f"{COMPAT}/lib.real/{file}": "",
    }
    write_files(root, files)
    (root / f"{COMPAT}/lib.real/libcuda.so.1".lstrip("/")).symlink_to(file)
    return root


def compat(root: Path, cuda: str, **env: str) -> fabric.FabricPlan:
    return choose(root, {"IMGKIT_CUDA_COMPAT": "auto", "CUDA_VERSION": cuda, **env}, nnodes=1)


def test_newer_cuda_on_a_data_centre_gpu_uses_compat(planted):
    plan = compat(
        driver_tree(planted, "550.54.15", "NVIDIA H100 80GB HBM3"), "12.9.0.043", LD_LIBRARY_PATH="/x"
    )
    assert plan.env["LD_LIBRARY_PATH"] == f"{COMPAT}/lib.real:/x"
    text = (
        "driver 550.54.15 supports CUDA 12.4, the image has 12.9; NVIDIA H100 80GB HBM3 is a data-centre GPU"
    )
    assert text in reason(plan, "cuda_compat")


@pytest.mark.parametrize(
    ("driver", "model", "cuda", "text"),
    [
        ("550.54.15", "NVIDIA H100 80GB HBM3", "12.4.1", "supports CUDA 12.4, the image has 12.4"),
        ("580.65.06", "Tesla T4", "12.9.0", "supports CUDA 13.0, the image has 12.9"),
        (
            "550.54.15",
            "NVIDIA GeForce RTX 4090",
            "12.9.0",
            "for data-centre GPUs, and NVIDIA GeForce RTX 4090 is",
        ),
        ("550.54.15", "NVIDIA RTX A6000", "13.0.0", "for data-centre GPUs, and NVIDIA RTX A6000 is none"),
        ("550.54.15", "NVIDIA A800 40GB Active", "13.0.0", "is none"),
        ("550.54.15", "", "13.0.0", "a GPU without a name is none"),
        ("575.57.08", "NVIDIA H200", "13.0.0", "is not newer than the driver"),
        ("999.10.01", "NVIDIA H200", "19.1.0", "newer than imgkit's table"),
        ("550.54.15", "NVIDIA H200", "", "unknown versions"),
    ],
)
def test_compat_is_refused_with_the_reason(planted, driver, model, cuda, text):
    plan = compat(driver_tree(planted, driver, model), cuda)
    assert "LD_LIBRARY_PATH" not in plan.env
    assert text in reason(plan, "cuda_compat")


@pytest.mark.parametrize(
    ("driver", "cuda", "is_used"),
    [("570.86.15", "13.0.1", True), ("535.161.08", "12.9.0", False), ("580.65.06", "13.1.0", False)],
    ids=["newer major", "newer minor", "minor of the newest"],
)
def test_newer_major_of_cuda_uses_compat_by_default(planted, driver, cuda, is_used):
    root = driver_tree(planted, driver, "NVIDIA H100 80GB HBM3", file="libcuda.so.590.10.01")
    plan = choose(root, {"CUDA_VERSION": cuda}, nnodes=1)
    assert (f"{COMPAT}/lib.real" in plan.env.get("LD_LIBRARY_PATH", "")) == is_used
    assert any(item.variable == "cuda_compat" for item in plan.decisions) == is_used


def test_workstation_gpu_uses_no_compat_by_default(planted):
    plan = choose(driver_tree(planted, "570.86.15", "NVIDIA RTX A6000"), {"CUDA_VERSION": "13.0.1"}, nnodes=1)
    assert "LD_LIBRARY_PATH" not in plan.env
    assert "NVIDIA RTX A6000 is none (the default)" in reason(plan, "cuda_compat")


def test_image_without_compat_says_so(planted):
    plan = compat(planted("none"), "12.9.0")
    assert "the image has no /usr/local/cuda/compat/libcuda.so.1" in reason(plan, "cuda_compat")


def test_compat_comes_before_the_links(root):
    version = "NVRM version: NVIDIA UNIX Kernel Module  550.54.15"
    drivers = {f"{COMPAT}/{name}": "" for name in ("libcuda.so.575.57.08", "libcuda.so.1")}
    write_files(root, {**drivers, "proc/driver/nvidia/version": version})
    plan = compat(root, "12.9.0", **AUTO)
    first, second = plan.env["LD_LIBRARY_PATH"].split(":")
    assert (first, second) == (COMPAT, library_path.links_folder(plan.links))
    assert str(os.getuid()) in second
