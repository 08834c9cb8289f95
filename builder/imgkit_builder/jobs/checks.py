"""What is checked of a job of this machine before anything waits in a queue."""

from __future__ import annotations

import os
from pathlib import Path

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.recipe.load import load
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rollcall import secret


def before_submission(job: Job) -> None:
    """Check the image and the folder before anything waits in a queue.

    Raises
    ------
    UsageError : the image does not exist, or is for other nodes.
    CheckFailed : a .sqsh is cut short.
    """
    runtime = runtime_of(job)
    if not runtime.is_isolated and not job.directory.is_dir():
        raise UsageError(f"no folder {job.directory}", where="--directory")
    if job.makes_image:
        _check_source(job.request)
        return
    check_environment(job)
    for _ in systems.named(job.system).check(job, is_submitted=True):
        pass  # the warnings have been shown
    runtime.check_submission(job)


def check_environment(job: Job) -> None:
    """Raise UsageError for a variable that the job takes from here, and that is not set or means trouble."""
    for name in () if runtime_of(job).is_isolated else job.container.names:
        if name not in os.environ:
            raise UsageError(
                f"{name} is not set here", where="--env", hint=f"export {name}=..., or --env-file FILE"
            )
        if "\n" in os.environ[name]:
            raise UsageError(f"{name} holds a line break", where="--env", hint="put it into a file")
    if job.container.env_file and os.path.lexists(job.container.env_file):  # it may be on the nodes alone
        os.close(secret.open_private(Path(job.container.env_file), purpose="the file of --env-file"))


def _check_source(request: JobRequest) -> None:
    """Look for the archive here, or read the recipe and look for the base, before the job waits."""
    file, hint = request.archive, "imgkit save makes one"
    if file is None:
        load(request.build)
        file, hint = request.base_from, "an archive or a .sif of the base where the nodes see it"
    if file is not None and not (file.is_file() or (request.build and file.is_dir())):
        raise UsageError(f"no file {file}", where="--base-from" if request.build else "--sif", hint=hint)
