"""Where the command of a job starts, and that what a job mounts is looked for on each node before that."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from job_builder import make_job, make_script, write_recipe

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.systems.mpi import MpiFlags
from imgkit_builder.jobs.systems.pods import PodFlags
from imgkit_entrypoints.errors import UsageError


@pytest.fixture
def extend(tmp_path: Path) -> Any:
    """``extend("cpu")``: a recipe that extends it and states a workdir."""
    text = "extends: {}\nimage:\n  workdir: /workspace/mine\n"
    return lambda parent: write_recipe(tmp_path, text.format(parent))


def test_workdir_of_a_recipe_holds_under_docker_and_singularity(extend):
    target = extend("cpu")
    docker = make_script(target).submit
    assert docker[docker.index("--workdir") + 1] == "/workspace/mine"
    assert "IMGKIT_JOB_DIR=/w" in docker
    singularity = make_script(target, runtime="singularity").submit
    at = singularity.index("--pwd")
    assert singularity[at + 1 : at + 3] == ("/workspace/mine", "/w/mine.sif")
    assert "IMGKIT_JOB_DIR=/w" in singularity
    shell = make_script(target, runtime="singularity", command=(), interactive=True)
    assert "--pwd" in shell.submit
    script = make_script(extend("mn5")).text
    assert "--pwd /workspace/mine" in script.replace("\\\n    ", "")
    assert "export IMGKIT_JOB_DIR=/w\n" in script


def test_flag_wins_over_recipe_and_code(extend, tmp_path):
    assert make_job(extend("cpu"), workdir="/srv").container.workdir == "/srv"
    code: dict[str, Any] = {"runtime": "singularity", "code": tmp_path}
    for recipe in ("cpu", extend("cpu")):
        assert make_job(recipe, **code).container.workdir == "/workspace"
        assert make_job(recipe, **code, workdir=".").container.workdir == ""


def test_run_without_container_has_no_workdir(extend):
    host_job = make_job(extend("cpu"), runtime="host")
    assert (host_job.container.workdir, "IMGKIT_JOB_DIR" in host_job.settings) == ("", False)
    with pytest.raises(UsageError, match="has no container") as caught:
        make_job("cpu", runtime="host", workdir="/x")
    assert "--directory" in (caught.value.hint or "")


def test_docker_warns_that_files_in_the_image_are_lost(extend):
    recipe = extend("cpu")
    (warning,) = make_job(recipe).warnings
    assert "are lost with the container" in warning
    assert make_job(recipe, workdir="/workspace/mine").warnings == ()  # the user has chosen
    assert make_job(recipe, runtime="singularity").warnings == ()  # the write fails there


@pytest.mark.parametrize(
    ("options", "start"),
    [({}, "/workspace/mine"), ({"workdir": "."}, "/data/me"), ({"workdir": "/srv"}, "/srv")],
)
def test_pods_start_there_too(extend, options, start):
    texts = {"runai": f"--working-dir {start} ", "pytorchjob": f"workingDir: {start}\n"}
    texts["trainjob"] = f"--chdir={start}\n"
    pods = {"image": "r/x:1", "directory": Path("/data/me"), "nodes": "2", **options}
    for form, text in texts.items():
        script = make_script(extend("rcp"), PodFlags(pvcs=("c:/data",), format=form), **pods).text  # type: ignore[arg-type]
        assert text in script
        assert "IMGKIT_RUN_DIR" in script


def run_on_node(options: dict[str, Any], *command: str) -> subprocess.CompletedProcess[str]:
    argv = systems.with_folder_check(make_job(**options), command)
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_node_without_a_folder_is_named(tmp_path):
    missing = tmp_path / "it's $(not) here"
    result = run_on_node({"binds": (f"{tmp_path}:/in", f"{missing}:/b:ro")}, "echo", "started")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"imgkit: node {os.uname().nodename} has no {missing}, which the job mounts "
        "(--bind, data, --secret-file or system.runtime.binds)\n"
    )


def test_secret_that_a_node_lacks_is_named(tmp_path):
    result = run_on_node({"secret_file": tmp_path / "secret"}, "echo", "started")
    assert f"has no {tmp_path}/secret," in result.stderr


def test_command_starts_with_its_arguments(tmp_path):
    result = run_on_node({"binds": (str(tmp_path),)}, "printf", "%s|", "--", "a b", "$c", "")
    assert (result.returncode, result.stdout) == (0, "--|a b|$c||")


SHELL: dict[str, Any] = {"interactive": True, "command": ()}


def hosts(names: str = "a,b", start: Any = "agents") -> dict[str, Any]:
    return {"flags": MpiFlags(hosts=names, mpi_start=start)}


@pytest.mark.parametrize(
    ("recipe", "options", "looks"),
    [
        ("mn5", SHELL, 1),
        ("mn5", {"interactive": True}, 1),
        ("olivia-eap", SHELL, 1),
        ("lambda", hosts(), 1),
        ("lambda", hosts(start="ranks"), 1),
        ("lambda", hosts(start="ssh"), 2),
        ("lambda", {**hosts("a"), **SHELL}, 1),
        ("lambda", {**hosts(start="ssh"), "runtime": "singularity"}, 2),
        ("cpu", {}, 1),
        ("cpu", SHELL, 1),
    ],
)
def test_each_start_looks_before_the_container(recipe, options, looks):
    script = make_script(recipe, binds=("/data/v1:/in:ro",), **options)
    lines = [line for line in script.text.splitlines() if "torch.distributed.launch" not in line]
    assert "\n".join(lines).count("/data/v1 -- ") == looks
    for _, line in script.host_commands:
        assert line.index("/data/v1 -- ") < line.index("/data/v1:/in:ro")


def test_job_that_mounts_nothing_has_no_look():
    assert systems.with_folder_check(make_job(), ("x",)) == ("x",)


def test_pyxis_looks_in_a_step_of_its_own():
    script = make_script(binds=("/data:/in:ro",), runtime="pyxis", image="ubuntu").text
    text = " ".join(script.replace("\\\n", " ").split())
    look, _, start = text.partition(" sh /data -- sh -c ")
    assert "srun --overlap --input=none --ntasks-per-node=1 sh -c" in look
    assert "--container-image=ubuntu" in start
