"""Where the command of a job starts: --workdir, the recipe's image.workdir, the code, the job's folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve
from imgkit_builder.jobs.systems.pods import PodFlags
from imgkit_builder.recipe.targets import Target, find
from imgkit_entrypoints.errors import UsageError

RUN = JobRequest.of(
    command=("dist-run", "train.py"), directory=Path("/w"), time="10m", account="a", qos="acc_debug"
)


@pytest.fixture
def stated(tmp_path: Path) -> Any:
    """``stated("cpu")``: a recipe that extends it and states a workdir."""

    def write(parent: str) -> Target:
        file = tmp_path / "mine.yaml"
        file.write_text(f"extends: {parent}\nimage:\n  workdir: /workspace/mine\n")
        return find(file)

    return write


def job(target: Target, **given: Any) -> Job:
    return resolve(target, RUN.changed(**given))


def argv(found: Job) -> tuple[str, ...]:
    return systems.named(found.system).script(found).submit


def test_stated_workdir_holds_under_docker_and_singularity(stated: Any) -> None:
    target = stated("cpu")
    docker = argv(job(target))
    assert docker[docker.index("--workdir") + 1] == "/workspace/mine"
    assert "IMGKIT_JOB_DIR=/w" in docker
    singularity = argv(job(target, runtime="singularity"))
    at = singularity.index("--pwd")
    assert singularity[at + 1 : at + 3] == ("/workspace/mine", "/w/mine.sif")
    assert "IMGKIT_JOB_DIR=/w" in singularity
    shell = argv(job(target, runtime="singularity", command=(), interactive=True))
    assert "--pwd" in shell
    script = systems.named("slurm").script(job(stated("mn5"))).text
    assert "--pwd /workspace/mine" in script.replace("\\\n    ", "")
    assert "export IMGKIT_JOB_DIR=/w\n" in script


def test_flag_wins_over_recipe_and_code(stated: Any, tmp_path: Path) -> None:
    assert job(stated("cpu"), workdir="/srv").container.workdir == "/srv"
    code = {"runtime": "singularity", "code": tmp_path}
    assert job(find("cpu"), **code).container.workdir == "/workspace"
    assert job(stated("cpu"), **code).container.workdir == "/workspace/mine"
    assert job(find("cpu"), **code, workdir=".").container.workdir == ""


def test_run_without_container_has_no_workdir(stated: Any) -> None:
    found = job(stated("cpu"), runtime="host")
    assert (found.container.workdir, "IMGKIT_JOB_DIR" in found.settings) == ("", False)
    with pytest.raises(UsageError, match="has no container") as caught:
        job(find("cpu"), runtime="host", workdir="/x")
    assert "--directory" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["data", "./data", "/a b", "/a/../b", "/a\nb"])
def test_folder_that_no_container_has_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        job(find("cpu"), workdir=text)
    assert caught.value.where == "--workdir"


def test_docker_warns_that_files_in_the_image_are_lost(stated: Any) -> None:
    def warnings(**given: Any) -> tuple[str, ...]:
        return job(stated("cpu"), account="", qos="", time="", **given).warnings

    (warning,) = warnings()
    assert "are lost with the container" in warning
    assert warnings(workdir="/workspace/mine") == ()  # the user has chosen
    assert warnings(runtime="singularity") == ()  # the write fails there


@pytest.mark.parametrize(
    ("given", "start"),
    [({}, "/workspace/mine"), ({"workdir": "."}, "/data/me"), ({"workdir": "/srv"}, "/srv")],
)
def test_pods_start_there_too(stated: Any, given: dict[str, str], start: str) -> None:
    pods = {"image": "r/x:1", "directory": Path("/data/me"), "nodes": "2"}
    flags = PodFlags(pvcs=("c:/data",))
    words = argv(job(stated("rcp"), **pods, **given, system_flags=(flags,)))
    assert words[words.index("--working-dir") + 1] == start
    for form, text in (("pytorchjob", f"workingDir: {start}\n"), ("trainjob", f"--chdir={start}\n")):
        found = job(stated("rcp"), **pods, **given, system_flags=(dataclasses.replace(flags, format=form),))
        assert text in systems.named(found.system).script(found).text
        assert "IMGKIT_RUN_DIR" in systems.named(found.system).script(found).text
