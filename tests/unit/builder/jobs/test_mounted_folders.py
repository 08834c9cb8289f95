"""What a job mounts is looked for on each node, before its container starts."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.jobs.systems.mpi import MpiFlags
from imgkit_builder.recipe.targets import load_target


def job(folder: Path, recipe: str = "mn5", **options: Any) -> Job:
    request = JobRequest.of(
        command=("dist-hello",), directory=folder, account="a", qos="acc_debug", time="5m"
    )
    return resolve_job(load_target(recipe), request.changed(**options))


def run_on_node(of: Job, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(systems.with_folder_check(of, command), capture_output=True, text=True, check=False)


def test_node_without_a_folder_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "it's $(not) here"
    result = run_on_node(job(tmp_path, binds=(f"{tmp_path}:/in", f"{missing}:/b:ro")), "echo", "started")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"imgkit: node {os.uname().nodename} has no {missing}, which the job mounts "
        "(--bind, data, --secret-file or system.runtime.binds)\n"
    )


def test_secret_that_a_node_lacks_is_named(tmp_path: Path) -> None:
    result = run_on_node(job(tmp_path / "run", secret_file=tmp_path / "secret"), "echo", "started")
    assert f"has no {tmp_path}/secret," in result.stderr


def test_command_starts_with_its_arguments(tmp_path: Path) -> None:
    result = run_on_node(job(tmp_path, binds=(str(tmp_path),)), "printf", "%s|", "--", "a b", "$c", "")
    assert (result.returncode, result.stdout) == (0, "--|a b|$c||")


SHELL = {"interactive": True, "command": ()}
HOSTS = MpiFlags(hosts="a,b")


@pytest.mark.parametrize(
    ("recipe", "options", "looks"),
    [
        ("mn5", SHELL, 1),
        ("mn5", {"interactive": True}, 1),
        ("olivia-eap", SHELL, 1),
        ("lambda", {"system_flags": (HOSTS,)}, 1),
        ("lambda", {"system_flags": (dataclasses.replace(HOSTS, mpi_start="ranks"),)}, 1),
        ("lambda", {"system_flags": (dataclasses.replace(HOSTS, mpi_start="ssh"),)}, 2),
        ("lambda", {"system_flags": (dataclasses.replace(HOSTS, hosts="a"),), **SHELL}, 1),
        (
            "lambda",
            {"system_flags": (dataclasses.replace(HOSTS, mpi_start="ssh"),), "runtime": "singularity"},
            2,
        ),
        ("cpu", {}, 1),
        ("cpu", SHELL, 1),
    ],
)
def test_each_start_looks_before_the_container(
    tmp_path: Path, recipe: str, options: dict[str, Any], looks: int
) -> None:
    mounting_job = job(tmp_path, recipe, binds=("/data/v1:/in:ro",), **options)
    script = systems.get_system(mounting_job.system).script(mounting_job)
    lines = [line for line in script.text.splitlines() if "torch.distributed.launch" not in line]
    assert "\n".join(lines).count("/data/v1 -- ") == looks
    for _, line in script.remote:
        assert line.index("/data/v1 -- ") < line.index("/data/v1:/in:ro")


def test_job_that_mounts_nothing_has_no_look(tmp_path: Path) -> None:
    assert systems.with_folder_check(job(tmp_path), ("x",)) == ("x",)


def test_pyxis_looks_in_a_step_of_its_own(tmp_path: Path) -> None:
    mounting_job = job(tmp_path, binds=("/data:/in:ro",), runtime="pyxis", image="ubuntu")
    text = " ".join(
        systems.get_system(mounting_job.system).script(mounting_job).text.replace("\\\n", " ").split()
    )
    look, _, start = text.partition(" sh /data -- sh -c ")
    assert "srun --overlap --input=none --ntasks-per-node=1 sh -c" in look
    assert "--container-image=ubuntu" in start
