"""Where the command of a job starts: --workdir, the code, the recipe's image.workdir, the job's folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.jobs.systems.pods import PodFlags
from imgkit_builder.recipe.targets import Target, load_target
from imgkit_entrypoints.errors import UsageError

RUN = JobRequest.of(
    command=("dist-run", "train.py"), directory=Path("/w"), time="10m", account="a", qos="acc_debug"
)


@pytest.fixture
def extend(tmp_path: Path) -> Any:
    """``extend("cpu")``: a recipe that extends it and states a workdir."""

    def write(parent: str) -> Target:
        file = tmp_path / "mine.yaml"
        file.write_text(f"extends: {parent}\nimage:\n  workdir: /workspace/mine\n")
        return load_target(file)

    return write


def job(target: Target, **options: Any) -> Job:
    return resolve_job(target, RUN.changed(**options))


def argv(job: Job) -> tuple[str, ...]:
    return systems.get_system(job.system).script(job).submit


def test_workdir_of_a_recipe_holds_under_docker_and_singularity(extend: Any) -> None:
    target = extend("cpu")
    docker = argv(job(target))
    assert docker[docker.index("--workdir") + 1] == "/workspace/mine"
    assert "IMGKIT_JOB_DIR=/w" in docker
    singularity = argv(job(target, runtime="singularity"))
    at = singularity.index("--pwd")
    assert singularity[at + 1 : at + 3] == ("/workspace/mine", "/w/mine.sif")
    assert "IMGKIT_JOB_DIR=/w" in singularity
    shell = argv(job(target, runtime="singularity", command=(), interactive=True))
    assert "--pwd" in shell
    script = systems.get_system("slurm").script(job(extend("mn5"))).text
    assert "--pwd /workspace/mine" in script.replace("\\\n    ", "")
    assert "export IMGKIT_JOB_DIR=/w\n" in script


def test_flag_wins_over_recipe_and_code(extend: Any, tmp_path: Path) -> None:
    assert job(extend("cpu"), workdir="/srv").container.workdir == "/srv"
    code = {"runtime": "singularity", "code": tmp_path}
    assert job(load_target("cpu"), **code).container.workdir == "/workspace"
    assert job(extend("cpu"), **code).container.workdir == "/workspace"
    assert job(load_target("cpu"), **code, workdir=".").container.workdir == ""


def test_run_without_container_has_no_workdir(extend: Any) -> None:
    host_job = job(extend("cpu"), runtime="host")
    assert (host_job.container.workdir, "IMGKIT_JOB_DIR" in host_job.settings) == ("", False)
    with pytest.raises(UsageError, match="has no container") as caught:
        job(load_target("cpu"), runtime="host", workdir="/x")
    assert "--directory" in (caught.value.hint or "")


def test_docker_warns_that_files_in_the_image_are_lost(extend: Any) -> None:
    def warnings(**options: Any) -> tuple[str, ...]:
        return job(extend("cpu"), account="", qos="", time="", **options).warnings

    (warning,) = warnings()
    assert "are lost with the container" in warning
    assert warnings(workdir="/workspace/mine") == ()  # the user has chosen
    assert warnings(runtime="singularity") == ()  # the write fails there


@pytest.mark.parametrize(
    ("options", "start"),
    [({}, "/workspace/mine"), ({"workdir": "."}, "/data/me"), ({"workdir": "/srv"}, "/srv")],
)
def test_pods_start_there_too(extend: Any, options: dict[str, str], start: str) -> None:
    pods = {"image": "r/x:1", "directory": Path("/data/me"), "nodes": "2"}
    flags = PodFlags(pvcs=("c:/data",))
    command = argv(job(extend("rcp"), **pods, **options, system_flags=(flags,)))
    assert command[command.index("--working-dir") + 1] == start
    for form, text in (("pytorchjob", f"workingDir: {start}\n"), ("trainjob", f"--chdir={start}\n")):
        kubernetes = dataclasses.replace(flags, format=form)
        script = systems.get_system("kubeflow").script(
            job(extend("rcp"), **pods, **options, system_flags=(kubernetes,))
        )
        assert text in script.text
        assert "IMGKIT_RUN_DIR" in script.text
