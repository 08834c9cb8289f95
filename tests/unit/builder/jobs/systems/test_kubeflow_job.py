"""PyTorchJob and TrainJob: compared with Kubeflow's own models; an unknown key is an error here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from job_builder import make_job, make_script
from job_records import queued_job

from imgkit_builder.base.progress import Silent
from imgkit_builder.jobs import submit
from imgkit_builder.jobs.job import Script
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.systems.kubeflow import SYSTEM as kubeflow
from imgkit_builder.jobs.systems.pods import KubernetesFormat, PodFlags
from imgkit_builder.jobs.transport import Transport
from imgkit_entrypoints.errors import ToolFailed

RCP = {"command": ("dist-train", "--steps", "1000"), "nodes": "3", "image": "r.example/me/rcp:1"}
HOME = ("data:/data:ro", "home:/home/me")
FORMATS: tuple[KubernetesFormat, ...] = ("pytorchjob", "trainjob")


def script(kind: KubernetesFormat, *, pvcs: tuple[str, ...] = (), run_as: str = "", **options: Any) -> Script:
    return make_script("rcp", PodFlags(format=kind, pvcs=pvcs, run_as=run_as), **{**RCP, **options})


def document(kind: KubernetesFormat, **options: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(script(kind, **options).text)
    return manifest


def read_by_kubeflow(manifest: dict[str, Any]) -> Any:
    """Return what is left of a manifest after Kubeflow's models have read it.

    They drop a key that they do not know, and raise an error where a value has another type, or a required
    key is missing.
    """
    if manifest["kind"] == "TrainJob":
        from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

        return TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()
    import kubernetes.client
    from kubeflow.training import models

    for name in (name for name in dir(models) if name.startswith("KubeflowOrg")):
        setattr(kubernetes.client.models, name, getattr(models, name))  # where its reader looks for models
    client = kubernetes.client.ApiClient()
    read = client.deserialize(SimpleNamespace(data=json.dumps(manifest)), "KubeflowOrgV1PyTorchJob")
    return client.sanitize_for_serialization(read)


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """What runs the program: of each role, or of the one trainer."""
    spec = manifest["spec"]
    if manifest["kind"] == "TrainJob":
        return [spec["trainer"]]
    roles = spec["pytorchReplicaSpecs"].values()
    return [container for role in roles for container in role["template"]["spec"]["containers"]]


def pod_specs(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Templates of the pods, metadata and spec."""
    spec = manifest["spec"]
    if manifest["kind"] == "PyTorchJob":
        return [role["template"] for role in spec["pytorchReplicaSpecs"].values()]
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return [node["template"]["spec"]["template"]]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nodes": "1"},
        {"pvcs": HOME, "directory": Path("/home/me/project"), "env": ("A=it's $(x)\t: {}",), "queue": "me"},
        {"gpus": 0, "nproc": 20},
        {"cpus": 32, "options": ("--annotation=a/b=c", "--extended-resource", "x/y=2")},
        {"interactive": True, "command": ()},
        {"pvcs": HOME, "directory": Path("/home/me/store"), "run_as": "1001:30034"},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_document_has_only_keys_of_the_models(kind, options):
    manifest = document(kind, **options)
    assert read_by_kubeflow(manifest) == manifest


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("level", ["job", "pod", "container"])
def test_unknown_key_is_noticed(kind, level):
    """Else the comparison above would compare nothing."""
    manifest = document(kind, pvcs=HOME)
    pod = pod_specs(manifest)[0]["spec"]
    levels = {"job": manifest["spec"], "pod": pod, "container": containers(manifest)[0]}
    levels[level]["imgkitSaysSo"] = "x"
    assert read_by_kubeflow(manifest) != manifest


@pytest.mark.parametrize(
    "argument", ["1e-4", "y", "N", "0o17", "0x1f", "1_000", "+1", ".5", "-3e2", "~", "12:30", ""]
)
def test_text_like_a_number_is_quoted(argument):
    """Readers of YAML differ in what is a number; kubectl's refuses one where a text belongs."""
    assert f"- '{argument}'\n" in script("pytorchjob", command=("dist-run", argument)).text


def test_project_is_a_namespace_and_its_scheduler():
    manifest = document("pytorchjob", queue="mlo-me")
    assert manifest["metadata"]["namespace"] == "runai-mlo-me"
    assert all(pod["spec"]["schedulerName"] == "runai-scheduler" for pod in pod_specs(manifest))
    assert "namespace" not in document("pytorchjob")["metadata"]


@pytest.mark.parametrize("kind", FORMATS)
def test_interactive_pods_sleep_below_their_comments(kind):
    job_script = script(kind, interactive=True, queue="mlo-me")
    container = containers(yaml.safe_load(job_script.text))[0]
    assert container["args" if kind == "pytorchjob" else "command"] == ["sleep", "infinity"]
    comments = [line for line in job_script.text.splitlines() if line.startswith("#")]
    assert any("kubectl exec --namespace=runai-mlo-me" in line for line in comments)
    assert "#   dist-train --steps 1000" in comments


def test_name_that_exists_starts_nothing(fake_program):
    """The client's message, from a fake kubectl."""
    message = 'Error from server (AlreadyExists): pytorchjobs.kubeflow.org "rcp" already exists'
    fake_program("kubectl", f"echo '{message}' >&2; exit 1")
    existing = make_job("rcp", PodFlags(format="pytorchjob"), image="r.example/me/rcp:1")
    prepared = PreparedJob(job=existing, script=kubeflow.script(existing))
    with pytest.raises(ToolFailed) as caught:
        submit.start_job(prepared, Transport(), Silent())
    assert str(caught.value.hint).startswith("nothing was started: a job named rcp exists")


def test_submitted_job_is_found_again():
    record = queued_job(id="trainjob.rcp", system="kubeflow", name="rcp", queue="me")
    assert kubeflow.status_commands(record) == (
        ("kubectl", "describe", "trainjob", "rcp", "--namespace=runai-me"),
    )
    assert "--selector=jobset.sigs.k8s.io/jobset-name=rcp" in kubeflow.log_source(record)
    first = dataclasses.replace(record, id="pytorchjob.rcp", queue="")
    assert kubeflow.cancel_command(first) == ("kubectl", "delete", "pytorchjob", "rcp")
    assert "--selector=training.kubeflow.org/job-name=rcp" in kubeflow.log_source(first)


@pytest.mark.parametrize("kind", FORMATS)
def test_secret_of_the_user_is_mounted_where_launchers_look(kind):
    for required in (False, True):
        manifest = document(kind, env=("WANDB_API_KEY",), require_secret=required)
        assert read_by_kubeflow(manifest)
        text = json.dumps(manifest)
        assert '"mountPath": "/run/secrets/imgkit", "readOnly": true' in text
        assert f'"path": "secret"}}], "optional": {str(not required).lower()}' in text
        assert '{"secretKeyRef": {"name": "imgkit", "key": "WANDB_API_KEY"}}' in text
    assert "secret" not in script(kind, nodes="1").text
    assert "/run/secrets" not in script(kind, secret_file=Path("/data/secret")).text
