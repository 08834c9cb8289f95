"""dist-run --per-node on two virtual nodes: a shell script, and real Ray and accelerate.

Ray and accelerate run with the Python that IMGKIT_TEST_PER_NODE_PYTHON names, which has both and torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit import Cluster, until

PYTHON = os.environ.get("IMGKIT_TEST_PER_NODE_PYTHON", "")
NODES = ("node1", "node2")
HEAD = "10.42.0.11"

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("per-node")]
needs_python = pytest.mark.skipif(not PYTHON, reason="IMGKIT_TEST_PER_NODE_PYTHON names no Python with Ray")

RAY_PROGRAM = """
import sys, time
import ray
ray.init(address="auto")

@ray.remote(num_cpus=1)
def address():
    time.sleep(1)
    return ray.util.get_node_ip_address()

print("addresses", sorted(set(ray.get([address.remote() for _ in range(4)]))), flush=True)
mode = sys.argv[1]
if mode == "fails":
    raise RuntimeError("wrong model")
if mode == "waits":
    print("waits", flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes without services."""
    cluster = Cluster(state=Path(f"/tmp/imgkit-test-per-node-{os.getpid()}"))
    cluster.up(2, "--no-slurm", "--no-ssh")
    yield cluster
    cluster.down()


class PerNodeRun:
    """The command line on both nodes, with the output of each in a file."""

    def __init__(self, cluster: Cluster, folder: Path, options: list[str], command: list[str]) -> None:
        self.cluster = cluster
        self.earlier = self.processes()
        self.logs = [folder / f"{node}.log" for node in NODES]
        dist_run = [sys.executable, "-I", "-m", "imgkit_entrypoints", "dist-run", "--per-node", "--nnodes=2"]
        self.agents = []
        path = f"{Path(PYTHON).parent}:{os.environ['PATH']}" if PYTHON else os.environ["PATH"]
        for rank, (node, log) in enumerate(zip(NODES, self.logs, strict=True)):
            argv = [*dist_run, f"--node-rank={rank}", f"--head={HEAD}", *options, "--", *command]
            with log.open("wb") as output:
                agent = subprocess.Popen(
                    cluster.argv("exec", node, "--", "env", f"PATH={path}", *argv),
                    stdout=output,
                    stderr=output,
                )
            self.agents.append(agent)

    def output(self) -> str:
        return "".join(log.read_text() for log in self.logs)

    def processes(self) -> list[str]:
        """Return the command lines on both nodes, but those of this question itself."""
        lines = self.cluster.ps("args", *NODES)
        return sorted(line for line in lines if not line.startswith("ps ") and "exec node" not in line)

    def process_id(self, node: str, name: str) -> int:
        """Return the id, on its node, of the first process whose command line has `name`."""
        lines = self.cluster.ps("pid,args", node)
        return next(int(line.split()[0]) for line in lines if name in line and "ps -eo" not in line)

    def codes(self) -> list[int]:
        """Return the exit codes; no process, socket or folder is left on either node."""
        codes = [agent.wait(timeout=180) for agent in self.agents]
        until(lambda: self.processes() == self.earlier)
        assert not list(Path("/tmp").glob("imgkit-ray-*"))
        return codes


def test_shell_script_and_its_daemons_end_with_the_head(cluster: Cluster, tmp_path: Path) -> None:
    script = (
        'echo "node {node_rank} of {nnodes} head {head} $NODE_RANK"; trap "" TERM\n'
        "setsid sleep 1001 & if [ {node_rank} = 0 ]; then sleep 1; exit 5; fi; sleep 1000"
    )
    run = PerNodeRun(cluster, tmp_path, ["--grace=2"], ["sh", "-c", script])
    assert run.codes() == [5, 5]
    assert f"node 1 of 2 head {HEAD} 1\n" in run.output()
    assert "the command on node 1 of 2 (node1) failed first: exit code 5" in run.output()


def ray_run(cluster: Cluster, folder: Path, mode: str, *options: str) -> PerNodeRun:
    program = folder / "program.py"
    program.write_text(RAY_PROGRAM)
    ray = ["ray", "symmetric-run", "--address", "{head}:{port}"]
    sizes = ["--min-nodes", "{nnodes}", "--num-cpus", "2", "--object-store-memory", "100000000"]
    return PerNodeRun(cluster, folder, list(options), [*ray, *sizes, "--", PYTHON, str(program), mode])


@needs_python
def test_ray_uses_both_nodes_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    run = ray_run(cluster, tmp_path, "succeeds")
    assert run.codes() == [0, 0]
    assert "addresses ['10.42.0.11', '10.42.0.12']" in run.output()


@needs_python
def test_failure_of_a_ray_program_ends_both_nodes(cluster: Cluster, tmp_path: Path) -> None:
    run = ray_run(cluster, tmp_path, "fails")
    assert run.codes() == [1, 1]
    assert "RuntimeError: wrong model" in run.output()


@needs_python
def test_killed_head_of_ray_ends_both_nodes(cluster: Cluster, tmp_path: Path) -> None:
    run = ray_run(cluster, tmp_path, "waits", "--grace=10")
    until(lambda: "waits\n" in run.output(), within_s=120)
    cluster("exec", "node1", "--", "kill", "-9", run.process_id("node1", "symmetric-run"))
    assert run.codes() == [137, 137]


@needs_python
def test_killed_raylet_of_another_node_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Ray's symmetric-run hides it: it returns 0."""
    run = ray_run(cluster, tmp_path, "waits", "--grace=10")
    until(lambda: "waits\n" in run.output(), within_s=120)
    cluster("exec", "node2", "--", "kill", "-9", run.process_id("node2", "raylet/raylet"))
    until(lambda: "the head's command goes on; ended with 0: node 2 of 2 (node2)" in run.output())
    cluster("exec", "node1", "--", "kill", run.process_id("node1", "imgkit_entrypoints dist-run"))
    run.codes()


@needs_python
def test_stop_request_ends_ray_on_both_nodes(cluster: Cluster, tmp_path: Path) -> None:
    run = ray_run(cluster, tmp_path, "waits", "--grace=10")
    until(lambda: "waits\n" in run.output(), within_s=120)
    agent = run.process_id("node1", "imgkit_entrypoints dist-run")
    cluster("exec", "node1", "--", "kill", agent)
    run.codes()
    assert "SIGTERM: asked the program to save and end" in run.output()


@needs_python
def test_accelerate_starts_a_process_on_each_node(cluster: Cluster, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        "total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0))\n"
        "print('sum', total.item(), 'of', accelerator.num_processes, flush=True)\n"
    )
    launch = ["accelerate", "launch", "--multi_gpu", "--num_cpu_threads_per_process", "1"]
    machines = [
        "--num_machines",
        "{nnodes}",
        "--machine_rank",
        "{node_rank}",
        "--num_processes",
        "{world_size}",
    ]
    meeting = ["--main_process_ip", "{head}", "--main_process_port", "{port}", str(program)]
    run = PerNodeRun(cluster, tmp_path, [], [*launch, *machines, *meeting])
    assert run.codes() == [0, 0]
    assert run.output().count("sum 3.0 of 2") == 2
