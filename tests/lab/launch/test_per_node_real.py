"""dist-run --per-node with real Ray and accelerate: in a .sif, under srun, as an ordinary user, on two nodes.

Each node has a /tmp of its own here, as the nodes of most clusters have.
"""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import SlurmSite, docker, imgkit_json, slurm_marks

NAME = f"imgkit-test-per-node-{os.getpid()}"
RECIPE = "image:\n  base: registry.invalid/base:1\n  pip: [{packages: [ray, accelerate]}]\n"
NODES = ("node1", "node2")
RAY = (
    *("ray", "symmetric-run", "--address", "{head}:{port}", "--min-nodes", "{nnodes}"),
    *("--num-cpus", "2", "--object-store-memory", "100000000", "--", "python3"),
)
RAY_PROGRAM = """
import os, signal, sys, time
import ray

def save(*_):
    with open(os.environ["IMGKIT_STOP_DIR"] + "/state-saved", "w") as file:
        file.write(os.environ["IMGKIT_JOB_ID"] + " 7")
    sys.exit()

ray.init(address="auto")
if sys.argv[1] == "saves":
    signal.signal(signal.SIGTERM, save)

@ray.remote(num_cpus=1)
def address():
    time.sleep(1)
    return ray.util.get_node_ip_address()

print("addresses", sorted(set(ray.get([address.remote() for _ in range(4)]))), flush=True)
if sys.argv[1] == "fails":
    raise RuntimeError("wrong model")
if sys.argv[1] in ("waits", "saves"):
    print("waits", flush=True)
    time.sleep(1000)
"""
ACCELERATE = (
    *("accelerate", "launch", "--multi_gpu", "--num_cpu_threads_per_process", "1"),
    *("--num_machines", "{nnodes}", "--machine_rank", "{node_rank}", "--num_processes", "{world_size}"),
    *("--main_process_ip", "{head}", "--main_process_port", "{port}", "--log_dir", "{run_dir}"),
)
ACCELERATE_PROGRAM = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0))
print("sum", total.item(), "of", accelerator.num_processes, flush=True)
"""
LIST_REMAINS = """
find /tmp /dev/shm -mindepth 1 ! -path '/tmp/imgkit-cache-*' | sed 's/^/file /'
ss -Hlntux | awk '{print "socket", $1, $5}'
ps -eo user:16,args | sed -n 's/^researcher */process /p'
"""
"""Prints what a run could leave on a node; the folder of compiled code stays there for the next run."""

pytestmark = [*slurm_marks, pytest.mark.soak, pytest.mark.xdist_group("per-node")]


@dataclass(frozen=True, kw_only=True)
class PerNodeSite(SlurmSite):
    """Two nodes with a private /tmp each, and the image that has Ray and accelerate."""

    sif: Path

    def submit(self, *command, options=()):
        """Submit a job that runs dist-run --per-node with the rest of its command line; return its number."""
        srun = ("srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1")
        container = ("singularity", "exec", "--bind", self.folder, self.sif)
        argv = map(str, (*srun, *container, "dist-run", "--per-node", "--grace=10", *command))
        script = self.folder / "job.sh"
        stop = 'trap "touch $IMGKIT_RUN_DIR/stop-for-requeue" USR1'
        start = f"{shlex.join(argv)} & wait $! || wait $!; echo code=$?"
        folder = f"export IMGKIT_RUN_DIR={self.folder}/run-$SLURM_JOB_ID"
        patience = "export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=120"
        script.write_text(f"#!/bin/bash\n{folder}\n{patience}\n{stop}\n{start}\n")
        output = self.folder / "job-%j.out"
        submitted = self("--user", "sbatch", "--parsable", "-N2", "-o", output, *options, script)
        return submitted.stdout.strip()

    def wait_for(self, text, job):
        """Wait until the job has printed `text`."""
        self.until(lambda: text in self.output_of(job) or not self.is_queued(job), job)
        assert text in self.output_of(job), self.output_of(job)

    def remains(self):
        """Return the files, sockets and processes on the nodes."""
        texts = (self("exec", node, "--", "sh", "-c", LIST_REMAINS).stdout for node in NODES)
        return sorted(line for text in texts for line in text.splitlines())

    def kill(self, node, name):
        """Kill the oldest process on `node` whose command line has `name`."""
        result = self("exec", node, "--", "pkill", "-KILL", "--oldest", "-u", "researcher", "-f", name)
        assert result.returncode == 0, name


@pytest.fixture(scope="module")
def site(standin, tmp_path_factory):
    recipe = tmp_path_factory.mktemp("per-node") / f"{NAME}.yaml"
    recipe.write_text(RECIPE)
    # Not below /tmp, which is another folder on each node.
    folder = Path(f"/var/tmp/{NAME}")
    folder.mkdir(mode=0o777)
    folder.chmod(0o1777)
    site = PerNodeSite(state=Path(f"{folder}-cluster"), folder=folder, sif=folder / "image.sif")
    try:
        imgkit_json("build", recipe, "--base", standin, "--tag", f"{NAME}:latest", "--no-test")
        imgkit_json("sif", f"{NAME}:latest", "--no-test", "-o", site.sif)
        (folder / "with_ray.py").write_text(RAY_PROGRAM)
        (folder / "with_accelerate.py").write_text(ACCELERATE_PROGRAM)
        site.up(2, "--private", "/tmp")
        yield site
    finally:
        site.down()
        docker("image", "rm", "--force", f"{NAME}:latest")
        shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _leaves_nothing(site):
    """Fail a test after whose job a file, a socket or a process is left on a node."""
    before = site.remains()
    yield
    assert site.remains() == before


def run_ray(site, mode, *options):
    """Submit a job that runs Ray's program; return its number."""
    return site.submit("--", *RAY, site.folder / "with_ray.py", mode, options=options)


def test_ray_uses_both_nodes(site):
    output = site.wait_for_end(run_ray(site, "succeeds"))
    assert "addresses ['10.42.0.11', '10.42.0.12']" in output, output
    assert output.endswith("code=0\n"), output


def test_failed_ray_program_ends_both_nodes(site):
    output = site.wait_for_end(run_ray(site, "fails"))
    assert "RuntimeError: wrong model" in output, output
    assert "the command on node 1 of 2 (node1) failed first: exit code 1" in output
    assert output.endswith("code=1\n"), output


@pytest.mark.parametrize(("process", "code"), [("bin/ray symmetric-run", 137), ("gcs/gcs_server", 1)])
def test_killed_head_of_ray_ends_both_nodes(site, process, code):
    job = run_ray(site, "waits")
    site.wait_for("waits\n", job)
    site.kill("node1", process)
    output = site.wait_for_end(job)
    assert "the command on node 1 of 2 (node1) failed first" in output, output
    assert output.endswith(f"code={code}\n"), output


def test_killed_raylet_of_another_node_is_named(site):
    """It cannot end the run: `ray symmetric-run` returns 0 there."""
    job = run_ray(site, "waits")
    site.wait_for("waits\n", job)
    site.kill("node2", "raylet/raylet")
    site.wait_for("the command on node 2 of 2 (node2) has ended with 0, and the head's goes on", job)
    site.kill("node1", "bin/ray symmetric-run")
    site.wait_for_end(job)


def test_ray_program_saves_before_the_time_limit(site):
    # Slurm looks at the time limits every 30 s, and sends the signal up to a minute earlier.
    output = site.wait_for_end(run_ray(site, "saves", "--time=3", "--signal=B:USR1@60"))
    assert "asked the program to save and end" in output, output
    assert "state saved at step 7" in output
    assert output.endswith("code=85\n"), output


def test_accelerate_starts_a_process_on_each_node(site):
    job = site.submit("--", *ACCELERATE, site.folder / "with_accelerate.py")
    output = site.wait_for_end(job)
    assert output.count("sum 3.0 of 2\n") == 2, output
    assert output.endswith("code=0\n"), output
