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

import jsonschema
import pytest
from labkit import AS_ROOT, Cluster, Done, in_image, slurm_marks

from imgkit_entrypoints.apps.bench import json_schema, record
from imgkit_entrypoints.apps.bench.collectives import EVERY, named
from imgkit_entrypoints.apps.bench.record import BenchRun

BENCH = ("python3", "-I", "-m", "imgkit_entrypoints", "dist-bench", "--device", "cpu")
TORCHRUN = (
    *("python3", "-I", "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
    *("--nproc-per-node", "2", "--"),  # it would take --max for its own --max-restarts
)


def loaded(file: Path) -> BenchRun:
    """Load a saved run, and validate it against the published schema too."""
    jsonschema.validate(json.loads(file.read_text()), json_schema.made())
    return record.load(file)


def inside(standin: str, folder: Path, *words: str, given: str = "") -> Done:
    """Run `words` in the image, in `folder`; ``/given.py`` there holds `given`."""
    here = ("--volume", f"{folder}:/here", "--workdir", "/here")
    shell = ("sh", "-c", 'cat > /given.py && exec "$@"', "sh")
    return in_image(standin, *shell, *words, options=here, given=given)


@pytest.mark.docker
def test_every_collective_is_measured_and_right(standin: str, tmp_path: Path) -> None:
    words = ("all", "--group", "node", "--min", "8", "--max", "64K", "--factor", "128", "--dtype", "bf16")
    short = ("--nproc", "3", "--iters", "2", "--warmup-iters", "1", "--save", "run.json")
    done = inside(standin, tmp_path, *BENCH, *words, *short)
    assert done.returncode == 0, done.stderr
    found = loaded(tmp_path / "run.json")
    assert found.complete
    assert {result.op for result in found.results} == set(EVERY)
    assert {result.wrong for result in found.results if result.timing == "iteration"} == {0}
    assert all(len(result.times_us) == 20 for result in found.results if result.timing == "iteration")
    assert {one.size_bytes % 48 for one in found.results if named(one.op).parts} == {0}, (
        "3 chunks of 16 bytes"
    )
    assert {len(one.batches_us) for one in found.results if one.timing == "batched"} == {5}
    assert found.command[:4] == ("dist-bench", "--device", "cpu", "all"), "the whole command"
    assert "these figures measure one node" in found.sentences[0]
    assert not [text for text in found.fingerprint if "TOKEN" in text or "PATH" in text]


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
def test_nodes_with_different_numbers_of_ranks_are_refused(standin: str, tmp_path: Path) -> None:
    told = inside(standin, tmp_path, "bash", "-c", TWO_NODES, "bash", *BENCH, "--max", "1K").stdout
    assert re.search(
        r"the nodes have different numbers of ranks: 1 on \S+ \(node 0\), 2 on \S+ \(node 1\)", told
    ), told
    assert "--nproc 1 starts the same number on each node" in told


# One rank needs no launcher. The collective says which memory it was given, and what was in it.
ROTATED = """
import os
os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
import torch.distributed as dist
from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.bench import options, setup
from imgkit_entrypoints.apps.bench import collectives
right, seen = dist.all_reduce, []
def all_reduce(tensor, *args, async_op=False, **kwargs):
    if tensor.numel() == 1024 and not async_op:
        seen.append((tensor.data_ptr(), len(tensor.unique())))
    return right(tensor, *args, async_op=async_op, **kwargs)
dist.all_reduce = all_reduce
with ranks.opened() as here:
    words = ["--size", "4K", "--iters", "50", "--warmup-iters", "0"]
    setup.set_up(options.read(words), here).measurer.measure(collectives.named("all_reduce"), 4096)
batches = seen[1:]  # without the guess of the time
print(len(batches), len(set(place for place, _ in batches)), min(kinds for _, kinds in batches))
"""


@pytest.mark.docker
def test_batches_rotate_through_random_data(standin: str, tmp_path: Path) -> None:
    done = inside(standin, tmp_path, "python3", "-I", "/given.py", given=ROTATED)
    launches, buffers, kinds = map(int, done.stdout.split()) if not done.returncode else (0, 0, 0)
    assert (launches, buffers) == (50, 10), done.stderr  # 5 batches of 10
    assert kinds > 1000, "few of 1024 random numbers are equal"


# Each line is a run. In the last one, the library adds where it is asked for the largest value.
VARIANTS = """
import torch.distributed as dist
from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.bench import options, setup, sighup, sweep
asked = '''
alltoallv --skew 1.5 --dtype bf16
all_reduce --redop max --out-of-place --communicators 2
reduce --redop min
reduce_scatter --redop avg
broadcast --out-of-place
all_gather --overlap
all_gather --duration 2s
all_reduce --redop max
'''.split(chr(10))[1:-1]
def main():
    with ranks.opened() as here:
        for number, line in enumerate(asked):
            if number == len(asked) - 1:
                right = dist.all_reduce
                dist.all_reduce = lambda tensor, *args, **kwargs: right(tensor, **kwargs)
            words = f"{line} --size 1M --iters 5 --save {number}.json".split()
            sweep.Sweep(setup.set_up(options.read(words), here)).run(sighup.HangupThread())
ranks.run_worker(main)
"""


@pytest.mark.soak  # other tests measure each collective
@pytest.mark.docker
def test_variants_are_measured_and_right(standin: str, tmp_path: Path) -> None:
    done = inside(standin, tmp_path, *TORCHRUN, "/given.py", given=VARIANTS)
    assert done.returncode == 0, done.stderr
    runs = [loaded(tmp_path / f"{number}.json") for number in range(8)]
    assert [len(run.results) for run in runs] == [2, 2, 2, 2, 2, 2, 1, 2]  # --duration has batches only
    found = [run.results[-1] for run in runs]
    assert [one.variant for one in found] == [
        "skew 1.5",
        "max, out of place, 2 communicators at once",
        "min",
        "avg",
        "out of place",
        "",
        "",
        "max",
    ]
    assert [bool(one.wrong) for one in found] == [False] * 7 + [True]
    assert re.search(r"% of the shorter one is hidden", "\n".join(runs[5].sentences))
    moments = json.loads((tmp_path / "6.json").read_text())["verdict"]["timeline"]
    assert len(moments) == len(found[6].batches_us) >= 2
    assert moments[-1]["at_s"] >= 2


# A broken library's results on one rank, before they are compared with the expected ones.
INJURED = """
from imgkit_entrypoints.apps.bench import verify
from imgkit_entrypoints.apps.bench.__main__ import main
right = verify.ExpectedValues.wrong
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
verify.ExpectedValues.wrong = wrong
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
    wrong = [item.wrong for item in loaded(tmp_path / "run.json").results if item.timing == "iteration"]
    assert wrong[0] is not None
    assert wrong[0] > 900  # of 1024: few places hold the same number by chance
    assert wrong[2] == 1


LATE = """
import time
import torch.distributed as dist
from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.bench import options, setup, sighup, sweep
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
            sweep.Sweep(setup.set_up(options.read(), here)).run(sighup.HangupThread())
ranks.run_worker(main)
"""


@pytest.mark.docker
@pytest.mark.quiet
def test_late_rank_is_named_and_nobody_else(standin: str, tmp_path: Path) -> None:
    words = ("--size", "4K", "--iters", "2", "--warmup-iters", "1")
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
    found = loaded(tmp_path / "run.json")
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
    found = loaded(tmp_path / "run.json")
    assert not found.complete
    assert found.results
    assert any("stopped on request" in text for text in found.sentences)
    assert "ChildFailedError" not in done.stderr, "torchrun says nothing more"


@pytest.mark.docker
def test_unwritable_file_is_refused_with_the_usage_code(standin: str, tmp_path: Path) -> None:
    done = inside(standin, tmp_path, *BENCH, "--nproc", "2", "--size", "4K", "--save", "/absent/run.json")
    assert done.returncode == 2
    assert "/absent/run.json: cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def on_wires(test: Any) -> Any:
    """A test whose numbers are times: it runs when no other test does, on one cluster for all of them."""
    for mark in (*slurm_marks, pytest.mark.quiet):
        test = mark(test)
    return test


@dataclass(frozen=True, kw_only=True)
class Site(Cluster):
    """Three nodes behind wires that are 50 Mbit/s fast, or as a test makes them."""

    sif: Path

    def told(self, *words: object) -> str:
        """What a command of the cluster prints."""
        done = self(*words)
        return done.stdout + done.stderr

    def start(self, nodes: int, *words: str, mpi: bool = False) -> tuple[str, ...]:
        warmup = () if "--matrix" in words else ("--warmup-iters", "2")
        image = ("singularity", "exec", str(self.sif), "dist-bench", "--device", "cpu", *warmup)
        if not mpi:
            return ("srun", f"-N{nodes}", f"--chdir={self.state}", *image, *words)
        hosts = ",".join(f"node{number}" for number in range(1, nodes + 1))
        mpirun = ("mpirun", "--host", hosts, "--map-by", "ppr:1:node", "--bind-to", "none")
        meant = [f"{name}={value}" for name, value in AS_ROOT.items()]
        return ("exec", "node1", "--", "env", *meant, *mpirun, "-x", "IMGKIT_HEAD=node1", *image, *words)

    def bench(self, nodes: int, *words: str, mpi: bool = False) -> BenchRun:
        """What a run saved."""
        output = self.told(*self.start(nodes, *words, "--save", f"{self.state}/run.json", mpi=mpi))
        assert "INCOMPLETE" not in output, output
        return loaded(self.state / "run.json")

    def rate(self, kilobits: int) -> None:
        """Limit the rate of all links."""
        for node in ("node1", "node2", "node3"):
            self("fault", "rate", node, kilobits)


@pytest.fixture(scope="module")
def site(mn5_sif: Path) -> Iterator[Site]:
    made = Site(state=Path(f"/tmp/imgkit-bench-{os.getpid()}"), sif=mn5_sif)
    made.up(3)
    try:
        made.rate(50_000)
        yield made
    finally:
        made.down()


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
def test_counters_give_the_rate_of_the_wire(site: Site, nodes: int, ranks: str, rate_Mbps: int) -> None:
    # The root's link always has work; a ring of so few bytes would measure the nodes' processors instead.
    words = ("gather", "--size", f"{rate_Mbps // 50}M", "--iters", "3", "--no-verify", "--nproc", ranks)
    site.rate(1000 * rate_Mbps)
    run = site.bench(nodes, *words, "--line-rate", str(rate_Mbps / 1000), mpi=rate_Mbps == 50)
    told = "\n".join(run.sentences)
    percent = re.search(r": (\d+) % \(by the algorithm .*\) of the line rate of 0", told)
    assert percent is not None, told
    assert 90 <= int(percent[1]) <= 110
    assert "Sockets are in use" in told
    assert (run.world.nodes, run.world.ranks) == (nodes, nodes * int(ranks))


@pytest.mark.soak
@on_wires
def test_both_directions_of_a_wire_work_at_once(site: Site) -> None:
    site.rate(50_000)
    run = site.bench(2, "sendrecv", "--size", "2M", "--iters", "3", "--no-verify")
    assert run.results[0].busbw_GBps > 0.9 * 0.00625 / 1.1  # frames are up to a tenth more than what is sent


LATE_HOST = """
import platform, time
import torch.distributed as dist
from imgkit_entrypoints.apps.bench.__main__ import main
right = dist.all_reduce
def all_reduce(*args, **kwargs):
    time.sleep(0.02 if platform.node() == "node2" else 0.0)
    return right(*args, **kwargs)
dist.all_reduce = all_reduce
main()
"""


@pytest.mark.soak
@on_wires
def test_late_host_is_named_as_a_whole(site: Site) -> None:
    (site.state / "late.py").write_text(LATE_HOST)
    image = ("singularity", "exec", str(site.sif), "dist-run", "--device", "cpu", "--nproc", "2", "late.py")
    told = site.told("srun", "-N2", f"--chdir={site.state}", *image, "--size", "4K", "--iters", "2")
    assert re.search(
        r"All ranks of node2 come [12]\d[.\d]* ms late .* The cause is a slow process, not a slow link", told
    ), told


@on_wires
def test_matrix_names_the_slow_node(site: Site) -> None:
    site.rate(50_000)
    site("fault", "rate", "node2", 5_000)
    words = ("--matrix", "rails", "--nproc", "2", "--max", "128K", "--iters", "3")
    told = site.bench(3, *words).sentences
    site("fault", "rate", "node2", 50_000)
    assert [text.split(" exchanges")[0] for text in told if "SLOW" in text] == ["SLOW NODE: node2"]
    assert "node2 comes" not in told[0]  # a slow link does not make its host late
    assert told[-1] == "FAILED: slow, by --matrix: node2."


@on_wires
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (("kill", "node2", "apps.bench"), "The sizes above are complete"),
        pytest.param(("cut", "node2"), "was still in progress", marks=pytest.mark.soak),
    ],
    ids=["rank lost", "node cut off"],
)
def test_what_was_finished_stays(site: Site, fault: tuple[str, ...], told: str) -> None:
    saved = site.state / f"{fault[0]}.json"
    words = ("--min", "64K", "--max", "64M", "--no-verify", "--save", str(saved))
    argv = site.argv(*site.start(2, *words))
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        while "GBps" not in run.stdout.readline():
            pass
        while not saved.exists():
            time.sleep(0.1)
        site("fault", *fault)
        if fault[0] == "cut":
            run.kill()  # the launcher would wait half a minute for a sign of life; its own tests cover that
        run.communicate(timeout=60)
    assert run.returncode != 0
    found = loaded(saved)
    assert not found.complete
    assert found.results
    assert told in found.sentences[-1]
