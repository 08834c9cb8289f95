"""Flags and IMGKIT_ variables on top of what the launcher says, nodes started by hand, and the port."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgkit_entrypoints.cli.commands import COMMANDS
from imgkit_entrypoints.cli.options import launch_parser, read_options
from imgkit_entrypoints.schedulers import resolve
from imgkit_entrypoints.schedulers.placement import (
    Direct,
    Placement,
    PlacementRequest,
    Size,
    job_port,
)

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "0"}
HAND: dict[str, Any] = {"nnodes": 2, "node_rank": 0, "head": "n1"}


def request_of(nnodes: object = None, **flags: Any) -> PlacementRequest:
    return PlacementRequest(size=None if nnodes is None else Size.parse(str(nnodes)), **flags)


def placement_of(env: dict[str, str], host: str = "", **flags: Any) -> Placement:
    return resolve.find_placement(request_of(**flags), env, {"/proc/sys/kernel/hostname": host or None}.get)


def test_head_and_port_of_the_user_win():
    placement = placement_of(STEP, head="10.1.0.1", port=1234)
    assert (placement.head, placement.base_port) == ("10.1.0.1", 1234)
    assert (placement.source["head"], placement.source["port"]) == ("--head", "--port")


def of_command(env: dict[str, str]) -> PlacementRequest:
    """What ``dist-run`` requests where its variables stand in for flags."""
    parsed = launch_parser(COMMANDS[0], env).parse_args([])
    return read_options(parsed, COMMANDS[0], ("dist-run",)).placement


def test_imgkit_variables_stand_for_flags():
    env = {**STEP, "IMGKIT_HEAD": "n1i", "IMGKIT_PORT": "1234", "IMGKIT_NNODES": "2"}
    placement = resolve.find_placement(of_command(env), env, lambda _: None)
    assert (placement.head, placement.port, placement.nnodes) == ("n1i", 1234, 2)
    assert (placement.source["head"], placement.source["port"]) == ("IMGKIT_HEAD", "IMGKIT_PORT")
    assert of_command({"IMGKIT_SCHEDULER": "openmpi"}).scheduler == "openmpi"


def test_flag_beats_its_variable():
    assert placement_of({**STEP, "IMGKIT_HEAD": "wrong"}, head="n1i").head == "n1i"


PBS_SCRIPT = {
    "PBS_JOBID": "7",
    "PBS_NODENUM": "0",
    "PBS_NODEFILE": "/var/spool/7",
    "PBS_ENVIRONMENT": "PBS_BATCH",
}
POD = {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    ("env", "flags", "expected"),
    [
        (BATCH, {"nnodes": 1}, ("standalone", 1, 0, "")),
        (PBS_SCRIPT, {"nnodes": 1}, ("pbs", 1, 0, "")),
        (POD, {"nnodes": 2}, ("kubeflow", 2, 1, "job-master-0")),  # WORLD_SIZE may count processes
        (STEP, {"scheduler": "manual", **HAND}, ("manual", 2, 0, "n1")),
        # ssh in a batch script started the node: Slurm knows only the script's shell.
        (BATCH, {**HAND, "node_rank": 1}, ("manual", 2, 1, "n1")),
        ({}, {"nnodes": 3, "node_rank": 2, "head": "10.0.0.1"}, ("manual", 3, 2, "10.0.0.1")),
        ({"IMGKIT_NODES": "n[1-3]", "IMGKIT_NODE_RANK": "2"}, {}, ("manual", 3, 2, "n1")),
    ],
)
def test_flags_complete_what_the_launcher_says(env, flags, expected):
    placement = placement_of(env, **flags)
    assert (placement.scheduler, placement.nnodes, placement.node_rank, placement.head) == expected
    if placement.scheduler == "manual" and flags:
        assert placement.source == {"nnodes": "--nnodes", "node_rank": "--node-rank", "head": "--head"}


def odd(env: dict[str, str], recipe: str = "slurm", **flags: Any) -> tuple[str, ...]:
    return resolve.placement_warnings(placement_of(env, **flags), request_of(**flags), env, recipe=recipe)


@pytest.mark.parametrize("recipe", ["slurm", "pbs"])
def test_hidden_job_is_a_warning(recipe):
    (text,) = odd({"HOME": "/root"}, recipe)
    assert text.startswith(f"the recipe says {recipe}, but no scheduler variable is set")
    assert "--cleanenv" in text


@pytest.mark.parametrize("recipe", ["runai", "mpi", "standalone", ""])
def test_alone_is_no_warning_for_other_recipes(recipe):
    assert odd({}, recipe) == ()


@pytest.mark.parametrize("flags", [{"nnodes": 1}, {"scheduler": "standalone"}, HAND])
def test_alone_as_asked_for_is_no_warning(flags):
    assert odd({}, **flags) == ()


def test_shown_job_is_no_warning():
    assert odd(STEP) == ()
    assert odd({"PBS_JOBID": "7", "PBS_NODENUM": "0", "IMGKIT_NODES": "n1"}) == ()


def test_direct_makes_a_node_a_rank():
    assert placement_of(STEP, direct=True).direct == Direct(
        rank=1, local_rank=0, world_size=2, local_world_size=1
    )
    assert placement_of(STEP).direct is None


def test_direct_takes_over_a_foreign_rank():
    worker = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n1"}
    placement = placement_of(worker, direct=True)
    assert (placement.nnodes, placement.node_rank, placement.head) == (2, 1, "n1")
    assert placement.direct == Direct(rank=5, local_rank=1, world_size=8, local_world_size=4)


@given(st.text(max_size=40))
def test_port_stays_below_the_ephemeral_range(job_id):
    assert 20000 <= job_port(job_id) < 31000 < 32768


def test_port_is_the_same_in_another_process():
    code = "from imgkit_entrypoints.schedulers.placement import job_port; print(job_port('7.0'))"
    ports = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert ports == {f"{job_port('7.0')}\n"}


def test_nodes_of_a_step_agree_on_the_port():
    first, second = (placement_of({**STEP, "SLURM_NODEID": node}) for node in "01")
    next_step = placement_of({**STEP, "SLURM_STEP_ID": "1"})
    assert first.base_port == second.base_port
    assert first.base_port != next_step.base_port


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16", Size(training=16)),
        ("16+1", Size(training=16, spares=1)),
        ("3+0", Size(training=3)),
    ],
)
def test_size_of_a_run_is_read(text, size):
    assert Size.parse(text) == size


def test_spares_are_nodes_of_the_launcher():
    placement = placement_of(STEP, nnodes="1+1")
    assert (placement.nnodes, placement.size) == (2, Size(training=1, spares=1))
