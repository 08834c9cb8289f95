"""The apps under a real torchrun in the stand-in image, without a network: hello, pi, doctor."""

from __future__ import annotations

import json
import re

import pytest
from labkit import Done, in_image

pytestmark = pytest.mark.docker


def command(standin: str, *args: str) -> Done:
    return in_image(standin, "python3", "-I", "-m", "imgkit_entrypoints", *args)


def test_rank_0_talks_with_every_rank(standin):
    result = command(standin, "dist-hello", "--nproc", "3")
    assert result.returncode == 0, result.stderr
    assert "all_reduce of ones: 3" in result.stdout
    assert re.findall(r" (\d)  \S+  cpu, 1 threads +(?:-|[\d.]+ us)$", result.stdout, re.MULTILINE) == [
        "0",
        "1",
        "2",
    ]


WORKER = """
import atexit, sys
from imgkit_entrypoints.apps.ranks import run_worker
atexit.register(print, "finalized")
def main():
    print("worked")
    sys.exit({code})
run_worker(main)
"""


@pytest.mark.parametrize(("code", "exit_code"), [("None", 0), ("85", 85), ("'lost'", 1)])
def test_worker_leaves_without_finalizing(standin, code, exit_code):
    result = in_image(standin, "python3", "-c", WORKER.format(code=code))
    assert (result.returncode, result.stdout) == (exit_code, "worked\n"), result.stderr
    assert ("lost" in result.stderr) == (exit_code == 1)


def test_pi_is_right_to_the_last_digits(standin):
    result = command(standin, "dist-pi", "--nproc", "2")
    assert result.returncode == 0, result.stderr
    error = re.search(r"error (\S+), 100000000 intervals, 2 ranks", result.stdout)
    assert error is not None, result.stdout
    assert float(error[1]) <= 1e-12
    terms = re.findall(r"rank \d on \S+: (\d+) terms", result.stdout)
    assert sum(map(int, terms)) == 100_000_001
    assert "parallel efficiency" in result.stdout


WORLD_SIZES = """
import math, types, torch
from imgkit_entrypoints.apps import pi
from imgkit_entrypoints.apps.share import share
here = types.SimpleNamespace(device=torch.device("cpu"))
for n in (1, 2, 7, pi.BLOCK - 1, pi.BLOCK, 3 * pi.BLOCK + 1, 100_000_000):
    for world_size in range(1, 9):
        shares = (share(n + 1, rank, world_size) for rank in range(world_size))
        value = math.fsum(pi.partial_sum(*share, n, here) for share in shares) / n
        assert abs(value - math.pi) <= pi.tolerance(n), (n, world_size, value)
        assert abs(value - math.pi + 1 / (6 * n * n)) <= 0.03 / n**4 + 1e-12, (n, world_size, value)
print("all right")
"""


def test_every_world_size_gives_the_same_pi(standin):
    result = in_image(standin, "python3", "-I", "-c", WORLD_SIZES)
    assert "all right" in result.stdout, result.stderr


SPOILED = """
import torch.distributed as dist

right = dist.all_reduce

def all_reduce(tensor, *args, **kwargs):
    # A rank that sends wrong values.
    if dist.get_rank() == 1 and tensor.numel() > 1024:
        tensor[tensor != 0] += 1
    right(tensor, *args, **kwargs)

dist.all_reduce = all_reduce
from imgkit_entrypoints.apps.doctor import main
main()
"""
TORCHRUN = (
    *("python3", "-I", "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
    *("--nproc-per-node", "2"),
)


def spoiled(standin: str) -> Done:
    """Run the doctor on two ranks; rank 1 computes wrong values."""
    shell = ("sh", "-c", 'cat > /spoiled.py && exec "$@"', "sh")
    return in_image(standin, *shell, *TORCHRUN, "/spoiled.py", stdin=SPOILED)


TWO_AGENTS = """
agent() {
    node=$1; shift
    python3 -I -m torch.distributed.run --rdzv-backend static --nnodes 2 --node-rank $node \\
        --master-addr 127.0.0.1 --master-port 15555 --nproc-per-node 1 "$@"
}
agent 1 "$@" & agent 0 "$@"; code=$?; wait $! && exit $code
"""


def test_two_nodes_verify_their_sum(standin):
    args = ("-m", "imgkit_entrypoints.apps.doctor", "--json")
    result = in_image(standin, "sh", "-c", TWO_AGENTS, "sh", *args)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout[result.stdout.index("{") :])
    assert (report["schema"], report["passed"], report["world_size"]) == (1, True, 2)
    assert [node["ranks"] for node in report["nodes"]] == [[0], [1]]
    assert [node["reasons"] for node in report["nodes"]] == [[], []]
    assert all(node["host"].endswith(f"(node {rank})") for rank, node in enumerate(report["nodes"]))


def test_rank_that_computes_wrongly_is_named(standin):
    result = spoiled(standin)
    assert result.returncode == 1
    assert "the values of rank 1 arrived corrupted at 2 of 2 ranks" in result.stdout
    assert "FAILED on" in result.stdout


GPUS = """
plan() {
    python3 -I -m imgkit_entrypoints dist-run --dry-run --json program.py "$@" |
        grep -e '"what"' -e '"nproc": '
}
IMGKIT_GPUS=4 plan || true
mknod /dev/nvidia0 c 195 0 # the engine's device rules close it
IMGKIT_GPUS=4 plan || true
touch /usr/lib/libcuda.so.1
IMGKIT_GPUS=4 plan || true
plan
IMGKIT_GPUS=4 IMGKIT_DEVICE=cpu plan
"""


def test_gpus_that_cannot_be_used_do_not_count(standin):
    result = in_image(standin, "bash", "-uc", GPUS)
    none = "no GPU is visible here, but IMGKIT_GPUS says 4 per node (/dev: "
    lines = [line.strip() for line in result.stdout.splitlines() if line.startswith(" ")]
    assert lines == [
        f'"what": "{none}no nvidia device)",',
        f'"what": "{none}nvidia0, but no libcuda.so.1, which --nv adds)",',
        f'"what": "{none}nvidia0, but not accessible to this process)",',
        '"nproc": 1,',
        '"nproc": 1,',
    ], result.stdout + result.stderr
