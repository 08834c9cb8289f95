"""Two launchers show: known pairs are decided, others are refused with both names and the flag."""

from __future__ import annotations

import itertools

import pytest

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers import resolve
from imgkit_entrypoints.schedulers.placement import Placement, PlacementRequest

# The fewest variables that each launcher sets, on node 1 of 2.
LAUNCHERS: dict[str, dict[str, str]] = {
    "slurm": {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_NODEID": "1",
    },
    "pals": {
        "PALS_RANKID": "1",
        "PALS_NODEID": "1",
        "PALS_LOCAL_SIZE": "1",
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
    },
    "pbs": {"PBS_JOBID": "7.head", "PBS_NODENUM": "1", "PBS_TASKNUM": "00000002"},
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    },
    "hydra": {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
    "kubeflow": {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "n1",
        "PET_MASTER_PORT": "29500",
    },
}
# mpiexec is the right way to start inside a PBS job, so it decides.
INSIDE = {("pals", "pbs"), ("pbs", "openmpi"), ("pbs", "hydra")}
# Slurm's Cray plugin sets PALS_ and PMI_, so they show no other launcher.
BY_SLURM = {("slurm", "pals")}


def placement_of(env: dict[str, str], scheduler: str | None = None) -> Placement:
    return resolve.find_placement(
        PlacementRequest(scheduler=scheduler), {"IMGKIT_NODES": "n1,n2", **env}, {"/none": ""}.get
    )


@pytest.mark.parametrize("name", LAUNCHERS)
def test_one_launcher_alone_decides(name: str) -> None:
    assert placement_of(LAUNCHERS[name]).scheduler == name


def test_variables_of_pyxis_do_not_decide() -> None:
    """It sets RANK and LOCAL_RANK for an image with PYTORCH_VERSION, and enroot's hook the others."""
    hook = {"MASTER_ADDR": "n9", "MASTER_PORT": "1", "WORLD_SIZE": "16", "RANK": "8", "LOCAL_RANK": "0"}
    placement = placement_of({**LAUNCHERS["slurm"], "PYTORCH_VERSION": "2.5.1", **hook})
    assert (placement.scheduler, placement.nnodes, placement.node_rank, placement.head) == (
        "slurm",
        2,
        1,
        "n1",
    )
    assert placement == placement_of(LAUNCHERS["slurm"])


@pytest.mark.parametrize("pair", list(itertools.combinations(LAUNCHERS, 2)), ids="+".join)
def test_pairs_are_decided_or_refused(pair: tuple[str, str]) -> None:
    env = LAUNCHERS[pair[0]] | LAUNCHERS[pair[1]]
    if pair in INSIDE:
        assert placement_of(env).scheduler == next(name for name in pair if name != "pbs")
    elif pair in BY_SLURM:
        assert placement_of(env).scheduler == "slurm"
    else:
        with pytest.raises(NoPlan) as caught:
            placement_of(env)
        assert all(name in caught.value.what for name in pair)
        assert all(f"--scheduler {name}" in (caught.value.hint or "") for name in pair)


@pytest.mark.parametrize("pair", list(itertools.permutations(LAUNCHERS, 2)), ids="+".join)
def test_the_flag_decides_any_pair(pair: tuple[str, str]) -> None:
    assert placement_of(LAUNCHERS[pair[1]] | LAUNCHERS[pair[0]], scheduler=pair[0]).scheduler == pair[0]


def test_pmi_of_srun_is_no_second_launcher() -> None:
    env = LAUNCHERS["slurm"] | {"PMI_RANK": "1", "PMI_SIZE": "2", "PMIX_RANK": "1"}
    assert placement_of(env).scheduler == "slurm"


@pytest.mark.parametrize("name", [name for name in LAUNCHERS if name != "kubeflow"])
def test_exported_torch_variables_are_no_launcher(name: str) -> None:
    """Many job scripts export them, and Slurm itself may run in pods."""
    exported = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "n1", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    assert placement_of(LAUNCHERS[name] | exported).scheduler == name


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("runai", "kubeflow"),
        ("kubernetes", "kubeflow"),
        ("mpi", "openmpi"),
        ("mpi", "hydra"),
        ("mpi", "pals"),
    ],
)
def test_names_of_recipes_are_understood(name: str, launcher: str) -> None:
    assert placement_of(LAUNCHERS[launcher], scheduler=name).scheduler == launcher


def test_standalone_starts_alone_in_a_step() -> None:
    placement = placement_of(LAUNCHERS["slurm"], scheduler="standalone")
    assert (placement.scheduler, placement.nnodes) == ("standalone", 1)


def test_nesting_is_refused_whatever_the_flag() -> None:
    for name in (None, "slurm", "standalone"):
        with pytest.raises(NoPlan, match="already a torchrun worker"):
            placement_of(LAUNCHERS["slurm"] | {"TORCHELASTIC_RUN_ID": "7"}, scheduler=name)
