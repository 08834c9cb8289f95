"""The decision about a launch, as a pure function of what was found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from imgkit_entrypoints.cli.commands import TORCHRUN
from imgkit_entrypoints.errors import NoPlan
from imgkit_entrypoints.facts import HostFacts, compute
from imgkit_entrypoints.known_issues import KnownIssue
from imgkit_entrypoints.launch import plan
from imgkit_entrypoints.launch.plan import (
    NNODES_PENDING,
    NODE_RANK_PENDING,
    PORT_PENDING,
    Request,
    StartMessages,
)
from imgkit_entrypoints.rollcall.messages import AttemptStart
from imgkit_entrypoints.schedulers.placement import Direct, Placement, Size
from imgkit_entrypoints.system import Fabric, Node, SystemFacts

WORKER = ("python3", "-m", "program")
REFUSED = SystemFacts(
    known_issues=(
        KnownIssue(
            id="site-x", message="X gives wrong sums", hint="use Y", when=("gpus >= 0",), effect="refuse"
        ),
    )
)


def host(gpus: int) -> HostFacts:
    source = f"{gpus} device files"
    return HostFacts(hostname="n1", arch="x86_64", python="3.11.2", cpus=8, gpus=gpus, gpus_source=source)


def node(nnodes: int = 1, node_rank: int = 0, **changes: object) -> Placement:
    values: dict[str, object] = {
        "scheduler": "slurm" if nnodes > 1 else "standalone",
        "hosts": tuple(f"n{rank}" for rank in range(nnodes)),
        "head": "n0" if nnodes > 1 else "",
        "port": None,
        "job_id": "7",
        "source": {},
        **changes,
    }
    return Placement(nnodes=nnodes, node_rank=node_rank, **values)  # type: ignore[arg-type]


def make(
    env: dict[str, str] | None = None,
    *,
    gpus: int = 0,
    system: SystemFacts | None = None,
    placement: Placement | None = None,
    facts: Mapping[str, object] | None = None,
    **request: object,
) -> plan.LaunchPlan:
    return plan.decide_launch(
        Request(**request),  # type: ignore[arg-type]
        WORKER,
        torchrun=TORCHRUN,
        placement=placement or node(),
        host=replace(host(gpus), **(facts or {})),
        system=system,
        env=env or {},
    )


def flag(launch_plan: plan.LaunchPlan, name: str) -> str:
    return launch_plan.argv[launch_plan.argv.index(name) + 1]


SPARE = Size(training=2, spares=2)
ALONE = Size(training=1, spares=3)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"gpus": 4, "system": SystemFacts(node=Node(gpus=4))}, {"nproc-per-node": "4"}),
        ({}, {"nproc-per-node": "1", "master-addr": "127.0.0.1", "rdzv-backend": "static"}),
        ({"log_dir": "/logs"}, {"log-dir": "/logs/n1"}),
        (
            {"placement": node(2, 1), "log_dir": "/logs"},
            {"nnodes": "2", "node-rank": "1", "master-addr": "n0", "master-port": PORT_PENDING,
             "rdzv-backend": "static", "log-dir": "/logs/n1"},
        ),
        (
            {"placement": node(4, 3, size=SPARE)},
            {"nnodes": NNODES_PENDING, "node-rank": NODE_RANK_PENDING, "master-addr": "n0",
             "rdzv-backend": "static", "max-restarts": "0"},
        ),
        ({"placement": node(size=ALONE)}, {"nnodes": "1", "node-rank": "0"}),
    ],
    ids=["GPUs", "processors", "logs", "two nodes", "spares are numbered in the roll call", "absent spares"],
)  # fmt: skip
def test_flags_of_torchrun(options, flags):
    launch_plan = make(**options)
    assert {name: flag(launch_plan, f"--{name}") for name in flags} == flags
    assert launch_plan.env["IMGKIT_DEVICE"] == ("cuda" if "gpus" in options else "cpu")
    assert "--standalone" not in launch_plan.argv  # its rendezvous unpickles
    assert launch_plan.argv[-len(WORKER) :] == WORKER


def test_command_per_node_replaces_torchrun():
    env = {"RANK": "3", "WORLD_SIZE": "8", "PET_NNODES": "2"}
    options = {"is_per_node": True, "worker_args": ("--headless",)}
    head, other = (make(env, placement=node(2, rank), **options) for rank in range(2))
    assert head.argv == WORKER
    assert other.argv == (*WORKER, "--headless")
    assert head.mode == "per-node"
    assert {*head.unset} >= {*env}


PBS = {"PBS_JOBID": "7"}


@pytest.mark.parametrize(
    ("env", "threads"),
    [
        ({}, "2"),
        ({"OMP_NUM_THREADS": "7"}, None),
        ({"OMP_NUM_THREADS": "288", "NCPUS": "288", **PBS}, "2"),
        ({"OMP_NUM_THREADS": "288", "NCPUS": "288"}, None),
        ({"OMP_NUM_THREADS": "8", **PBS}, "2"),
        ({"OMP_NUM_THREADS": "8"}, None),
    ],
    ids=["shared", "of the user", "through mpiexec", "no mpiexec", "task of pbsdsh", "no pbsdsh"],
)
def test_threads_are_shared_between_workers(env, threads):
    assert make(env, nproc="4").env.get("OMP_NUM_THREADS") == threads


def test_recipe_environment_fills_gaps_only():
    system = SystemFacts(env={"NCCL_CROSS_NIC": "1", "MY_SETTING": "PHB"})
    launch_plan = make({"NCCL_CROSS_NIC": "0"}, system=system)
    assert launch_plan.env["MY_SETTING"] == "PHB"
    assert "NCCL_CROSS_NIC" not in launch_plan.env
    assert any(
        decision.variable == "NCCL_CROSS_NIC" and "set by the user" in decision.reason
        for decision in launch_plan.decisions
    )


def with_image(env, image, **options):
    return make(env, nproc="4", facts={"image_env": image}, **options)


def test_threads_of_the_image_are_replaced():
    env = {"OMP_NUM_THREADS": "1"}
    launch_plan = with_image(env, env)
    assert launch_plan.env["OMP_NUM_THREADS"] == "2"
    (decision,) = (item for item in launch_plan.decisions if item.variable == "OMP_NUM_THREADS")
    assert decision.reason == "8 processors allowed / 4 processes; replaces the image's '1'"
    assert "OMP_NUM_THREADS" not in with_image(env, {"PATH": "/bin"}).env


@pytest.mark.parametrize("env", [{}, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "5"}])
def test_threads_of_the_recipe_are_kept(env):
    launch_plan = with_image(env, {"OMP_NUM_THREADS": "1"}, system=SystemFacts(env={"OMP_NUM_THREADS": "5"}))
    assert launch_plan.env["OMP_NUM_THREADS"] == "5"
    assert [item.origin for item in launch_plan.decisions if item.variable == "OMP_NUM_THREADS"] == ["recipe"]


def test_unknown_image_is_in_the_plan_where_it_matters():
    env = {"OMP_NUM_THREADS": "1"}
    (row,) = (line for line in with_image(env, None).lines() if line.startswith("image "))
    assert row.split()[1] == "unknown"
    assert "they count as set by the user" in row
    assert not any(line.startswith("image ") for line in with_image({}, None).lines())
    launch_plan = with_image(env, {"PATH": "/bin"})
    assert not any(line.startswith("image ") for line in launch_plan.lines())
    assert launch_plan.to_dict()["image"] == ""


def test_ranks_of_an_mpi_start_need_no_torchrun():
    direct = Direct(rank=5, local_rank=1, world_size=8, local_world_size=4)
    launch_plan = make(placement=node(2, 1, direct=direct))
    assert launch_plan.mode == "direct"
    assert launch_plan.argv == WORKER
    env = launch_plan.env
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == ("5", "1", "8")
    assert env["MASTER_ADDR"] == "n0"


@pytest.mark.parametrize(
    ("torch", "has"),
    [("2.13.0+cpu", True), ("2.12.0", True), ("2.3.0a0+40ec155e58.nv24.3", False), ("", False)],
)
def test_flags_follow_the_version_of_torch(torch, has):
    assert ("--shutdown-timeout" in make(facts={"torch_version": torch}).argv) == has


def test_operator_variables_are_kept_from_torchrun():
    launch_plan = make({"PET_STANDALONE": "", "PET_NNODES": "1"})
    assert launch_plan.unset == ("PET_NNODES", "PET_STANDALONE")


@pytest.mark.parametrize(
    ("text", "gpus", "nproc", "reason"),
    [
        ("4", 0, 4, "PET_NPROC_PER_NODE"),
        ("2", 4, 2, "PET_NPROC_PER_NODE"),
        ("auto", 4, 4, "one per GPU"),
        ("auto", 0, 8, "one per processor allowed"),
        ("gpu", 4, 4, "one per GPU"),
        ("cpu", 0, 8, "one per processor allowed"),
        ("", 0, 1, "no GPU: one"),
    ],
)
def test_operator_s_number_of_processes_counts(text, gpus, nproc, reason):
    launch_plan = make({"PET_NPROC_PER_NODE": text}, gpus=gpus)
    assert flag(launch_plan, "--nproc-per-node") == str(nproc)
    (decision,) = (item for item in launch_plan.decisions if item.variable == "nproc")
    assert reason in decision.reason
    assert launch_plan.messages.warnings == ()


def test_operator_s_number_that_is_not_used_is_told():
    env = {"PET_NPROC_PER_NODE": "4"}
    launch_plan = make(env, nproc="2")
    assert launch_plan.nproc == 2
    (warning,) = launch_plan.messages.warnings
    assert warning == "PET_NPROC_PER_NODE=4 is not used: --nproc takes precedence, 2 on this node"
    direct = Direct(rank=0, local_rank=0, world_size=1, local_world_size=1)
    (warning,) = make(env, placement=node(direct=direct)).messages.warnings
    assert warning.startswith("PET_NPROC_PER_NODE=4 is not used: standalone")
    assert make(env, nproc="4").messages.warnings == ()
    assert make({"PET_NPROC_PER_NODE": "four"}, nproc="2").nproc == 2


def test_processors_can_be_chosen_where_the_system_has_gpus():
    system = SystemFacts(node=Node(gpus=4, gpu_model="NVIDIA H100"))
    launch_plan = make(system=system, nproc="2", device="cpu")
    assert (launch_plan.nproc, launch_plan.env["IMGKIT_DEVICE"]) == (2, "cpu")


@pytest.mark.parametrize("name", ["IMGKIT_GPUS", "SLURM_GPUS_ON_NODE"])
def test_gpus_of_the_job_are_expected_where_no_image_states_them(name):
    assert make({name: "4"}, gpus=4).nproc == 4
    assert make({name: "4"}, device="cpu").nproc == 1
    assert make({name: "0"}).nproc == 1


def test_gpus_of_another_maker_are_named_with_what_helps():
    source = f"/dev: no nvidia device; /dev: kfd; {compute.ONLY_NVIDIA}"
    with pytest.raises(NoPlan, match="/dev: kfd") as caught:
        make(system=SystemFacts(node=Node(gpus=8)), facts={"gpus_source": source})
    assert "on nodes with NVIDIA GPUs; a container with --rocm does not help" in str(caught.value.hint)
    assert "--device cpu" in str(caught.value.hint)


def test_processors_need_no_network_of_the_system():
    system = SystemFacts(node=Node(gpus=1), fabric=Fabric(kind="infiniband"))
    assert make(device="cpu", placement=node(2), system=system).env["IMGKIT_DEVICE"] == "cpu"


def test_network_is_announced_only_where_it_is_used():
    system = SystemFacts(node=Node(), fabric=Fabric(kind="infiniband"))
    laptop = make(system=system)
    assert laptop.env["NCCL_IB_DISABLE"] == "1"
    assert list(laptop.announcements(verbose=False)) == ["1 node, 1 process, cpu (to see why: -v)"]
    for plan_with_network in (make(placement=node(2), system=system), make(gpus=1, system=system)):
        _, warning = plan_with_network.announcements(verbose=False)
        assert "the recipe says infiniband" in warning
        reasons = list(plan_with_network.announcements(verbose=True))
        assert any(line.startswith("NCCL_IB_DISABLE=1") for line in reasons)


def test_at_most_three_lines_are_announced():
    launch_plan = replace(
        make(placement=node(2), nproc="4"), messages=StartMessages(warnings=("a", "b", "c"))
    )
    assert list(launch_plan.announcements(verbose=False)) == [
        "2 nodes, 4 processes on each, cpu (to see why: -v)",
        "warning: a",
        "2 more warnings (to see them: -v)",
    ]
    assert list(launch_plan.announcements(verbose=True))[-3:] == ["a", "b", "c"]


def test_hidden_note_is_shown_on_request():
    launch_plan = replace(make(), messages=StartMessages(notes=("a", "b"), hidden=frozenset("a")))
    assert list(launch_plan.announcements(verbose=False))[1:] == ["b"]
    assert list(launch_plan.announcements(verbose=True))[1:3] == ["a", "b"]
    assert [line for line in launch_plan.lines() if line.startswith("note: ")] == ["note: a", "note: b"]


def test_spares_and_failures_are_in_the_plan():
    launch_plan = make(placement=node(3, size=Size.parse("2+1")))
    document = json.loads(json.dumps(launch_plan.to_dict()))
    assert document["schema"] == 1
    assert document["placement"]["size"] == {"training": 2, "spares": 1}
    assert document["max_failures"] == 3
    assert make(placement=node(3)).max_failures == 0
    assert make(placement=node(3), max_failures=2).max_failures == 2
    assert launch_plan.messages.warnings == ()


@pytest.mark.parametrize("scheduler", ["pbs", "pals", "openmpi", "hydra"])
def test_spare_that_waits_in_vain_is_a_warning(scheduler):
    (warning,) = make(placement=node(3, size=Size.parse("2+1"), scheduler=scheduler)).messages.warnings
    assert warning.startswith(f"{scheduler} ends all processes when one node is lost")


@pytest.mark.parametrize(
    ("host", "label"), [("../a b", "_a_b"), ("..", "node"), ("", "node"), ("a1.site", "a1.site")]
)
def test_host_name_cannot_lead_out_of_the_log_folder(host, label):
    assert plan.host_label(host) == label


def test_attempts_have_log_folders_of_their_own():
    launch_plan = make(log_dir="/logs", max_failures=1)
    order = AttemptStart(attempt=2, nnodes=1, node_rank=None, port=1)
    argv = plan.fill_markers(launch_plan.argv, order, 0, Path("/tmp"))
    assert argv[argv.index("--log-dir") + 1] == "/logs/n1/attempt2"


@pytest.mark.parametrize("nnodes", [1, 2])
def test_known_issue_that_refuses_lets_processors_start(nnodes):
    assert make(gpus=4, system=REFUSED, placement=node(nnodes), device="cpu").argv


RANKED = Direct(rank=2, local_rank=0, world_size=4, local_world_size=1)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"direct": RANKED}, "spares have no effect without torchrun"),
        ({"scheduler": "pbs"}, "pbs ends all processes when one node is lost, so a spare can only replace"),
        ({}, ""),
        ({"scheduler": "pbs", "size": None}, ""),
    ],
    ids=["own ranks", "all end together", "a scheduler that keeps the others", "no spares"],
)
def test_spares_that_cannot_replace_a_node_are_warned_of(changes, warning):
    placement = node(4, 2, **{"size": SPARE, **changes})
    spare_warnings = [text for text in make(placement=placement).messages.warnings if "spare" in text]
    assert len(spare_warnings) == bool(warning)
    assert all(text.startswith(warning) for text in spare_warnings)


def test_dry_run_names_the_hosts():
    rows = [line.split() for line in make(placement=node(2, 1)).lines()]
    assert ["hosts", "n0,n1"] in rows
    assert ["head", "n0"] in rows
    assert ["node_rank", "0", "the", "only", "node"] in [line.split() for line in make().lines()]
