"""RunAI: the one command that submits a job, for the first client or a later one.

tests/golden/runai keeps the options that each client's reference lists, with its address. The ``dist-...``
command alone follows ``--``: no shell reads it again, so nothing is quoted twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.quoting import quote
from imgkit_builder.jobs.submitted import QueuedJob
from imgkit_builder.jobs.systems import JobShell, need_program, pods, runai_client, user_options
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.schedulers import kubernetes

KINDS = ("training", "training pytorch")
"""Commands of the later client for one pod and for several. A job of the first client has an empty kind."""


class RunAI(pods.Pods):
    """RunAI: its own client, or for ``--format`` the documents of Kubeflow."""

    uses = ("queue", "cpus")

    reports_state = False

    def script(self, job: Job) -> Script:
        """Return the command. For an interactive job, comments above it explain how to work in its pods."""
        need_program(job)
        name = pods.check_name(job)
        command = pods.ASLEEP if job.is_interactive else kubernetes.start_argv(job.command)
        argv = (
            *_options(job, name),
            *job.recipe.system.queue.options,
            *user_options(job),
            *("--", *map(pods.literal, command)),
        )
        kind, project = _kind(job), _project(job.allocation.queue)
        end = " ".join(map(quote, _job_command(kind, "delete", name, project)))
        comments = pods.entered(job, _ways(job, name, kind), end) if job.is_interactive else ()
        return Script(text="\n".join((*comments, _rows(argv), "")), submit=argv, kind=kind)

    def check(self, job: Job, *, is_submitted: bool = False) -> Iterator[str]:
        """Yield warnings, and compare the later client's options with the help of the client on PATH.

        Raises
        ------
        UsageError : that client has no such command, or lacks an option of the recipe or of imgkit; names it.
        """
        yield from super().check(job, is_submitted=is_submitted)
        if is_submitted and (kind := _kind(job)):
            argv = (*_options(job, job.name), *job.recipe.system.queue.options)
            runai_client.refuse_unknown((*kind.split(), "submit"), argv)

    def parse_job_id(self, output: str, name: str) -> str:
        """Return the job's name, which is its id."""
        return name

    def status_commands(self, record: QueuedJob) -> tuple[Argv, ...]:
        """Return the command that shows the job, its pods and its events."""
        return (_job_command(record.kind, "describe", record.name, _project(record.queue)),)

    def log_source(self, record: QueuedJob) -> Argv:
        """Return the command that follows the output of the first pod; the volume has that of all pods."""
        project = _project(record.queue)
        return (runai_client.PROGRAM, *_commands(record.kind), "logs", record.name, "--follow", *project)

    def shell_command(self, record: QueuedJob, line: str, node: str) -> JobShell:
        """Return the command of a further process in a pod's container."""
        argv = (runai_client.PROGRAM, *_commands(record.kind), "bash", record.name, *_project(record.queue))
        return JobShell(argv=(*argv, *(("--pod", node) if node else ())), description=pods.SAME_CONTAINER)

    def cancel_command(self, record: QueuedJob) -> Argv:
        """Return the command that ends the job and deletes its pods."""
        return _job_command(record.kind, "delete", record.name, _project(record.queue))


SYSTEM = RunAI()


def _kind(job: Job) -> str:
    """Return the commands of the later client that know the job; empty for the first client."""
    return "" if pods.client_of(job) == "v1" else KINDS[job.allocation.nodes > 1]


def _job_command(kind: str, verb: str, name: str, project: Argv) -> Argv:
    """The command about one job."""
    argv = (*_commands(kind), verb) if kind else (verb, "job")
    return (runai_client.PROGRAM, *argv, name, *project)


def _commands(kind: str) -> Argv:
    if kind and kind not in KINDS:
        raise UsageError(
            f"no runai client calls a job {kind!r}", where="the record of the job", hint="runai workload list"
        )
    return tuple(kind.split())


def _project(queue: str) -> Argv:
    return ("--project", queue) if queue else ()


def _options(job: Job, name: str) -> Iterator[str]:
    """Yield the command up to the options of the recipe and of the user."""
    allocation = job.allocation
    claims, folder, is_first = pods.claims(job), pods.workdir(job), pods.client_of(job) == "v1"
    if is_first:
        # One pod is a plain job; workers are the pods after the first.
        submit = ("submit",) if allocation.nodes == 1 else ("submit-dist", "pytorch")
        yield from ("runai", *submit, "--name", name)
    else:
        yield from ("runai", *KINDS[allocation.nodes > 1].split(), "submit", name)
    yield from (*_project(allocation.queue), "--image", job.container.image)
    if allocation.nodes > 1:
        yield from ("--workers", str(allocation.nodes - 1))
    if allocation.gpus or is_first:  # the later option takes a positive number; without it a pod has no GPU
        yield from ("--gpu" if is_first else "--gpu-devices-request", str(allocation.gpus))
    if allocation.cpus:
        yield from ("--cpu" if is_first else "--cpu-core-request", str(allocation.cpus))
    for claim in claims:
        if claim.read_only and not is_first:
            raise UsageError(
                f"{claim}: the later runai client has no option for a read-only volume",
                where="--pvc",
                hint=f"--pvc {claim.name}:{claim.path}; --format pytorchjob, or --client v1",
            )
        volume = f"claimname={claim.name},path={claim.path}"
        yield from ("--pvc", str(claim)) if is_first else ("--existing-pvc", volume)
    yield from ("--working-dir", folder) if folder else ()
    # The short form alone is in every reference: 2.18 has --environment, 2.24 --environment-variable.
    for key, value in pods.variables(job).items():
        yield from ("-e", f"{key}={pods.literal(value)}")
    for key in job.container.names:
        # docs.run.ai/v2.13/admin/workloads/secrets: the first client passes the reference alone.
        reference = ("-e", f"{key}=SECRET:{pods.SECRET},{key}")
        yield from reference if is_first else ("--env-secret", f"{key}={pods.SECRET},key={key}")


def _rows(argv: Argv) -> str:
    """The command, with one line for each option and its value."""
    end = argv.index("--")
    rows = [[argv[0]]]
    for index, argument in enumerate(argv[1:], 1):
        if index <= end and argument.startswith("-"):
            rows.append([])
        rows[-1].append(argument)
    return " \\\n    ".join(" ".join(map(quote, row)) for row in rows)


def _ways(job: Job, name: str, kind: str) -> tuple[str, ...]:
    nodes = job.allocation.nodes
    command = " ".join((runai_client.PROGRAM, *kind.split(), "bash", name, *_project(job.allocation.queue)))
    if nodes == 1:
        return (command,)
    names = (f"{name}-master-0", *(f"{name}-worker-{index}" for index in range(nodes - 1)))
    return tuple(f"{command} --pod {pod}" for pod in names)
