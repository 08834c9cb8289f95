"""Libraries compiled against two versions of glibc, on a host with Slingshot, and really loaded in a .sif.

Real are the compiler, the libraries, the dynamic linker and the container. FAKES are what cannot be here: the
NICs (a /sys of text files), and the content of libcxi, libfabric and aws-ofi-nccl. The newer glibc is that of
Debian sid where the lab has it, else a stand-in that defines one more version.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from labkit import IMGKIT, ROOT, expect_failure, expect_success, public_folder, run

from imgkit_entrypoints.facts import host_libs

pytestmark = [
    pytest.mark.docker,
    pytest.mark.singularity,
    pytest.mark.programs("cc"),
    # All tests use one folder of the node, and the fixture removes it.
    pytest.mark.xdist_group("host-libs"),
]
SID = Path("/var/cache/imgkit-lab/docker-sid/usr/lib/x86_64-linux-gnu/libc.so.6")
SOURCES = {
    "cxi": "#include <stdlib.h>\nlong cxil_number(const char *t) { return strtol(t, 0, 10); }",
    "newer": "long NEWER(const char *, char **, int);\n"
    "long cxil_number(const char *t) { return NEWER(t, 0, 10); }",
    "fabric": "long cxil_number(const char *);\nlong fi_number(const char *t) { return cxil_number(t); }",
    "plugin": "long fi_number(const char *);\nlong ncclNetPlugin_v8(const char *t) { return fi_number(t); }",
    "libc": "long newer_strtol(const char *t, char **e, int b) { return 0; }",
}
LOADS = "import ctypes; print('NCCL would get', ctypes.CDLL('libnccl-net.so').ncclNetPlugin_v8(b'42'))"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """A node whose host has the libraries."""

    folder: Path
    version: str
    """Version of glibc that the newer libcxi needs."""

    def inside(self, sif, host, *args, env=()):
        """Run `args` as the container of a job does, with the tree `host` as the node's own."""
        bound = (
            f"{self.folder}/{host}/usr:/run/imgkit/host/usr:ro",
            f"{self.folder}/sys:/sys",
            str(self.folder),
        )
        binds = (option for bind in bound for option in ("--bind", bind))
        env_options = (option for text in ("IMGKIT_HOST_LIBS=auto", *env) for option in ("--env", text))
        return run("singularity", "exec", "--no-mount", "sys", *binds, *env_options, sif, *args, folder="/")


@pytest.fixture(scope="module")
def node():
    folder = public_folder("host-libs")
    try:
        for name, text in SOURCES.items():
            (folder / f"{name}.c").write_text(text)
        (folder / "load.py").write_text(LOADS)
        for number in range(2):
            nic = folder / f"sys/class/cxi/cxi{number}"
            nic.mkdir(parents=True)
        older, newer = folder / "older/usr/lib64", folder / "newer/usr/lib64"
        needs = library(older, "libcxi.so.1", folder / "cxi.c")
        assert "GLIBC_" in needs
        if SID.exists():
            version = "2.38"
            library(newer, "libcxi.so.1", folder / "newer.c", "-DNEWER=__isoc23_strtol", "-nostdlib", SID)
        else:
            version = "2.99"
            (folder / "map").write_text("GLIBC_2.99 { newer_strtol; };")
            library(folder, "libc.so.6", folder / "libc.c", f"-Wl,--version-script={folder}/map", "-nostdlib")
            options = ("-DNEWER=newer_strtol", "-nostdlib", folder / "libc.so.6")
            library(newer, "libcxi.so.1", folder / "newer.c", *options)
        for lib64 in (older, newer):
            library(lib64, "libfabric.so.1", folder / "fabric.c", lib64 / "libcxi.so.1")
            library(lib64, "libnccl-net-ofi.so", folder / "plugin.c", lib64 / "libfabric.so.1")
            (lib64 / "libnccl-net.so").symlink_to("libnccl-net-ofi.so")
        yield Node(folder=folder, version=version)
    finally:
        shutil.rmtree(folder)
        for links_folder in Path("/tmp").glob(f"imgkit-host-libs-{os.getuid()}-*"):
            shutil.rmtree(links_folder)


def library(folder, name, source, *args):
    """Compile a library; what readelf prints of its versions."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    options = ("-shared", "-fPIC", f"-Wl,-soname,{name}", "-Wl,--allow-shlib-undefined", "-Wl,--no-as-needed")
    subprocess.run(["cc", *options, "-o", file, source, *args], check=True)
    return subprocess.run(["readelf", "-VW", file], check=True, capture_output=True, text=True).stdout


RECIPE = """
extends: cpu
system:
  runtime:
    kind: singularity
    command: apptainer
    options: [--no-mount, sys]
    binds: ["FOLDER/sys:/sys", FOLDER]
    host_libs: [FOLDER/older/usr/lib64]
  fabric: {kind: slingshot, host_libs: auto}
"""


def test_job_loads_what_fits_of_its_host(mn5_sif, node):
    recipe = node.folder / "mine.yaml"
    recipe.write_text(RECIPE.replace("FOLDER", str(node.folder)))
    command = ("dist-run", "--device", "cpu", "--nproc", "1", node.folder / "load.py")
    job = ("run", recipe, "--image", mn5_sif, "--gpus", "0", "--no-code", "--", *command)
    result = expect_success(run(*IMGKIT, *job, folder=node.folder))
    assert "NCCL would get 42" in result.stdout
    # One node without GPUs uses no network, so its start announces no library.
    assert "libcxi" not in result.stderr


def test_dry_run_names_the_library_that_fits(mn5_sif, node):
    result = expect_success(node.inside(mn5_sif, "older", "dist-env", "--dry-run", "--device", "cpu"))
    assert re.search(r"libcxi\.so\.1 +\S+/libcxi\.so\.1 +the host's; it needs GLIBC_2", result.stdout), (
        result.stdout
    )


def test_doctor_loads_what_fits(mn5_sif, node):
    result = node.inside(mn5_sif, "older", "dist-doctor", "--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert (checks["host libraries"]["verdict"], checks["libfabric"]["verdict"]) == ("ok", "ok"), (
        result.stdout
    )


def test_newer_glibc_is_refused_as_the_linker_would(mn5_sif, node):
    result = expect_success(node.inside(mn5_sif, "newer", "dist-env", "--dry-run", "--device", "cpu"))
    refusal = re.search(
        r"libcxi.so.1 needs GLIBC_(\S+), the image has (2\.\d+) \(/\S*libc.so.6\)", result.stdout
    )
    assert refusal, result.stdout
    assert refusal[1] == node.version
    assert "LD_LIBRARY_PATH " not in result.stdout
    assert "libfabric.so.1 needs libcxi.so.1, which is not used" in result.stdout
    # What happens without the rule: the dynamic linker says the same, when the run has begun.
    forced = "LD_LIBRARY_PATH=/run/imgkit/host/usr/lib64"
    result = node.inside(mn5_sif, "newer", "env", forced, "python3", "-I", node.folder / "load.py")
    assert result.returncode != 0
    assert f"version `GLIBC_{node.version}' not found" in result.stderr


def test_user_declines_the_hosts_libraries(mn5_sif, node):
    env = ["IMGKIT_HOST_LIBS=none"]
    result = expect_success(
        node.inside(mn5_sif, "older", "dist-env", "--dry-run", "--device", "cpu", env=env)
    )
    assert "libcxi" not in result.stdout


def test_folder_of_somebody_else_is_not_used(mn5_sif, node):
    result = node.inside(mn5_sif, "older", "dist-env", "--dry-run", "--json", "--device", "cpu")
    folder = Path(json.loads(result.stdout)["env"]["LD_LIBRARY_PATH"].split(":")[0])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "libcxi.so.1").symlink_to("/home/stranger/libcxi.so.1")
    try:
        command = ("dist-run", "--device", "cpu", "--nproc", "1", node.folder / "load.py")
        expect_failure(
            node.inside(mn5_sif, "older", *command),
            2,
            f"{folder}: cannot be used: it holds something else",
            f"rm -r {folder}",
        )
    finally:
        shutil.rmtree(folder)


DECIDES = """
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from imgkit_entrypoints import fabric, facts, files
from imgkit_entrypoints.fabric import library_path
plan = fabric.choose_fabric(facts.gather(), None, os.environ)
print(*(decision.reason for decision in plan.decisions if decision.variable == "libcxi.so.1"))
files.make_links(Path(library_path.links_folder(plan.links)), plan.links)
env = {**os.environ, "LD_LIBRARY_PATH": plan.env["LD_LIBRARY_PATH"]}
sys.exit(subprocess.run([sys.executable, sys.argv[2]], env=env).returncode)
"""


@pytest.mark.soak
@pytest.mark.skipif(
    not SID.exists(), reason="no root of Debian sid: ci/lab/engine start --private DIR --debian sid"
)
@pytest.mark.parametrize("host", ["older", "newer"])
def test_newer_image_loads_both(node, tmp_path, host):
    # The root has no Python. This one's runs there: glibc serves programs of older versions.
    modules = Path(sys.base_prefix).glob("lib/python3*/lib-dynload/*.so")
    text = subprocess.run(["ldd", *modules], check=True, capture_output=True, text=True).stdout
    for dependency in set(re.findall(r"=> (/\S+)", text)):
        if Path(dependency).name not in host_libs.IMAGE_LIBRARIES and "libcrypt.so" not in dependency:
            shutil.copy(dependency, tmp_path)
    entrypoints = ROOT / "entrypoints"
    binds = (sys.base_prefix, entrypoints, tmp_path, node.folder, f"{node.folder}/sys:/sys")
    bound = (*binds, f"{node.folder}/{host}/usr:/run/imgkit/host/usr:ro")
    env = ("--env", f"IMGKIT_HOST_LIBS=auto,LD_LIBRARY_PATH={tmp_path}", "--no-mount", "sys,home")
    root = SID.parents[3]
    python = Path(sys.executable).resolve()
    argv = (python, "-c", DECIDES, entrypoints, node.folder / "load.py")
    mounts = (option for bind in bound for option in ("--bind", bind))
    result = expect_success(run("apptainer", "--quiet", "exec", *env, *mounts, root, *argv, folder="/"))
    assert re.match(r"the host's; it needs GLIBC_2\S+, the image has 2\.\d+ \(/\S*libc", result.stdout), (
        result.stdout
    )
    assert "NCCL would get 42" in result.stdout
