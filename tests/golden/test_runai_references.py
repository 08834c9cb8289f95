"""Every option that imgkit writes for a runai client is in the published references of that client.

``runai/VERSION.txt`` is what a reference lists; its first lines name the source and what was not seen.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from job_records import queued_job

from imgkit_builder.jobs import volume
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.remote.store import Store
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.jobs.systems import pods
from imgkit_builder.jobs.systems.runai import SYSTEM as runai
from imgkit_builder.recipe.targets import load_target

HERE = Path(__file__).parent
JOBS = sorted((HERE / "jobs").glob("*.args"))
REFERENCES = {"v1": ("v1",), "v2": ("2.18", "2.24", "3.0")}
MISSING = {"2.18": {"--env-secret"}, "3.0": {"--backoff-limit"}}
"""Options that a reference lacks: imgkit looks in the help of the client on PATH for its own, such as the
first, before it submits; the second is a user's.
"""


def reference(name: str) -> Mapping[str, frozenset[str]]:
    lines = (HERE / f"runai/{name}.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.partition(":") for line in lines if not line.startswith("#"))
    return {command: frozenset(re.sub(r"[][]", "", options).split()) for command, _, options in rows}


def unknown(argv: Sequence[str], name: str) -> Iterator[str]:
    """Yield what the reference `name` lacks of ``runai COMMAND [NAME] [OPTIONS]``."""
    argv = argv[: argv.index("--")] if "--" in argv else argv
    options_of = reference(name)
    text = f"{' '.join(argv[1:])} "
    commands = [command for command in options_of if text.startswith(f"{command} ")]
    if not commands:
        yield " ".join(argv[:4])
        return
    command = max(commands, key=len)
    for argument in argv:
        option = argument.partition("=")[0]
        if option.startswith("-") and option not in options_of[command]:
            yield option


def of_client() -> Iterator[tuple[str, str]]:
    for file in JOBS:
        args = shlex.split(file.read_text(encoding="utf-8"))
        form = args[args.index("--format") + 1] if "--format" in args else ""
        if form.startswith("runai-"):
            for name in REFERENCES[form.removeprefix("runai-")]:
                yield file.stem, name


@pytest.mark.parametrize(("case", "name"), list(of_client()))
def test_submission_has_options_of_the_reference_alone(case, name):
    text = (HERE / f"jobs/{case}.txt").read_text(encoding="utf-8")
    comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
    command = shlex.split("\n".join(line for line in text.splitlines() if not line.startswith("#")))
    assert set(unknown(command, name)) <= MISSING.get(name, set())
    ways = [line for line in comments if line.startswith("runai ")]
    ends = [line.partition("until: ")[2] for line in comments if "until: " in line]
    for line in (*ways, *ends):
        assert not list(unknown(shlex.split(line), name)), line


@pytest.mark.parametrize(
    ("form", "name"), [(f"runai-{client}", name) for client in ("v1", "v2") for name in REFERENCES[client]]
)
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_job_is_followed_by_commands_of_the_reference(form, name, nodes):
    request = JobRequest.of(
        command=("dist-pi",), nodes=nodes, image="r/x:1", system_flags=(pods.PodFlags(format=form),)
    )
    job = resolve_job(load_target("rcp"), request)
    record = queued_job(id="rcp", system="runai", name="rcp", queue="me", kind=runai.script(job).kind)
    (status,) = runai.status_commands(record)
    for argv in (status, runai.log_source(record), runai.cancel_command(record)):
        assert not list(unknown(argv, name)), argv
        assert argv[-2:] == ("--project", "me")
    assert runai.cancel_command(dataclasses.replace(record, queue=""))[-1] == "rcp"


@pytest.mark.parametrize(
    ("form", "name"), [(f"runai-{client}", name) for client in ("v1", "v2") for name in REFERENCES[client]]
)
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_pods_with_a_store_run_under_the_user_s_ids(form, name, nodes):
    request = JobRequest.of(
        command=("python", "train.py"),
        nodes=nodes,
        image="r/x:1",
        system_flags=(pods.PodFlags(format=form),),
    )
    remote = Remote(name="mlo", address="far", recipe="mlo", pvc="mlo-scratch:/mloscratch")
    early = volume.provisional_job("", request, remote)
    store = Store(
        home="/mnt/mlo/scratch/homes/me/imgkit",
        has_program=True,
        images=(),
        code=(),
        volume="/mnt/mlo/scratch",
        ids="1001:30034",
    )
    submit = runai.script(volume.job_with_pod_paths(store, early, remote)).submit
    assert set(unknown(submit, name)) <= MISSING.get(name, set())
    text = " ".join(submit)
    folder = "/mloscratch/homes/me/imgkit"
    assert f" --working-dir {folder} --run-as-uid 1001 --run-as-gid 30034 " in text
    assert f"IMGKIT_RUN_DIR={folder}/runs/mlo-" in text
    assert "mlo-scratch" in text


def test_every_client_has_a_reference_and_a_job():
    names = {name for names in REFERENCES.values() for name in names}
    assert {path.stem for path in (HERE / "runai").glob("*.txt")} == names
    assert {name for _, name in of_client()} == names


def test_option_of_another_client_is_noticed():
    assert list(unknown(("runai", "training", "submit", "x", "--pvc", "a:/b", "--", "--gpu"), "3.0")) == [
        "--pvc"
    ]
    assert list(unknown(("runai", "submit-dist", "pytorch", "--name", "x"), "3.0"))
