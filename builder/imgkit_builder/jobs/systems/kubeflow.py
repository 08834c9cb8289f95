"""Kubeflow: the same job as a PyTorchJob (Training Operator v1) or a TrainJob (Trainer v2), for ``kubectl``.

The recipe has options of RunAI's client; each of them becomes a part of the document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.submitted import JobState, JobStatus, QueuedJob
from imgkit_builder.jobs.systems import JobShell, QueueCommands, need_program, pods
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rollcall.secret import MOUNTED

RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime for PyTorch that comes with Kubeflow Trainer."""

STATES: Mapping[str, JobState] = {
    "Created": "waiting",
    "Suspended": "waiting",
    "Running": "running",
    "Restarting": "running",
    "Succeeded": "succeeded",
    "Complete": "succeeded",
    "Failed": "failed",
}
"""Types of the conditions of a PyTorchJob (kubeflow.org/v1) and of a TrainJob (v1alpha1)."""
_SELECTORS = {
    "pytorchjob": "training.kubeflow.org/job-name",
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
}


class Kubeflow(pods.Pods):
    """Kubeflow: documents that kubectl creates. RunAI hands jobs to it; no recipe names it."""

    queue = QueueCommands(
        own_jobs=("kubectl", "get", "pods", "--namespace=runai-PROJECT"),  # their names begin with the job's
        unknown_job="NotFound",
    )

    def script(self, job: Job) -> Script:
        """Return the document for ``kubectl create``."""
        need_program(job)
        kind = pods.format_of(job)
        document = _pytorchjob(job) if kind == "pytorchjob" else _trainjob(job)
        text = _yaml(_compact(document))
        if job.is_interactive:
            queue = job.allocation.queue
            namespace = f" --namespace={_namespace(queue)}" if queue else ""
            ways = (
                f"kubectl get pods{namespace} --selector={_SELECTORS[kind]}={job.name}",
                f"kubectl exec{namespace} --stdin --tty POD -- bash",
            )
            text = "\n".join((*pods.entered(job, ways, f"kubectl delete{namespace} {kind} {job.name}"), text))
        return Script(text=text, submit=("kubectl", "create", "-f", "-"), on_stdin=True)

    def parse_job_id(self, output: str, name: str) -> str:
        """Return kind and name, which kubectl needs, from ``pytorchjob.kubeflow.org/NAME created``."""
        match = re.search(r"^(\w+)\.\S*/(\S+) created", output, re.MULTILINE)
        return f"{match[1]}.{match[2]}" if match else ""

    def status_commands(self, record: QueuedJob) -> tuple[Argv, ...]:
        """Return the command that shows the job and its events."""
        return (("kubectl", "describe", *_object(record), *_in_namespace(record)),)

    def parse_status(self, output: str) -> JobStatus:
        """Return the state by the newest condition that holds, as ``kubectl describe`` lists them."""
        conditions = re.findall(r"^ *Status: +True\n +Type: +(\w+)$", output, re.MULTILINE)
        state: JobState = STATES.get(conditions[-1], "") if conditions else ""
        return JobStatus(state=state, text=output)

    def log_source(self, record: QueuedJob) -> Argv:
        """Return the command that follows the output of all pods."""
        kind, name = _object(record)
        selector = f"--selector={_SELECTORS[kind]}={name}"
        return (
            *("kubectl", "logs", selector, "--follow", "--prefix", "--tail=-1", "--max-log-requests=1000"),
            *_in_namespace(record),
        )

    def shell_command(self, record: QueuedJob, line: str, node: str) -> JobShell:
        """Return the command of a further process in a pod's container."""
        kind, name = _object(record)
        # JobSet's Jobs have names that are known; the pods of a Job have not.
        first = f"job/{name}-node-0" if kind == "trainjob" else f"{name}-master-0"
        argv = ("kubectl", "exec", *_in_namespace(record), "--stdin", "--tty", node or first, "--", "bash")
        return JobShell(argv=argv, description=pods.SAME_CONTAINER)

    def cancel_command(self, record: QueuedJob) -> Argv:
        """Return the command that deletes the job and its pods."""
        return ("kubectl", "delete", *_object(record), *_in_namespace(record))


SYSTEM = Kubeflow()


def _yaml(document: Mapping[str, Any]) -> str:
    """The document, with quotes around text that another YAML reader could take for a number or a boolean.

    kubectl reads 1e-4 as a number, PyYAML as text that needs no quotes. A number cannot be an argument.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        def represent_text(self, text: str) -> yaml.Node:
            plain = re.match(r"(?:/|--?)?[A-Za-z]", text) and text.lower() not in ("y", "n")
            return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else "'")

    Dumper.add_representer(str, Dumper.represent_text)
    text: str = yaml.dump(document, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text


def _compact(value: Any) -> Any:
    """Return `value` without what is None or empty in its mappings, at any depth."""
    if isinstance(value, list):
        return [_compact(item) for item in value]
    if not isinstance(value, dict):
        return value
    items = {key: _compact(item) for key, item in value.items()}
    return {key: item for key, item in items.items() if item not in (None, {}, [])}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Requested:
    """The meaning of the options for RunAI's client, from the recipe and the user."""

    annotations: Mapping[str, str]
    resources: Mapping[str, str]
    large_shm: bool


def _requested(job: Job) -> _Requested:
    annotations: dict[str, str] = {}
    resources: dict[str, str] = {}
    large_shm = False
    options = [*job.recipe.system.queue.options, *job.request.allocation.options]
    while options:
        flag, equals, value = options.pop(0).partition("=")
        if flag == "--large-shm":
            large_shm = True
            continue
        into = {"--annotation": annotations, "-a": annotations, "--extended-resource": resources}.get(flag)
        name, is_pair, text = (value if equals else options.pop(0) if options else "").partition("=")
        if into is None or not is_pair:
            raise UsageError(
                f"{flag} cannot be part of a {pods.format_of(job)}",
                where="--option",
                hint="--option=--annotation=NAME=VALUE, --option=--extended-resource=NAME=COUNT, or edit "
                "the output of imgkit run --dry-run",
            )
        into[name] = text
    return _Requested(annotations=annotations, resources=resources, large_shm=large_shm)


def _pytorchjob(job: Job) -> dict[str, Any]:
    container = {
        "name": "pytorch",  # the operator sets its variables only in the container of this name
        "image": job.container.image,
        # args, not command: keeps the image's entry point, as runai does.
        "args": _command(job),
        "workingDir": pods.workdir(job) or None,
        "env": _env(job),
        "resources": _resources(job),
    }
    allocation = job.allocation
    scheduler = "runai-scheduler" if allocation.queue else None
    pod = {"template": _pod(job, container, schedulerName=scheduler)}
    master, worker, clean = "Never", "Never", "None"
    if job.outlives_nodes:
        # The master's exit code is the job's. A master that was killed (128 and more) starts again, as do the
        # workers, which fail without it. For a worker with Never, one lost pod would make the job "failed",
        # although the run goes on; with OnFailure the operator makes a new pod. Pods that have ended stay
        # otherwise, and so do their logs. A worker that comes back too late would call for ever.
        master, worker, clean = "ExitCode", "OnFailure", "Running"
    workers = (
        {"replicas": allocation.nodes - 1, "restartPolicy": worker, **pod} if allocation.nodes > 1 else None
    )
    replicas = {"Master": {"replicas": 1, "restartPolicy": master, **pod}, "Worker": workers}
    spec = {"runPolicy": {"cleanPodPolicy": clean}, "pytorchReplicaSpecs": replicas}
    return _document(job, "kubeflow.org/v1", "PyTorchJob", spec)


def _trainjob(job: Job) -> dict[str, Any]:
    if job.allocation.size.spares:
        raise UsageError(
            f"--nodes {job.allocation.size}, but a TrainJob ends on all nodes when one pod has failed a few "
            "times",
            where="--format",
            hint=f"--format pytorchjob, or --nodes {job.allocation.size.training}",
        )
    folder = pods.workdir(job)
    trainer = {
        "image": job.container.image,
        # command, not args: a runtime can have a command of its own, for example torchrun. No workingDir.
        "command": [*(("env", f"--chdir={folder}") if folder else ()), *_command(job)],
        "numNodes": job.allocation.nodes,
        "env": _env(job),
        "resourcesPerNode": _resources(job),
    }
    # Kubeflow Trainer before 2.2 knows no runtimePatches: its fields for the same had other names.
    jobs = {
        "replicatedJobs": [{"name": "node", "template": {"spec": {"template": _pod(job, {"name": "node"})}}}]
    }
    patch = {"manager": "imgkit/job", "trainingRuntimeSpec": {"template": {"spec": jobs}}}
    spec = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer, "runtimePatches": [patch]}
    return _document(job, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec)


def _document(job: Job, version: str, kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    namespace = _namespace(job.allocation.queue) if job.allocation.queue else None
    metadata = {"name": pods.check_name(job), "namespace": namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": dict(spec)}


def _pod(job: Job, container: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    """The template of the pods: `container` with the volumes that it mounts; none if it only has a name."""
    requested = _requested(job)
    mounts: list[dict[str, Any]] = []
    volumes: list[dict[str, Any]] = []
    if requested.large_shm:
        # Workers pass tensors to each other there; the default size in a container is 64 MiB.
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    if job.makes_secret:
        key = {"key": MOUNTED.name, "path": MOUNTED.name}
        secret = {
            "secretName": pods.SECRET,
            "items": [key],
            "optional": not job.request.launch.require_secret,
        }
        mounts.append({"name": "secret", "mountPath": str(MOUNTED.parent), "readOnly": True})
        volumes.append({"name": "secret", "secret": secret})
    for index, claim in enumerate(pods.claims(job)):
        name = f"volume{index}"
        mounts.append({"name": name, "mountPath": str(claim.path), "readOnly": claim.read_only or None})
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim.name}})
    containers = [{**container, "volumeMounts": mounts}] if mounts or len(container) > 1 else None
    return {
        "metadata": {"annotations": dict(requested.annotations)},
        "spec": {**spec, "containers": containers, "volumes": volumes},
    }


def _namespace(project: str) -> str:
    """The namespace of a RunAI project (docs.run.ai, "Support for other Kubernetes Applications")."""
    return f"runai-{project}"


def _command(job: Job) -> list[str]:
    argv = pods.ASLEEP if job.is_interactive else job.command
    return list(map(pods.literal, argv))


def _env(job: Job) -> list[dict[str, Any]]:
    values = ({"name": name, "value": pods.literal(value)} for name, value in pods.variables(job).items())
    secrets = {name: {"secretKeyRef": {"name": pods.SECRET, "key": name}} for name in job.container.names}
    return [*values, *({"name": name, "valueFrom": reference} for name, reference in secrets.items())]


def _resources(job: Job) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": str(job.allocation.gpus)} if job.allocation.gpus else {}
    return {
        "limits": {**gpus, **_requested(job).resources},
        "requests": {"cpu": str(job.allocation.cpus) if job.allocation.cpus else None},
    }


def _object(record: QueuedJob) -> tuple[str, str]:
    kind, _, name = record.id.partition(".")
    return kind, name


def _in_namespace(record: QueuedJob) -> Argv:
    return (f"--namespace={_namespace(record.queue)}",) if record.queue else ()
