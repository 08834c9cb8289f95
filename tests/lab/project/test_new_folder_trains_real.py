"""The folder of imgkit init in a container and under Slurm: after any end, the run goes on bit by bit."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from labkit import IMGKIT, PACKAGE, PLACE, QUIET, Cluster, expect_success, imgkit, run, slurm_marks, until
from remotekit import far_host, login_node
from runkit import assert_same_state

pytestmark = [*slurm_marks, pytest.mark.sshd, pytest.mark.soak]
SYSTEM = """\
image:
  base: imgkit.local/standin:24.03
  platform: amd64
system:
  title: the virtual cluster
  scheduler: slurm
  runtime: {kind: singularity, command: singularity}
  node: {gpus: 0, cpus: 2}
"""


def accuracies(text):
    """What was printed last for each epoch."""
    return dict(re.findall(r"(epoch \d+)/\d+  accuracy (.*%)", text))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "my work"
    expect_success(imgkit("init", "--recipe", "cpu", folder, env={"XDG_STATE_HOME": str(tmp_path / "state")}))
    yield folder
    run("docker", "rm", "--force", f"imgkit-init-{os.getpid()}")


def train_argv(folder, image, name):
    """The command that trains in `folder`, as its owner, in the run folder `name`."""
    start = ["docker", "run", "--rm", "--init", "--network", "none", "--name", f"imgkit-init-{os.getpid()}"]
    mounted = ["--volume", f"{PACKAGE}:{PLACE}:ro", "--volume", f"{folder}:/workspace", *QUIET]
    mounted += ["--user", f"{os.geteuid()}:{os.getegid()}", "--env", "HOME=/tmp"]
    launcher = ["python3", "-m", "imgkit_entrypoints", "dist-run", "--device", "cpu", "--nproc", "2"]
    train = ["/workspace/train.py", "--samples", "60000", "--epochs", "3", "--save-every", "50"]
    env = ["--env", f"IMGKIT_RUN_DIR=/workspace/runs/{name}"]
    return [*start, *mounted, *env, image, *launcher, *train]


def test_killed_and_stopped_training_ends_as_an_undisturbed_one(folder, standin):
    undisturbed = expect_success(run(*train_argv(folder, standin, "whole")))
    train, run_folder = train_argv(folder, standin, "cut"), folder / "runs/cut"

    def checkpoints(after=0):
        steps = [int(path.name[5:]) for path in run_folder.glob("checkpoints/step-*")]
        return max(steps, default=0) > after

    with subprocess.Popen(train, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
        until(checkpoints)
        run("docker", "kill", "--signal", "KILL", f"imgkit-init-{os.getpid()}")
    assert killed.returncode != 0
    until(lambda: not run("docker", "ps", "--quiet", "--filter", f"name=imgkit-init-{os.getpid()}").stdout)
    with subprocess.Popen(train, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as stopped:
        until(lambda: checkpoints(after=1000))
        (run_folder / "stop").touch()
        output, _ = stopped.communicate(timeout=120)
    assert stopped.returncode == 0, output
    (resumed,) = re.findall(r"resumes after step (\d+)", output)
    assert int(resumed) % 50 == 0
    (saved,) = re.findall(r"the state of step (\d+) is saved", output)
    (run_folder / "stop").unlink()
    resumed_run = expect_success(run(*train))
    assert f"resumes after step {saved}: " in resumed_run.stdout + resumed_run.stderr
    assert_same_state(standin, run_folder, folder / "runs/whole")
    assert (run_folder / "weights.pt").read_bytes() == (folder / "runs/whole/weights.pt").read_bytes()
    assert accuracies(output + resumed_run.stdout).items() <= accuracies(undisturbed.stdout).items()


class FollowedJob:
    """``imgkit run`` in a folder, which follows the job that it submitted."""

    def __init__(self, far, folder, *args):
        self.output, self.errors = folder.parent / "output", folder.parent / "errors"
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*IMGKIT, "run", *args],
                cwd=folder,
                env={**os.environ, **far.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def text(self):
        return self.output.read_text() + self.errors.read_text()

    def wait(self, condition):
        until(lambda: self.process.poll() is not None or condition(self.text()), describe=self.text)
        assert self.process.poll() is None, self.text()


def kill(cluster, node, program):
    """Kill the newest process of `node` whose arguments match `program`."""
    pids = [line.split()[0] for line in cluster.ps("pid=,args=", node) if re.search(program, line)]
    assert pids
    assert cluster("exec", node, "--", "kill", "-KILL", pids[-1]).returncode == 0


def test_job_on_two_nodes_ends_as_an_undisturbed_one(standin):
    """The weights are the same after a stop, a killed worker, a requeue by hand, and a killed launcher."""
    root, name = Path(f"/tmp/imgkit-new-{os.getpid()}"), f"new{os.getpid()}"
    cluster = Cluster(state=root / "c")
    launch = ("dist-run", "--nproc", "2", "--max-failures", "1")
    train = ("/workspace/train.py", "--samples", "120000", "--epochs", "4", "--save-every", "50")
    command = ("--base", standin, "--nodes", "2", "--", *launch, *train)  # a stand-in has to be named
    with ExitStack() as stack:
        far = stack.enter_context(far_host(root))
        stack.callback(cluster.down)
        stack.callback(run, "docker", "rmi", "--force", f"{name}:latest")
        cluster.up(2)
        login_node(far, cluster)
        (root / "system.yaml").write_text(SYSTEM)
        far.imgkit("remote", "add", "far", f"far:{root}/store", "--recipe", root / "system.yaml")
        expect_success(far.imgkit("init", root / name))

        undisturbed_run = expect_success(far.imgkit("run", *command, folder=root / name))
        (undisturbed,) = (root / "store/runs").iterdir()

        cut = FollowedJob(far, root / name, *command)
        stack.callback(cut.process.wait)
        stack.callback(cut.process.kill)
        cut.wait(lambda text: " loss " in text)
        (folder,) = set((root / "store/runs").iterdir()) - {undisturbed}
        job = folder.name.rpartition("-")[2]

        def resumed(count):
            return lambda text: (
                text.count("resumes after step ") == count
                and " loss " in text.rpartition("resumes after step ")[2]
            )

        cluster("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@120 does
        cut.wait(lambda text: "requeued" in text)
        cluster.start_again(job)
        cut.wait(resumed(1))
        kill(cluster, "node2", "/workspace/train.py")
        cut.wait(resumed(2))
        cluster("scontrol", "requeue", job)
        cluster.start_again(job)
        cut.wait(resumed(3))
        kill(cluster, "node2", "python3 -I -m imgkit_entrypoints dist-run")
        assert cut.process.wait(timeout=240) == 1, cut.text()
        assert "resumes after step " in cut.text()
        cluster("scontrol", "requeue", job)
        cluster.start_again(job)
        until(lambda: not cluster("squeue", "--noheader", f"--jobs={job}").stdout.strip(), within_s=600)
        text = (root / f"store/{name}-{job}.out").read_text()
        starts = [int(step) for step in re.findall(r"resumes after step (\d+)", text)]
        assert starts == sorted(set(starts)), text
        assert len(starts) == 4, text
        saved = [int(step) for step in re.findall(r"the state of step (\d+) is saved", text)]
        assert saved == [starts[0], starts[2]]  # the others went on from a checkpoint of every 50 steps
        assert "attempt 2 starts" in text
        assert_same_state("imgkit.local/standin:24.03", folder, undisturbed)
        assert (folder / "weights.pt").read_bytes() == (undisturbed / "weights.pt").read_bytes()
        assert accuracies(text) == accuracies(undisturbed_run.stdout)
