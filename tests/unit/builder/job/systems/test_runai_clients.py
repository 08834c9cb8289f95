"""Which client of RunAI a command is written for, and what later clients are given. The clients are fakes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from imgkit_builder.cli.app import build_app
from imgkit_builder.job import submit
from imgkit_builder.job.request import Job, Request, SubmittedJob
from imgkit_builder.job.resolve import resolve
from imgkit_builder.job.systems import pods, runai_client
from imgkit_builder.job.systems.runai import SYSTEM as runai
from imgkit_builder.recipe import targets
from imgkit_entrypoints.errors import UsageError

RCP = Request(command=("dist-pi",), nodes="2", image="r.example/me/rcp:1")
SHARED = (
    "--project --image --gpu-devices-request --cpu-core-request --existing-pvc --working-dir -e --annotation "
    "--extended-resource --large-shm"
)
EARLY = {"training submit": SHARED, "training pytorch submit": f"{SHARED} --workers --min-replicas"}
LATE = {
    "training submit": f"{SHARED} --env-secret",
    "training pytorch submit": f"{SHARED} --env-secret --workers",
}
FakeRunAI = Callable[[Mapping[str, str]], Path]


@pytest.fixture(autouse=True)
def no_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No ``runai`` of this machine, and records of our own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if found := shutil.which("runai"):
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        assert not shutil.which("runai"), f"{found} is a runai of this machine"


def job(
    recipe: str | Path = "rcp", *, client: str = "", pvcs: tuple[str, ...] = ("home:/w",), **given: Any
) -> Job:
    own = pods.PodFlags(pvcs=pvcs, client=client)
    return resolve(targets.find(recipe), dataclasses.replace(RCP, system_flags=(own,), **given))


def decided(found: Job) -> str:
    return found.flags(pods.PodFlags).client


def stated(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: rcp\nsystem:\n  queue:\n    {text}\n")
    return file


@pytest.mark.parametrize(("commands", "name"), [(EARLY, "2.18"), (LATE, "2.24")])
def test_client_on_path_decides(fake_runai: FakeRunAI, commands: Mapping[str, str], name: str) -> None:
    fake_runai(commands)
    assert decided(job()) == name
    assert job().warnings == ()


def test_first_client_on_path_decides(first_runai: Path) -> None:
    assert decided(job()) == "v1"
    assert runai.script(job()).submit[:3] == ("runai", "submit-dist", "pytorch")
    assert not first_runai.exists(), "only its help was asked for"


def test_flag_wins_over_recipe_and_recipe_over_path(fake_runai: FakeRunAI, tmp_path: Path) -> None:
    fake_runai(EARLY)
    file = stated(tmp_path, "client: '2.25'")
    assert decided(job(file)) == "2.24"
    assert decided(job(file, client="v1")) == "v1"
    assert decided(job(file, client="3.0.7")) == "3.0"


def test_without_a_client_the_newest_is_assumed_with_a_warning() -> None:
    found = job()
    assert decided(found) == "3.0"
    (warning,) = found.warnings
    assert warning == "no runai on PATH: the command is for the client 3.0; --client names another one"


def test_unknown_client_on_path_is_refused_by_name(fake_runai: FakeRunAI) -> None:
    fake_runai({"submit-mpi": "--name"})
    with pytest.raises(UsageError, match=r"runai-bin/runai is no runai client that imgkit knows"):
        job()
    assert decided(job(client="2.24")) == "2.24"


@pytest.mark.parametrize("text", ["3.1", "2.17", "2.13", "1", "v2", "4.0", "2.x", "02.18.1.2", "-1.0"])
def test_unknown_version_is_refused_by_name(text: str, tmp_path: Path) -> None:
    what = f"unknown runai client {text!r}: known are v1, or 2.18 to 3.0"
    with pytest.raises(UsageError) as caught:
        job(client=text)
    assert (caught.value.where, caught.value.what) == ("--client", what)
    with pytest.raises(UsageError) as caught:
        job(stated(tmp_path, f"client: '{text}'"))
    assert what in str(caught.value)
    assert "mine.yaml:4" in str(caught.value)


@pytest.mark.parametrize("text", ["1.9", "2.4", "two"])
def test_unknown_trainer_is_refused_by_name(text: str, tmp_path: Path) -> None:
    what = f"unknown Kubeflow Trainer {text!r}: known are 2.0 to 2.3"
    with pytest.raises(UsageError) as caught:
        job(stated(tmp_path, f"trainer: '{text}'"), client="3.0")
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("client", "given", "where", "what"),
    [
        ("2.24", {"pvcs": ("data:/data:ro",)}, "--pvc", "2.24 has no option for a read-only volume"),
        ("2.18", {"env": ("WANDB_API_KEY",)}, "--env", "2.18 has no option for a key of a Secret"),
    ],
)
def test_what_a_client_has_no_option_for_is_refused(
    client: str, given: dict[str, Any], where: str, what: str
) -> None:
    with pytest.raises(UsageError) as caught:
        runai.script(job(client=client, **given))
    assert caught.value.where == where
    assert caught.value.what.endswith(what)
    assert "--client v1" in str(caught.value.hint)
    assert runai.script(job(client="v1", **given)).submit


def test_pod_without_gpus_asks_for_none() -> None:
    words = runai.script(job(client="3.0", gpus=0, cpus=4)).submit
    assert "--gpu-devices-request" not in words
    assert words[words.index("--cpu-core-request") + 1] == "4"


def test_words_of_a_program_are_not_split_again_by_later_clients() -> None:
    assert job(client="3.0", command=("dist-run", "$HOME", "a b")).warnings == ()


def test_option_that_the_client_on_path_lacks_is_refused_before_submission(fake_runai: FakeRunAI) -> None:
    fake_runai(
        {**LATE, "training pytorch submit": LATE["training pytorch submit"].replace("--large-shm", "")}
    )
    with pytest.raises(UsageError) as caught:
        submit.before_submission(job())
    assert caught.value.what.endswith("runai: training pytorch submit has no option --large-shm")
    submit.before_submission(job(nodes="1"))
    submit.before_submission(job(client="v1"))


def test_command_that_the_client_on_path_lacks_is_refused_before_submission(first_runai: Path) -> None:
    with pytest.raises(UsageError) as caught:
        submit.before_submission(job(client="3.0"))
    assert "has no command training pytorch submit" in caught.value.what
    assert caught.value.hint == "--client v1, the one that is on PATH"


def test_options_of_the_user_reach_the_client(fake_runai: FakeRunAI) -> None:
    """The client refuses them itself, by name, and may have hidden ones."""
    fake_runai(LATE)
    submit.before_submission(job(options=("--hidden=1",)))


@pytest.mark.parametrize(
    ("nodes", "commands"), [("1", ["training"]), ("2", ["training", "pytorch"])], ids=["one pod", "two pods"]
)
def test_submitted_job_is_followed_by_its_commands(
    fake_runai: FakeRunAI, nodes: str, commands: list[str]
) -> None:
    called = fake_runai(LATE)
    argv = [
        "submit",
        "rcp",
        "--nodes",
        nodes,
        "--image",
        "r/x:1",
        "--pvc",
        "home:/w",
        "-q",
        "me",
        "--",
        "dist-pi",
    ]
    app = build_app(("submit", "status", "cancel", "logs"))
    done = CliRunner().invoke(app, argv)
    assert (done.exit_code, done.stdout) == (0, "rcp\n"), done.output
    assert called.read_text().split()[: len(commands) + 2] == [*commands, "submit", "rcp"]
    assert submit.record_of("rcp").kind == " ".join(commands)
    done = CliRunner().invoke(app, ["status", "rcp", "--json"])
    assert json.loads(done.stdout)["output"].split() == [*commands, "describe", "rcp", "--project", "me"]
    done = CliRunner().invoke(app, ["cancel", "rcp"])
    assert called.read_text().split() == [*commands, "delete", "rcp", "--project", "me"]
    done = CliRunner().invoke(app, ["logs", "rcp", "--json"])
    assert json.loads(done.stdout)["command"] == [
        "runai",
        *commands,
        "logs",
        "rcp",
        "--follow",
        "--project",
        "me",
    ]


def test_record_with_another_kind_starts_nothing() -> None:
    record = SubmittedJob(
        id="rcp", system="runai", name="rcp", recipe="rcp", directory=Path("/w"), kind="upgrade --force"
    )
    with pytest.raises(UsageError, match="upgrade --force"):
        runai.cancel(record)


@pytest.mark.parametrize(
    ("own", "warning"),
    [
        ({"format": "pytorchjob", "client": "v1"}, "--client is not used with --format pytorchjob"),
        ({"format": "pytorchjob", "trainer": "2.1"}, "--trainer is not used with --format pytorchjob"),
        ({"client": "v1", "trainer": "2.1"}, "--trainer is not used with --format runai"),
    ],
)
def test_version_without_effect_is_a_warning(own: dict[str, Any], warning: str) -> None:
    flags = pods.PodFlags(pvcs=("home:/w",), **own)
    assert resolve(targets.find("rcp"), dataclasses.replace(RCP, system_flags=(flags,))).warnings == (
        warning,
    )


def test_help_of_a_client_is_read_once(fake_runai: FakeRunAI, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runai(LATE)
    assert runai_client.on_path() == "2.24"
    monkeypatch.setattr(runai_client.process, "run", lambda *_, **__: pytest.fail("started again"))
    assert runai_client.on_path() == "2.24"
