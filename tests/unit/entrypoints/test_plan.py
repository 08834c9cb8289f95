"""The decision about a launch, as a pure function of what was found."""

from __future__ import annotations

import json

import pytest

from imgkit_entrypoints import plan
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.facts import HostFacts
from imgkit_entrypoints.launch import PORT_PENDING
from imgkit_entrypoints.placement import Direct, Placement
from imgkit_entrypoints.system import Fabric, Node, SystemFacts

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
    env: dict[str, str] | None = None,
    *,
    gpus: int = 0,
    system: SystemFacts | None = None,
    place: Placement | None = None,
    **request: object,
) -> plan.LaunchPlan:
    return plan.make(
        plan.Request(**request),  # type: ignore[arg-type]
        WORKER,
        place=place or node(),
        host=host(gpus),
        system=system,
        env=env or {},
    )


def node(nnodes: int = 1, node_rank: int = 0, **more: object) -> Placement:
    values: dict[str, object] = {
        "scheduler": "slurm" if nnodes > 1 else "standalone",
        "hosts": tuple(f"n{rank}" for rank in range(nnodes)),
        "head": "n0" if nnodes > 1 else "",
        "port": None,
        "job_id": "7",
        "source": {},
        **more,
    }
    return Placement(nnodes=nnodes, node_rank=node_rank, **values)  # type: ignore[arg-type]


def flag(made: plan.LaunchPlan, name: str) -> str:
    return made.argv[made.argv.index(name) + 1]


def test_gpus_decide_number_of_workers():
    made = make(gpus=4, system=SystemFacts(node=Node(gpus=4)))
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


def test_threads_that_pbs_set_are_divided():
    made = make({"OMP_NUM_THREADS": "8", "NCPUS": "8"}, nproc="4", place=node(scheduler="pbs"))
    assert made.env["OMP_NUM_THREADS"] == "2"


def test_recipe_environment_fills_gaps_only():
    system = SystemFacts(env={"NCCL_CROSS_NIC": "1", "MY_SETTING": "PHB"})
    made = make({"NCCL_CROSS_NIC": "0"}, system=system)
    assert made.env["MY_SETTING"] == "PHB"
    assert "NCCL_CROSS_NIC" not in made.env
    assert any(said.variable == "NCCL_CROSS_NIC" and "yours" in said.reason for said in made.decisions)


def test_fixed_nodes_use_static_rendezvous():
    made = make(place=node(2, 1))
    assert flag(made, "--rdzv-backend") == "static"
    assert (flag(made, "--nnodes"), flag(made, "--node-rank")) == ("2", "1")
    assert flag(made, "--master-addr") == "n0"
    assert flag(made, "--master-port") == PORT_PENDING


def test_range_of_nodes_uses_c10d():
    made = make(place=node(4, min_nnodes=2, port=15001))
    assert flag(made, "--rdzv-backend") == "c10d"
    assert flag(made, "--nnodes") == "2:4"
    assert flag(made, "--rdzv-endpoint") == "n0:15001"
    assert flag(made, "--rdzv-id") == "7"


def test_logs_of_nodes_do_not_mix():
    assert flag(make(place=node(2, 1), log_dir="/logs"), "--log-dir") == "/logs/node1"


def test_ranks_of_an_mpi_start_need_no_torchrun():
    direct = Direct(rank=5, local_rank=1, world_size=8, local_world_size=4)
    made = make(place=node(2, 1, direct=direct))
    assert made.mode == "direct"
    assert made.argv == WORKER
    assert (made.env["RANK"], made.env["LOCAL_RANK"], made.env["WORLD_SIZE"]) == ("5", "1", "8")
    assert made.env["MASTER_ADDR"] == "n0"


def test_old_scripts_get_their_local_rank():
    assert make(pass_local_rank=True).argv[-len(WORKER) - 4 :] == (
        *("sh", "-c", 'exec "$@" --local_rank="$LOCAL_RANK"', "sh"),
        *WORKER,
    )


def test_operator_variables_are_kept_from_torchrun():
    made = make({"PET_STANDALONE": "", "PET_NNODES": "1"})
    assert made.unset == ("PET_NNODES", "PET_STANDALONE")


def test_plan_is_json():
    assert json.loads(json.dumps(make().to_dict()))["schema"] == 1


def test_expected_but_invisible_gpus_are_refused():
    with pytest.raises(NoPlan, match="4 a node") as caught:
        make(system=SystemFacts(node=Node(gpus=4)))
    assert "--nv" in str(caught.value.hint)


def test_cuda_without_gpu_is_refused():
    with pytest.raises(NoPlan, match="--device cuda"):
        make(device="cuda")


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(NoPlan, match="several ranks on one GPU"):
        make(gpus=2, nproc="3")


def test_ranks_started_beyond_the_gpus_are_refused():
    direct = Direct(rank=0, local_rank=0, world_size=4, local_world_size=4)
    with pytest.raises(NoPlan, match="several ranks on one GPU"):
        make(gpus=2, place=node(direct=direct))


def test_nodes_that_could_not_connect_are_refused():
    system = SystemFacts(node=Node(gpus=1), fabric=Fabric(kind="infiniband"))
    with pytest.raises(NoPlan, match="the recipe says infiniband"):
        make(gpus=1, place=node(2), system=system)
    assert make(device="cpu", place=node(2), system=system).env["IMGKIT_DEVICE"] == "cpu"
