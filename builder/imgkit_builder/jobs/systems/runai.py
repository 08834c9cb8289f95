"""RunAI: write the command that submits a job, for the first client of RunAI or for the later one.

The two clients have different commands and options. tests/golden/runai contains the options from the
reference of each client, with its address. The job's command follows ``--`` as separate arguments. So no
shell parses it again, and nothing must be quoted twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.quoting import quote, repeat_option
from imgkit_builder.jobs.submitted import QueuedJob
from imgkit_builder.jobs.systems import JobShell, pods, runai_client, user_options
from imgkit_entrypoints.errors import UsageError

KINDS = ("training", "training pytorch")
"""The kinds of jobs of the later client, for one pod and for several pods: ``runai training pytorch submit``.

A job of the first client has no kind, so its kind is empty.
"""


class RunAI(pods.Pods):
    """RunAI with its own client.

    If ``--format`` selects a document for Kubernetes, `Kubeflow` takes the job.
    """

    uses = ("queue", "cpus", "mem", "mem-per-gpu")

    # The output of the client's "describe" is only shown to the user. imgkit does not parse it.
    reports_state = False

    def script(self, job: Job) -> Script:
        """Return the command that submits the job. For an interactive job, comments explain how to use it."""
        name = pods.pod_name(job)
        argv = (
            *_command_options(job, name),
            *job.recipe.system.queue.options,
            *user_options(job),
            "--",
            *pods.pod_command(job),
        )
        kind = _job_kind(job)
        text = f"{_command_text(argv)}\n"
        if job.is_interactive:
            text = "\n".join((*_interactive_comments(job, name, kind), text))
        return Script(text=text, submit=argv, kind=kind)

    def check(self, job: Job, *, is_submitted: bool = False) -> Iterator[str]:
        """Yield warnings about requests that the user may not have intended.

        With `is_submitted`, a command for the later client is compared with the options of the client on
        PATH.

        Raises
        ------
        UsageError : the client on PATH does not have the command, or an option of the recipe or of imgkit.
        """
        yield from super().check(job, is_submitted=is_submitted)
        if not is_submitted:
            return
        kind = _job_kind(job)
        if kind:  # the first client, which has no kinds, does not list its options completely
            argv = (*_command_options(job, job.name), *job.recipe.system.queue.options)
            runai_client.refuse_unknown((*kind.split(), "submit"), argv)

    def parse_job_id(self, output: str, name: str) -> str:
        """Return `name`, the job's name, because it is also its id. The output is not used."""
        return name

    def status_commands(self, record: QueuedJob) -> tuple[Argv, ...]:
        """Return the command that shows the job, its pods and its events."""
        return (_job_command(record.kind, "describe", record.name, _project_arguments(record.queue)),)

    def log_source(self, record: QueuedJob) -> Argv:
        """Return the command that follows the output of the first pod.

        If the job has a writable volume, the run folder contains the logs of all pods.
        """
        project = _project_arguments(record.queue)
        return _client_command(record.kind, "logs", record.name, "--follow", *project)

    def shell_command(self, record: QueuedJob, shell_line: str, node: str) -> JobShell:
        """Return the command that opens a shell in a pod's container, next to the job's program.

        Parameters
        ----------
        shell_line : is not used, because the shell needs no other container.
        node : the name of the pod, or "" for the first one.
        """
        argv = _client_command(record.kind, "bash", record.name, *_project_arguments(record.queue))
        if node:
            argv = (*argv, "--pod", node)
        return JobShell(argv=argv, description=pods.SAME_CONTAINER)

    def cancel_command(self, record: QueuedJob) -> Argv:
        """Return the command that ends the job and deletes its pods."""
        return _job_command(record.kind, "delete", record.name, _project_arguments(record.queue))


SYSTEM = RunAI()


def _job_kind(job: Job) -> str:
    """Return the kind of the job, one of `KINDS`, such as ``training pytorch``.

    For the first client, it is "".
    """
    if pods.client_version(job) == "v1":
        return ""
    return _v2_kind(job)


def _v2_kind(job: Job) -> str:
    """Return the kind that the later client uses for a job with this number of pods."""
    one_pod, several_pods = KINDS
    return several_pods if job.allocation.nodes > 1 else one_pod


def _job_command(kind: str, verb: str, name: str, project: Argv) -> Argv:
    """Return a command about a job: ``runai training VERB NAME``, or ``runai VERB job NAME``."""
    if not kind:
        return _client_command(kind, verb, "job", name, *project)
    return _client_command(kind, verb, name, *project)


def _client_command(kind: str, *arguments: str) -> Argv:
    """Return a command of the client for a kind of job: ``runai training pytorch ARGUMENTS``.

    Raises
    ------
    UsageError : `kind`, which comes from the job's record, is not one of `KINDS`.
    """
    # The kind becomes words of a command, so a damaged record must not put arbitrary text there.
    if kind and kind not in KINDS:
        raise UsageError(
            f"no runai client calls a job {kind!r}", where="the record of the job", hint="runai workload list"
        )
    return (runai_client.PROGRAM, *kind.split(), *arguments)


def _project_arguments(queue: str) -> Argv:
    """Return the option for RunAI's project, which is the job's queue. Without a queue, it is empty."""
    return ("--project", queue) if queue else ()


def _command_options(job: Job, name: str) -> Iterator[str]:
    """Yield the arguments that imgkit chooses for the submission: ``runai training submit NAME --image ...``.

    The options of the recipe and of the user come after them. RunAI's two clients, v1 and v2, have different
    names for most options.

    Raises
    ------
    UsageError : the pods cannot have the folder, a volume or a variable of the job.
    """
    allocation = job.allocation
    claims = pods.volume_claims(job)
    folder = pods.pod_workdir(job)
    is_v1 = pods.client_version(job) == "v1"
    yield from _submit_command(job, name, is_v1=is_v1)
    yield from (*_project_arguments(allocation.queue), "--image", job.container.image)
    if allocation.nodes > 1:
        yield from ("--workers", str(allocation.nodes - 1))  # all pods except the first
    yield from _resource_options(job, is_v1=is_v1)
    yield from _node_pool_options(job, is_v1=is_v1)
    for claim in claims:
        yield from _volume_option(claim, is_v1=is_v1)
    if folder:
        yield from ("--working-dir", folder)
    ids = pods.user_ids(job)
    if ids is not None:
        uid, gid = ids
        yield from ("--run-as-uid", uid, "--run-as-gid", gid)
    yield from _variable_options(job, is_v1=is_v1)


def _resource_options(job: Job, *, is_v1: bool) -> Iterator[str]:
    """Yield the options for the GPUs, CPUs and memory of each pod.

    ``--gpu 4 --cpu 32`` of the first client corresponds to ``--gpu-devices-request 4 --cpu-core-request 32``
    of the later one.
    """
    allocation = job.allocation
    if is_v1:
        yield from ("--gpu", str(allocation.gpus))
    elif allocation.gpus:  # the option accepts only positive numbers; without it, a pod has no GPU
        yield from ("--gpu-devices-request", str(allocation.gpus))
    if allocation.cpus:
        yield from ("--cpu" if is_v1 else "--cpu-core-request", str(allocation.cpus))
    memory = pods.memory_quantity(job)
    if memory:
        yield from ("--memory" if is_v1 else "--cpu-memory-request", memory)


def _submit_command(job: Job, name: str, *, is_v1: bool) -> Argv:
    """Return the start of the command that submits a job. It depends on the client and the number of pods."""
    if not is_v1:
        return ("runai", *_v2_kind(job).split(), "submit", name)
    if job.allocation.nodes == 1:
        return ("runai", "submit", "--name", name)
    return ("runai", "submit-dist", "pytorch", "--name", name)


def _node_pool_options(job: Job, *, is_v1: bool) -> Argv:
    """Return the options with the node pools, in the order in which RunAI tries them."""
    node_pools = job.recipe.system.queue.node_pools
    if is_v1 and node_pools:
        # A single text; the later client takes the option several times.
        return ("--node-pools", ",".join(node_pools))
    return repeat_option("--node-pools", node_pools)


def _volume_option(claim: pods.Claim, *, is_v1: bool) -> Argv:
    """Return the option that mounts a volume into the pods.

    Raises
    ------
    UsageError : the volume is read-only, which the later client cannot express.
    """
    if is_v1:
        return ("--pvc", str(claim))
    if claim.read_only:
        raise UsageError(
            f"{claim}: the later runai client has no option for a read-only volume",
            where="--pvc",
            hint=f"--pvc {claim.name}:{claim.path}; --format pytorchjob, or --format runai-v1",
        )
    return ("--existing-pvc", f"claimname={claim.name},path={claim.path}")


def _variable_options(job: Job, *, is_v1: bool) -> Iterator[str]:
    """Yield the options that set the variables of the pods."""
    # The short form -e is the same in all versions. The long form is --environment in 2.18 and
    # --environment-variable in 2.24.
    for name, value in pods.pod_variables(job).items():
        yield from ("-e", f"{name}={pods.escape_for_kubernetes(value)}")
    for name in job.container.names:
        if is_v1:
            # The client passes only the reference to the Secret (docs.run.ai/v2.13/admin/workloads/secrets).
            yield from ("-e", f"{name}=SECRET:{pods.SECRET_NAME},{name}")
        else:
            yield from ("--env-secret", f"{name}={pods.SECRET_NAME},key={name}")


def _command_text(argv: Argv) -> str:
    """Return the command as shell text, with one line for each option and its value.

    The job's own command, which follows ``--``, stays on one line.
    """
    text = argv[0]
    is_in_options = True  # until "--", which the job's command follows
    for argument in argv[1:]:
        separator = " "
        if is_in_options and argument.startswith("-"):
            separator = " \\\n    "
        text += separator + quote(argument)
        if argument == "--":
            is_in_options = False
    return text


def _interactive_comments(job: Job, name: str, kind: str) -> Argv:
    """Return comment lines that explain how to enter the pods of an interactive job and how to delete it.

    If the job has several pods, there is one command for each of them.
    """
    project = _project_arguments(job.allocation.queue)
    enter_command = " ".join(_client_command(kind, "bash", name, *project))
    delete_command = " ".join(map(quote, _job_command(kind, "delete", name, project)))
    workers = job.allocation.nodes - 1
    if not workers:
        return pods.interactive_comments(job, [enter_command], delete_command)
    pod_names = [f"{name}-master-0", *(f"{name}-worker-{index}" for index in range(workers))]
    enter_commands = [f"{enter_command} --pod {pod_name}" for pod_name in pod_names]
    return pods.interactive_comments(job, enter_commands, delete_command)
