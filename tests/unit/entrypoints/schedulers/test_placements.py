"""A table of environments: every launcher with one node, with several nodes, and with a wrong start.

The environments of Slurm, Open MPI and Hydra are shortened real ones (Slurm 22.05, Open MPI 5.0, MPICH 5.0).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers import resolve
from imgkit_entrypoints.schedulers.placement import Direct, Placement, PlacementRequest

Env = dict[str, str]


def files(**content: str) -> Callable[[str], str | None]:
    """A reader of the host name and the node file only."""
    paths = {"hostname": "/proc/sys/kernel/hostname", "nodefile": "/var/spool/pbs/aux/7.head"}
    return {paths[name]: text for name, text in content.items()}.get


NOTHING = files()


def placement_of(
    env: Env, read: Callable[[str], str | None] = NOTHING, flags: Mapping[str, Any] | None = None
) -> Placement:
    return resolve.find_placement(PlacementRequest(**(flags or {})), env, read)


def test_suffix_is_for_the_head_of_slurms_list():
    env = slurm_step("jwb[0001-0002].juwels", 1, 2)
    placement = resolve.find_placement(PlacementRequest(), env, NOTHING, head_suffix="i")
    assert (placement.head, placement.hosts[0]) == ("jwb0001i.juwels", "jwb0001.juwels")
    assert placement.source["head"] == "SLURM_STEP_NODELIST, with the system's fabric.head_suffix 'i'"


@pytest.mark.parametrize(
    ("extra", "nodes", "head"),
    [
        ({"IMGKIT_HEAD": "x"}, 2, "x"),  # a name that the user has given
        ({"IMGKIT_NODES": "a,b"}, 2, "a"),
        ({}, 1, ""),
    ],
)
def test_suffix_changes_no_name_of_the_user(extra: Env, nodes: int, head: str):
    env = slurm_step("n[1-2]" if nodes > 1 else "n1", 0, nodes) | extra
    assert resolve.find_placement(PlacementRequest(), env, NOTHING, head_suffix="i").head == head


def slurm_job(nodes: int, nodelist: str, **extra: str) -> Env:
    """Variables that every process of a job has, in the batch script and in steps."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOBID": "7",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NODELIST": nodelist,
        "SLURM_JOB_CPUS_PER_NODE": f"80(x{nodes})" if nodes > 1 else "80",
        "SLURM_TASKS_PER_NODE": f"1(x{nodes})" if nodes > 1 else "1",
        **extra,
    }


def slurm_batch(nodes: int, nodelist: str, **extra: str) -> Env:
    return slurm_job(nodes, nodelist, SLURM_PROCID="0", SLURM_NODEID="0", SLURM_LOCALID="0", **extra)


def slurm_step(nodelist: str, node: int, nodes: int, per_node: str = "", **extra: str) -> Env:
    return {
        **slurm_job(nodes, nodelist),
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": nodelist,
        "SLURM_STEP_TASKS_PER_NODE": per_node or (f"1(x{nodes})" if nodes > 1 else "1"),
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
        # 22.05 sets it in every step of a batch script; it is no sign of a heterogeneous job.
        "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0": "80",
        **extra,
    }


def pbs_task(node: int, **extra: str) -> Env:
    """A process that pbsdsh started, which has none of the script's exports."""
    return {"PBS_JOBID": "7.head", "PBS_NODENUM": str(node), "PBS_TASKNUM": f"{node + 2:08X}", **extra}


PBS_SCRIPT: Env = {
    "PBS_JOBID": "7.head",
    "PBS_NODENUM": "0",
    "PBS_TASKNUM": "1",
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_NODEFILE": "/var/spool/pbs/aux/7.head",
    "PBS_O_WORKDIR": "/home/me/run",
}
NODEFILE = files(nodefile="x9.cl\nx9.cl\nx10.cl\nx10.cl\n")


def pals(rank: int, size: int, local: int = 1, **extra: str) -> Env:
    """PALS passes the script's environment on."""
    return {
        **PBS_SCRIPT,
        "PALS_RANKID": str(rank),
        "PALS_NODEID": str(rank // local),
        "PALS_LOCAL_RANKID": str(rank % local),
        "PALS_LOCAL_SIZE": str(local),
        "PALS_APID": "c0de",
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        **extra,
    }


def openmpi(rank: int, size: int, local: int = 1, **extra: str) -> Env:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local),
        "OMPI_COMM_WORLD_NODE_RANK": "0",
        "PMIX_RANK": str(rank),
        "PMIX_NAMESPACE": "prterun-x9-77@1",
        **extra,
    }


def hydra(rank: int, size: int, local: int = 1, **extra: str) -> Env:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank % local),
        "MPI_LOCALNRANKS": str(local),
        **extra,
    }


def pod(rank: int, world: int, **extra: str) -> Env:
    """The environment of the first operators, which count pods."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        **extra,
    }


def later_pod(rank: int, pods: int, nproc: int) -> Env:
    """Later operators count processes in WORLD_SIZE and pods in PET_NNODES; PET_STANDALONE is empty."""
    pet = {"PET_NNODES": str(pods), "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": str(nproc)}
    return {**pod(rank, pods * nproc), **pet, "PET_STANDALONE": ""}


def trainer(rank: int, pods: int) -> Env:
    return {
        "PET_NNODES": str(pods),
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": "4",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29500",
    }


# environment, files -> scheduler, nnodes, node_rank, hosts, head, port, job_id
RIGHT: dict[str, tuple[Env, Callable[[str], str | None], tuple[Any, ...]]] = {
    "slurm step, 1 node": (slurm_step("n1", 0, 1), NOTHING, ("slurm", 1, 0, ("n1",), "", None, "7.3")),
    "slurm step, node 1 of 3": (
        slurm_step("n[9-10],a1", 1, 3, SLURMD_NODENAME="n10"),
        NOTHING,
        ("slurm", 3, 1, ("n9", "n10", "a1"), "n9", None, "7.3"),
    ),
    "slurm batch script, 1 node": (slurm_batch(1, "n1"), NOTHING, ("slurm", 1, 0, ("n1",), "", None, "7")),
    "slurm salloc's shell on the 1 node": (
        slurm_job(1, "n1"),
        files(hostname="n1.cl\n"),
        ("slurm", 1, 0, ("n1",), "", None, "7"),
    ),
    "slurm srun -N1 in a job of 4": (
        {**slurm_step("n3", 0, 1), **slurm_job(4, "n[1-4]")},
        NOTHING,
        ("slurm", 1, 0, ("n3",), "", None, "7.3"),
    ),
    "slurm with names on the fast network": (
        slurm_step("n[1-2]", 1, 2, IMGKIT_NODES="n1i,n2i"),
        NOTHING,
        ("slurm", 2, 1, ("n1i", "n2i"), "n1i", None, "7.3"),
    ),
    "pbs script, 1 node": (
        PBS_SCRIPT,
        files(nodefile="x9\nx9\n"),
        ("pbs", 1, 0, ("x9",), "", None, "7.head"),
    ),
    "pbs task, node 1 of 2, list handed in": (
        pbs_task(1, IMGKIT_NODES="x9,x10"),
        NOTHING,
        ("pbs", 2, 1, ("x9", "x10"), "x9", None, "7.head"),
    ),
    "pbs task, node 0 of 2, node file bound": (
        pbs_task(0, PBS_NODEFILE="/var/spool/pbs/aux/7.head"),
        NODEFILE,
        ("pbs", 2, 0, ("x9.cl", "x10.cl"), "x9.cl", None, "7.head"),
    ),
    "pals in pbs, 1 node": (
        pals(0, 1),
        files(nodefile="x9\n"),
        ("pals", 1, 0, ("x9",), "", None, "7.head.c0de"),
    ),
    "pals in pbs, node 1 of 2": (
        pals(1, 2),
        NODEFILE,
        ("pals", 2, 1, ("x9.cl", "x10.cl"), "x9.cl", None, "7.head.c0de"),
    ),
    "pals without any SIZE": (
        {**pals(1, 2, IMGKIT_NODES="x9,x10"), "PMI_SIZE": ""},
        NOTHING,
        ("pals", 2, 1, ("x9", "x10"), "x9", None, "7.head.c0de"),
    ),
    "pals with a list and nothing else that counts": (
        {"PALS_RANKID": "1", "PALS_NODEID": "1", "PALS_LOCAL_RANKID": "0", "IMGKIT_NODES": "a,b"},
        NOTHING,
        ("pals", 2, 1, ("a", "b"), "a", None, ""),
    ),
    "pals with PMIx in pbs": (
        {**pals(1, 2), "PMI_RANK": "", "PMI_SIZE": "", "PMIX_RANK": "1"},
        NODEFILE,
        ("pals", 2, 1, ("x9.cl", "x10.cl"), "x9.cl", None, "7.head.c0de"),
    ),
    "openmpi, 1 node": (openmpi(0, 1), NOTHING, ("openmpi", 1, 0, (), "", None, "prterun-x9-77@1")),
    "openmpi, node 1 of 2": (
        openmpi(1, 2, IMGKIT_HEAD="x9"),
        NOTHING,
        ("openmpi", 2, 1, (), "x9", None, "prterun-x9-77@1"),
    ),
    "openmpi with the guide's -x MASTER_ADDR": (
        openmpi(1, 2, MASTER_ADDR="104.171.200.62", MASTER_PORT="1234"),
        NOTHING,
        ("openmpi", 2, 1, (), "104.171.200.62", 1234, "prterun-x9-77@1"),
    ),
    "hydra, 1 node": (hydra(0, 1), NOTHING, ("hydra", 1, 0, (), "", None, "")),
    "hydra, node 1 of 2": (
        hydra(1, 2, IMGKIT_NODES="x9, x10"),
        NOTHING,
        ("hydra", 2, 1, ("x9", "x10"), "x9", None, ""),
    ),
    "runai, 1 pod": (pod(0, 1), NOTHING, ("kubeflow", 1, 0, (), "", None, "")),
    "runai, pod 1 of 3": (pod(1, 3), NOTHING, ("kubeflow", 3, 1, (), "job-master-0", 23456, "")),
    "later operator, pod 1 of 2 with 4 processes": (
        later_pod(1, 2, 4),
        NOTHING,
        ("kubeflow", 2, 1, (), "job-master-0", 23456, ""),
    ),
    "pod whose PET_ and plain numbers disagree": (
        {**later_pod(1, 2, 4), "RANK": "4"},
        NOTHING,
        ("kubeflow", 2, 1, (), "job-master-0", 23456, ""),
    ),
    "runai v2, pod 1 of 2 with 4 GPUs": (
        {"PET_NNODES": "2", **pod(1, 8), "RUNAI_NUM_OF_GPUS": "4"},
        NOTHING,
        ("kubeflow", 2, 1, (), "job-master-0", 23456, ""),
    ),
    "trainer v2, pod 1 of 2": (
        trainer(1, 2),
        NOTHING,
        ("kubeflow", 2, 1, (), "job-node-0-0.job", 29500, ""),
    ),
    "pods with an endpoint": (
        {"PET_NNODES": "3", "PET_RDZV_ENDPOINT": "job-worker-0:29400", "RANK": "1", "WORLD_SIZE": "3"},
        NOTHING,
        ("kubeflow", 3, 1, (), "job-worker-0", 29400, ""),
    ),
    "ssh to each of a list": (
        {"IMGKIT_NODES": "x9,x10"},
        files(hostname="x10\n"),
        ("manual", 2, 1, ("x9", "x10"), "x9", None, ""),
    ),
    "workstation": ({}, NOTHING, ("standalone", 1, 0, (), "", None, "")),
    "pod without an operator": (
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1"},
        NOTHING,
        ("standalone", 1, 0, (), "", None, ""),
    ),
    "pals inputs preset by the site": (
        {"PALS_PPN": "4", "PALS_CPU_BIND": "none", "PALS_DEPTH": "8"},
        NOTHING,
        ("standalone", 1, 0, (), "", None, ""),
    ),
    "ssh into a slurm node": ({"SLURM_JOB_ID": "7"}, NOTHING, ("standalone", 1, 0, (), "", None, "")),
}


@pytest.mark.parametrize("name", RIGHT)
def test_environment_yields_placement(name: str) -> None:
    env, read, expected = RIGHT[name]
    placement = placement_of(env, read)
    assert (
        placement.scheduler,
        placement.nnodes,
        placement.node_rank,
        placement.hosts,
        placement.head,
        placement.port,
        placement.job_id,
    ) == expected
    assert placement.direct is None


@pytest.mark.parametrize("name", RIGHT)
def test_every_source_is_a_variable_that_was_set(name: str) -> None:
    env, read, _ = RIGHT[name]
    for sources in placement_of(env, read).source.values():
        for source in sources.split(", "):
            assert source == "hostname" or env.get(source), source


@pytest.mark.parametrize("name", [name for name, row in RIGHT.items() if row[2][0] == "kubeflow"])
def test_local_rank_of_a_pod_changes_nothing(name: str) -> None:
    env, read, _ = RIGHT[name]
    assert placement_of({**env, "LOCAL_RANK": "0"}, read) == placement_of(env, read)


DIRECT: dict[str, tuple[Env, tuple[str, int, int], Direct]] = {
    "slurm, rank 3 of 2 x 2": (
        slurm_step("n[1-2]", 1, 2, "2(x2)", SLURM_PROCID="3", SLURM_LOCALID="1"),
        ("slurm", 2, 1),
        Direct(rank=3, local_rank=1, world_size=4, local_world_size=2),
    ),
    "slurm, the smaller of two nodes": (
        slurm_step("n[1-2]", 1, 2, "2,1", SLURM_PROCID="2"),
        ("slurm", 2, 1),
        Direct(rank=2, local_rank=0, world_size=3, local_world_size=1),
    ),
    "pals, rank 3 of 2 x 2": (
        pals(3, 4, 2, IMGKIT_NODES="x9,x10"),
        ("pals", 2, 1),
        Direct(rank=3, local_rank=1, world_size=4, local_world_size=2),
    ),
    "openmpi, the guide's mpirun -np 4 -H a:2,b:2": (
        openmpi(2, 4, 2, MASTER_ADDR="104.171.200.62", MASTER_PORT="1234"),
        ("openmpi", 2, 1),
        Direct(rank=2, local_rank=0, world_size=4, local_world_size=2),
    ),
    "openmpi, ranks dealt round the nodes": (
        {**openmpi(1, 4, 2, IMGKIT_HEAD="x9"), "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        ("openmpi", 2, 1),
        Direct(rank=1, local_rank=0, world_size=4, local_world_size=2),
    ),
    "hydra, 4 on this machine": (
        hydra(3, 4, 4),
        ("hydra", 1, 0),
        Direct(rank=3, local_rank=3, world_size=4, local_world_size=4),
    ),
}


@pytest.mark.parametrize("name", DIRECT)
def test_several_ranks_a_node_are_direct(name: str) -> None:
    env, where, expected = DIRECT[name]
    placement = placement_of(env)
    assert (placement.scheduler, placement.nnodes, placement.node_rank) == where
    assert placement.direct == expected


# environment, files -> words of the message, words of the command in the hint
WRONG: dict[str, tuple[Env, Callable[[str], str | None], str, str]] = {
    "slurm batch script of 2": (
        slurm_batch(2, "n[1-2]"),
        NOTHING,
        "the batch script, on 1 of the job's 2 nodes",
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=80 --kill-on-bad-exit=1 dist-run",
    ),
    "slurm batch script whose id looks like a step's": (
        slurm_batch(2, "n[1-2]", SLURM_STEP_ID="-5"),
        NOTHING,
        "the batch script",
        "srun --nodes=2",
    ),
    "slurm salloc on the login node": (
        slurm_job(2, "n[1-2]"),
        NOTHING,
        "salloc, outside the job of 2 nodes",
        "srun --nodes=2",
    ),
    "slurm salloc of 1 on the login node": (
        slurm_job(1, "n1"),
        files(hostname="login"),
        "runs on login, but the job's node is n1",
        "srun --nodes=1",
    ),
    "slurm salloc's interactive step": (
        {**slurm_step("n1", 0, 1, SLURM_STEP_ID="4294967290"), **slurm_job(2, "n[1-2]")},
        NOTHING,
        "salloc, on 1 of the job's 2 nodes",
        "srun --nodes=2",
    ),
    "slurm heterogeneous step": (
        slurm_step("n1", 0, 1, SLURM_JOB_NODELIST_HET_GROUP_0="n1", SLURM_JOB_NODELIST_HET_GROUP_1="n2"),
        NOTHING,
        "heterogeneous",
        "one component",
    ),
    "slurm heterogeneous salloc": (
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n2"},
        NOTHING,
        "heterogeneous",
        "one component",
    ),
    "slurm list of another length": (slurm_step("n[1-3]", 0, 2), NOTHING, "3 hosts", ""),
    "slurm list that is malformed": (slurm_step("n[1-2", 0, 2), NOTHING, r"\[ without \]", ""),
    "slurm without node number": (
        slurm_step("n[1-2]", 0, 2, SLURM_NODEID=""),
        NOTHING,
        "NODEID is not",
        "cleanenv",
    ),
    "slurm without list of nodes": (
        slurm_step("", 1, 2),
        NOTHING,
        "the step has 2 nodes, but SLURM_STEP_NODELIST, which lists them, is not set",
        "^start the container without --cleanenv, or give --head HOST: the host of node 0$",
    ),
    "slurm step of no nodes": (
        slurm_step("n1", 0, 1, SLURM_STEP_NUM_NODES="0"),
        NOTHING,
        "'0' is not a whole number of at least 1",
        "",
    ),
    "slurm node number too high": (
        slurm_step("n[1-2]", 2, 2),
        NOTHING,
        "SLURM_NODEID is 2, but the step has only nodes 0 to 1",
        "",
    ),
    "slurm task counts of another length": (
        slurm_step("n[1-2]", 0, 2, "2(x3)"),
        NOTHING,
        "SLURM_STEP_TASKS_PER_NODE has counts for 3 nodes, but the step has 2",
        "",
    ),
    "slurm environment of another task": (
        slurm_step("n[1-2]", 0, 2, SLURMD_NODENAME="n2"),
        NOTHING,
        "SLURM_NODEID=0 is n1 in .*, but this node is n2",
        "",
    ),
    "pbs script of 2": (
        PBS_SCRIPT,
        NODEFILE,
        r"2 hosts \(x9.cl, x10.cl\), but this is the job script's process",
        "mpiexec -n 2 --ppn 1 --cpu-bind none dist-run",
    ),
    "pbs script of 2, list handed in": (
        {**PBS_SCRIPT, "IMGKIT_NODES": "x9,x10"},
        NOTHING,
        "the job script's process",
        "pbsdsh -n",
    ),
    "pbs interactive shell of 2": (
        {**PBS_SCRIPT, "PBS_ENVIRONMENT": "PBS_INTERACTIVE"},
        NODEFILE,
        "the job script's process",
        "mpiexec -n 2",
    ),
    "pbs script without a visible list": (PBS_SCRIPT, NOTHING, "not visible here", r"awk '!seen\[\$0\]\+\+'"),
    "pbs task without a list": (pbs_task(1), NOTHING, "not visible here", "export IMGKIT_NODES"),
    "pbs task beyond the list": (pbs_task(2, IMGKIT_NODES="x9,x10"), NOTHING, "host 2 of the job", ""),
    "pbs list that was sorted": (
        pbs_task(0, IMGKIT_NODES="x10,x9"),
        files(hostname="x9\n"),
        "node 0 according to PBS_NODENUM, but x9 is host 1 of IMGKIT_NODES",
        "sort does not",
    ),
    "pals on 1 of 2": (
        pals(0, 1),
        NODEFILE,
        "started this on 1 node, but the job has 2",
        "mpiexec -n 2 --ppn 1 --cpu-bind none dist-run",
    ),
    "pals, several ranks on a node and none counted": (
        {"PALS_RANKID": "1", "PALS_NODEID": "0", "PALS_LOCAL_RANKID": "1", "IMGKIT_NODES": "a,b"},
        NOTHING,
        "ranks on this node is unknown: none of PALS_LOCAL_SIZE, PMI_LOCAL_SIZE, PMI_SIZE, PALS_SIZE is set",
        "without --cleanenv",
    ),
    "pals and no list": (
        {"PALS_RANKID": "1", "PALS_NODEID": "1", "PALS_LOCAL_RANKID": "0"},
        NOTHING,
        "PALS_RANKID=1, PALS_LOCAL_RANKID=0, PALS_NODEID=1.*number of nodes is unknown: none of PMI_SIZE, "
        "PALS_SIZE is set, and there is no host list",
        "--env IMGKIT_NODES=HOST,HOST",
    ),
    "pals on 2 of 3": (
        pals(0, 2, IMGKIT_NODES="a,b,c"),
        NOTHING,
        "started 2 nodes, but IMGKIT_NODES lists 3",
        "--env IMGKIT_NODES=",
    ),
    "openmpi without a head": (openmpi(0, 2), files(hostname="x9"), "host has rank 0", "-x IMGKIT_HEAD=x9"),
    "openmpi on 1 of 2": (
        openmpi(0, 1, IMGKIT_NODES="x9,x10"),
        NOTHING,
        "on 1 node, but the job has 2",
        "mpirun -np 2 --map-by ppr:1:node --bind-to none -x IMGKIT_NODES=x9,x10 dist-run",
    ),
    "openmpi with uneven nodes": (openmpi(0, 3, 2), NOTHING, "different numbers of ranks", "same number"),
    "hydra without a head": (hydra(1, 2), files(hostname="x10"), "host has rank 0", "-genv IMGKIT_HEAD HOST"),
    "hydra on 1 of 2": (
        hydra(0, 1, IMGKIT_NODES="x9,x10"),
        NOTHING,
        "on 1 node, but the job has 2",
        "mpiexec -n 2 -ppn 1 -bind-to none -genv IMGKIT_NODES x9,x10 dist-run",
    ),
    "hydra rank beyond the size": (
        hydra(2, 2, IMGKIT_HEAD="x9"),
        NOTHING,
        "rank 2, but the job has only ranks 0 to 1",
        "",
    ),
    "bare PMI": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, NOTHING, "number of nodes is unknown", "IMGKIT_NODES"),
    "pod beyond the number": (
        pod(3, 3),
        NOTHING,
        "pod 3, but WORLD_SIZE allows only pods 0 to 2",
        "--nnodes",
    ),
    "pods without a first one": (
        {"PET_NNODES": "2", "PET_NODE_RANK": "1"},
        NOTHING,
        "where the first one is",
        "--head",
    ),
    "pods with an odd number": (
        {**trainer(1, 2), "PET_NNODES": "two"},
        NOTHING,
        "'two' is not a whole number",
        "",
    ),
    "pods of an elastic job": (
        {"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "RANK": "1", "WORLD_SIZE": "3"},
        NOTHING,
        "the number of pods is a range",
        "leave elasticPolicy out",
    ),
    "list without this host": (
        {"IMGKIT_NODES": "x9,x10"},
        files(hostname="login"),
        "--node-rank RANK is missing",
        "--node-rank RANK",
    ),
    "rank of another launcher": (
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        NOTHING,
        "already one rank of several",
        "--direct",
    ),
    "first of several ranks on a node": (
        {**pod(0, 4), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        NOTHING,
        "already one rank of several",
        "--direct",
    ),
    "torchrun worker in a pod": (
        {**trainer(1, 2), "GROUP_RANK": "1", "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        NOTHING,
        "already a torchrun worker",
        "-u GROUP_RANK",
    ),
    "torchrun worker": (
        {"TORCHELASTIC_RUN_ID": "7", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
        NOTHING,
        "already a torchrun worker",
        "env -u TORCHELASTIC_RUN_ID",
    ),
    "lsf job of 2": (
        {"LSB_DJOB_HOSTFILE": "/var/spool/pbs/aux/7.head"},
        NODEFILE,
        "LSF job on 2 hosts",
        "--nnodes 2 --node-rank RANK --head x9.cl",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_start_is_refused_with_the_way_out(name: str) -> None:
    env, read, message, hint = WRONG[name]
    with pytest.raises(NoPlan, match=message) as caught:
        placement_of(env, read)
    assert caught.value.exit_code == 5
    assert re.search(hint, caught.value.hint or ""), caught.value.hint
