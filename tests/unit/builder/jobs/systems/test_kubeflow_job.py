"""PyTorchJob and TrainJob: compared with Kubeflow's own models; an unknown key is an error here."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from job_records import queued_job

from imgkit_builder.base.progress import Silent
from imgkit_builder.jobs import submit
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve
from imgkit_builder.jobs.systems.kubeflow import SYSTEM as kubeflow
from imgkit_builder.jobs.systems.pods import KubernetesFormat, PodFlags
from imgkit_builder.jobs.transport import Local
from imgkit_builder.recipe.targets import find
from imgkit_entrypoints.errors import ToolFailed

RECIPE = find("rcp")
RCP = JobRequest.of(command=("dist-train", "--steps", "1000"), nodes="3", image="r.example/me/rcp:1")
HOME = ("data:/data:ro", "home:/home/me")
FORMATS: tuple[KubernetesFormat, ...] = ("pytorchjob", "trainjob")


def job(kind: KubernetesFormat, *, pvcs: tuple[str, ...] = (), recipe: str = "", **given: Any) -> Job:
    own = PodFlags(format=kind, pvcs=pvcs)
    return resolve(find(recipe) if recipe else RECIPE, RCP.changed(system_flags=(own,), **given))


def script(kind: KubernetesFormat, **given: Any) -> Script:
    return kubeflow.script(job(kind, **given))


def document(kind: KubernetesFormat, **given: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(script(kind, **given).text)
    return found


def understood(found: dict[str, Any]) -> Any:
    """What is left of a document after Kubeflow's models have read it: they drop a key that they do not know.

    They raise an error where a value has another type, or a required key is not there.
    """
    if found["kind"] == "TrainJob":
        from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

        return TrainerV1alpha1TrainJob.from_dict(found).to_dict()
    import kubernetes.client
    from kubeflow.training import models

    for name in (name for name in dir(models) if name.startswith("KubeflowOrg")):
        setattr(kubernetes.client.models, name, getattr(models, name))  # where its reader looks for models
    client = kubernetes.client.ApiClient()
    read = client.deserialize(SimpleNamespace(data=json.dumps(found)), "KubeflowOrgV1PyTorchJob")
    return client.sanitize_for_serialization(read)


def containers(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What runs the program: of each role, or of the one trainer."""
    spec = found["spec"]
    if found["kind"] == "TrainJob":
        return [spec["trainer"]]
    roles = spec["pytorchReplicaSpecs"].values()
    return [container for role in roles for container in role["template"]["spec"]["containers"]]


def pod_specs(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Templates of the pods, metadata and spec."""
    spec = found["spec"]
    if found["kind"] == "PyTorchJob":
        return [role["template"] for role in spec["pytorchReplicaSpecs"].values()]
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return [node["template"]["spec"]["template"]]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"nodes": "1"},
        {"pvcs": HOME, "directory": Path("/home/me/project"), "env": ("A=it's $(x)\t: {}",), "queue": "me"},
        {"gpus": 0, "nproc": 20},
        {"cpus": 32, "options": ("--annotation=a/b=c", "--extended-resource", "x/y=2")},
        {"interactive": True, "command": ()},
    ],
    ids=lambda given: " ".join(given) or "plain",
)
def test_document_is_what_models_know(kind: KubernetesFormat, given: dict[str, Any]) -> None:
    found = document(kind, **given)
    assert understood(found) == found


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("place", ["job", "pod", "container"])
def test_unknown_key_is_noticed(kind: KubernetesFormat, place: str) -> None:
    """The comparison above is one."""
    found = document(kind, pvcs=HOME)
    {"job": found["spec"], "pod": pod_specs(found)[0]["spec"], "container": containers(found)[0]}[place][
        "imgkitSaysSo"
    ] = "x"
    assert understood(found) != found


@pytest.mark.parametrize(
    "word", ["1e-4", "y", "N", "0o17", "0x1f", "1_000", "+1", ".5", "-3e2", "~", "12:30", ""]
)
def test_number_like_word_is_quoted(word: str) -> None:
    """Readers of YAML differ in what is a number; kubectl's refuses one where a text belongs."""
    assert f"- '{word}'\n" in script("pytorchjob", command=("dist-run", word)).text


def test_directory_is_where_the_program_starts() -> None:
    given = {"pvcs": HOME, "directory": Path("/home/me/my run")}
    assert {each["workingDir"] for each in containers(document("pytorchjob", **given))} == {"/home/me/my run"}
    trainer = document("trainjob", **given)["spec"]["trainer"]
    assert trainer["command"][:3] == ["env", "--chdir=/home/me/my run", "dist-train"]


def test_project_is_a_namespace_and_its_scheduler() -> None:
    found = document("pytorchjob", queue="mlo-me")
    assert found["metadata"]["namespace"] == "runai-mlo-me"
    assert all(pod["spec"]["schedulerName"] == "runai-scheduler" for pod in pod_specs(found))
    assert "namespace" not in document("pytorchjob")["metadata"]


@pytest.mark.parametrize("kind", FORMATS)
def test_interactive_pods_sleep_below_their_comments(kind: KubernetesFormat) -> None:
    made = script(kind, interactive=True, queue="mlo-me")
    assert containers(yaml.safe_load(made.text))[0].get("args" if kind == "pytorchjob" else "command") == [
        "sleep",
        "infinity",
    ]
    comments = [line for line in made.text.splitlines() if line.startswith("#")]
    assert any("kubectl exec --namespace=runai-mlo-me" in line for line in comments)
    assert "#   dist-train --steps 1000" in comments


def test_name_that_exists_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The client's message, from a fake kubectl."""
    said = 'Error from server (AlreadyExists): pytorchjobs.kubeflow.org "rcp" already exists'
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    existing = job("pytorchjob")
    prepared = PreparedJob(job=existing, script=kubeflow.script(existing))
    with pytest.raises(ToolFailed) as caught:
        submit.start(prepared, Local(), Silent())
    assert str(caught.value.hint).startswith("nothing was started: a job named rcp exists")


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("pytorchjob.kubeflow.org/rcp created\n", "pytorchjob.rcp"),
        ("Warning: x/y\ntrainjob.trainer.kubeflow.org/run-7 created\n", "trainjob.run-7"),
        ("nothing\n", ""),
        ("pytorchjob.kubeflow.org/rcp unchanged\n", ""),  # of apply: nothing starts
    ],
)
def test_id_is_kind_and_name(output: str, found: str) -> None:
    assert kubeflow.parse_job_id(output, "rcp") == found


CONDITION = """\
    Last Update Time:      2026-01-01T00:00:00Z
    Reason:                PyTorchJob{type}
    Status:                {status}
    Type:                  {type}
"""
"""A condition as ``kubectl describe`` prints it; no cluster ran here."""


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ((("Created", "True"),), "waiting"),
        ((("Created", "True"), ("Running", "True")), "running"),
        ((("Created", "True"), ("Running", "False"), ("Succeeded", "True")), "succeeded"),
        ((("Created", "True"), ("Failed", "True")), "failed"),
        ((("Complete", "True"),), "succeeded"),
        ((("Other", "True"),), ""),
        ((), ""),
    ],
)
def test_newest_condition_is_the_state(conditions: tuple[tuple[str, str], ...], state: str) -> None:
    text = "".join(CONDITION.format(type=kind, status=status) for kind, status in conditions)
    assert kubeflow.parse_status(f"Status:\n  Conditions:\n{text}Events: <none>\n").state == state


def test_submitted_job_is_found_again() -> None:
    record = queued_job(id="trainjob.rcp", system="kubeflow", name="rcp", queue="me")
    assert kubeflow.status_commands(record) == (
        ("kubectl", "describe", "trainjob", "rcp", "--namespace=runai-me"),
    )
    assert "--selector=jobset.sigs.k8s.io/jobset-name=rcp" in kubeflow.log_source(record)
    first = dataclasses.replace(record, id="pytorchjob.rcp", queue="")
    assert kubeflow.cancel_command(first) == ("kubectl", "delete", "pytorchjob", "rcp")
    assert "--selector=training.kubeflow.org/job-name=rcp" in kubeflow.log_source(first)


@pytest.mark.parametrize("kind", FORMATS)
def test_secret_of_the_user_is_mounted_where_launchers_look(kind: KubernetesFormat) -> None:
    for required in (False, True):
        found = document(kind, env=("WANDB_API_KEY",), require_secret=required)
        assert understood(found)
        text = json.dumps(found)
        assert '"mountPath": "/run/secrets/imgkit", "readOnly": true' in text
        assert f'"path": "secret"}}], "optional": {str(not required).lower()}' in text
        assert '{"secretKeyRef": {"name": "imgkit", "key": "WANDB_API_KEY"}}' in text
    assert "secret" not in script(kind, nodes="1").text
    assert "/run/secrets" not in script(kind, secret_file=Path("/data/secret")).text
