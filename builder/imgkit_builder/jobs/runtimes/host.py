"""No container: the node itself runs the user's command, or imgkit when it creates an image."""

from __future__ import annotations

import os
from pathlib import Path

from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Argv, Job, RuntimeKind
from imgkit_builder.jobs.runtimes.base import Runtime
from imgkit_entrypoints.errors import UsageError

_START_IN_CODE = (
    'cd -- "$1" || { echo "imgkit: node $(uname -n) has no $1, the run\'s copy of the code: all nodes need '
    'the job\'s folder (--directory)" >&2; exit 2; }; shift; exec "$@"'
)
"""Shell text that changes to the folder in its first argument, and runs the other arguments there."""


class Host(Runtime):
    """The node itself, without a container. The "image" of a job is a virtual environment, or empty."""

    kind: RuntimeKind = "host"
    has_container = False
    no_mounts_hint = "leave it out"
    opens_shells = True

    def image(self, reference: str, recipe_name: str, directory: Path) -> str:
        """Return the path of the virtual environment. It is empty if the job uses the node's own Python."""
        if not reference:
            return ""
        return str(directory / reference)

    def check(self, job: Job) -> None:
        """Raise UsageError if the job requests something that needs a container."""
        super().check(job)
        if job.request.container.workdir:
            hint = "--directory DIR: the job's folder, in which the command starts"
            raise UsageError("--runtime host has no container", where="--workdir", hint=hint)

    def check_submission(self, job: Job) -> None:
        """Raise UsageError if the virtual environment for the job does not exist.

        Its Python is not started. This machine may be a login node with another processor than the nodes, for
        which the environment was created.
        """
        environment = job.container.image
        if environment and not os.path.lexists(f"{environment}/bin/python3"):
            raise UsageError(
                f"no virtual environment {environment}",
                where="--image",
                hint=f"on a node: python3 -m venv {environment}",
            )

    def modules(self, job: Job) -> tuple[str, ...]:
        """Return the environment modules that the recipe lists for runs without a container."""
        return job.recipe.system.runtime.host_modules

    def exports(self, job: Job) -> tuple[str, ...]:
        """Return shell lines that set the variables of the job, and then the path of the host's libraries."""
        lines = super().exports(job)
        libraries = self.listed_libraries(job)
        if not libraries:
            return lines
        return (*lines, quoting.export_library_path(libraries))

    def _start(self, job: Job, command: Argv, forward: Argv) -> Argv:
        """Return an argv that runs `command` in the run's copy of the code.

        Without code, return `command`.
        """
        if job.container.code is None:
            return command
        folder = quoting.quote_with_site_variables(job.workspace)
        return ("sh", "-c", _START_IN_CODE, "sh", folder, *command)

    def _entry_point_python(self, job: Job) -> str:
        """Return the Python of the virtual environment, or ``python3``, which is found on PATH."""
        environment = job.container.image
        if not environment:
            return "python3"
        return f"{environment}/bin/python3"


class NoContainer(Host):
    """The imgkit of the node itself, for a job that creates an image file. This file is the job's "image"."""

    kind = "no-container"
    opens_shells = False

    def modules(self, job: Job) -> tuple[str, ...]:
        """Return the modules of the recipe's runtime, because the runtime builds or tests the image."""
        return job.recipe.system.runtime.modules

    def exports(self, job: Job) -> tuple[str, ...]:
        """Return no shell lines, because the variables of the system are meant for programs in an image."""
        return ()
