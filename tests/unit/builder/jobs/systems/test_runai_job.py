"""The command that the first client of RunAI is given, and how a submitted job is followed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from imgkit_builder.cli.app import build_app
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve
from imgkit_builder.jobs.systems import pods
from imgkit_builder.jobs.systems.runai import SYSTEM as runai
from imgkit_builder.recipe.targets import find
from imgkit_entrypoints.errors import UsageError

RECIPE = find("rcp")
RCP = JobRequest.of(command=("dist-pi",), nodes="2", image="r.example/me/rcp:1")


def job(*, pvcs: tuple[str, ...] = ("home:/home/me",), **given: Any) -> Job:
    own = pods.PodFlags(pvcs=pvcs, client="v1")
    return resolve(RECIPE, RCP.changed(system_flags=(own,), **given))


def script(**given: Any) -> Script:
    return runai.script(job(**given))


def variables(made: Script) -> dict[str, str]:
    words = made.submit
    given = [words[index + 1] for index, word in enumerate(words) if word == "-e"]
    return dict(text.split("=", 1) for text in given)


def value(made: Script, flag: str) -> str:
    return made.submit[made.submit.index(flag) + 1]


def refused(**given: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        script(**given)
    return caught.value


@pytest.mark.parametrize("word", ["plain", "a b", "it's", "; rm -rf /", "$HOME", "`id`", "--", "-x", "", "ü"])
def test_program_s_words_are_quoted_once(word: str) -> None:
    made = script(command=("dist-run", "main.py", word))
    assert made.submit[-4:] == ("--", "dist-run", "main.py", word)
    shell = f'runai() {{ printf "%s\\0" runai "$@"; }}\n{made.text}'
    read = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert tuple(read.split("\0")[:-1]) == made.submit


@pytest.mark.parametrize(
    ("typed", "handed"),
    [("$(NAME)", "$$(NAME)"), ("$$", "$$$"), ("$$(NAME)", "$$$$(NAME)"), ("$NAME $", "$NAME $")],
)
def test_kubernetes_expands_nothing(typed: str, handed: str) -> None:
    made = script(command=("dist-run", typed), env=(f"A={typed}",))
    assert made.submit[-1] == variables(made)["A"] == handed


@pytest.mark.parametrize("name", ["IMGKIT_LOG_DIR", "IMGKIT_NPROC"])
def test_user_s_own_variables_win(name: str) -> None:
    assert variables(script(env=(f"{name}=7",), nproc=20))[name] == "7"


def test_directory_is_one_of_the_pods() -> None:
    made = script(directory=Path("/home/me/project"))
    assert value(made, "--working-dir") == "/home/me/project"
    assert variables(made)["IMGKIT_RUN_DIR"] == "/home/me/project/runs/rcp"


def test_nothing_is_kept_where_nothing_can_be_written() -> None:
    made = script(pvcs=("code:/code:ro", "home:/home/me"), directory=Path("/code/project"))
    assert value(made, "--working-dir") == "/code/project"
    assert variables(made)["IMGKIT_RUN_DIR"] == "/home/me/runs/rcp"


@pytest.mark.parametrize(
    ("given", "doubt"),
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
def test_doubt_is_a_warning(given: dict[str, Any], doubt: str) -> None:
    assert job().warnings == ()
    (warning,) = job(**given).warnings
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


@pytest.fixture
def client(first_runai: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A fake of the first client, and the file of what it was called with."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return first_runai


def test_submission_runs_the_words_and_is_followed(client: Path) -> None:
    app = build_app()
    argv = ["--nodes", "2", "--image", "r/x:1", "--pvc", "home:/home/me", "--directory", "/home/me/a"]
    done = CliRunner().invoke(
        app, ["run", "--detach", "rcp", *argv, "-q", "mlo-me", "--", "dist-run", "a b.py"]
    )
    assert (done.exit_code, done.stdout) == (0, "rcp\n")
    done = CliRunner().invoke(app, ["status", "rcp", "--json"])
    assert json.loads(done.stdout)["output"].split() == ["describe", "job", "rcp", "--project", "mlo-me"]


def test_interactive_submission_says_how_to_get_in(client: Path) -> None:
    argv = ["run", "rcp", "--nodes", "2", "--image", "r/x:1", "--interactive"]
    done = CliRunner().invoke(build_app(), argv)
    assert done.stdout == "rcp\n"
    assert "runai bash rcp --pod rcp-worker-0" in done.stderr
