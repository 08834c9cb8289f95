"""The train.py of imgkit init, in a container and under Slurm: killed, it resumes; told to stop, it saves."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from labkit import IMGKIT, PACKAGE, PLACE, QUIET, Cluster, cluster_marks, imgkit, run, until
from remotekit import far_host, login_node

pytestmark = [*cluster_marks, pytest.mark.sshd, pytest.mark.soak]
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


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "my work"
    done = imgkit("init", "--recipe", "cpu", made, env={"XDG_STATE_HOME": str(tmp_path / "state")})
    assert done.returncode == 0, done.stderr
    yield made
    run("docker", "rm", "--force", f"imgkit-init-{os.getpid()}")


def words(folder: Path, image: str, *options: object) -> list[str]:
    """The command that trains in `folder`, as its owner."""
    start = ["docker", "run", "--rm", "--init", "--network", "none", "--name", f"imgkit-init-{os.getpid()}"]
    mounted = ["--volume", f"{PACKAGE}:{PLACE}:ro", "--volume", f"{folder}:/workspace", *QUIET]
    mounted += ["--user", f"{os.geteuid()}:{os.getegid()}", "--env", "HOME=/tmp"]
    train = ["python3", "-m", "imgkit_entrypoints", "dist-run", "--device", "cpu", *map(str, options)]
    return [*start, *mounted, "--env", "IMGKIT_RUN_DIR=/workspace/runs/one", image, *train]


def steps(folder: Path) -> list[int]:
    file = folder / "runs/one/metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def test_killed_training_goes_on_where_it_saved(folder: Path, standin: str) -> None:
    train = words(folder, standin, "--nproc", 1, "/workspace/train.py", "--save-every", 50, "--steps")
    with subprocess.Popen(
        [*train, "1000000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as killed:
        until(lambda: len(steps(folder)) > 4)
        run("docker", "kill", "--signal", "KILL", f"imgkit-init-{os.getpid()}")
    assert killed.returncode != 0
    reached = steps(folder)[-1]
    until(lambda: not run("docker", "ps", "--quiet", "--filter", f"name=imgkit-init-{os.getpid()}").stdout)
    done = run(*train, reached + 40)
    assert done.returncode == 0, done.stderr
    start = reached // 50 * 50
    assert f"starts after step {start}\n" in done.stdout
    assert steps(folder)[-1] == reached + 40
    assert done.stdout.count(" loss ") == (reached + 40) // 20 - start // 20


def test_stopped_training_saves_its_last_step(folder: Path, standin: str) -> None:
    train = words(folder, standin, "--nproc", 2, "/workspace/train.py", "--save-every", 100000, "--steps")
    with subprocess.Popen(
        [*train, "1000000"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as stopped:
        until(lambda: len(steps(folder)) > 2)
        (folder / "runs/one/stop").touch()
        said, _ = stopped.communicate(timeout=120)
    assert stopped.returncode == 0, said
    (folder / "runs/one/stop").unlink()
    done = run(*train, "40")
    assert done.returncode == 0, done.stderr
    saved = int(done.stdout.partition("starts after step ")[2].partition("\n")[0])
    assert steps(folder)[-1] <= saved < steps(folder)[-1] + 20


def test_job_of_a_new_folder_survives_signal_and_requeue(standin: str) -> None:
    """Slurm asks the job to stop, later kills and requeues it, and it ends well."""
    place, name = Path(f"/tmp/imgkit-new-{os.getpid()}"), f"new{os.getpid()}"
    cluster = Cluster(state=place / "c")
    with ExitStack() as stack:
        far = stack.enter_context(far_host(place))
        stack.callback(cluster.down)
        stack.callback(run, "docker", "rmi", "--force", f"{name}:latest")
        cluster.up(1)
        login_node(far, cluster)
        (place / "system.yaml").write_text(SYSTEM)
        far.imgkit("remote", "add", "far", f"far:{place}/store", "--recipe", place / "system.yaml")
        made = far.imgkit("init", place / name)
        assert made.returncode == 0, made.stderr
        train = place / name / "train.py"
        slow = train.read_text().replace("optimizer.step()\n", "optimizer.step(); time.sleep(0.01)\n")
        train.write_text(slow)  # as a larger model is: there is time to stop it twice
        told, said = place / "told", place / "said"
        with (
            told.open("wb") as output,
            said.open("wb") as errors,
            subprocess.Popen(
                [*IMGKIT, "run", "--base", standin],  # a stand-in has to be named
                cwd=place / name,
                env={**os.environ, **far.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            ) as started,
        ):

            def wait(condition: Callable[[str], object]) -> None:
                until(lambda: started.poll() is not None or condition(told.read_text()))
                assert started.poll() is None, said.read_text() + told.read_text()

            wait(lambda text: " loss " in text)
            (job,) = [path.name for path in (place / "store/jobs").iterdir()]
            cluster("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@120 does
            wait(lambda text: "requeued" in text)
            cluster.start_again(job)
            wait(lambda text: " loss " in text.partition("requeued")[2])
            cluster("scontrol", "requeue", job)
            cluster.start_again(job)
            started.wait(timeout=900)
        text = told.read_text()
        assert started.returncode == 0, said.read_text() + text
        first, second, third = map(int, re.findall(r"starts after step (\d+)", text))
        assert 0 == first < second < third  # a requeue, too, lets the program save first
        assert f"state saved ({job}.0 {second}): requeued" in text
        assert f"state saved at step {third}\n" in text
        assert "step 2000/2000  loss " in text.rpartition("starts after step")[2]
        assert f"{job}@far has ended well" in said.read_text()
