"""The steps of ci/action through a shell, as GitHub's runner starts them: each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from labkit import ROOT, expect_failure, expect_success, run

pytestmark = [pytest.mark.docker]

ACTION = yaml.safe_load((ROOT / "ci/action/action.yml").read_text())
RECIPE = """\
image: {base: 'imgkit.local/standin:24.03-notorch', platform: amd64}
system: {title: x, scheduler: slurm}
"""


class Runner:
    """A runner's folder, which lasts over the steps of a job."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("GITHUB_PATH", "GITHUB_OUTPUT"):
            (folder / name).touch()
        (folder / "work").mkdir()

    def step(self, step, **inputs):
        values = {f"inputs.{name}": value for name, value in inputs.items()}
        values |= {"github.action_path": str(ROOT / "ci/action"), "runner.temp": str(self.folder)}
        env = {
            name: re.sub(r"\$\{\{ (\S+) \}\}", lambda match: values[match[1]], text)
            for name, text in step.get("env", {}).items()
        }
        files = {name: str(self.folder / name) for name in ("GITHUB_PATH", "GITHUB_OUTPUT")}
        path = ":".join(
            [*reversed((self.folder / "GITHUB_PATH").read_text().split("\n")), os.environ["PATH"]]
        )
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.folder / "work",
            env={**os.environ, **files, **env, "PATH": path.lstrip(":")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path)


def test_steps_build_and_convert_a_recipe(runner, standin_notorch):
    name = f"action{os.getpid()}"
    (runner.folder / "work/a b").mkdir()
    recipe = f"a b/{name}.yaml"
    (runner.folder / "work" / recipe).write_text(RECIPE)
    try:
        for step in ACTION["runs"]["steps"]:
            expect_success(runner.step(step, recipe=recipe, base=standin_notorch))
    finally:
        run("docker", "rmi", "--force", f"{name}:latest")
    sif = Path((runner.folder / "GITHUB_OUTPUT").read_text().strip().removeprefix("sif="))
    assert sif == runner.folder / f"work/{name}.sif"
    assert sif.stat().st_size > 10_000_000
    assert [path.name for path in sif.parent.iterdir() if path.suffix in (".tar", ".tmp")] == []


def test_recipe_that_is_a_command_is_no_command(runner):
    (runner.folder / "GITHUB_PATH").write_text(f"{Path(sys.executable).parent}\n")
    step = next(step for step in ACTION["runs"]["steps"] if step["name"] == "build and test")
    expect_failure(runner.step(step, recipe='$(touch "made")"; touch made #', base=""), 2, "no recipe")
    assert not (runner.folder / "work/made").exists()


def test_no_step_has_an_expression_in_its_script():
    assert [step["name"] for step in ACTION["runs"]["steps"] if "${{" in step["run"]] == []
