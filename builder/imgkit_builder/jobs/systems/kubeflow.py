"""Kubeflow: write jobs of RunAI as a PyTorchJob (Training Operator v1) or a TrainJob (Trainer v2).

The scheduler options in the recipe are options of RunAI's client. Each of them is translated to a part of the
document for Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.submitted import JobState, JobStatus, QueuedJob
from imgkit_builder.jobs.systems import JobShell, QueueCommands, pods
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rollcall.secret import MOUNTED

RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime for PyTorch that Kubeflow Trainer provides."""

STATES: Mapping[str, JobState] = {
    "Created": "waiting",
    "Suspended": "waiting",
    "Running": "running",
    "Restarting": "running",
    "Succeeded": "succeeded",
    "Complete": "succeeded",
    "Failed": "failed",
}
"""The meaning of the types of conditions, for a PyTorchJob (kubeflow.org/v1) and a TrainJob (v1alpha1)."""
_LARGE_SHM = "--large-shm"
"""The option of RunAI's client for shared memory without the default limit."""
# The label that selects the pods of a job, by the kind of the job.
_SELECTORS = {
    "pytorchjob": "training.kubeflow.org/job-name",
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
}


class Kubeflow(pods.Pods):
    """Kubeflow, whose jobs are documents that kubectl creates.

    No recipe names this system. It takes the jobs of RunAI if ``--format`` selects it.
    """

    queue = QueueCommands(
        # The command lists pods, because their names begin with the name of the job.
        own_jobs=("kubectl", "get", "pods", "--namespace=runai-PROJECT"),
        unknown_job="NotFound",
    )

    def script(self, job: Job) -> Script:
        """Return the document for ``kubectl create``. For an interactive job, it begins with comments."""
        kind = pods.output_format(job)
        if job.recipe.system.queue.node_pools:
            raise UsageError(
                f"node_pools cannot be part of a {kind}",
                where=job.recipe.where("system", "queue", "node_pools"),
                hint="use --format runai, or a recipe without queue.node_pools",
            )
        document = _pytorchjob_document(job) if kind == "pytorchjob" else _trainjob_document(job)
        comments = _interactive_comments(job, kind) if job.is_interactive else ()
        text = "\n".join((*comments, _to_yaml(_without_empty_values(document))))
        return Script(text=text, submit=("kubectl", "create", "-f", "-"), on_stdin=True)

    def parse_job_id(self, output: str, name: str) -> str:
        """Return the id ``KIND.NAME`` from the output ``pytorchjob.kubeflow.org/NAME created`` of kubectl.

        Later commands of kubectl need both the kind and the name.
        """
        match = re.search(r"^(\w+)\.\S*/(\S+) created", output, re.MULTILINE)
        if match is None:
            return ""
        return f"{match[1]}.{match[2]}"

    def status_commands(self, record: QueuedJob) -> tuple[Argv, ...]:
        """Return the command that shows the job and its events."""
        kind, name = _split_job_id(record)
        return (("kubectl", "describe", kind, name, *_namespace_options(record.queue)),)

    def parse_status(self, output: str) -> JobStatus:
        """Return the state of the job from the newest condition that is true.

        ``kubectl describe`` lists the conditions in the order of time.
        """
        true_conditions = re.findall(r"^ *Status: +True\n +Type: +(\w+)$", output, re.MULTILINE)
        state: JobState = ""
        if true_conditions:
            state = STATES.get(true_conditions[-1], "")  # "" for a condition that imgkit does not know
        return JobStatus(state=state, text=output)

    def log_source(self, record: QueuedJob) -> Argv:
        """Return the command that follows the output of all pods."""
        kind, name = _split_job_id(record)
        selector = f"--selector={_SELECTORS[kind]}={name}"
        # With a selector, kubectl by default prints only the last 10 lines of each pod, and follows at most 5
        # pods.
        options = ("--follow", "--prefix", "--tail=-1", "--max-log-requests=1000")
        return ("kubectl", "logs", selector, *options, *_namespace_options(record.queue))

    def shell_command(self, record: QueuedJob, shell_line: str, node: str) -> JobShell:
        """Return the command that opens a shell in a pod's container, next to the job's program.

        Parameters
        ----------
        shell_line : is not used, because the shell needs no other container.
        node : the name of the pod, or "" for the first one.
        """
        pod = node or _first_pod(record)
        namespace = _namespace_options(record.queue)
        argv = ("kubectl", "exec", *namespace, "--stdin", "--tty", pod, "--", "bash")
        return JobShell(argv=argv, description=pods.SAME_CONTAINER)

    def cancel_command(self, record: QueuedJob) -> Argv:
        """Return the command that deletes the job and its pods."""
        kind, name = _split_job_id(record)
        return ("kubectl", "delete", kind, name, *_namespace_options(record.queue))


SYSTEM = Kubeflow()


def _interactive_comments(job: Job, kind: str) -> tuple[str, ...]:
    """Return comment lines that explain how to enter the pods of an interactive job and how to delete it."""
    namespace = _namespace_options(job.allocation.queue)
    enter_commands = (
        " ".join(("kubectl", "get", "pods", *namespace, f"--selector={_SELECTORS[kind]}={job.name}")),
        " ".join(("kubectl", "exec", *namespace, "--stdin --tty POD -- bash")),
    )
    delete_command = " ".join(("kubectl", "delete", *namespace, kind, job.name))
    return pods.interactive_comments(job, enter_commands, delete_command)


def _to_yaml(document: Mapping[str, Any]) -> str:
    """Return the document as YAML, with quotes around texts that kubectl could read as another type.

    PyYAML writes some texts without quotes although other readers take them for a number or a boolean. For
    example, kubectl reads 1e-4 as a number, and Kubernetes refuses a number as an argument of a command. So
    only texts that begin like a word, an option or a path are written without quotes. "y" and "n" get quotes,
    because they are booleans in YAML 1.1.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        def represent_text(self, text: str) -> yaml.Node:
            begins_like_word = re.match(r"(?:/|--?)?[A-Za-z]", text)
            is_boolean = text.lower() in ("y", "n")
            style = None if begins_like_word and not is_boolean else "'"
            return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, Dumper.represent_text)
    # The large width keeps each text on a single line.
    text: str = yaml.dump(document, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text


def _without_empty_values(value: Any) -> Any:
    """Return a copy of `value` in which no mapping has a key with the value None, {} or [], at any depth."""
    if isinstance(value, list):
        return [_without_empty_values(item) for item in value]
    if not isinstance(value, dict):
        return value
    items = {key: _without_empty_values(item) for key, item in value.items()}
    return {key: item for key, item in items.items() if item not in (None, {}, [])}


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClientOptions:
    """The options of RunAI's client that the recipe and the user set, as parts of a document."""

    annotations: Mapping[str, str]
    """Annotations of the pods, from ``--annotation NAME=VALUE``."""
    resources: Mapping[str, str]
    """Limits of the pods, from ``--extended-resource NAME=COUNT``."""
    large_shm: bool
    """Whether ``--large-shm`` requests shared memory without the default limit."""


def _parse_client_options(job: Job) -> _ClientOptions:
    """Translate options of RunAI's client, from the recipe and the user, to parts of a Kubeflow document.

    ``["--annotation", "team=a", "--large-shm"]`` -> the annotation ``{"team": "a"}`` and large shared memory.

    Raises
    ------
    UsageError : an option cannot be translated.
    """
    annotations: dict[str, str] = {}
    resources: dict[str, str] = {}
    values_of_flag = {"--annotation": annotations, "-a": annotations, "--extended-resource": resources}
    large_shm = False
    items = (*job.recipe.system.queue.options, *job.request.allocation.options)
    for flag, assignment in _split_options(items):
        if flag == _LARGE_SHM:
            large_shm = True
            continue
        name, equals_sign, value = assignment.partition("=")
        if flag not in values_of_flag or not equals_sign:
            raise _unsupported_option_error(job, flag)
        values_of_flag[flag][name] = value
    return _ClientOptions(annotations=annotations, resources=resources, large_shm=large_shm)


def _split_options(items: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the flag and the value of each option: ``("--annotation", "team=a")``, ``("--large-shm", "")``.

    The value of an option is in the same item (``--name=value``) or in the next one (``--name``, ``value``).
    """
    remaining_items = iter(items)
    for item in remaining_items:
        flag, equals_sign, value = item.partition("=")
        if not equals_sign and flag != _LARGE_SHM:  # the only flag without a value
            value = next(remaining_items, "")  # takes this item from the loop, because it is not an option
        yield flag, value


def _unsupported_option_error(job: Job, flag: str) -> UsageError:
    """Return the error for an option of RunAI's client that no field of the document can express."""
    return UsageError(
        f"{flag} cannot be part of a {pods.output_format(job)}",
        where="--option",
        hint="--option=--annotation=NAME=VALUE, --option=--extended-resource=NAME=COUNT, or edit "
        "the output of imgkit run --dry-run",
    )


def _pytorchjob_document(job: Job) -> dict[str, Any]:
    """Return a PyTorchJob with a master pod for the first node and a worker pod for each other node.

    Usually, pods are never restarted, and all pods stay after the end of the job so that their logs can be
    read. This is different for a job that must go on when a node fails.
    """
    master_restarts = worker_restarts = "Never"
    pods_to_delete = "None"
    if job.outlives_nodes:
        # The job ends with the exit code of the master. With ExitCode, the master is restarted if it was
        # killed (exit code 128 or more).
        master_restarts = "ExitCode"
        # Without the master, the workers fail and must be restarted with it. OnFailure creates a new pod for
        # a lost one. With Never, the operator would mark the job as failed after one lost pod, although the
        # run goes on.
        worker_restarts = "OnFailure"
        # At the end of the job, the operator deletes the pods that are still running. A worker that was
        # restarted too late would try to reach the master forever. Pods that have ended stay, and so do their
        # logs.
        pods_to_delete = "Running"
    pod = _pytorch_pod(job)
    replicas = {"Master": {"replicas": 1, "restartPolicy": master_restarts, "template": pod}}
    workers = job.allocation.nodes - 1
    if workers:
        replicas["Worker"] = {"replicas": workers, "restartPolicy": worker_restarts, "template": pod}
    spec = {"runPolicy": {"cleanPodPolicy": pods_to_delete}, "pytorchReplicaSpecs": replicas}
    return _kubernetes_document(job, "kubeflow.org/v1", "PyTorchJob", spec)


def _pytorch_pod(job: Job) -> dict[str, Any]:
    """Return the template of all pods of a PyTorchJob."""
    container = {
        "name": "pytorch",  # the operator sets its variables only in a container with this name
        "image": job.container.image,
        # "args" keeps the entry point of the image, as RunAI's client does. "command" would replace it.
        "args": [*pods.pod_command(job)],
        "workingDir": pods.pod_workdir(job) or None,
        "env": _pod_variables(job),
        "resources": _pod_resources(job),
    }
    scheduler = "runai-scheduler" if job.allocation.queue else None
    return _pod_template(job, container, schedulerName=scheduler)


def _trainjob_document(job: Job) -> dict[str, Any]:
    """Return a TrainJob, which contains the values of this job for the cluster's training runtime `RUNTIME`.

    The runtime is a template for jobs. Kubeflow Trainer creates the pods from it.

    Raises
    ------
    UsageError : the job has spare nodes, which a TrainJob cannot use.
    """
    size = job.allocation.size
    if size.spares:
        raise UsageError(
            f"--nodes {size}, but a TrainJob ends on all nodes when one pod has failed a few times",
            where="--format",
            hint=f"--format pytorchjob, or --nodes {size.training}",
        )
    trainer = _trainer(job)
    # Kubeflow Trainer has the field runtimePatches from version 2.2 on. In earlier versions, the fields for
    # this purpose have other names.
    node = {"name": "node", "template": {"spec": {"template": _pod_template(job, {"name": "node"})}}}
    job_set = {"template": {"spec": {"replicatedJobs": [node]}}}
    patch = {"manager": "imgkit/job", "trainingRuntimeSpec": job_set}
    spec = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer, "runtimePatches": [patch]}
    return _kubernetes_document(job, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec)


def _trainer(job: Job) -> dict[str, Any]:
    """Return the field ``trainer`` of a TrainJob: the image, command, size and variables of the job."""
    # "command" replaces the command of the runtime, for example torchrun, which "args" would keep. A trainer
    # has no field for the working directory, so the program env changes to it.
    command = list(pods.pod_command(job))
    folder = pods.pod_workdir(job)
    if folder:
        command = ["env", f"--chdir={folder}", *command]
    return {
        "image": job.container.image,
        "command": command,
        "numNodes": job.allocation.nodes,
        "env": _pod_variables(job),
        "resourcesPerNode": _pod_resources(job),
    }


def _kubernetes_document(job: Job, version: str, kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document for Kubernetes with the job's name and namespace."""
    metadata = {"name": pods.pod_name(job)}
    if job.allocation.queue:
        metadata["namespace"] = _runai_namespace(job.allocation.queue)
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": dict(spec)}


def _pod_template(job: Job, container: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    """Return the template of a pod with `container` and the volumes that the container mounts.

    For a TrainJob, `container` has only a name, because the runtime already defines the container. If such a
    container mounts nothing, it is left out, because there is nothing to patch.

    Parameters
    ----------
    spec : further fields of the pod.
    """
    client_options = _parse_client_options(job)
    volumes = list(_pod_volumes(job, large_shm=client_options.large_shm))
    mounts = [volume.mount for volume in volumes]
    # A container without mounts would be an empty patch of a TrainJob.
    containers = []
    has_only_name = len(container) == 1  # "name" is its only key
    if mounts or not has_only_name:
        containers.append({**container, "volumeMounts": mounts})
    return {
        "metadata": {"annotations": dict(client_options.annotations)},
        "spec": {
            **spec,
            "securityContext": _security_context(job),
            "containers": containers,
            "volumes": [volume.definition for volume in volumes],
        },
    }


class _PodVolume(NamedTuple):
    """A volume of a pod, and how the container mounts it. Both parts have the same ``name``."""

    definition: dict[str, Any]
    mount: dict[str, Any]


def _pod_volumes(job: Job, *, large_shm: bool) -> Iterator[_PodVolume]:
    """Yield the volumes of a pod: shared memory, the secret of the run, and the volumes of ``--pvc``.

    Parameters
    ----------
    large_shm : whether the container gets shared memory without the default limit.
    """
    if large_shm:
        # Data workers pass tensors through shared memory, which has only 64 MiB in a container by default.
        yield _PodVolume(
            definition={"name": "shm", "emptyDir": {"medium": "Memory"}},
            mount={"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        )
    if job.makes_secret:
        # The secret by which the nodes of the run recognize each other comes from the user's Secret.
        source = {
            "secretName": pods.SECRET_NAME,
            "items": [{"key": MOUNTED.name, "path": MOUNTED.name}],
            "optional": not job.request.launch.require_secret,
        }
        yield _PodVolume(
            definition={"name": "secret", "secret": source},
            mount={"name": "secret", "mountPath": str(MOUNTED.parent), "readOnly": True},
        )
    for index, claim in enumerate(pods.volume_claims(job)):
        name = f"volume{index}"
        yield _PodVolume(
            definition={"name": name, "persistentVolumeClaim": {"claimName": claim.name}},
            mount={"name": name, "mountPath": str(claim.path), "readOnly": claim.read_only or None},
        )


def _security_context(job: Job) -> dict[str, Any]:
    """Return the ids of the user in the pods. If the image or the cluster sets them, the result is empty."""
    ids = pods.user_ids(job)
    if ids is None:
        return {}
    # Kubernetes accepts the ids only as numbers. Before imgkit has connected to the remote, the ids are the
    # texts "UID" and "GID", which cannot be converted.
    uid, gid = (int(text) if text.isdecimal() else text for text in ids)
    return {"runAsUser": uid, "runAsGroup": gid}


def _runai_namespace(project: str) -> str:
    """Return the namespace of a project (docs.run.ai, "Support for other Kubernetes Applications")."""
    return f"runai-{project}"


def _pod_variables(job: Job) -> list[dict[str, Any]]:
    """Return the variables of each pod, in the form of a document for Kubernetes.

    A variable of ``--env NAME`` may be secret. So its value comes from the user's Secret.
    """
    env: list[dict[str, Any]] = []
    for name, value in pods.pod_variables(job).items():
        env.append({"name": name, "value": pods.escape_for_kubernetes(value)})
    for name in job.container.names:
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": pods.SECRET_NAME, "key": name}}})
    return env


def _pod_resources(job: Job) -> dict[str, Any]:
    """Return the resources of each pod: GPUs as limits, and CPUs and memory as requests.

    Kubernetes accepts GPUs only as limits.
    """
    allocation = job.allocation
    limits = {}
    if allocation.gpus:
        limits["nvidia.com/gpu"] = str(allocation.gpus)
    limits.update(_parse_client_options(job).resources)
    requests = {}
    if allocation.cpus:
        requests["cpu"] = str(allocation.cpus)
    memory = pods.memory_quantity(job)
    if memory:
        requests["memory"] = memory
    return {"limits": limits, "requests": requests}


def _first_pod(record: QueuedJob) -> str:
    """Return the name by which kubectl finds the first pod of the job."""
    kind, name = _split_job_id(record)
    if kind == "trainjob":
        # JobSet gives its Jobs fixed names, but the names of their pods end with random characters. With
        # "job/NAME", kubectl itself finds the pod.
        return f"job/{name}-node-0"
    return f"{name}-master-0"


def _split_job_id(record: QueuedJob) -> tuple[str, str]:
    """Return the two parts of the job's id, which is ``KIND.NAME``."""
    kind, _, name = record.id.partition(".")
    return kind, name


def _namespace_options(project: str) -> Argv:
    """Return kubectl's option for the namespace of a RunAI project. Without a project, it is empty."""
    if not project:
        return ()
    return (f"--namespace={_runai_namespace(project)}",)
