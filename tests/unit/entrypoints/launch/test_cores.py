"""The processors of the workers, decided from copies of nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_nodes import grace_hopper, mare_nostrum, write_gpu_node

from imgkit_entrypoints import facts
from imgkit_entrypoints.cli.commands import TORCHRUN
from imgkit_entrypoints.launch import cores, plan
from imgkit_entrypoints.launch.plan import LaunchPlan, Request
from imgkit_entrypoints.schedulers.placement import Direct, Placement

BOTH_SOCKETS = "0-39;0-39;40-79;40-79"
NODE = Placement(
    scheduler="slurm", nnodes=1, node_rank=0, hosts=("n1",), head="", port=None, job_id="7", source={}
)
DIRECT = replace(NODE, direct=Direct(rank=0, local_rank=0, world_size=1, local_world_size=1))


def make(
    root: Path, env: Mapping[str, str] | None = None, placement: Placement = NODE, **request
) -> LaunchPlan:
    env = env or {}
    return plan.decide_launch(
        Request(**request),
        ("python3", "train.py"),
        torchrun=TORCHRUN,
        placement=placement,
        host=facts.gather(root, env),
        system=None,
        env=env,
    )


def reason(launch_plan: LaunchPlan) -> str:
    (decision,) = (item for item in launch_plan.decisions if item.variable == cores.VARIABLE)
    return decision.reason


HEXADECIMAL = {"0000:1b:00.0": 1, "0000:18:00.0": 0}
CROWDED = {"0000:1b:00.0": 0, "0000:2c:00.0": 0, "0000:9d:00.0": 0, "0000:ad:00.0": 1}


@pytest.mark.parametrize(
    ("write", "env", "cpus", "threads"),
    [
        (mare_nostrum, {"SLURM_JOB_CPUS_PER_NODE": "80(x2)"}, BOTH_SOCKETS, "20"),
        (grace_hopper, {}, "0-71;72-143;144-215;216-287", "72"),
        (lambda root: write_gpu_node(root, HEXADECIMAL, {0: "0-3", 1: "4-7"}, "0-7"), {}, "0-3;4-7", "4"),
        (
            lambda root: write_gpu_node(root, CROWDED, {0: "0-39", 1: "40-79"}, "0-79"),
            {},
            "0-39;0-39;0-39;40-79",
            "13",
        ),
        (
            lambda root: mare_nostrum(root, "0-9,40-49"),
            {"SLURM_JOB_CPUS_PER_NODE": "20"},
            BOTH_SOCKETS,
            "5",
        ),
        (mare_nostrum, {"CUDA_VISIBLE_DEVICES": "2"}, "40-79", "40"),
        (mare_nostrum, {"CUDA_VISIBLE_DEVICES": "3,0"}, "40-79;0-39", "40"),
        (mare_nostrum, {"CUDA_VISIBLE_DEVICES": "1,2,-1,0"}, "0-39;40-79", "40"),
        (mare_nostrum, {"CUDA_VISIBLE_DEVICES": "2,"}, "40-79", "40"),
    ],
    ids=["sockets", "no node of memory", "order of hexadecimal addresses", "fewest on a crowded node",
         "part of a node", "one visible", "other order", "-1 ends the list", "empty name"],
)  # fmt: skip
def test_workers_run_on_the_socket_of_their_gpu(tmp_path, write, env, cpus, threads):
    launch_plan = make(write(tmp_path), env)
    assert launch_plan.env[cores.VARIABLE] == cpus
    assert launch_plan.env["OMP_NUM_THREADS"] == threads
    (decision,) = (item for item in launch_plan.decisions if item.variable == "OMP_NUM_THREADS")
    assert (decision.reason == "a worker has 13 processors beside its GPU") == (threads == "13")


def test_one_line_of_verbose_output_names_the_processors(tmp_path):
    launch_plan = make(mare_nostrum(tmp_path))
    why = "the NUMA nodes of the GPUs: 0, 0, 1, 1; processors allowed: 0-79"
    line = f"{cores.VARIABLE}={BOTH_SOCKETS}: {why}"
    assert [text for text in launch_plan.announcements(verbose=True) if cores.VARIABLE in text] == [line]
    assert not any(cores.VARIABLE in text for text in launch_plan.announcements(verbose=False))


def test_gpus_of_other_jobs_do_not_count(tmp_path):
    root = mare_nostrum(tmp_path, allowed="20-59")
    for number in (0, 2):
        (root / f"dev/nvidia{number}").unlink()
    launch_plan = make(root, {"SLURM_JOB_CPUS_PER_NODE": "40"})
    assert launch_plan.env[cores.VARIABLE] == "0-39;40-79"
    assert launch_plan.env["OMP_NUM_THREADS"] == "20"


@pytest.mark.parametrize(
    ("write", "env", "expected"),
    [
        (
            lambda root: mare_nostrum(root, "0-39"),
            {},
            "too few processors are allowed on NUMA node 1 (the NUMA nodes of the GPUs: 0, 0, 1, 1; "
            "processors allowed: 0-39)",
        ),
        (
            lambda root: mare_nostrum(root, "0-40"),
            {},
            "too few processors are allowed on NUMA node 1 (the NUMA nodes of the GPUs: 0, 0, 1, 1; "
            "processors allowed: 0-40)",
        ),
        (
            lambda root: mare_nostrum(root, "0-9,40-49"),
            {"SLURM_JOB_CPUS_PER_NODE": "80(x2)"},
            "SLURM_JOB_CPUS_PER_NODE: the job has all 80 processors, but was bound to 0-9,40-49",
        ),
        (
            lambda root: write_gpu_node(root, {"0000:1b:00.0": 0}, {0: "0-7", 1: ""}, "0-7"),
            {},
            "/sys/devices/system/node does not show two NUMA nodes with processors",
        ),
        (
            lambda root: write_gpu_node(root, {"0000:1b:00.0": -1}, {0: "0-3", 1: "4-7"}, "0-7"),
            {},
            "too few processors are allowed on NUMA node None (the NUMA nodes of the GPUs: None; "
            "processors allowed: 0-7)",
        ),
        (
            lambda root: write_gpu_node(root, {"0009:01:00.0": 4}, {0: "0-71", 1: "72-143", 4: ""}, "0-143"),
            {},
            "too few processors are allowed on NUMA node 4 (the NUMA nodes of the GPUs: 4; "
            "processors allowed: 0-143)",
        ),
        (mare_nostrum, {"CUDA_VISIBLE_DEVICES": "GPU-1"}, "it is unknown which GPU each worker gets"),
    ],
    ids=[
        "other socket",
        "one core for two",
        "bound job",
        "one node",
        "unknown node",
        "node of memory",
        "named by UUID",
    ],
)
def test_workers_are_not_bound(tmp_path, write, env, expected):
    launch_plan = make(write(tmp_path), env)
    assert cores.VARIABLE not in launch_plan.env
    assert reason(launch_plan) == expected
    (line,) = (text for text in launch_plan.lines() if text.startswith(cores.VARIABLE))
    assert line.endswith(f"not set: {expected}")


def test_gpus_of_two_models_have_no_known_order(tmp_path):
    root = mare_nostrum(tmp_path)
    (root / "proc/driver/nvidia/gpus/0000:1b:00.0/information").write_text(
        "Model: NVIDIA T400\nDevice Minor: 0\n"
    )
    assert reason(make(root)) == "it is unknown which GPU each worker gets"


@pytest.mark.parametrize(
    ("placement", "request_", "threads"),
    [(NODE, {"is_per_node": True}, "20"), (NODE, {"device": "cpu"}, "80"), (DIRECT, {}, "80")],
    ids=["--per-node", "on CPUs", "--direct"],
)
def test_only_workers_of_torchrun_on_gpus_are_bound(tmp_path, placement, request_, threads):
    launch_plan = make(mare_nostrum(tmp_path), placement=placement, **request_)
    assert not any(cores.VARIABLE in line for line in launch_plan.lines())
    assert launch_plan.env["OMP_NUM_THREADS"] == threads


def test_binding_can_be_refused(tmp_path):
    launch_plan = make(mare_nostrum(tmp_path), binds_cpus=False)
    assert cores.VARIABLE not in launch_plan.env
    assert reason(launch_plan) == "--no-cpu-binding"


def test_lost_processors_are_a_warning(capfd):
    own_cpus = os.sched_getaffinity(0)
    cores.bind_to_cpus({cores.VARIABLE: "0-1;9000"}, 1)
    assert os.sched_getaffinity(0) == own_cpus
    warning = "local rank 1 is not bound to the processors 9000: Invalid argument"
    assert capfd.readouterr().err == f"imgkit: warning: {warning}\n"


@pytest.mark.parametrize("text", ["", "x", "1-", "3-2", "0-99999", "1,,2", "0" * 5000])
def test_malformed_processors_are_none(text):
    assert facts.compute.parse_cpu_list(text) == frozenset()
