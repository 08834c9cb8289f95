"""Real runs of dist-bench: gloo in the stand-in image, rate-limited links in the virtual cluster."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from labkit import AS_ROOT, Cluster, Done, in_image, slurm_marks

from imgkit_entrypoints.apps.bench.collectives import NAMES, find_collective

Saved = dict[str, Any]
BENCH = ("python3", "-I", "-m", "imgkit_entrypoints", "dist-bench", "--device", "cpu")
TORCHRUN = (
    *("python3", "-I", "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
    *("--nproc-per-node", "2", "--"),  # it would take --max for its own --max-restarts
)


def loaded(file: Path) -> Saved:
    """Load a saved run."""
    saved: Saved = json.loads(file.read_text())
    assert (saved["version"], saved["args"][0]) == (1, "dist-bench")
    return saved


def figures(result: Saved) -> Saved:
    """Return the figures of a result, whichever way the operation works."""
    figures: Saved = result["in_place"] or result["out_of_place"]
    return figures


def inside(standin: str, folder: Path, *args: str, script: str = "") -> Done:
    """Run `args` in the image, in `folder`; ``/given.py`` there holds `script`."""
    mounted = ("--volume", f"{folder}:/here", "--workdir", "/here")
    shell = ("sh", "-c", 'cat > /given.py && exec "$@"', "sh")
    return in_image(standin, *shell, *args, options=mounted, stdin=script)


@pytest.mark.docker
def test_every_collective_is_measured_and_right(standin, tmp_path):
    args = ("all", "--min", "8", "--max", "64K", "--factor", "128", "--dtype", "bf16", "--csv", "run.csv")
    short = ("--nproc", "3", "--iters", "2", "--warmup-iters", "1", "--save", "run.json", "--plot", "run.svg")
    completed = inside(standin, tmp_path, *BENCH, *args, *short)
    assert completed.returncode == 0, completed.stderr
    assert "# Out of bounds values : 0 OK" in completed.stdout
    saved = loaded(tmp_path / "run.json")
    assert saved["complete"]
    results = saved["results"]
    assert {result["experiment_name"] for result in results} == set(NAMES)
    assert {figures(result)["nwrong"] for result in results} == {0}
    chunked = [result for result in results if find_collective(result["experiment_name"]).is_divided]
    assert {result["size"] % 48 for result in chunked} == {0}, "3 chunks of 16 bytes"
    assert {result["actual_iterations"] for result in results} == {5}
    assert saved["args"][:2] == ["dist-bench", "all"]
    assert "this is one node" in saved["verdict"]["sentences"][0]
    assert not [name for name in saved["fingerprint"] if "TOKEN" in name or "PATH" in name]
    assert (tmp_path / "run.csv").read_text().count("\n") == 1 + len(results)
    assert (tmp_path / "run.svg").read_text().count("<polyline") == len(NAMES)


TWO_NODES = """
for node in 0 1; do
    words="--nnodes 2 --node-rank $node --head 127.0.0.1 --port 29731 --nproc $((node + 1))"
    "$@" $words > /tmp/$node 2>&1 &
done
wait
cat /tmp/0
"""
"""A script that starts one worker on a first node and two on a second, and shows the first one's output."""


@pytest.mark.docker
@pytest.mark.soak
def test_nodes_with_different_numbers_of_ranks_are_refused(standin, tmp_path):
    stdout = inside(standin, tmp_path, "bash", "-c", TWO_NODES, "bash", *BENCH, "--max", "1K").stdout
    assert re.search(
        r"the nodes have different numbers of ranks: 1 on \S+ \(node 0\), 2 on \S+ \(node 1\)", stdout
    ), stdout
    assert "--nproc 1 starts the same number on each node" in stdout


# One rank needs no launcher. The collective says which memory it was given, and what was in it.
ROTATED = """
import os
os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
import torch.distributed as dist
from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.bench import options, setup
from imgkit_entrypoints.apps.bench import collectives
right, seen = dist.all_reduce, []
def all_reduce(tensor, *args, **kwargs):
    if tensor.numel() == 1024:
        seen.append((tensor.data_ptr(), len(tensor.unique())))
    return right(tensor, *args, **kwargs)
dist.all_reduce = all_reduce
with ranks.join_group() as here:
    words = ["--size", "4K", "--iters", "50", "--warmup-iters", "0", "--no-verify"]
    all_reduce_record = collectives.find_collective("all_reduce")
    setup.set_up(options.read_options(words), here).measurer.measure(all_reduce_record, 4096)
batches = seen[1:]  # without the guess of the time
print(len(batches), len(set(place for place, _ in batches)), min(kinds for _, kinds in batches))
"""


@pytest.mark.docker
def test_batches_rotate_through_random_data(standin, tmp_path):
    result = inside(standin, tmp_path, "python3", "-I", "/given.py", script=ROTATED)
    launches, buffers, kinds = map(int, result.stdout.split()) if not result.returncode else (0, 0, 0)
    assert (launches, buffers) == (50, 10), result.stderr  # 5 batches of 10
    assert kinds > 1000, "few of 1024 random numbers are equal"


# A broken library's results on one rank, before they are compared with the expected ones.
INJURED = """
from imgkit_entrypoints.apps.bench import verify
from imgkit_entrypoints.apps.bench.__main__ import main
right = verify.ExpectedValues.count_wrong
def count_wrong(self, buffer, result, iteration):
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
verify.ExpectedValues.count_wrong = count_wrong
main()
"""


@pytest.mark.docker
def test_swap_shift_and_flipped_bit_are_found(standin, tmp_path):
    args = ("all_gather", "--min", "4K", "--max", "1M", "--factor", "16", "--iters", "2")
    completed = inside(standin, tmp_path, *TORCHRUN, "/given.py", *args, "--save", "run.json", script=INJURED)
    assert completed.returncode == 1
    assert "elements were wrong" in completed.stdout
    mismatches = re.findall(
        r"WRONG: all_gather of (\d+) bytes, iteration (\d+), rank (\d+), element (\d+): \S+, expected \S+",
        completed.stdout,
    )
    assert [(size, turn, rank) for size, turn, rank, _ in mismatches] == [
        (size, "7", "1") for size in ("4096", "65536", "1048576")
    ]
    assert mismatches[2][3] == str(262144 - 3)
    wrong = [figures(result)["nwrong"] for result in loaded(tmp_path / "run.json")["results"]]
    assert wrong[0] > 900  # of 1024: few places hold the same number by chance
    assert wrong[2] == 1


@pytest.mark.docker
def test_one_rank_and_too_little_memory_are_told(standin, tmp_path):
    args = ("--nproc", "1", "--min", "4K", "--max", "8T", "--factor", str(1 << 31), "--save", "run.json")
    completed = inside(standin, tmp_path, *BENCH, *args, "--iters", "2")
    assert completed.returncode == 1
    assert "OUT OF MEMORY: all_reduce of 8TiB" in completed.stdout
    saved = loaded(tmp_path / "run.json")
    assert not saved["complete"]
    assert [result["size"] for result in saved["results"]] == [4096]
    assert "bandwidth between ranks needs two" in saved["verdict"]["sentences"][0]


STOPPED = """
"$@" & pid=$!
while ! [ -s run.json ]; do sleep 0.1; done
kill -TERM $pid
wait $pid
"""


@pytest.mark.docker
def test_stop_request_leaves_whole_sizes(standin, tmp_path):
    args = ("--nproc", "2", "--seconds", "5", "--save", "run.json")
    result = inside(standin, tmp_path, "sh", "-c", STOPPED, "sh", *BENCH, *args)
    assert result.returncode == 1, result.stderr
    saved = loaded(tmp_path / "run.json")
    assert not saved["complete"]
    assert saved["results"]
    assert any("stopped on request" in text for text in saved["verdict"]["sentences"])
    assert "ChildFailedError" not in result.stderr, "torchrun says nothing more"


@pytest.mark.docker
def test_unwritable_file_is_refused_with_the_usage_code(standin, tmp_path):
    result = inside(standin, tmp_path, *BENCH, "--nproc", "2", "--size", "4K", "--save", "/absent/run.json")
    assert result.returncode == 2
    assert "/absent/run.json: cannot be written" in result.stderr
    assert "Traceback" not in result.stderr


def on_wires(test: Any) -> Any:
    """A test whose numbers are times: it runs when no other test does, on one cluster for all of them."""
    for mark in (*slurm_marks, pytest.mark.quiet):
        test = mark(test)
    return test


@dataclass(frozen=True, kw_only=True)
class Site(Cluster):
    """Three nodes behind wires that are 50 Mbit/s fast, or as a test makes them."""

    sif: Path

    def output_of(self, *args: object) -> str:
        """What a command of the cluster prints."""
        result = self(*args)
        return result.stdout + result.stderr

    def start(self, nodes: int, *args: str, mpi: bool = False) -> tuple[str, ...]:
        image = ("singularity", "exec", str(self.sif), "dist-bench", "--device", "cpu", "--warmup-iters", "2")
        if not mpi:
            return ("srun", f"-N{nodes}", f"--chdir={self.state}", *image, *args)
        hosts = ",".join(f"node{number}" for number in range(1, nodes + 1))
        mpirun = ("mpirun", "--host", hosts, "--map-by", "ppr:1:node", "--bind-to", "none")
        assignments = [f"{name}={value}" for name, value in AS_ROOT.items()]
        return ("exec", "node1", "--", "env", *assignments, *mpirun, "-x", "IMGKIT_HEAD=node1", *image, *args)

    def bench(self, nodes: int, *args: str, mpi: bool = False) -> Saved:
        """What a run saved."""
        output = self.output_of(*self.start(nodes, *args, "--save", f"{self.state}/run.json", mpi=mpi))
        assert "INCOMPLETE" not in output, output
        return loaded(self.state / "run.json")

    def rate(self, kilobits: int) -> None:
        """Limit the rate of all links."""
        for node in ("node1", "node2", "node3"):
            self("fault", "rate", node, kilobits)


@pytest.fixture(scope="module")
def site(mn5_sif: Path) -> Iterator[Site]:
    cluster = Site(state=Path(f"/tmp/imgkit-bench-{os.getpid()}"), sif=mn5_sif)
    cluster.up(3)
    try:
        cluster.rate(50_000)
        yield cluster
    finally:
        cluster.down()


# One case with several nodes and ranks; ci/soak runs the others.
HERE = (3, "2", 200)


@on_wires
@pytest.mark.parametrize(
    ("nodes", "ranks", "rate_Mbps"),
    [
        pytest.param(*case, marks=() if case == HERE else pytest.mark.soak)
        for case in itertools.product((2, 3), ("1", "2"), (200, 50))
    ],
)
def test_verdict_gives_the_share_of_the_wire(site, nodes, ranks, rate_Mbps):
    # The root's link always has work; a ring of so few bytes would measure the nodes' processors instead.
    args = ("gather", "--size", f"{rate_Mbps // 50}M", "--iters", "3", "--no-verify", "--nproc", ranks)
    site.rate(1000 * rate_Mbps)
    saved = site.bench(nodes, *args, "--line-rate", str(rate_Mbps / 1000), mpi=rate_Mbps == 50)
    (busbw,) = saved["verdict"]["busbw"]
    assert 75 <= busbw["percent"] <= 105  # frames are up to a tenth more than what is sent
    assert (saved["world"]["nodes"], saved["world"]["ranks"]) == (nodes, nodes * int(ranks))


@pytest.mark.soak
@on_wires
def test_both_directions_of_a_wire_work_at_once(site):
    site.rate(50_000)
    run = site.bench(2, "sendrecv", "--size", "2M", "--iters", "3", "--no-verify")
    # Frames are up to a tenth more than what is sent.
    assert figures(run["results"][0])["bus_bw"] > 0.9 * 0.00625 / 1.1


@on_wires
@pytest.mark.parametrize(
    "fault",
    [("kill", "node2", "apps.bench"), pytest.param(("cut", "node2"), marks=pytest.mark.soak)],
    ids=["rank lost", "node cut off"],
)
def test_what_was_finished_stays(site, fault):
    saved = site.state / f"{fault[0]}.json"
    args = ("--min", "64K", "--max", "64M", "--no-verify", "--save", str(saved))
    argv = site.argv(*site.start(2, *args))
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        while not saved.exists():
            time.sleep(0.1)
        site("fault", *fault)
        if fault[0] == "cut":
            run.kill()  # the launcher would wait half a minute for a sign of life; its own tests cover that
        run.communicate(timeout=60)
    assert run.returncode != 0
    record = loaded(saved)
    assert not record["complete"]
    assert record["results"]
    assert record["verdict"]["sentences"][-1].startswith("INCOMPLETE: ")
