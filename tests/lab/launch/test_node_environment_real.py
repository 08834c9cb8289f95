"""What workers get of a node, with real torch, MPI and network namespaces: caches, variables, no internet.

Needs the Python with torch that IMGKIT_TEST_TORCH_PYTHON names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest
from labkit import PACKAGE

PYTHON = os.environ.get("IMGKIT_TEST_TORCH_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="IMGKIT_TEST_TORCH_PYTHON names no Python with torch")

DistRun = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def dist_run(tmp_path):
    """Return a function that runs a program under dist-run; `before` are words in front of it."""
    venv = tmp_path / "venv"  # workers start with -I, so the package must be on the path of the Python
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", venv], check=True)
    site = subprocess.run(
        [PYTHON, "-c", "import torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    folder = next((venv / "lib").glob("python*/site-packages"))
    (folder / "torch.pth").write_text(f"{site}{PACKAGE.parent}\n")
    (tmp_path / "node").mkdir()

    def run(program, *options, before=(), **env):
        (tmp_path / "program.py").write_text(program)
        argv = (*before, str(venv / "bin/python"), "-I", "-m", "imgkit_entrypoints", "dist-run", *options)
        return subprocess.run(
            [*argv, "--device", "cpu", "program.py"],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path / "node"), "HOME": str(tmp_path), **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


COMPILES = """
import torch
from torch._dynamo.utils import counters
function = torch.compile(lambda x: torch.sin(x) * x + 1)
function(torch.randn(1000))
counts = counters["inductor"]
print("compiled", counts["fxgraph_cache_miss"], "reused", counts["fxgraph_cache_hit"])
"""


@pytest.mark.programs("g++")
def test_second_start_on_a_new_node_compiles_nothing(dist_run, tmp_path):
    first = dist_run(COMPILES, "--compile-cache", "cache.zip")
    assert "compiled 1 reused 0" in first.stdout, first.stderr
    assert "packed" in first.stderr
    shutil.rmtree(tmp_path / "node")
    (tmp_path / "node").mkdir()
    second = dist_run(COMPILES, "--compile-cache", "cache.zip")
    assert "compiled 0 reused 1" in second.stdout, second.stderr
    assert "packed" not in second.stderr


STALE = """
import ctypes, os, pathlib, sys, time
folder = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
folder.mkdir(parents=True, exist_ok=True)
kernel, libc = folder / "kernel.json", ctypes.CDLL(None, use_errno=True)
is_network_disk = folder == pathlib.Path("shared").absolute()
mount = os.open(folder, os.O_RDONLY)

def compile_kernel():
    part = kernel.with_suffix(f".{os.getpid()}")
    part.write_text("code")
    part.replace(kernel)

def read_kernel():
    if not is_network_disk:
        return kernel.read_text()
    # A client of NFS looks the name up, and reads by the handle: two requests to the server.
    handle, mount_id = ctypes.create_string_buffer(136), ctypes.c_int()
    handle[:4] = (128).to_bytes(4, sys.byteorder)
    if libc.name_to_handle_at(-100, os.fsencode(kernel), handle, ctypes.byref(mount_id), 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    time.sleep(0.001)
    descriptor = libc.open_by_handle_at(mount, handle, os.O_RDONLY)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(descriptor)

end = time.monotonic() + 2
while time.monotonic() < end:
    compile_kernel()
    read_kernel()
print("all kernels were read")
"""
"""Triton issue 11512 in small: each process writes its kernel over that of the others, and reads it."""


def test_private_cache_loses_no_kernel_where_a_shared_one_does(dist_run, tmp_path):
    shared = dist_run(STALE, "--nproc", "4", TRITON_CACHE_DIR=str(tmp_path / "shared"))
    if "Operation not permitted" in shared.stderr or "not supported" in shared.stderr:
        pytest.skip("this user or file system has no handles of files")
    assert shared.returncode == 1
    assert "Stale file handle" in shared.stderr
    private = dist_run(STALE, "--nproc", "4")
    assert private.returncode == 0, private.stderr
    assert private.stdout.count("all kernels were read") == 4


USES_MPI = """
import ctypes
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
assert mpi.MPI_Init(None, None) == 0
print("MPI starts")
mpi.MPI_Finalize()
"""


@pytest.mark.programs("mpirun")
@pytest.mark.parametrize(
    ("keep", "works"), [((), True), (("--keep-env", "OMPI_*", "--keep-env", "PMIX_*"), False)]
)
def test_mpi_of_a_worker_does_not_meet_the_launcher_of_its_node(dist_run, keep, works):
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    result = dist_run(USES_MPI, "--nproc", "2", *keep, before=("mpirun", "-np", "1"), **root)
    assert (result.stdout.count("MPI starts") == 2) == works, result.stdout + result.stderr
    assert ("workers start without OMPI_* (" in result.stderr) == works


DOWNLOADS = "import urllib.request; urllib.request.urlopen('http://192.0.2.1:8080/model')"
NO_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@pytest.mark.programs("unshare", "ip")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_download_without_a_route_names_the_host(dist_run):
    result = dist_run(DOWNLOADS, before=NO_NETWORK, HF_ENDPOINT="http://192.0.2.1")
    assert "this node cannot reach http://192.0.2.1: let imgkit run send" in result.stderr
    assert "this node cannot reach 192.0.2.1:8080" in result.stderr.partition("failed first")[2]
    quiet = dist_run("print('offline')", before=NO_NETWORK, HF_HUB_OFFLINE="1")
    assert "cannot reach" not in quiet.stderr
    assert "offline" in quiet.stdout


# A route, but no answer: packets for other machines end in the loopback device.
BEHIND_A_FIREWALL = (
    *("unshare", "--net", "sh", "-c"),
    'ip link set lo up && ip route add default dev lo && exec "$@"',
    "sh",
)


@pytest.mark.programs("unshare", "ip")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_service_that_does_not_answer_is_offline(dist_run):
    program = "import os; print(os.environ['WANDB_MODE'])"
    result = dist_run(program, before=BEHIND_A_FIREWALL, WANDB_API_KEY="x", WANDB_BASE_URL="http://192.0.2.1")
    assert "this node cannot reach http://192.0.2.1: WANDB_MODE=offline" in result.stderr
    assert "offline" in result.stdout
