"""Pods, for real: what ``imgkit run rcp`` writes, started on nodes as the operators start it.

An operator gives each pod the document's command and variables, and variables of its own (envvar.go in
kubeflow/training-operator pkg/controller.v1/pytorch; Trainer v2's torch plugin). Pods share no list of hosts,
only the name of the first one, which resolves once that one is ready.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from labkit import IMGKIT, Cluster, cluster_marks, output, until

PORT = "23456"
SAY_WORLD = """
import os, time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
print(f"world {dist.get_world_size()}", flush=True)
asked = torch.zeros(1)
while not asked.item():
    time.sleep(0.1)
    asked.fill_(Path(os.environ["END"]).exists())
    dist.all_reduce(asked, dist.ReduceOp.MAX)
print(f"ended with {dist.get_world_size()}", flush=True)
dist.destroy_process_group()
"""

pytestmark = [*cluster_marks, pytest.mark.xdist_group("pods")]


@dataclass(frozen=True, kw_only=True)
class Pods(Cluster):
    """Nodes that pods run on, and those that were started."""

    sif: Path
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def volume(self):
        """What the pods keep: the place of their persistent volume."""
        return self.state / "volume"

    @property
    def secret(self):
        """A folder as a mounted Secret: links, and a file that the pod's group may read."""
        return self.state / "kubelet"

    def mount_secret(self):
        """Make that folder."""
        (self.secret / "..2026").mkdir(parents=True)
        (self.secret / "..2026/secret").write_bytes(bytes(range(32)))
        (self.secret / "..2026/secret").chmod(0o440)
        (self.secret / "..data").symlink_to("..2026")
        (self.secret / "secret").symlink_to("..data/secret")

    def resolve(self, name):
        """Make `name` resolve to node1 on every node."""
        for node in ("node1", "node2", "node3"):
            line = f"echo 10.42.0.11 {name} >> /etc/hosts"
            assert self("exec", node, "--", "sh", "-c", line).returncode == 0

    def start(self, node, command, env):
        """Start a pod there, with these variables and no other."""
        variables = [argument for pair in env.items() for argument in ("--env", "=".join(pair))]
        mounts = ["--bind", self.volume]
        if "IMGKIT_REQUIRE_SECRET" in env:
            mounts += ["--bind", f"{self.secret}:/run/secrets/imgkit:ro"]
        inside = ["singularity", "exec", *mounts, self.sif, *command]
        with self.log(node).open("ab") as log:
            self.started[node] = subprocess.Popen(
                self.argv("exec", "--clean-env", *variables, node, "--", *inside),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def codes(self):
        """Exit codes of all pods, after their end."""
        try:
            return [pod.wait(timeout=300) for pod in self.started.values()]
        finally:
            for pod in self.started.values():
                pod.kill()

    def log(self, node):
        return self.state / f"{node}.log"

    def output(self):
        """What all of them have said so far."""
        return "".join(path.read_text() for path in sorted(self.state.glob("node*.log")))


@pytest.fixture(scope="module")
def nodes(mn5_sif):
    cluster = Pods(state=Path(f"/tmp/imgkit-test-pods-{os.getpid()}"), sif=mn5_sif)
    cluster.up(3, "--no-slurm", "--no-ssh")
    cluster.volume.mkdir()
    cluster.mount_secret()
    yield cluster
    cluster.down()


@pytest.fixture
def pods(nodes):
    for node in ("node1", "node2", "node3"):
        nodes.log(node).unlink(missing_ok=True)
    nodes.started.clear()
    return nodes


def written(pods, kind, *args):
    """Command and variables of each pod, as ``imgkit run rcp`` writes them in the form `kind`.

    A client can follow the form.
    """
    before, command = args[: args.index("--")], args[args.index("--") :]
    form, _, client = kind.partition(" ")
    name = f"{form}-{client}" if client else form
    options = ("--format", name, "--gpus", "0", "--image", "r/rcp:1", "--pvc", f"home:{pods.volume}", *before)
    job = json.loads(output(*IMGKIT, "run", "--dry-run", "rcp", "--json", *options, *command))
    if form == "runai":
        submit = job["submit"]
        values = [submit[index + 1] for index, argument in enumerate(submit) if argument == "-e"]
        return submit[submit.index("--") + 1 :], dict(text.split("=", 1) for text in values)
    spec: dict[str, Any] = yaml.safe_load(job["script"])["spec"]
    if kind == "trainjob":
        pod = spec["trainer"]
        return pod["command"], {entry["name"]: entry["value"] for entry in pod["env"]}
    pod = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    return pod["args"], {entry["name"]: entry.get("value", "") for entry in pod["env"]}


def operator_v1(head, rank):
    """The variables that the RunAI tutorials expect: WORLD_SIZE counts pods."""
    return {
        **{"PYTHONUNBUFFERED": "0", "RANK": str(rank), "WORLD_SIZE": "2"},
        **{"MASTER_ADDR": head, "MASTER_PORT": PORT},
    }


def operator_v1_later(head, rank):
    """WORLD_SIZE counts processes."""
    pet = {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "2", "PET_STANDALONE": ""}
    return {**operator_v1(head, rank), "WORLD_SIZE": "4", **pet}


def trainer_v2(head, rank):
    """No RANK and no WORLD_SIZE."""
    return {
        **{"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "auto"},
        **{"PET_MASTER_ADDR": head, "PET_MASTER_PORT": "29400"},
    }


VINTAGES = {
    "runai": ("runai v1", operator_v1),
    "runai-later": ("runai v2", operator_v1_later),
    "pytorchjob": ("pytorchjob", operator_v1_later),
    "trainjob": ("trainjob", trainer_v2),
}


def start_two(pods, vintage, name, *command):
    kind, operator = vintage
    required = () if kind.startswith("runai") else ("--require-secret",)  # its clients mount no Secret
    argv, env = written(pods, kind, *required, "--name", name, "--nodes", "2", "--nproc", "2", "--", *command)
    for rank, node in enumerate(("node1", "node2")):
        pod_env = {**env, **operator(f"{name}-master-0", rank), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        pods.start(node, argv, pod_env)


def wait_for_text(pods, count, text):
    """Wait for `text` to have been said `count` times."""
    until(
        lambda: pods.output().count(text) >= count,
        describe=lambda: f"not {count} x {text!r}\n{pods.output()}",
    )


@pytest.mark.parametrize(
    "vintage",
    [
        pytest.param(vintage, id=name, marks=() if name == "runai" else pytest.mark.soak)
        for name, vintage in VINTAGES.items()
    ],
)
def test_bench_waits_for_the_head_s_name_and_is_kept_on_the_volume(pods, vintage):
    name = f"bench-{vintage[0].replace(' ', '-').replace('.', '')}"
    start_two(pods, vintage, name, "dist-bench", "all_reduce", "--size", "64K", "--iters", "5")
    wait_for_text(pods, 1, "2 nodes, 2 processes on each")
    time.sleep(3)
    assert "present in" not in pods.output()
    pods.resolve(f"{name}-master-0")
    assert pods.codes() == [0, 0], pods.output()
    assert "roll call: 2/2 present" in pods.output()
    assert "sum, 4 ranks, gloo" in pods.output()
    assert ("no secret is set: any program" in pods.output()) == (vintage[0].startswith("runai"))
    logs = pods.volume / "runs" / name / "logs"
    assert {path.name for path in logs.iterdir()} == {"node1", "node2"}
    stored_output = "".join(path.read_text() for path in logs.rglob("stdout.log"))
    table = [line for line in stored_output.splitlines() if "all_reduce" in line]
    assert table, stored_output
    assert all(line in pods.output() for line in table)


@pytest.mark.xdist_group("alone")  # on a cluster of its own, since it takes long
@pytest.mark.soak
def test_spare_pod_takes_over_from_a_lost_one(pods):
    name, end = "spare", pods.volume / "end"
    program = pods.volume / "spare.py"
    program.write_text(SAY_WORLD)
    command = ("dist-run", "--nproc", "1", str(program))
    argv, env = written(
        pods, "pytorchjob", "--name", name, "--nodes", "2+1", "--env", f"END={end}", "--", *command
    )
    pods.resolve(f"{name}-master-0")

    def start(index):
        operator = {**operator_v1_later(f"{name}-master-0", index), "WORLD_SIZE": "3", "PET_NNODES": "3"}
        pods.start(f"node{index + 1}", argv, {**env, **operator})

    for index in range(3):
        start(index)
    wait_for_text(pods, 2, "world 2")
    assert pods("fault", "kill", "node2", "dist-run").returncode == 0
    assert pods.started["node2"].wait(timeout=120) == 137
    wait_for_text(pods, 1, "attempt 2 starts with 2 nodes")
    wait_for_text(pods, 4, "world 2")
    start(1)  # as Kubernetes does
    assert pods.started["node2"].wait(timeout=120) == 5
    wait_for_text(pods, 1, "no node can join it later")
    end.touch()
    assert pods.codes() == [0, 5, 0], pods.output()
    assert pods.output().count("ended with 2") == 2
