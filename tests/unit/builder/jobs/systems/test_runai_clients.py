"""Which client of RunAI a command is written for, and what later clients are given. The clients are fakes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from job_records import queued_job

from imgkit_builder.jobs import checks, records
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.jobs.systems import pods
from imgkit_builder.jobs.systems.runai import SYSTEM as runai
from imgkit_builder.recipe import targets
from imgkit_entrypoints.errors import UsageError

RCP = JobRequest.of(command=("dist-pi",), nodes="2", image="r.example/me/rcp:1")
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
def no_client(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No ``runai`` of this machine."""
    if program := shutil.which("runai"):
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        assert not shutil.which("runai"), f"{program} is a runai of this machine"


def job(
    recipe: str | Path = "rcp",
    *,
    form: pods.KubernetesFormat = "runai",
    pvcs: tuple[str, ...] = ("home:/w",),
    **options: Any,
) -> Job:
    flags = pods.PodFlags(pvcs=pvcs, format=form)
    return resolve_job(targets.load_target(recipe), RCP.changed(system_flags=(flags,), **options))


def write_recipe(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: rcp\nsystem:\n  queue:\n    {text}\n")
    return file


@pytest.mark.parametrize("commands", [EARLY, LATE])
def test_client_on_path_decides(fake_runai: FakeRunAI, commands: Mapping[str, str]) -> None:
    fake_runai(commands)
    assert pods.client_version(job()) == "v2"
    assert job().warnings == ()


def test_first_client_on_path_decides(first_runai: Path) -> None:
    assert pods.client_version(job()) == "v1"
    assert runai.script(job()).submit[:3] == ("runai", "submit-dist", "pytorch")
    assert not first_runai.exists(), "only its help was asked for"


def test_flag_wins_over_recipe_and_recipe_over_path(fake_runai: FakeRunAI, tmp_path: Path) -> None:
    fake_runai(EARLY)
    file = write_recipe(tmp_path, "client: v1")
    assert pods.client_version(job(file)) == "v1"
    assert pods.client_version(job(file, form="runai-v2")) == "v2"


def test_without_a_client_the_later_one_is_assumed_with_a_warning() -> None:
    pod_job = job()
    assert pods.client_version(pod_job) == "v2"
    (warning,) = pod_job.warnings
    assert (
        warning
        == "no runai on PATH: the command is for the later client; --format runai-v1 names the first one"
    )


def test_unknown_client_on_path_is_refused_by_name(fake_runai: FakeRunAI) -> None:
    fake_runai({"submit-mpi": "--name"})
    with pytest.raises(UsageError, match=r"bin/runai is no runai client that imgkit knows"):
        job()
    assert pods.client_version(job(form="runai-v2")) == "v2"


def test_key_of_a_secret_is_refused_where_the_client_on_path_has_no_option(fake_runai: FakeRunAI) -> None:
    fake_runai(EARLY)
    with pytest.raises(UsageError) as caught:
        checks.before_submission(job(env=("WANDB_API_KEY",)))
    assert caught.value.what.endswith("training pytorch submit has no option --env-secret")


def test_later_clients_do_not_split_arguments() -> None:
    assert job(form="runai-v2", command=("dist-run", "$HOME", "a b")).warnings == ()


def test_option_that_the_client_on_path_lacks_is_refused_before_submission(fake_runai: FakeRunAI) -> None:
    fake_runai(
        {**LATE, "training pytorch submit": LATE["training pytorch submit"].replace("--large-shm", "")}
    )
    with pytest.raises(UsageError) as caught:
        checks.before_submission(job())
    assert caught.value.what.endswith("runai: training pytorch submit has no option --large-shm")
    checks.before_submission(job(nodes="1"))
    checks.before_submission(job(form="runai-v1"))


def test_command_that_the_client_on_path_lacks_is_refused_before_submission(first_runai: Path) -> None:
    with pytest.raises(UsageError) as caught:
        checks.before_submission(job(form="runai-v2"))
    assert "has no command training pytorch submit" in caught.value.what
    assert caught.value.hint == "--format runai-v1, the one that is on PATH"


def test_options_of_the_user_reach_the_client(fake_runai: FakeRunAI) -> None:
    """The client refuses them itself, by name, and may have hidden ones."""
    fake_runai(LATE)
    checks.before_submission(job(options=("--hidden=1",)))


@pytest.mark.parametrize(
    ("nodes", "commands"), [("1", ["training"]), ("2", ["training", "pytorch"])], ids=["one pod", "two pods"]
)
def test_submitted_job_is_followed_by_its_commands(
    call: Any, fake_runai: FakeRunAI, nodes: str, commands: list[str]
) -> None:
    called = fake_runai(LATE)
    argv = f"run --detach rcp --nodes {nodes} --image r/x:1 --pvc home:/w -q me -- dist-pi".split()
    code, out, err = call(*argv)
    assert (code, out) == (0, "rcp\n"), err
    assert called.read_text().split()[: len(commands) + 2] == [*commands, "submit", "rcp"]
    assert records.find_record("rcp").job.kind == " ".join(commands)
    answer = json.loads(call("status", "rcp", "--json")[1])
    assert answer["output"].split() == [*commands, "describe", "rcp", "--project", "me"]
    call("cancel", "rcp")
    assert called.read_text().split() == [*commands, "delete", "rcp", "--project", "me"]
    answer = json.loads(call("logs", "rcp", "--json")[1])
    assert answer["command"] == ["runai", *commands, "logs", "rcp", "--follow", "--project", "me"]


def test_record_with_another_kind_starts_nothing() -> None:
    record = queued_job(id="rcp", system="runai", name="rcp", kind="upgrade --force")
    with pytest.raises(UsageError, match="upgrade --force"):
        runai.cancel_command(record)
