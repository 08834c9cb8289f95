"""One machine without a scheduler: the container is started here and now."""

from __future__ import annotations

from imgkit_builder.job import container
from imgkit_builder.job.request import Job, Record, Script
from imgkit_builder.job.words import line
from imgkit_entrypoints.errors import UsageError


def script(job: Job) -> Script:
    """The one command."""
    if job.nodes > 1:
        raise UsageError(
            f"{job.nodes} nodes, and {job.recipe.name} is for one machine",
            where="--nodes",
            hint="a recipe with a scheduler: imgkit list",
        )
    if job.request.archive is not None:
        raise UsageError("there is no scheduler to convert by", where="--sif", hint="imgkit sif ARCHIVE")
    given = ("env", *(f"{name}={value}" for name, value in job.settings.items()))
    words = container.start(job, job.command) if job.command else container.shell(job)
    if job.run_by == "docker" and not job.command:
        words = (*words[:2], "--interactive", "--tty", *words[2:])
    elif job.run_by != "docker" and len(given) > 1:
        words = (*given, *words)
    return Script(text=line(words) + "\n", submit=words, foreground=True)


def job_id(output: str) -> str:
    """There is none."""
    return ""


def status(record: Record) -> tuple[str, ...]:
    """There is no queue to look at."""
    raise UsageError("a run on this machine has no job id", hint="it ends with its command")


logs = cancel = status


def queues() -> tuple[tuple[str, ...], ...]:
    """There are none."""
    return ()
