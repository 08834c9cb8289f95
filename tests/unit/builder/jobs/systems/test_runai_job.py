"""The command that the first client of RunAI is given, and how a submitted job is followed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.jobs.systems import pods
from imgkit_builder.jobs.systems.runai import SYSTEM as runai
from imgkit_builder.recipe.targets import load_target
from imgkit_entrypoints.errors import UsageError

RECIPE = load_target("rcp")
RCP = JobRequest.of(command=("dist-pi",), nodes="2", image="r.example/me/rcp:1")


def job(*, pvcs: tuple[str, ...] = ("home:/home/me",), **options: Any) -> Job:
    flags = pods.PodFlags(pvcs=pvcs, format="runai-v1")
    return resolve_job(RECIPE, RCP.changed(system_flags=(flags,), **options))


def script(**options: Any) -> Script:
    return runai.script(job(**options))


def variables(job_script: Script) -> dict[str, str]:
    argv = job_script.submit
    values = [argv[index + 1] for index, argument in enumerate(argv) if argument == "-e"]
    return dict(text.split("=", 1) for text in values)


def value(job_script: Script, flag: str) -> str:
    return job_script.submit[job_script.submit.index(flag) + 1]


def refused(**options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        script(**options)
    return caught.value


@pytest.mark.parametrize(
    "argument", ["plain", "a b", "it's", "; rm -rf /", "$HOME", "`id`", "--", "-x", "", "ü"]
)
def test_program_s_arguments_are_quoted_once(argument: str) -> None:
    job_script = script(command=("dist-run", "main.py", argument))
    assert job_script.submit[-4:] == ("--", "dist-run", "main.py", argument)
    shell = f'runai() {{ printf "%s\\0" runai "$@"; }}\n{job_script.text}'
    read = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert tuple(read.split("\0")[:-1]) == job_script.submit


@pytest.mark.parametrize(
    ("typed", "handed"),
    [("$(NAME)", "$$(NAME)"), ("$$", "$$$"), ("$$(NAME)", "$$$$(NAME)"), ("$NAME $", "$NAME $")],
)
def test_kubernetes_expands_nothing(typed: str, handed: str) -> None:
    job_script = script(command=("dist-run", typed), env=(f"A={typed}",))
    assert job_script.submit[-1] == variables(job_script)["A"] == handed


@pytest.mark.parametrize("name", ["IMGKIT_LOG_DIR", "IMGKIT_NPROC"])
def test_user_s_own_variables_win(name: str) -> None:
    assert variables(script(env=(f"{name}=7",), nproc=20))[name] == "7"


def test_directory_is_one_of_the_pods() -> None:
    job_script = script(directory=Path("/home/me/project"))
    assert value(job_script, "--working-dir") == "/home/me/project"
    assert variables(job_script)["IMGKIT_RUN_DIR"] == "/home/me/project/runs/rcp"


def test_nothing_is_kept_where_nothing_can_be_written() -> None:
    job_script = script(pvcs=("code:/code:ro", "home:/home/me"), directory=Path("/code/project"))
    assert value(job_script, "--working-dir") == "/code/project"
    assert variables(job_script)["IMGKIT_RUN_DIR"] == "/home/me/runs/rcp"


@pytest.mark.parametrize(
    ("options", "doubt"),
    [
        ({"pvcs": ()}, "no --pvc to write to"),
        ({"pvcs": ("data:/data:ro",)}, "no --pvc to write to"),
        ({"binds": ("/scratch",)}, "--bind is not used"),
        ({"env": ("A=x y",)}, "'A=x y': older runai clients"),
        ({"command": ("dist-run", "$HOME")}, "'$HOME': older runai clients"),
        ({"gpus": 4}, "pods may share a node"),
        ({"account": "a1"}, "--account is not used"),
        ({"nodes": "2+1"}, "RunAI decides what follows a lost pod"),
    ],
)
def test_doubt_is_a_warning(options: dict[str, Any], doubt: str) -> None:
    assert job().warnings == ()
    (warning,) = job(**options).warnings
    assert doubt in warning


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("my_first_distributed_app", "my-first-distributed-app"),
        ("Run1", "run1"),
        ("run.1", "run-1"),
        ("run-", "run"),
        ("r" * 51, "r" * 50),
    ],
)
def test_name_that_no_pod_can_have_is_refused(name: str, better: str) -> None:
    error = refused(name=name)
    assert (error.where, error.hint) == ("--name", f"--name {better}")


@pytest.mark.parametrize("text", ["home", "home:data", "Home:/data", "home:/da ta", "home:/data:rw"])
def test_volume_that_is_none_is_refused(text: str) -> None:
    assert refused(pvcs=(text,)).where == "--pvc"


@pytest.mark.usefixtures("home", "first_runai")
def test_submitted_job_is_followed_by_its_name(call: Any) -> None:
    pods = ("--nodes", "2", "--image", "r/x:1", "--pvc", "home:/home/me", "--directory", "/home/me/a")
    command = ("-q", "mlo-me", "--", "dist-run", "a b.py")
    assert call("run", "--detach", "rcp", *pods, *command)[:2] == (0, "rcp\n")
    answer = json.loads(call("status", "rcp", "--json")[1])
    assert answer["output"].split() == ["describe", "job", "rcp", "--project", "mlo-me"]


@pytest.mark.usefixtures("home", "first_runai")
def test_interactive_submission_says_how_to_get_in(call: Any) -> None:
    code, out, err = call("run", "rcp", "--nodes", "2", "--image", "r/x:1", "--interactive")
    assert (code, out) == (0, "rcp\n")
    assert "runai bash rcp --pod rcp-worker-0" in err
