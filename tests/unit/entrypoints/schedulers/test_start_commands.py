"""The argv that starts one process per node, and the lines printed if only one process was started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers import manual, resolve, slurm
from imgkit_entrypoints.schedulers.environment import Environment
from imgkit_entrypoints.schedulers.mpi import HYDRA, OPENMPI, PALS
from imgkit_entrypoints.schedulers.placement import PlacementRequest

COMMAND = ("singularity", "exec", "my image.sif", "dist-train", "--name", "it's $5")


@pytest.mark.parametrize(
    ("launcher", "start", "options"),
    [
        (PALS, "mpiexec -n 2 --ppn 1 --cpu-bind none", ("--env", "IMGKIT_HEAD=x 9")),
        (OPENMPI, "mpirun -np 2 --map-by ppr:1:node --bind-to none", ("-x", "IMGKIT_HEAD=x 9")),
        (HYDRA, "mpiexec -n 2 -ppn 1 -bind-to none", ("-genv", "IMGKIT_HEAD", "x 9")),
    ],
    ids=["pals", "openmpi", "hydra"],
)
def test_variable_is_handed_to_each_node(launcher, start, options):
    """The argv of srun and pbsdsh is in golden job scripts."""
    argv = launcher.start_argv(("dist-pi",), nnodes=2, forward={"IMGKIT_HEAD": "x 9"})
    assert argv == (*start.split(), *options, "dist-pi")


def test_options_of_a_node_come_before_the_script():
    """Words after the script are the script's own."""
    argv = manual.start_argv(("sh", "dist-run", "a.py", "-x"), nnodes=2, node_rank=1, head="x9", port=7)
    placed = ("--nnodes", "2", "--node-rank", "1", "--head", "x9", "--port", "7")
    assert argv == ("sh", "dist-run", *placed, "a.py", "-x")


def test_printed_srun_has_the_cpus_of_the_smallest_node():
    env = {"SLURM_JOB_CPUS_PER_NODE": "80(x2),72", "SLURM_CPUS_PER_TASK": "20"}
    assert "--cpus-per-task=72 " in slurm.per_node_command(("dist-pi",), nnodes=3, env=Environment(env))


def refusal(env: dict[str, str], command: tuple[str, ...], content: dict[str, str]) -> str:
    with pytest.raises(NoPlan) as caught:
        resolve.find_placement(PlacementRequest(command=command), env, content.get)
    return caught.value.hint or ""


BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "0"}


def test_printed_command_starts_this_container():
    container = {"APPTAINER_CONTAINER": "/my images/a.sif", "APPTAINER_BIND": "/data:/in"}
    driver = {"/proc/driver/nvidia/version": "NVRM"}
    command = "apptainer exec --nv --bind /data:/in '/my images/a.sif' dist-train"
    assert f"--kill-on-bad-exit=1 {command}\n" in refusal({**BATCH, **container}, ("dist-train",), driver)
    older = {"SINGULARITY_CONTAINER": "/a.sif"}
    assert "exit=1 singularity exec /a.sif dist-train\n" in refusal({**BATCH, **older}, ("dist-train",), {})


def test_printed_command_names_the_sif_not_its_unpacked_copy():
    unpacked = {"APPTAINER_CONTAINER": "/tmp/rootfs-1234/root", "APPTAINER_NAME": "mn5.sif"}
    hint = refusal({**BATCH, **unpacked}, ("dist-train",), {})
    assert "exit=1 apptainer exec mn5.sif dist-train\n" in hint
    assert "rootfs" not in hint
    named = {"APPTAINER_CONTAINER": "/my images/a.sif", "APPTAINER_NAME": "a.sif"}
    assert "exec '/my images/a.sif' dist-train\n" in refusal({**BATCH, **named}, ("dist-train",), {})


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Stand-ins that record their calls with the host list; pbsdsh runs its command."""
    for name, rest in (("mpiexec", ""), ("pbsdsh", 'shift 3; "$@"'), ("singularity", "")):
        log = tmp_path / f"{name}.log"
        tool = tmp_path / name
        # One write per call, because several run at once.
        tool.write_text(
            f'#!/bin/bash\nline=$(printf "%s|" "$PWD" "$IMGKIT_NODES" "$@")\necho "$line">>"{log}"\n{rest}\n'
        )
        tool.chmod(0o755)
    return tmp_path


def test_printed_pbs_lines_run_as_they_stand(tools):
    """The job of the early-access tutorial: two hosts with two lines each in the node file."""
    nodefile = tools / "nodes"
    nodefile.write_text("x9\nx9\nx10\nx10\n")
    work = tools / "my run"
    work.mkdir()
    env = {
        "PBS_JOBID": "7",
        "PBS_NODENUM": "0",
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_NODEFILE": str(nodefile),
    }
    hint = refusal(env, COMMAND, {str(nodefile): nodefile.read_text()})
    script = "\n".join(line for line in hint.splitlines()[1:-1] if not line.strip().startswith("or, "))
    result = subprocess.run(
        ["bash", "-euc", script],
        env={**env, "PBS_O_WORKDIR": str(work), "PATH": f"{tools}:{os.environ['PATH']}"},
        cwd=tools,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    args = "|".join(COMMAND[1:])
    assert (tools / "mpiexec.log").read_text() == (
        f"{tools}|x9,x10|-n|2|--ppn|1|--cpu-bind|none|singularity|{args}|\n"
    )
    calls = sorted((tools / "pbsdsh.log").read_text().splitlines())
    assert [call.split("|")[2:5] for call in calls] == [["-n", "0", "--"], ["-n", "2", "--"]]
    assert (tools / "singularity.log").read_text() == f"{work}|x9,x10|{args}|\n" * 2
