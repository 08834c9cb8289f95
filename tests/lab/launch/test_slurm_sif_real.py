"""The .sif under a real Slurm on two nodes: a right start, a wrong one and its printed way out, the end."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import ROOT, SLURMS, Cluster, slurm_marks, until

PER_NODE = ("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1")
TWO = ("--device", "cpu", "--nproc", "2")
PLACES = [("0", "node1"), ("1", "node1"), ("2", "node2"), ("3", "node2")]
"""Rank and node of every process, two a node."""

pytestmark = [*slurm_marks, pytest.mark.xdist_group("slurm-sif")]


@dataclass(frozen=True, kw_only=True)
class Slurm(Cluster):
    """A cluster of two nodes and the file that its jobs run."""

    sif: Path

    @property
    def output(self):
        return self.state / "jobs/output"

    def submit(self, *lines):
        """Start a job script of `lines` as the cluster's ordinary user; returns its number."""
        self.output.unlink(missing_ok=True)
        script = self.state / "job.sh"
        script.write_text("\n".join(("#!/bin/bash", *lines, "")))
        return self("--user", "sbatch", "--parsable", "-N2", "-o", self.output, script).stdout.strip()

    def run(self, *lines):
        """What a job script of `lines` printed. Not by sbatch -W, which looks after 2, 10, 42 s only."""
        self.wait_for_end(self.submit(*lines))
        return self.output.read_text()

    def wait_for_end(self, job):
        self.until(lambda: not self("squeue", "-h", "-j", job).stdout)

    def until(self, condition):
        def describe():
            text = self.output.read_text() if self.output.exists() else ""
            return "\n".join((text, *self.processes()))

        until(condition, describe=describe)

    def exec(self, *args):
        return " ".join(map(str, ("singularity", "exec", "--bind", self.state, self.sif, *args)))

    def processes(self):
        """Processes of a job, on all nodes."""
        lines = self.ps("user:16,args", "node1", "node2")
        return [line for line in lines if line.startswith("researcher ")]


@pytest.fixture(scope="module", params=SLURMS)
def slurm(mn5_sif, request):
    cluster = Slurm(state=Path(f"/tmp/imgkit-test-slurm-sif-{os.getpid()}"), sif=mn5_sif)
    cluster.up(2, release=request.param)
    cluster.output.parent.mkdir()
    cluster.output.parent.chmod(0o1777)
    yield cluster
    cluster.down()


def test_one_command_a_node_computes_pi(slurm):
    output = slurm.run(" ".join((*PER_NODE, slurm.exec("dist-pi", *TWO))), "echo code=$?")
    error = re.search(r"error (\S+), 100000000 intervals, 4 ranks", output)
    assert error is not None, output
    assert float(error[1]) <= 1e-12
    assert re.findall(r"rank (\d) on (\w+):", output) == PLACES
    assert output.endswith("code=0\n")


def test_start_without_srun_prints_what_works(slurm):
    refused = slurm.run(slurm.exec("dist-hello", *TWO), "echo code=$?")
    assert refused.endswith("code=5\n")
    assert "srun has started nothing on the others" in refused
    typed = next(line.strip() for line in refused.splitlines() if line.strip().startswith("srun "))
    output = slurm.run(typed, "echo code=$?")
    assert "all_reduce of ones: 4" in output, output
    assert re.findall(r": +(\d)  (node\d)  cpu", output) == PLACES
    assert output.endswith("code=0\n")


def test_node_that_never_calls_is_named(slurm):
    # srun starts both tasks; one of them never reaches the container.
    start = slurm.exec("dist-hello", *TWO, "--rollcall-timeout", "3")
    output = slurm.run(f"srun -N2 -n2 sh -c 'test $SLURM_NODEID = 1 || {start}'", "echo code=$?")
    assert "node 2 of 2 (node2) did not join; 1/2 present after 3 s" in output, output
    assert output.endswith("code=5\n")


def test_busy_port_is_refused(slurm):
    code = "import socket, time; held = socket.create_server(('', 29501)); time.sleep(60)"
    start = slurm.exec("dist-hello", *TWO, "--port", "29500")
    output = slurm.run(f'python3 -c "{code}" & sleep 1', " ".join((*PER_NODE, start)), "kill %1")
    assert "port 29501, where the nodes of this run meet, is busy on the head" in output, output
    assert "node1: task 0: Exited with exit code 5" in output


def test_hidden_job_is_told(slurm):
    command = slurm.exec("dist-hello", *TWO, "--dry-run").replace("exec", "exec --cleanenv", 1)
    output = slurm.run(f"srun -N2 {command}")
    assert len(re.findall("no scheduler variable is set here.*--cleanenv", output)) == 2, output


def test_commands_per_node_end_with_the_head(slurm):
    """A shell script that is deaf to TERM and starts daemons."""
    script = slurm.state / "per_node.sh"
    script.write_text(
        'echo "node $1 of $2 head $3 port $MASTER_PORT folder $RAY_TMPDIR"; trap "" TERM\n'
        "setsid sleep 1001 &\n[ $1 = 0 ] && sleep 1 && exit 5\nsleep 1000\n"
    )
    options = (
        "--per-node",
        "--device",
        "cpu",
        "--grace",
        "2",
        "--",
        "sh",
        script,
        "{node_rank}",
        "{nnodes}",
        "{head}",
    )
    output = slurm.run(" ".join((*PER_NODE, slurm.exec("dist-run", *options))), "echo code=$?")
    lines = re.findall(r"node (\d) of 2 head (\S+) port (\d+) folder (\S+)", output)
    assert sorted(line[:2] for line in lines) == [("0", "10.42.0.11"), ("1", "10.42.0.11")], output
    assert len({line[2:] for line in lines}) == 1
    assert "the command on node 1 of 2 (node1) failed first: exit code 5" in output
    assert output.endswith("code=5\n"), output
    assert not slurm.processes()
    assert not Path(lines[0][3]).exists()


def waiting(slurm):
    """A job whose four workers wait for ever: its number, and the processes of node 1's workers."""
    code = "import os, time; print('waiting', os.environ['RANK'], os.getpid(), flush=True); time.sleep(600)"
    (slurm.state / "wait.py").write_text(code)
    run = slurm.exec("dist-run", *TWO, "--grace", "1", slurm.state / "wait.py")
    job = slurm.submit(" ".join((*PER_NODE, run)), "echo code=$?")
    slurm.until(lambda: slurm.output.exists() and slurm.output.read_text().count("waiting") == 4)
    assert len(slurm.processes()) > 4
    return job, re.findall(r"waiting [23] (\d+)", slurm.output.read_text())


@pytest.mark.parametrize("how", [(), ("--signal=KILL", "--full")], ids=["term", "kill"])
def test_cancelled_job_leaves_no_process(slurm, how):
    job, _ = waiting(slurm)
    slurm("scancel", *how, job)
    slurm.wait_for_end(job)
    slurm.until(lambda: not slurm.processes())


def test_killed_worker_ends_the_job(slurm):
    job, workers = waiting(slurm)
    slurm("exec", "node2", "--", "kill", "-KILL", workers[0])
    slurm.wait_for_end(job)
    slurm.until(lambda: not slurm.processes())
    output = slurm.output.read_text()
    # From Slurm 24.11 on, srun may end node 0 before its last lines.
    assert re.search(r"rank [23] on node 2 of 2 \(node2\) failed(?: first:|,) killed by SIGKILL", output), (
        output
    )
    assert re.search(r"node 2 of 2 \(node2\) ended with exit code \d+", output), output
    assert not output.endswith("code=0\n")


def sharded(slurm, name, *options):
    """A job script of examples/fsdp2.py on one worker a node, with its run folder."""
    program = slurm.state / "fsdp2.py"
    program.write_text((ROOT / "examples/fsdp2.py").read_text())
    run = slurm.exec("dist-run", "--device", "cpu", "--nproc", "1", *options, program)
    return [f"export IMGKIT_RUN_DIR={slurm.output.parent / name}", " ".join((*PER_NODE, run)), "echo code=$?"]


def shards(slurm, name):
    """The newest checkpoint's name, and the sha256 of its shards."""
    newest = max((slurm.output.parent / name / "checkpoints").iterdir())
    files = json.loads((newest / "manifest.json").read_text())["files"]
    return newest.name, {file: row for file, row in files.items() if file.startswith("shard-")}


@pytest.mark.soak
def test_sharded_run_on_two_nodes_resumes_bitwise(slurm):
    assert slurm.run(*sharded(slurm, "whole")).endswith("code=0\n")
    job = slurm.submit(*sharded(slurm, "cut"))
    slurm.until(lambda: (slurm.output.parent / "cut/checkpoints/step-0000000100").exists())
    slurm("exec", "node2", "--", "pkill", "-KILL", "--newest", "-f", "fsdp2.py")
    slurm.wait_for_end(job)
    slurm.until(lambda: not slurm.processes())
    assert shards(slurm, "cut")[0] == "step-0000000100"
    output = slurm.run(*sharded(slurm, "cut"))
    assert "run: resumes after step 100: " in output
    assert output.endswith("code=0\n"), output
    assert shards(slurm, "whole") == shards(slurm, "cut")
    assert len(shards(slurm, "cut")[1]) == 2


@pytest.mark.soak
def test_run_folder_of_one_node_alone_is_refused(slurm):
    folder = slurm.output.parent / "unshared"
    folder.mkdir()
    folder.chmod(0o1777)
    slurm("exec", "node2", "--", "mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder)
    try:
        output = slurm.run(*sharded(slurm, "unshared"))
    finally:
        slurm("exec", "node2", "--", "umount", folder)
    refusal = (
        "sharded state needs a folder that all ranks see and write, and rank 0 on node1 shares this one not "
    )
    assert f"{refusal}with node2 (No such file or directory)" in output, output
    assert "code=0" not in output
    assert not list(folder.glob("checkpoints/*"))
