"""dist-bench for real: on gloo in the stand-in image, and over rate-limited wires in the virtual cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from imgkit_entrypoints.apps.bench import schema
from imgkit_entrypoints.apps.bench.collectives import NAMES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "entrypoints/imgkit_entrypoints"
PLACE = "/usr/local/lib/python3.11/dist-packages/imgkit_entrypoints"
# Without a network no host name resolves: Gloo finds lo by itself, but warns first.
QUIET = ("--env", "GLOO_SOCKET_IFNAME=lo", "--env", "OMP_NUM_THREADS=1")
BENCH = ("python3", "-I", "-m", "imgkit_entrypoints", "dist-bench", "--device", "cpu")
TORCHRUN = (
    *("python3", "-I", "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
    *("--nproc-per-node", "2", "--"),  # it would take --max for its own --max-restarts
)


def inside(standin: str, folder: Path, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run `words` in the image, in `folder`; ``/given.py`` there holds `given`."""
    options = ("--rm", "--interactive", "--network", "none", "--volume", f"{PACKAGE}:{PLACE}:ro")
    here = ("--volume", f"{folder}:/here", "--workdir", "/here")
    shell = ("sh", "-c", 'cat > /given.py && exec "$@"', "sh")
    return subprocess.run(
        ["docker", "run", *options, *here, *QUIET, standin, *shell, *words],
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.docker
def test_every_collective_is_measured_and_right(standin: str, tmp_path: Path) -> None:
    words = ("all", "--group", "node", "--min", "8", "--max", "64K", "--factor", "128", "--dtype", "bf16")
    short = ("--nproc", "3", "--iters", "2", "--warmup", "1", "--save", "run.json")
    done = inside(standin, tmp_path, *BENCH, *words, *short)
    assert done.returncode == 0, done.stderr
    found = schema.load(tmp_path / "run.json")
    assert found.complete
    assert {result.op for result in found.results} == set(NAMES)
    assert {result.wrong for result in found.results if result.timing == "iteration"} == {0}
    assert all(len(result.times_us) == 20 for result in found.results if result.timing == "iteration")
    assert "1023B" not in done.stdout, "three ranks share whole elements"
    assert "inside of one node" in found.sentences[0]
    assert not [text for text in found.fingerprint if "TOKEN" in text or "PATH" in text]


# What each rank would get from a broken library, before it is compared with what is right.
INJURED = """
from imgkit_entrypoints.apps.bench import verify
from imgkit_entrypoints.apps.bench.__main__ import main
right = verify.Truth.wrong
def wrong(self, buffer, result, iteration):
    import torch, torch.distributed as dist
    if iteration == 7 and dist.get_rank() == 1:
        half = buffer.numel() // 2
        if half == 512:
            buffer.copy_(torch.cat([buffer[half:], buffer[:half]]))
        elif half == 8192:
            buffer.copy_(buffer.roll(1))
        else:
            buffer.view(torch.int32)[-3] ^= 1 << 31
    return right(self, buffer, result, iteration)
verify.Truth.wrong = wrong
main()
"""


@pytest.mark.docker
def test_swap_shift_and_flipped_bit_are_found(standin: str, tmp_path: Path) -> None:
    words = ("all_gather", "--min", "4K", "--max", "1M", "--factor", "16", "--iters", "2")
    done = inside(standin, tmp_path, *TORCHRUN, "/given.py", *words, "--save", "run.json", given=INJURED)
    assert done.returncode == 1
    assert "elements were wrong" in done.stdout
    found = re.findall(
        r"WRONG: all_gather of (\d+) bytes, iteration (\d+), rank (\d+), element (\d+): \S+, expected \S+",
        done.stdout,
    )
    assert [(size, turn, rank) for size, turn, rank, _ in found] == [
        (size, "7", "1") for size in ("4096", "65536", "1048576")
    ]
    assert found[2][3] == str(262144 - 3)
    wrong = [item.wrong for item in schema.load(tmp_path / "run.json").results if item.timing == "iteration"]
    assert wrong[0] is not None
    assert wrong[0] > 900  # of 1024: few places hold the same number by chance
    assert wrong[2] == 1


LATE = """
import time
import torch.distributed as dist
from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.bench import options, sweep
right, pause = dist.all_reduce, {}
def all_reduce(*args, **kwargs):
    time.sleep(pause.get(dist.get_rank(), 0.0))
    return right(*args, **kwargs)
dist.all_reduce = all_reduce
def main():
    with ranks.opened() as here:
        for pause_s in ({}, {1: 0.02}, {0: 0.001}):
            pause.clear()
            pause.update(pause_s)
            sweep.Sweep(options.read(), here).run()
ranks.run_worker(main)
"""


@pytest.mark.docker
def test_late_rank_is_named_and_nobody_else(standin: str, tmp_path: Path) -> None:
    words = ("--size", "4K", "--iters", "2", "--warmup", "1")
    done = inside(standin, tmp_path, *TORCHRUN, "/given.py", *words, given=LATE)
    found = [line for line in done.stdout.splitlines() if " late " in line]
    assert len(found) == 3, done.stderr
    assert "No rank comes late" in found[0]
    assert re.match(r"Rank 1 on \S+ comes 2\d[.\d]* ms late", found[1])
    assert re.match(r"Rank 0 on \S+ comes [.\d]+ ms late", found[2])


@pytest.mark.docker
def test_one_rank_and_too_little_memory_are_told(standin: str, tmp_path: Path) -> None:
    words = ("--nproc", "1", "--min", "4K", "--max", "8T", "--factor", str(1 << 31), "--save", "run.json")
    done = inside(standin, tmp_path, *BENCH, *words, "--iters", "2")
    assert done.returncode == 1
    assert "OUT OF MEMORY: all_reduce of 8TiB" in done.stdout
    found = schema.load(tmp_path / "run.json")
    assert not found.complete
    assert [item.size_bytes for item in found.results] == [4096, 4096]
    assert "bandwidth between ranks needs two" in found.sentences[0]


STOPPED = """
"$@" & pid=$!
while ! [ -s run.json ]; do sleep 0.1; done
kill -TERM $pid
wait $pid
"""


@pytest.mark.docker
def test_stop_request_leaves_whole_sizes(standin: str, tmp_path: Path) -> None:
    words = ("--nproc", "2", "--seconds", "5", "--save", "run.json")
    done = inside(standin, tmp_path, "sh", "-c", STOPPED, "sh", *BENCH, *words)
    assert done.returncode == 1, done.stderr
    found = schema.load(tmp_path / "run.json")
    assert not found.complete
    assert found.results
    assert any("stopped on request" in text for text in found.sentences)


class Site:
    """Three nodes behind wires of 50 Mbit/s."""

    def __init__(self, state: Path, sif: Path) -> None:
        self.state, self.sif = state, sif

    def cluster(self, *words: str | int) -> str:
        argv = [sys.executable, str(ROOT / "ci/lab/cluster"), "--state", str(self.state), *map(str, words)]
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout + done.stderr

    def argv(self, nodes: int, *words: str) -> tuple[str, ...]:
        image = ("singularity", "exec", str(self.sif), "dist-bench", "--device", "cpu", "--warmup", "2")
        return ("srun", f"-N{nodes}", f"--chdir={self.state}", *image, *words)

    def bench(self, nodes: int, *words: str) -> schema.Run:
        """What a run saved."""
        output = self.cluster(*self.argv(nodes, *words, "--save", f"{self.state}/run.json"))
        assert "INCOMPLETE" not in output, output
        return schema.load(self.state / "run.json")


@pytest.fixture(scope="module")
def site(mn5_sif: Path) -> Iterator[Site]:
    # Not under pytest's base folder: that is closed (mode 0700) to the cluster's ordinary user.
    made = Site(Path(f"/tmp/imgkit-bench-{os.getpid()}"), mn5_sif)
    made.cluster("up", 3, "--no-ssh", "--die-with", os.getpid())
    try:
        for node in ("node1", "node2", "node3"):
            made.cluster("fault", "rate", node, 50_000)
        yield made
    finally:
        made.cluster("down")


@pytest.mark.cluster
@pytest.mark.docker
@pytest.mark.singularity
@pytest.mark.parametrize(("nodes", "ranks", "op"), [(2, "1", "all_reduce"), (3, "2", "gather")])
def test_counters_give_the_rate_of_the_wire(site: Site, nodes: int, ranks: str, op: str) -> None:
    words = ("--size", "2M", "--iters", "5", "--no-check", "--line-rate", "0.05", "--nproc", ranks)
    told = "\n".join(site.bench(nodes, op, *words).sentences)
    percent = re.search(r": (\d+) % \(by the algorithm .*\) of the line rate of 0.05 Gbps", told)
    assert percent is not None, told
    assert 90 <= int(percent[1]) <= 110
    assert "Sockets are in use" in told


@pytest.mark.cluster
@pytest.mark.docker
@pytest.mark.singularity
def test_matrix_names_the_slow_node(site: Site) -> None:
    site.cluster("fault", "rate", "node2", 5_000)
    told = site.bench(3, "--matrix", "--max", "128K", "--iters", "3").sentences
    site.cluster("fault", "rate", "node2", 50_000)
    assert [text.split(" exchanges")[0] for text in told if "SLOW" in text] == ["SLOW NODE: node2"]
    assert "No rank comes late" in told[0]  # a slow wire is no late host


@pytest.mark.cluster
@pytest.mark.docker
@pytest.mark.singularity
@pytest.mark.parametrize(
    ("fault", "told"),
    [(("kill", "node2", "apps.bench"), "the collective failed"), (("cut", "node2"), "was still going on")],
    ids=["rank lost", "node cut off"],
)
def test_what_was_finished_stays(site: Site, fault: tuple[str, ...], told: str) -> None:
    saved = site.state / f"{fault[0]}.json"
    words = ("--min", "64K", "--max", "64M", "--no-check", "--save", str(saved))
    argv = [sys.executable, str(ROOT / "ci/lab/cluster"), "--state", str(site.state), *site.argv(2, *words)]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        while "GBps" not in run.stdout.readline():
            pass
        while not saved.exists():
            time.sleep(0.1)
        site.cluster("fault", *fault)
        if fault[0] == "cut":
            run.kill()  # the launcher would wait half a minute for a sign of life; its own tests do
        run.communicate(timeout=60)
    assert run.returncode != 0
    found = schema.load(saved)
    assert not found.complete
    assert found.results
    assert told in found.sentences[-1]
