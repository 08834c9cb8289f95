"""Check a job on the machine that submits it, before it waits in a queue."""

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
    """Check the folder, image and variables of a job before it waits in a queue.

    Raises
    ------
    UsageError : the folder, the image or a variable is missing, or the image is for other nodes.
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
    """Check the variables of ``--env NAME`` and the file of ``--env-file``.

    Raises
    ------
    UsageError : a variable is not set or has a line break, or other users can read the file.
    """
    if not runtime_of(job).is_isolated:
        for name in job.container.names:
            _check_variable(name)
    env_file = job.container.env_file
    if env_file and os.path.lexists(env_file):  # the file may be on the nodes only
        descriptor = secret.open_private(Path(env_file), purpose="the file of --env-file")
        os.close(descriptor)


def _check_variable(name: str) -> None:
    """Raise UsageError for a variable that is not set on this machine, or whose value has a line break."""
    value = os.environ.get(name)
    if value is None:
        raise UsageError(
            f"{name} is not set here", where="--env", hint=f"export {name}=..., or --env-file FILE"
        )
    if "\n" in value:
        raise UsageError(f"{name} holds a line break", where="--env", hint="put it into a file")


def _check_source(request: JobRequest) -> None:
    """Raise UsageError if this machine lacks what the job makes its image from.

    That is the archive of ``--sif``, or for ``--build`` the recipe, and the base of ``--base-from`` if any.
    """
    archive, base = request.archive, request.base_from
    if archive is not None:
        if not archive.is_file():
            raise UsageError(f"no file {archive}", where="--sif", hint="imgkit save makes one")
        return
    load(request.build)
    if base is not None and not (base.is_file() or base.is_dir()):
        hint = "an archive or a .sif of the base where the nodes see it"
        raise UsageError(f"no file {base}", where="--base-from", hint=hint)
