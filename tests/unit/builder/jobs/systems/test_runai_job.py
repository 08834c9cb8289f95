"""What RunAI's clients are given, of which version, and how a job is followed. The clients are fakes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from job_builder import Recipe, make_job, make_script, write_recipe
from job_records import queued_job

from imgkit_builder.jobs import checks, records
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.systems import pods
from imgkit_builder.jobs.systems.runai import SYSTEM as runai
from imgkit_entrypoints.errors import UsageError

RCP = {"command": ("dist-pi",), "nodes": "2", "image": "r.example/me/rcp:1"}
HOME = ("home:/home/me",)


def job(
    recipe: Recipe = "rcp", *, form: Any = "runai-v1", pvcs: tuple[str, ...] = HOME, **options: Any
) -> Job:
    return make_job(recipe, pods.PodFlags(pvcs=pvcs, format=form), **{**RCP, **options})


def script(*, pvcs: tuple[str, ...] = HOME, **options: Any) -> Script:
    return make_script("rcp", pods.PodFlags(pvcs=pvcs, format="runai-v1"), **{**RCP, **options})


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
def test_program_s_arguments_are_quoted_once(argument):
    job_script = script(command=("dist-run", "main.py", argument))
    assert job_script.submit[-4:] == ("--", "dist-run", "main.py", argument)
    shell = f'runai() {{ printf "%s\\0" runai "$@"; }}\n{job_script.text}'
    read = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert tuple(read.split("\0")[:-1]) == job_script.submit


@pytest.mark.parametrize(
    ("typed", "handed"),
    [("$(NAME)", "$$(NAME)"), ("$$", "$$$"), ("$$(NAME)", "$$$$(NAME)"), ("$NAME $", "$NAME $")],
)
def test_kubernetes_expands_nothing(typed, handed):
    job_script = script(command=("dist-run", typed), env=(f"A={typed}",))
    assert job_script.submit[-1] == variables(job_script)["A"] == handed


@pytest.mark.parametrize("name", ["IMGKIT_LOG_DIR", "IMGKIT_NPROC"])
def test_user_s_own_variables_win(name):
    assert variables(script(env=(f"{name}=7",), nproc=20))[name] == "7"


def test_nothing_is_kept_where_nothing_can_be_written():
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
def test_doubt_is_a_warning(options, doubt):
    assert job().warnings == ()
    (warning,) = job(**options).warnings
    assert doubt in warning


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("Run1", "run1"),
        ("run.1", "run-1"),
        ("run-", "run"),
    ],
)
def test_name_that_no_pod_can_have_is_refused(name, better):
    error = refused(name=name)
    assert (error.where, error.hint) == ("--name", f"--name {better}")


@pytest.mark.parametrize("text", ["home", "home:data", "Home:/data", "home:/da ta", "home:/data:rw"])
def test_volume_that_is_none_is_refused(text):
    assert refused(pvcs=(text,)).where == "--pvc"


@pytest.mark.usefixtures("home", "first_runai")
def test_submitted_job_is_followed_by_its_name(call):
    pods = ("--nodes", "2", "--image", "r/x:1", "--pvc", "home:/home/me", "--directory", "/home/me/a")
    command = ("-q", "mlo-me", "--", "dist-run", "a b.py")
    assert call("run", "--detach", "rcp", *pods, *command)[:2] == (0, "rcp\n")
    answer = json.loads(call("status", "rcp", "--json")[1])
    assert answer["output"].split() == ["describe", "job", "rcp", "--project", "mlo-me"]


@pytest.mark.usefixtures("home", "first_runai")
def test_interactive_submission_says_how_to_get_in(call):
    code, out, err = call("run", "rcp", "--nodes", "2", "--image", "r/x:1", "--interactive")
    assert (code, out) == (0, "rcp\n")
    assert "runai bash rcp --pod rcp-worker-0" in err


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


@pytest.mark.parametrize("commands", [EARLY, LATE])
def test_client_on_path_decides(fake_runai, commands):
    fake_runai(commands)
    assert pods.client_version(job(form="runai")) == "v2"
    assert job(form="runai").warnings == ()


def test_first_client_on_path_decides(first_runai):
    assert pods.client_version(job(form="runai")) == "v1"
    assert runai.script(job(form="runai")).submit[:3] == ("runai", "submit-dist", "pytorch")
    assert not first_runai.exists(), "only its help was asked for"


def test_flag_wins_over_recipe_and_recipe_over_path(fake_runai, tmp_path):
    fake_runai(EARLY)
    file = write_recipe(tmp_path, "extends: rcp\nsystem:\n  queue:\n    client: v1\n")
    assert pods.client_version(job(file, form="runai")) == "v1"
    assert pods.client_version(job(file, form="runai-v2")) == "v2"


def test_without_a_client_the_later_one_is_assumed_with_a_warning():
    pod_job = job(form="runai")
    assert pods.client_version(pod_job) == "v2"
    (warning,) = pod_job.warnings
    assert (
        warning
        == "no runai on PATH: the command is for the later client; --format runai-v1 names the first one"
    )


def test_unknown_client_on_path_is_refused_by_name(fake_runai):
    fake_runai({"submit-mpi": "--name"})
    with pytest.raises(UsageError, match=r"bin/runai is no runai client that imgkit knows"):
        job(form="runai")
    assert pods.client_version(job(form="runai-v2")) == "v2"


def test_key_of_a_secret_is_refused_where_the_client_on_path_has_no_option(fake_runai):
    fake_runai(EARLY)
    with pytest.raises(UsageError) as caught:
        checks.before_submission(job(form="runai", env=("WANDB_API_KEY",)))
    assert caught.value.what.endswith("training pytorch submit has no option --env-secret")


def test_later_clients_do_not_split_arguments():
    assert job(form="runai-v2", command=("dist-run", "$HOME", "a b")).warnings == ()


def test_option_that_the_client_on_path_lacks_is_refused_before_submission(fake_runai):
    fake_runai(
        {**LATE, "training pytorch submit": LATE["training pytorch submit"].replace("--large-shm", "")}
    )
    with pytest.raises(UsageError) as caught:
        checks.before_submission(job(form="runai"))
    assert caught.value.what.endswith("runai: training pytorch submit has no option --large-shm")
    checks.before_submission(job(form="runai", nodes="1"))
    checks.before_submission(job(form="runai-v1"))


def test_command_that_the_client_on_path_lacks_is_refused_before_submission(first_runai):
    with pytest.raises(UsageError) as caught:
        checks.before_submission(job(form="runai-v2"))
    assert "has no command training pytorch submit" in caught.value.what
    assert caught.value.hint == "--format runai-v1, the one that is on PATH"


def test_options_of_the_user_reach_the_client(fake_runai):
    """The client refuses them itself, by name, and may have hidden ones."""
    fake_runai(LATE)
    checks.before_submission(job(form="runai", options=("--hidden=1",)))


@pytest.mark.parametrize(
    ("nodes", "commands"), [("1", ["training"]), ("2", ["training", "pytorch"])], ids=["one pod", "two pods"]
)
def test_submitted_job_is_followed_by_its_commands(call, fake_runai, nodes, commands):
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


def test_record_with_another_kind_starts_nothing():
    record = queued_job(id="rcp", system="runai", name="rcp", kind="upgrade --force")
    with pytest.raises(UsageError, match="upgrade --force"):
        runai.cancel_command(record)
