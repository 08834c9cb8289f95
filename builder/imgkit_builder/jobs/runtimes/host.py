"""No container: the node itself runs the command of a user, or imgkit itself to make an image."""

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
"""Shell text that changes into the folder of its first argument, and runs the other arguments there."""


class Host(Runtime):
    """The node itself, without a container. The "image" of a job is a virtual environment, or nothing."""

    kind: RuntimeKind = "host"
    has_container = False
    without_mounts = "leave it out"
    opens_shells = True

    def image(self, reference: str, recipe_name: str, directory: Path) -> str:
        """Return the path of the virtual environment. It is empty for the node's own Python."""
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
        """Raise UsageError if the virtual environment in which the job runs does not exist.

        Its Python is not started. This can be a login node with another processor than the nodes for which
        the environment was made.
        """
        environment = job.container.image
        if environment and not os.path.lexists(f"{environment}/bin/python3"):
            raise UsageError(
                f"no virtual environment {environment}",
                where="--image",
                hint=f"on a node: python3 -m venv {environment}",
            )

    def modules(self, job: Job) -> tuple[str, ...]:
        """Return the environment modules that the recipe has for runs without a container."""
        return job.recipe.system.runtime.host_modules

    def exports(self, job: Job) -> tuple[str, ...]:
        """Return shell lines that set the variables, and at the end the path of the host's libraries."""
        lines = super().exports(job)
        libraries = self.listed_libraries(job)
        if not libraries:
            return lines
        return (*lines, quoting.export_library_path(libraries))

    def _start(self, job: Job, command: Argv, forward: Argv) -> Argv:
        """Return `command`, which starts in the run's copy of the code if there is one."""
        if job.container.code is None:
            return command
        folder = quoting.quote_with_site_variables(job.workspace)
        return ("sh", "-c", _START_IN_CODE, "sh", folder, *command)

    def _entry_point_python(self, job: Job) -> str:
        """Return the Python of the virtual environment, or else the first ``python3`` on PATH."""
        environment = job.container.image
        if not environment:
            return "python3"
        return f"{environment}/bin/python3"


class NoContainer(Host):
    """The node's own imgkit, for a job that makes an image file. Its "image" is the file that it makes."""

    kind = "no-container"
    opens_shells = False

    def modules(self, job: Job) -> tuple[str, ...]:
        """Return the modules of the recipe's runtime, which builds the image or tests it."""
        return job.recipe.system.runtime.modules

    def exports(self, job: Job) -> tuple[str, ...]:
        """Return no shell lines, because the variables of the system are for programs in an image."""
        return ()
