"""Placement on a real Slurm: variables of srun, sbatch and salloc, and Slurm's expansion of node lists."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from labkit import ROOT, SLURMS, Cluster

from imgkit_entrypoints.schedulers import slurm
from imgkit_entrypoints.schedulers.hostlist import expand_nodelist

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("placement")]

SHOW = """
import os, sys
from pathlib import Path
from imgkit_entrypoints.schedulers import resolve

from imgkit_entrypoints.errors import ImgkitError
from imgkit_entrypoints.schedulers.placement import PlacementRequest
def read(path):
    try:
        return Path(path).read_text()
    except OSError:
        return None
try:
    found = resolve.find_placement(PlacementRequest(command=("python3", sys.argv[0])), os.environ, read)
except ImgkitError as error:
    print(error.exit_code, error)
else:
    ranks = "-" if found.direct is None else f"rank {found.direct.rank} of {found.direct.world_size}"
    hosts = ",".join(found.hosts)
    print(f"place {found.scheduler} {found.node_rank}/{found.nnodes} {hosts} {found.head} {ranks}",
    flush=True)
"""


@pytest.fixture(scope="module", params=SLURMS)
def state(request):
    cluster = Cluster(state=Path(f"/tmp/imgkit-test-placement-{os.getpid()}"))
    cluster.up(2, release=request.param)
    script = f"import sys\nsys.path.insert(0, {str(ROOT / 'entrypoints')!r})\n{SHOW}"
    (cluster.state / "show.py").write_text(script)
    yield cluster.state
    cluster.down()


def cluster(state, *args):
    """The lines that a command of the cluster printed."""
    return Cluster(state=state)(*args).stdout.splitlines()


def batch(state, *lines, nodes=2):
    """Output lines of a batch job."""
    script, output = state / "job.sh", state / "job.out"
    script.write_text("\n".join(("#!/bin/bash", *lines, "")))
    cluster(state, "sbatch", "-W", f"-N{nodes}", "-o", output, script)
    return output.read_text().splitlines()


def show(state):
    return ("python3", str(state / "show.py"))


def test_each_node_of_a_step_is_placed(state):
    lines = cluster(state, "srun", "-N2", "--mpi=pmi2", *show(state))
    assert sorted(lines) == [f"place slurm {node}/2 node1,node2 node1 -" for node in (0, 1)]


def test_tasks_of_uneven_nodes_are_ranks(state):
    lines = cluster(state, "srun", "-O", "-N2", "-n3", *show(state))
    nodes = {0: 0, 1: 0, 2: 1}
    assert sorted(lines, key=lambda line: line.split("rank")[1]) == [
        f"place slurm {node}/2 node1,node2 node1 rank {rank} of 3" for rank, node in nodes.items()
    ]


def test_batch_script_is_refused_and_its_hint_works(state):
    command = " ".join(show(state))
    refused = batch(state, command)
    assert refused[0].startswith("5 SLURM_JOB_NUM_NODES=2: this is the shell of the batch script")
    typed = next(line.strip() for line in refused if line.strip().startswith("srun "))
    assert sorted(batch(state, typed)) == [f"place slurm {node}/2 node1,node2 node1 -" for node in (0, 1)]


def test_step_has_the_processors_that_its_command_names(state):
    # Newer releases let a step inherit those of the job, also as SLURM_TRES_PER_TASK, unless it names them.
    step = slurm.start_argv(("printenv", "SLURM_CPUS_PER_TASK"), nnodes=2, cpus=2)
    assert batch(state, "#SBATCH --cpus-per-task=4", shlex.join(step)) == ["2", "2"]


def test_one_node_step_of_larger_job_is_valid(state):
    assert batch(state, f"srun -N1 -n1 {' '.join(show(state))}") == ["place slurm 0/1 node1  -"]


def test_batch_script_on_one_node_is_placed(state):
    assert batch(state, " ".join(show(state)), nodes=1) == ["place slurm 0/1 node1  -"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-N2",), "salloc, outside the job of 2 nodes"),
        (("-N1",), "runs on login, but the job's node is node1"),
        (("-N1", ":", "-N1"), "heterogeneous"),
    ],
    ids=" ".join,
)
def test_shell_of_salloc_is_refused(state, options, message):
    lines = cluster(state, "salloc", *options, *show(state))
    assert lines[0].startswith("5 ")
    assert message in lines[0]


def test_pods_are_placed(state):
    lines = cluster(state, "pods", "--", *show(state))
    assert sorted(re.sub(r"^\[\w+\] ", "", line) for line in lines) == [
        f"place kubeflow {node}/2  node1 -" for node in (0, 1)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "node-[42,49-51]",
        "rack[0-1]n[1-2]",
        "n[098-101],m",
        "n[8-12],n8,n[3,01]",
        "a[1-2]b[3-4]c[5-6]d[7-8]",
        "x[1-2]y[01-03]z[9-10]",
    ],
)
def test_expansion_is_slurm_s_own(state, text):
    assert list(expand_nodelist(text)) == cluster(state, "scontrol", "show", "hostnames", text)
