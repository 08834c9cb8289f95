"""``imgkit run`` without a scheduler, for real: Open MPI and ssh between the nodes of the virtual cluster,
docker on this machine. The .sif is that of the recipe mn5; what is tested is how it is started.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import (
    AS_ROOT,
    IMGKIT,
    LOOK,
    LOOKED,
    TOKEN,
    Cluster,
    cluster_marks,
    expect_failure,
    expect_success,
    soak,
    until,
)

FORMS = {"launcher": (), "direct": ("--mpi-start", "ranks"), "ssh": ("--mpi-start", "ssh")}
HOSTS = ("--hosts", "node1,node2")

pytestmark = [*cluster_marks, pytest.mark.xdist_group("mpi")]

STUB = """
import os, time
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} works", flush=True)
time.sleep(600)
"""
"""A stub of a training: without torch it starts in a second less."""

# Lambda's public tutorial, "Message Passing": main_mpirun.py; main.py differs in the three names alone.
TUTORIAL = """
import os
import argparse
import torch
import torch.distributed as dist

LOCAL_RANK = int(os.environ['OMPI_COMM_WORLD_LOCAL_RANK'])
WORLD_SIZE = int(os.environ['OMPI_COMM_WORLD_SIZE'])
WORLD_RANK = int(os.environ['OMPI_COMM_WORLD_RANK'])

def run(backend):
    tensor = torch.zeros(1)
    if WORLD_RANK == 0:
        for rank_recv in range(1, WORLD_SIZE):
            dist.send(tensor=tensor, dst=rank_recv)
            print('Rank {} sent data to Rank {}\\n'.format(0, rank_recv))
    else:
        dist.recv(tensor=tensor, src=0)
        print('Rank {} has received data from rank {}\\n'.format(WORLD_RANK, 0))

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", type=str, default="nccl", choices=['nccl', 'gloo'])
    args = parser.parse_args()
    dist.init_process_group(args.backend, rank=WORLD_RANK, world_size=WORLD_SIZE)
    run(args.backend)
"""


@dataclass(frozen=True, kw_only=True)
class Nodes(Cluster):
    """Two nodes without a scheduler."""

    sif: Path

    @property
    def folder(self):
        """Where the jobs run; on the command line of everything that they start."""
        return self.state / "jobs"

    def on(self, node, *args):
        return self("exec", node, "--", *args, env={**AS_ROOT, "TOKEN": TOKEN})

    def job(self, verb, *flags, command, nproc=2):
        image = ("--runtime", "singularity", "--image", self.sif, "--directory", self.folder)
        return (
            *IMGKIT,
            verb,
            "lambda",
            *HOSTS,
            "--gpus",
            "0",
            "--nproc",
            str(nproc),
            *image,
            *flags,
            "--",
            *command,
        )

    def processes(self):
        """Processes of a job, on all nodes."""
        lines = self.ps("stat,args", "login", "node1", "node2")
        return [line for line in lines if str(self.folder) in line and not line.startswith("Z")]

    def emptied(self):
        """Wait until nothing of a job is left."""
        until(lambda: not self.processes(), describe=lambda: "\n".join(self.processes()))


(TRIXIE,) = soak("trixie")
"""Debian trixie's launchers: Open MPI 5 and MPICH."""


@pytest.fixture(scope="module", params=["own", TRIXIE])
def cluster(mn5_sif, request):
    nodes = Nodes(state=Path(f"/tmp/imgkit-test-mpi-{os.getpid()}"), sif=mn5_sif)
    nodes.up(2, "--no-slurm", release=request.param)
    nodes.folder.mkdir()
    try:
        yield nodes
    finally:
        nodes.down()


@pytest.mark.parametrize("form", ["launcher", *soak("direct", "ssh")])
def test_hello_connects_all_ranks(cluster, form):
    result = expect_success(cluster.on("login", *cluster.job("run", *FORMS[form], command=("dist-hello",))))
    assert "all_reduce of ones: 4" in result.stdout
    ranks = re.findall(r"(\d)  (node\d)  cpu", result.stdout)
    assert ranks == [("0", "node1"), ("1", "node1"), ("2", "node2"), ("3", "node2")]
    cluster.emptied()


@pytest.mark.parametrize("form", [*soak("launcher"), "ssh"])
def test_no_text_of_a_job_holds_its_secrets(cluster, form):
    shutil.copy(LOOK, cluster.folder)
    secret = cluster.folder / "by hand"
    secret.touch(mode=0o600)
    secret.write_text("0123456789abcdef" * 4)
    flags = (
        "--env",
        "TOKEN",
        "--require-secret",
        *(("--secret-file", str(secret)) if form == "launcher" else ()),
    )
    job = cluster.job("run", *FORMS[form], *flags, command=("dist-run", LOOK.name), nproc=1)
    result = cluster.on("login", *job)
    assert LOOKED.findall(result.stdout) == [("[]", "[]")] * 2, result.stdout + result.stderr
    assert result.returncode == 0
    assert TOKEN not in result.stdout + result.stderr


@pytest.mark.parametrize("form", ["direct", *soak("ssh")])
def test_tutorial_programs_run_unchanged(cluster, form):
    text, command, nproc = TUTORIAL, ["python3"], 1
    if form == "ssh":
        text = text.replace("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK").replace(
            "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"
        )
        text = text.replace("OMPI_COMM_WORLD_RANK", "RANK")
        text = text.replace(
            "parser.add_argument(",
            'parser.add_argument("--local_rank", type=int)\n    parser.add_argument(',
            1,
        )
        command, nproc = ["dist-run", "--pass-local-rank"], 2
    (cluster.folder / "main.py").write_text(text)
    argv = (*command, "main.py", "--backend=gloo")
    job = cluster.job("run", *FORMS[form], command=argv, nproc=nproc)
    result = expect_success(cluster.on("node1", *job))
    receivers = range(1, 2 * nproc)
    assert all(f"Rank {rank} has received data from rank 0" in result.stdout for rank in receivers)


def test_printed_lines_of_torch_s_launcher_run(cluster):
    printed = cluster.on(
        "login", *cluster.job("run", "--dry-run", "--mpi-start", "ssh", command=("dist-hello",), nproc=1)
    ).stdout
    lines = [line.removeprefix("# ") for line in printed.splitlines() if line.startswith("# ssh ")]
    assert len(lines) == 2
    result = cluster.on("login", "bash", "-c", f"{lines[1]} & {lines[0]}; wait")
    assert "all_reduce of ones: 2" in result.stdout, result.stderr


@pytest.mark.parametrize("form", ["launcher", "ssh", *soak("direct")])
def test_host_without_a_mounted_folder_is_named(cluster, form):
    folder = "/run/imgkit only here"  # each node has a /run of its own
    assert cluster.on("node1", "mkdir", "-p", folder).returncode == 0
    result = expect_failure(
        cluster.on("login", *cluster.job("run", *FORMS[form], "--bind", folder, command=("true",))), 2
    )
    output = result.stdout + result.stderr
    assert f"imgkit: node node2 has no {folder}, which the job mounts (--bind, " in output, output
    assert "node1 has no" not in output


def test_other_order_than_mpirun_s_is_refused(cluster):
    expect_failure(
        cluster.on("node2", *cluster.job("run", command=("dist-hello",))),
        2,
        "this is node2: mpirun gives rank 0 to its own host",
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_end_of_the_fan_out_empties_the_nodes(cluster, number):
    (cluster.folder / "loop.py").write_text(STUB)
    job = cluster.job("run", "--mpi-start", "ssh", command=("dist-run", "--grace", "2", "loop.py"))
    # Its own processes end with the first one's end otherwise: this one is to be killed alone.
    with subprocess.Popen(
        cluster.argv("exec", "login", "--", *job), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        seen = 0
        for line in running.stdout:
            seen += " works" in line
            if seen == 4:
                break
        assert seen == 4
        child = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()[0]
        os.kill(int(child), number)
        running.stdout.read()
        assert running.wait(240) != 0
    cluster.emptied()


@pytest.mark.parametrize("cluster", [TRIXIE], indirect=True, scope="module")
def test_hydra_without_a_head_is_refused_and_its_hint_works(cluster):
    start = ("mpiexec.hydra", "-hosts", "node1,node2", "-n", "2", "-ppn", "1", "-bind-to", "none")
    run = ("singularity", "exec", cluster.sif, "dist-hello", "--device", "cpu", "--nproc", "2")
    refused = expect_failure(cluster.on("login", *start, *run), 5)
    assert "-genv IMGKIT_HEAD HOST" in refused.stdout + refused.stderr
    result = expect_success(cluster.on("login", *start, "-genv", "IMGKIT_HEAD", "node1", *run))
    assert "all_reduce of ones: 4" in result.stdout
    assert re.findall(r"(\d)  (node\d)  cpu", result.stdout) == [
        *(("0", "node1"), ("1", "node1"), ("2", "node2"), ("3", "node2"))
    ]
    cluster.emptied()


@pytest.mark.parametrize("cluster", [TRIXIE], indirect=True, scope="module")
def test_killed_node_agent_ends_hydra(cluster):
    (cluster.folder / "loop.py").write_text(STUB)
    start = ("mpiexec.hydra", "-hosts", "node1,node2", "-n", "2", "-ppn", "1", "-bind-to", "none")
    image = ("singularity", "exec", "--bind", cluster.folder, cluster.sif)
    run = ("dist-run", "--device", "cpu", "--nproc", "1", "--grace", "2", cluster.folder / "loop.py")
    argv = cluster.argv("exec", "login", "--", *start, "-genv", "IMGKIT_HEAD", "node1", *image, *run)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        seen = 0
        for line in running.stdout:
            seen += " works" in line
            if seen == 2:
                break
        assert seen == 2
        cluster.on("node2", "pkill", "-KILL", "-f", "imgkit_entrypoints dist-run")
        running.stdout.read()
        assert running.wait(240) != 0
    cluster.emptied()
