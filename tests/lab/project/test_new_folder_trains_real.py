"""The train.py of imgkit init in the stand-in: killed, it resumes; asked to stop, it saves first."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit import PACKAGE, PLACE, QUIET, imgkit, run, until

pytestmark = [pytest.mark.docker, pytest.mark.soak]


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
