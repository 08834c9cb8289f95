"""Check a job on the machine that submits it, so that errors are found before the job waits in a queue."""

from __future__ import annotations

import os
from pathlib import Path

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rollcall import secret


def before_submission(job: Job) -> None:
    """Check the folder, image and variables of a job. Without these checks, it would fail after the queue.

    Raises
    ------
    UsageError : the folder, the image or a variable is missing, or the image is for other nodes.
    CheckFailed : a .sqsh is cut short.
    """
    runtime = runtime_of(job)
    # Pods see no folders of this machine, so the job's folder need not exist here.
    if not runtime.is_isolated and not job.directory.is_dir():
        raise UsageError(f"no folder {job.directory}", where="--directory")
    check_environment(job)
    # A generator raises its errors only when it is read, so it is read here. Its warnings have been shown
    # before.
    tuple(systems.get_system(job.system).check(job, is_submitted=True))
    runtime.check_submission(job)


def check_environment(job: Job) -> None:
    """Check the variables of ``--env NAME`` and the file of ``--env-file``.

    If the file is not on this machine, it is not checked, because the nodes read it when the job starts.

    Raises
    ------
    UsageError : a variable is not set or contains a line break, or other users can read the file.
    """
    # Pods get these variables from Kubernetes and not from this machine.
    if not runtime_of(job).is_isolated:
        for name in job.container.names:
            _check_variable(name)
    env_file = job.container.env_file
    if env_file and os.path.lexists(env_file):
        # The file is opened only to check its owner and its mode. The nodes read its content.
        os.close(secret.open_private(Path(env_file), purpose="the file of --env-file"))


def _check_variable(name: str) -> None:
    """Raise UsageError if a variable is not set on this machine, or if its value contains a line break."""
    value = os.environ.get(name)
    if value is None:
        raise UsageError(
            f"{name} is not set here", where="--env", hint=f"export {name}=..., or --env-file FILE"
        )
    # Commands on other hosts read each variable as one line, NAME=VALUE (`systems.fanout`).
    if "\n" in value:
        raise UsageError(f"{name} holds a line break", where="--env", hint="put it into a file")
