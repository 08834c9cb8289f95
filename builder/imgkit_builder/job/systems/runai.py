"""RunAI: the one command that submits a job, in the client's v1 form (``runai submit-dist pytorch``).

The flags are those of docs.run.ai/v2.13/Researcher/cli-reference/runai-submit-dist-pytorch. The ``dist-...``
command alone follows ``--``: no shell reads it again, so nothing is quoted twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from imgkit_builder.job import quoting
from imgkit_builder.job.quoting import quote
from imgkit_builder.job.request import Job, Script, SubmittedJob
from imgkit_builder.job.systems import pods
from imgkit_entrypoints.schedulers import kubernetes


class RunAI(pods.Pods):
    """RunAI: its own client, or for ``--format`` the documents of Kubeflow."""

    uses = ("queue", "cpus")

    def hands_to(self, flags: pods.PodFlags) -> str:
        """Kubeflow, if ``--format`` asks for a document."""
        return "" if flags.format == "runai" else "kubeflow"

    def script(self, job: Job) -> Script:
        """The command. For an interactive job, comments above it explain how to work in its pods."""
        name = pods.check_name(job)
        command = pods.ASLEEP if job.request.interactive else kubernetes.start_argv(job.command)
        folder = pods.directory(job)
        words = (
            # One pod is a plain job; workers are the pods after the first.
            *(("runai", "submit") if job.nodes == 1 else ("runai", "submit-dist", "pytorch")),
            *("--name", name),
            *(("--project", job.queue) if job.queue else ()),
            *("--image", job.image),
            *(("--workers", str(job.nodes - 1)) if job.nodes > 1 else ()),
            *_replicas(job),
            *("--gpu", str(job.gpus)),
            *(("--cpu", str(job.cpus)) if job.cpus else ()),
            *(word for claim in pods.claims(job) for word in ("--pvc", str(claim))),
            *(("--working-dir", str(folder)) if folder else ()),
            *_environment(job),
            *job.recipe.system.queue.options,
            *map(quoting.option, job.request.options),
            *("--", *map(pods.literal, command)),
        )
        project = f" --project {job.queue}" if job.queue else ""
        end = f"runai delete job {name}{project}"
        comments = pods.entered(job, _ways(job, name, project), end) if job.request.interactive else ()
        return Script(text="\n".join((*comments, _rows(words), "")), submit=words)

    def job_id(self, output: str, name: str) -> str:
        """The job's name, which is its id."""
        return name

    def status(self, record: SubmittedJob) -> tuple[str, ...]:
        """Words that show the job, its pods and its events."""
        return ("runai", "describe", "job", record.name, *_project(record))

    def logs(self, record: SubmittedJob) -> tuple[str, ...]:
        """Words that follow the output of the first pod; the volume has the output of all pods."""
        return ("runai", "logs", record.name, "--follow", *_project(record))

    def cancel(self, record: SubmittedJob) -> tuple[str, ...]:
        """Words that end the job and delete its pods."""
        return ("runai", "delete", "job", record.name, *_project(record))

    def queues(self) -> tuple[tuple[str, ...], ...]:
        """Words that show the projects and their free GPUs."""
        return (("runai", "list", "projects"),)


SYSTEM = RunAI()


def _rows(words: Sequence[str]) -> str:
    """The command, with one line for each option and its value."""
    end = words.index("--")
    rows = [[words[0]]]
    for index, word in enumerate(words[1:], 1):
        if index <= end and word.startswith("-"):
            rows.append([])
        rows[-1].append(word)
    return " \\\n    ".join(" ".join(map(quote, row)) for row in rows)


def _environment(job: Job) -> Iterator[str]:
    for name, value in pods.variables(job).items():
        yield from ("-e", f"{name}={pods.literal(value)}")
    for name in job.names:
        # docs.run.ai/v2.13/admin/workloads/secrets: the client passes the reference alone.
        yield from ("-e", f"{name}=SECRET:{pods.SECRET},{name}")


def _replicas(job: Job) -> tuple[str, ...]:
    if not job.elastic:
        return ()
    return ("--min-replicas", str(job.size.least), "--max-replicas", str(job.nodes))


def _ways(job: Job, name: str, project: str) -> tuple[str, ...]:
    if job.nodes == 1:
        return (f"runai bash {name}{project}",)
    names = (f"{name}-master-0", *(f"{name}-worker-{index}" for index in range(job.nodes - 1)))
    return tuple(f"runai bash {name}{project} --pod {pod}" for pod in names)


def _project(record: SubmittedJob) -> tuple[str, ...]:
    return ("--project", record.queue) if record.queue else ()
