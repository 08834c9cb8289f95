"""A table of environments: every launcher with one node, with several, with a wrong start, and in pairs.

The environments of Slurm, Open MPI and Hydra are shortened real ones (Slurm 22.05, Open MPI 5.0, MPICH 5.0).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.schedulers import resolve
from imgkit_entrypoints.schedulers.placement import Placement, PlacementRequest

Env = dict[str, str]
Read = Callable[[str], str | None]


def files(**content: str) -> Read:
    """A reader of the host name and the node file only."""
    paths = {"hostname": "/proc/sys/kernel/hostname", "nodefile": "/var/spool/pbs/aux/7.head"}
    return {paths[name]: text for name, text in content.items()}.get


NOTHING = files()


def placement_of(
    env: Env, read: Read = NOTHING, head_suffix: str = "", scheduler: str | None = None
) -> Placement:
    return resolve.find_placement(PlacementRequest(scheduler=scheduler), env, read, head_suffix=head_suffix)


def test_suffix_is_for_the_head_of_slurms_list():
    env = slurm_step("jwb[0001-0002].juwels", 1, 2)
    placement = placement_of(env, head_suffix="i")
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
def test_suffix_changes_no_name_of_the_user(extra, nodes, head):
    env = slurm_step("n[1-2]" if nodes > 1 else "n1", 0, nodes) | extra
    assert placement_of(env, head_suffix="i").head == head


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


class Case(NamedTuple):
    env: Env
    expected: str
    """The placement in the form of `summary`, or a pattern for the message."""
    hint: str = ""
    read: Read = NOTHING


def summary(placement: Placement) -> str:
    """``slurm 1/3 hosts=n1,n2,n3 head=n1 job=7.3`` is node 1 of 3. A direct rank is added to it."""
    fields = {
        "hosts": ",".join(placement.hosts),
        "head": placement.head,
        "port": placement.port,
        "job": placement.job_id,
    }
    if placement.direct:
        ranks = placement.direct
        fields["rank"] = f"{ranks.rank}/{ranks.world_size}"
        fields["local"] = f"{ranks.local_rank}/{ranks.local_world_size}"
    texts = [f"{name}={value}" for name, value in fields.items() if value]
    return " ".join([f"{placement.scheduler} {placement.node_rank}/{placement.nnodes}", *texts])


RIGHT = {
    "slurm step, 1 node": Case(slurm_step("n1", 0, 1), "slurm 0/1 hosts=n1 job=7.3"),
    "slurm step, node 1 of 3": Case(
        slurm_step("n[9-10],a1", 1, 3, SLURMD_NODENAME="n10"), "slurm 1/3 hosts=n9,n10,a1 head=n9 job=7.3"
    ),
    "slurm batch script, 1 node": Case(slurm_batch(1, "n1"), "slurm 0/1 hosts=n1 job=7"),
    "slurm salloc's shell on the 1 node": Case(
        slurm_job(1, "n1"), "slurm 0/1 hosts=n1 job=7", read=files(hostname="n1.cl\n")
    ),
    "slurm srun -N1 in a job of 4": Case(
        {**slurm_step("n3", 0, 1), **slurm_job(4, "n[1-4]")}, "slurm 0/1 hosts=n3 job=7.3"
    ),
    "slurm with names on the fast network": Case(
        slurm_step("n[1-2]", 1, 2, IMGKIT_NODES="n1i,n2i"), "slurm 1/2 hosts=n1i,n2i head=n1i job=7.3"
    ),
    "pbs script, 1 node": Case(PBS_SCRIPT, "pbs 0/1 hosts=x9 job=7.head", read=files(nodefile="x9\nx9\n")),
    "pbs task, node 1 of 2, list handed in": Case(
        pbs_task(1, IMGKIT_NODES="x9,x10"), "pbs 1/2 hosts=x9,x10 head=x9 job=7.head"
    ),
    "pbs task, node 0 of 2, node file bound": Case(
        pbs_task(0, PBS_NODEFILE="/var/spool/pbs/aux/7.head"),
        "pbs 0/2 hosts=x9.cl,x10.cl head=x9.cl job=7.head",
        read=NODEFILE,
    ),
    "pals in pbs, 1 node": Case(pals(0, 1), "pals 0/1 hosts=x9 job=7.head.c0de", read=files(nodefile="x9\n")),
    "pals in pbs, node 1 of 2": Case(
        pals(1, 2), "pals 1/2 hosts=x9.cl,x10.cl head=x9.cl job=7.head.c0de", read=NODEFILE
    ),
    "pals without any SIZE": Case(
        {**pals(1, 2, IMGKIT_NODES="x9,x10"), "PMI_SIZE": ""}, "pals 1/2 hosts=x9,x10 head=x9 job=7.head.c0de"
    ),
    "pals with a list and nothing else that counts": Case(
        {"PALS_RANKID": "1", "PALS_NODEID": "1", "PALS_LOCAL_RANKID": "0", "IMGKIT_NODES": "a,b"},
        "pals 1/2 hosts=a,b head=a",
    ),
    "pals with PMIx in pbs": Case(
        {**pals(1, 2), "PMI_RANK": "", "PMI_SIZE": "", "PMIX_RANK": "1"},
        "pals 1/2 hosts=x9.cl,x10.cl head=x9.cl job=7.head.c0de",
        read=NODEFILE,
    ),
    "openmpi, 1 node": Case(openmpi(0, 1), "openmpi 0/1 job=prterun-x9-77@1"),
    "openmpi, node 1 of 2": Case(openmpi(1, 2, IMGKIT_HEAD="x9"), "openmpi 1/2 head=x9 job=prterun-x9-77@1"),
    "openmpi with the guide's -x MASTER_ADDR": Case(
        openmpi(1, 2, MASTER_ADDR="104.171.200.62", MASTER_PORT="1234"),
        "openmpi 1/2 head=104.171.200.62 port=1234 job=prterun-x9-77@1",
    ),
    "hydra, 1 node": Case(hydra(0, 1), "hydra 0/1"),
    "hydra, node 1 of 2": Case(hydra(1, 2, IMGKIT_NODES="x9, x10"), "hydra 1/2 hosts=x9,x10 head=x9"),
    "runai, 1 pod": Case(pod(0, 1), "kubeflow 0/1"),
    "runai, pod 1 of 3": Case(pod(1, 3), "kubeflow 1/3 head=job-master-0 port=23456"),
    "later operator, pod 1 of 2 with 4 processes": Case(
        later_pod(1, 2, 4), "kubeflow 1/2 head=job-master-0 port=23456"
    ),
    "pod whose PET_ and plain numbers disagree": Case(
        {**later_pod(1, 2, 4), "RANK": "4"}, "kubeflow 1/2 head=job-master-0 port=23456"
    ),
    "runai v2, pod 1 of 2 with 4 GPUs": Case(
        {"PET_NNODES": "2", **pod(1, 8), "RUNAI_NUM_OF_GPUS": "4"},
        "kubeflow 1/2 head=job-master-0 port=23456",
    ),
    "trainer v2, pod 1 of 2": Case(trainer(1, 2), "kubeflow 1/2 head=job-node-0-0.job port=29500"),
    "pods with an endpoint": Case(
        {"PET_NNODES": "3", "PET_RDZV_ENDPOINT": "job-worker-0:29400", "RANK": "1", "WORLD_SIZE": "3"},
        "kubeflow 1/3 head=job-worker-0 port=29400",
    ),
    "ssh to each of a list": Case(
        {"IMGKIT_NODES": "x9,x10"}, "manual 1/2 hosts=x9,x10 head=x9", read=files(hostname="x10\n")
    ),
    "workstation": Case({}, "standalone 0/1"),
    "pod without an operator": Case({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "standalone 0/1"),
    "pals inputs preset by the site": Case(
        {"PALS_PPN": "4", "PALS_CPU_BIND": "none", "PALS_DEPTH": "8"}, "standalone 0/1"
    ),
    "ssh into a slurm node": Case({"SLURM_JOB_ID": "7"}, "standalone 0/1"),
    "slurm, rank 3 of 2 x 2": Case(
        slurm_step("n[1-2]", 1, 2, "2(x2)", SLURM_PROCID="3", SLURM_LOCALID="1"),
        "slurm 1/2 hosts=n1,n2 head=n1 job=7.3 rank=3/4 local=1/2",
    ),
    "slurm, the smaller of two nodes": Case(
        slurm_step("n[1-2]", 1, 2, "2,1", SLURM_PROCID="2"),
        "slurm 1/2 hosts=n1,n2 head=n1 job=7.3 rank=2/3 local=0/1",
    ),
    "pals, rank 3 of 2 x 2": Case(
        pals(3, 4, 2, IMGKIT_NODES="x9,x10"),
        "pals 1/2 hosts=x9,x10 head=x9 job=7.head.c0de rank=3/4 local=1/2",
    ),
    "openmpi, the guide's mpirun -np 4 -H a:2,b:2": Case(
        openmpi(2, 4, 2, MASTER_ADDR="104.171.200.62", MASTER_PORT="1234"),
        "openmpi 1/2 head=104.171.200.62 port=1234 job=prterun-x9-77@1 rank=2/4 local=0/2",
    ),
    "openmpi, ranks dealt round the nodes": Case(
        {**openmpi(1, 4, 2, IMGKIT_HEAD="x9"), "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        "openmpi 1/2 head=x9 job=prterun-x9-77@1 rank=1/4 local=0/2",
    ),
    "openmpi, a rank that both orders of placement have": Case(
        openmpi(3, 6, 2, IMGKIT_HEAD="x9"),
        "openmpi 1/3 head=x9 job=prterun-x9-77@1 rank=3/6 local=1/2",
    ),
    "hydra, 4 on this machine": Case(hydra(3, 4, 4), "hydra 0/1 rank=3/4 local=3/4"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_environment_yields_placement(name):
    case = RIGHT[name]
    placement = placement_of(case.env, case.read)
    assert summary(placement) == case.expected
    for sources in placement.source.values():
        for source in sources.split(", "):
            assert source == "hostname" or case.env.get(source), source


@pytest.mark.parametrize("name", [name for name, case in RIGHT.items() if "kubeflow" in case.expected])
def test_local_rank_of_a_pod_changes_nothing(name):
    env = RIGHT[name].env
    assert placement_of({**env, "LOCAL_RANK": "0"}) == placement_of(env)


WRONG = {
    "slurm batch script of 2": Case(
        slurm_batch(2, "n[1-2]"),
        "the batch script, on 1 of the job's 2 nodes",
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=80 --kill-on-bad-exit=1 dist-run",
    ),
    "slurm batch script whose id looks like a step's": Case(
        slurm_batch(2, "n[1-2]", SLURM_STEP_ID="-5"), "the batch script", "srun --nodes=2"
    ),
    "slurm salloc on the login node": Case(
        slurm_job(2, "n[1-2]"), "salloc, outside the job of 2 nodes", "srun --nodes=2"
    ),
    "slurm salloc of 1 on the login node": Case(
        slurm_job(1, "n1"),
        "runs on login, but the job's node is n1",
        "srun --nodes=1",
        read=files(hostname="login"),
    ),
    "slurm salloc's interactive step": Case(
        {**slurm_step("n1", 0, 1, SLURM_STEP_ID="4294967290"), **slurm_job(2, "n[1-2]")},
        "salloc, on 1 of the job's 2 nodes",
        "srun --nodes=2",
    ),
    "slurm heterogeneous step": Case(
        slurm_step("n1", 0, 1, SLURM_JOB_NODELIST_HET_GROUP_0="n1", SLURM_JOB_NODELIST_HET_GROUP_1="n2"),
        "heterogeneous",
        "one component",
    ),
    "slurm heterogeneous salloc": Case(
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n2"},
        "heterogeneous",
        "one component",
    ),
    "slurm list of another length": Case(slurm_step("n[1-3]", 0, 2), "3 hosts"),
    "slurm list that is malformed": Case(slurm_step("n[1-2", 0, 2), r"\[ without \]"),
    "slurm without node number": Case(
        slurm_step("n[1-2]", 0, 2, SLURM_NODEID=""), "NODEID is not", "cleanenv"
    ),
    "slurm without list of nodes": Case(
        slurm_step("", 1, 2),
        "the step has 2 nodes, but SLURM_STEP_NODELIST, which lists them, is not set",
        "^start the container without --cleanenv, or give --head HOST: the host of node 0$",
    ),
    "slurm step of no nodes": Case(
        slurm_step("n1", 0, 1, SLURM_STEP_NUM_NODES="0"), "'0' is not a whole number of at least 1"
    ),
    "slurm node number too high": Case(
        slurm_step("n[1-2]", 2, 2), "SLURM_NODEID is 2, but the step has only nodes 0 to 1"
    ),
    "slurm task counts of another length": Case(
        slurm_step("n[1-2]", 0, 2, "2(x3)"),
        "SLURM_STEP_TASKS_PER_NODE has counts for 3 nodes, but the step has 2",
    ),
    "slurm environment of another task": Case(
        slurm_step("n[1-2]", 0, 2, SLURMD_NODENAME="n2"), "SLURM_NODEID=0 is n1 in .*, but this node is n2"
    ),
    "pbs script of 2": Case(
        PBS_SCRIPT,
        r"2 hosts \(x9.cl, x10.cl\), but this is the job script's process",
        "mpiexec -n 2 --ppn 1 --cpu-bind none dist-run",
        read=NODEFILE,
    ),
    "pbs script of 2, list handed in": Case(
        {**PBS_SCRIPT, "IMGKIT_NODES": "x9,x10"}, "the job script's process", "pbsdsh -n"
    ),
    "pbs interactive shell of 2": Case(
        {**PBS_SCRIPT, "PBS_ENVIRONMENT": "PBS_INTERACTIVE"},
        "the job script's process",
        "mpiexec -n 2",
        read=NODEFILE,
    ),
    "pbs script without a visible list": Case(PBS_SCRIPT, "not visible here", r"awk '!seen\[\$0\]\+\+'"),
    "pbs task without a list": Case(pbs_task(1), "not visible here", "export IMGKIT_NODES"),
    "pbs task beyond the list": Case(pbs_task(2, IMGKIT_NODES="x9,x10"), "host 2 of the job"),
    "pbs list that was sorted": Case(
        pbs_task(0, IMGKIT_NODES="x10,x9"),
        "node 0 according to PBS_NODENUM, but x9 is host 1 of IMGKIT_NODES",
        "sort does not",
        read=files(hostname="x9\n"),
    ),
    "pals on 1 of 2": Case(
        pals(0, 1),
        "started this on 1 node, but the job has 2",
        "mpiexec -n 2 --ppn 1 --cpu-bind none dist-run",
        read=NODEFILE,
    ),
    "pals, several ranks on a node and none counted": Case(
        {"PALS_RANKID": "1", "PALS_NODEID": "0", "PALS_LOCAL_RANKID": "1", "IMGKIT_NODES": "a,b"},
        "ranks on this node is unknown: none of PALS_LOCAL_SIZE, PMI_LOCAL_SIZE, PMI_SIZE, PALS_SIZE is set",
        "without --cleanenv",
    ),
    "pals and no list": Case(
        {"PALS_RANKID": "1", "PALS_NODEID": "1", "PALS_LOCAL_RANKID": "0"},
        "PALS_RANKID=1, PALS_LOCAL_RANKID=0, PALS_NODEID=1.*number of nodes is unknown: none of PMI_SIZE, "
        "PALS_SIZE is set, and there is no host list",
        "--env IMGKIT_NODES=HOST,HOST",
    ),
    "pals on 2 of 3": Case(
        pals(0, 2, IMGKIT_NODES="a,b,c"), "started 2 nodes, but IMGKIT_NODES lists 3", "--env IMGKIT_NODES="
    ),
    "openmpi without a head": Case(
        openmpi(0, 2), "host has rank 0", "-x IMGKIT_HEAD=x9", read=files(hostname="x9")
    ),
    "openmpi on 1 of 2": Case(
        openmpi(0, 1, IMGKIT_NODES="x9,x10"),
        "on 1 node, but the job has 2",
        "mpirun -np 2 --map-by ppr:1:node --bind-to none -x IMGKIT_NODES=x9,x10 dist-run",
    ),
    "openmpi with uneven nodes": Case(openmpi(0, 3, 2), "different numbers of ranks", "same number"),
    "hydra without a head": Case(
        hydra(1, 2), "host has rank 0", "-genv IMGKIT_HEAD HOST", read=files(hostname="x10")
    ),
    "hydra on 1 of 2": Case(
        hydra(0, 1, IMGKIT_NODES="x9,x10"),
        "on 1 node, but the job has 2",
        "mpiexec -n 2 -ppn 1 -bind-to none -genv IMGKIT_NODES x9,x10 dist-run",
    ),
    "hydra rank beyond the size": Case(
        hydra(2, 2, IMGKIT_HEAD="x9"), "rank 2, but the job has only ranks 0 to 1"
    ),
    "bare PMI": Case({"PMI_RANK": "0", "PMI_SIZE": "2"}, "number of nodes is unknown", "IMGKIT_NODES"),
    "pod beyond the number": Case(pod(3, 3), "pod 3, but WORLD_SIZE allows only pods 0 to 2", "--nnodes"),
    "pods without a first one": Case(
        {"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "where the first one is", "--head"
    ),
    "pods with an odd number": Case({**trainer(1, 2), "PET_NNODES": "two"}, "'two' is not a whole number"),
    "pods of an elastic job": Case(
        {"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "RANK": "1", "WORLD_SIZE": "3"},
        "the number of pods is a range",
        "leave elasticPolicy out",
    ),
    "list without this host": Case(
        {"IMGKIT_NODES": "x9,x10"},
        "--node-rank RANK is missing",
        "--node-rank RANK",
        read=files(hostname="login"),
    ),
    "rank of another launcher": Case(
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        "already one rank of several",
        "--direct",
    ),
    "first of several ranks on a node": Case(
        {**pod(0, 4), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "already one rank of several", "--direct"
    ),
    "torchrun worker in a pod": Case(
        {**trainer(1, 2), "GROUP_RANK": "1", "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        "already a torchrun worker",
        "-u GROUP_RANK",
    ),
    "torchrun worker": Case(
        {"TORCHELASTIC_RUN_ID": "7", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
        "already a torchrun worker",
        "env -u TORCHELASTIC_RUN_ID",
    ),
    "lsf job of 2": Case(
        {"LSB_DJOB_HOSTFILE": "/var/spool/pbs/aux/7.head"},
        "LSF job on 2 hosts",
        "--nnodes 2 --node-rank RANK --head x9.cl",
        read=NODEFILE,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_start_is_refused_with_the_way_out(name):
    case = WRONG[name]
    with pytest.raises(NoPlan, match=case.expected) as caught:
        placement_of(case.env, case.read)
    assert caught.value.exit_code == 5
    assert re.search(case.hint, caught.value.hint or ""), caught.value.hint


def pick(env: Env, prefix: str, names: str) -> Env:
    return {f"{prefix}_{name}": env[f"{prefix}_{name}"] for name in names.split()}


MPI = "WORLD_RANK WORLD_SIZE WORLD_LOCAL_RANK WORLD_LOCAL_SIZE"
LAUNCHERS: dict[str, Env] = {
    "slurm": pick(slurm_step("n[1-2]", 1, 2), "SLURM", "JOB_ID STEP_ID STEP_NUM_NODES STEP_NODELIST NODEID"),
    "pals": pick(pals(1, 2), "PALS", "RANKID NODEID LOCAL_SIZE") | pick(pals(1, 2), "PMI", "RANK SIZE"),
    "pbs": pbs_task(1),
    "openmpi": pick(openmpi(1, 2), "OMPI_COMM", MPI),
    "hydra": hydra(1, 2),
    "kubeflow": pick(trainer(1, 2), "PET", "NNODES NODE_RANK MASTER_ADDR MASTER_PORT"),
}
"""The fewest variables that each launcher sets, on node 1 of 2."""
# mpiexec is the right way to start inside a PBS job, so it decides.
INSIDE = {("pals", "pbs"), ("pbs", "openmpi"), ("pbs", "hydra")}
LIST = {"IMGKIT_NODES": "n1,n2"}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_one_launcher_alone_decides(name):
    assert placement_of(LIST | LAUNCHERS[name]).scheduler == name


@pytest.mark.parametrize("pair", list(itertools.combinations(LAUNCHERS, 2)), ids="+".join)
def test_pairs_are_decided_or_refused(pair):
    env = LIST | LAUNCHERS[pair[0]] | LAUNCHERS[pair[1]]
    if pair in INSIDE:
        assert placement_of(env).scheduler == next(name for name in pair if name != "pbs")
    elif pair == ("slurm", "pals"):  # Slurm's Cray plugin sets PALS_ and PMI_, so they show no other launcher
        assert placement_of(env).scheduler == "slurm"
    else:
        with pytest.raises(NoPlan) as caught:
            placement_of(env)
        assert all(name in caught.value.what for name in pair)
        assert all(f"--scheduler {name}" in (caught.value.hint or "") for name in pair)


@pytest.mark.parametrize("pair", list(itertools.permutations(LAUNCHERS, 2)), ids="+".join)
def test_the_flag_decides_any_pair(pair):
    env = LIST | LAUNCHERS[pair[1]] | LAUNCHERS[pair[0]]
    assert placement_of(env, scheduler=pair[0]).scheduler == pair[0]


@pytest.mark.parametrize(
    "others",
    [
        {"PMI_RANK": "1", "PMI_SIZE": "2", "PMIX_RANK": "1"},  # srun's PMI
        # pyxis sets RANK and LOCAL_RANK for an image with PYTORCH_VERSION, and enroot's hook the others.
        {
            **{"MASTER_ADDR": "n9", "MASTER_PORT": "1", "WORLD_SIZE": "16", "RANK": "8", "LOCAL_RANK": "0"},
            "PYTORCH_VERSION": "2.5.1",
        },
    ],
    ids=["pmi", "pyxis"],
)
def test_variables_of_others_change_nothing_in_a_step(others):
    assert placement_of(LAUNCHERS["slurm"] | others) == placement_of(LAUNCHERS["slurm"])


@pytest.mark.parametrize("name", [name for name in LAUNCHERS if name != "kubeflow"])
def test_exported_torch_variables_are_no_launcher(name):
    """Many job scripts export them, and Slurm itself may run in pods."""
    assert placement_of(LIST | LAUNCHERS[name] | pod(0, 8)).scheduler == name


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        *(("runai", "kubeflow"), ("kubernetes", "kubeflow")),
        *(("mpi", "openmpi"), ("mpi", "hydra"), ("mpi", "pals")),
    ],
)
def test_names_of_recipes_are_understood(name, launcher):
    assert placement_of(LIST | LAUNCHERS[launcher], scheduler=name).scheduler == launcher


def test_standalone_starts_alone_in_a_step():
    assert summary(placement_of(LAUNCHERS["slurm"], scheduler="standalone")) == "standalone 0/1"


@pytest.mark.parametrize("scheduler", [None, "slurm", "standalone"])
def test_nesting_is_refused_whatever_the_flag(scheduler):
    with pytest.raises(NoPlan, match="already a torchrun worker"):
        placement_of(LAUNCHERS["slurm"] | {"TORCHELASTIC_RUN_ID": "7"}, scheduler=scheduler)
