"""The decision about a launch, as a pure function of what was found."""

from __future__ import annotations

import json

import pytest

from imgkit_entrypoints import plan
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.system import Node, SystemFacts

WORKER = ("python3", "-m", "program")


def host(gpus: int = 0, cpus: int = 8) -> HostFacts:
    return HostFacts(
        hostname="n1",
        arch="x86_64",
        python="3.11.2",
        cpus=cpus,
        gpus=gpus,
        gpus_source=f"{gpus} device files",
    )


def make(
    env: dict[str, str] | None = None, *, gpus: int = 0, facts: SystemFacts | None = None, **request: object
):
    return plan.make(
        plan.Request(**request),  # type: ignore[arg-type]
        WORKER,
        host=host(gpus),
        facts=facts,
        env=env or {},
    )


def flag(made: plan.LaunchPlan, name: str) -> str:
    return made.argv[made.argv.index(name) + 1]


def test_gpus_decide_number_of_workers():
    made = make(gpus=4, facts=SystemFacts(node=Node(gpus=4)))
    assert flag(made, "--nproc-per-node") == "4"
    assert made.env["IMGKIT_DEVICE"] == "cuda"


def test_cpu_machine_starts_one_worker():
    made = make()
    assert flag(made, "--nproc-per-node") == "1"
    assert made.env["IMGKIT_DEVICE"] == "cpu"


def test_worker_words_come_last_unchanged():
    assert make(nproc="2").argv[-len(WORKER) :] == WORKER


def test_one_node_needs_no_resolvable_name():
    assert flag(make(), "--local-addr") == "127.0.0.1"


def test_threads_are_shared_between_workers():
    assert make(nproc="4").env["OMP_NUM_THREADS"] == "2"


def test_users_threads_are_left_alone():
    assert "OMP_NUM_THREADS" not in make({"OMP_NUM_THREADS": "7"}).env


def test_recipe_environment_fills_gaps_only():
    facts = SystemFacts(env={"NCCL_CROSS_NIC": "1", "NCCL_NET_GDR_LEVEL": "PHB"})
    made = make({"NCCL_CROSS_NIC": "0"}, facts=facts)
    assert made.env["NCCL_NET_GDR_LEVEL"] == "PHB"
    assert "NCCL_CROSS_NIC" not in made.env
    assert any("NCCL_CROSS_NIC=0: yours" in note for note in made.notes)


def test_explicit_nodes_use_static_rendezvous():
    made = make({"SLURM_JOB_NUM_NODES": "2"}, nnodes=2, node_rank=1, head="n0", port=15001)
    assert flag(made, "--rdzv-backend") == "static"
    assert (flag(made, "--nnodes"), flag(made, "--node-rank")) == ("2", "1")
    assert (flag(made, "--master-addr"), flag(made, "--master-port")) == ("n0", "15001")


def test_step_on_one_node_of_a_larger_job_runs_alone():
    env = {"SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_NUM_NODES": "1"}
    assert "--standalone" in make(env).argv


def test_operator_variables_are_kept_from_torchrun():
    made = make({"PET_STANDALONE": "", "PET_NNODES": "1"})
    assert made.unset == ("PET_NNODES", "PET_STANDALONE")


def test_plan_is_json():
    assert json.loads(json.dumps(make().to_dict()))["schema"] == 1


@pytest.mark.parametrize(
    "variable", ["SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "PET_NNODES", "OMPI_COMM_WORLD_SIZE"]
)
def test_several_nodes_without_placement_are_refused(variable: str):
    with pytest.raises(NoPlan, match=variable) as caught:
        make({variable: "2"})
    assert "--node-rank" in str(caught.value.hint)


def test_expected_but_invisible_gpus_are_refused():
    with pytest.raises(NoPlan, match="4 a node") as caught:
        make(facts=SystemFacts(node=Node(gpus=4)))
    assert "--nv" in str(caught.value.hint)


def test_cuda_without_gpu_is_refused():
    with pytest.raises(NoPlan, match="--device cuda"):
        make(device="cuda")


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(NoPlan, match="several ranks on one GPU"):
        make(gpus=2, nproc="3")


@pytest.mark.parametrize(
    ("request_", "missing"),
    [({"nnodes": 2, "head": "a"}, "--node-rank"), ({"nnodes": 2, "node_rank": 0}, "--head")],
)
def test_half_a_placement_is_refused(request_: dict[str, object], missing: str):
    with pytest.raises(NoPlan, match=f"needs {missing}"):
        make(**request_)


def test_node_rank_beyond_nodes_is_refused():
    with pytest.raises(NoPlan, match="not below"):
        make(nnodes=2, node_rank=2, head="a")
