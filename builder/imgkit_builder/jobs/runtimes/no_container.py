"""No container. The job's command is imgkit itself, which makes an image file on the node."""

from __future__ import annotations

from pathlib import Path

from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.runtimes.base import Runtime


class NoContainer(Runtime):
    """The node's own imgkit, without a container and without the variables of a user's program."""

    kind = "no-container"
    has_container = False

    def image(self, text: str, recipe: str, directory: Path) -> str:
        """Return the path of the image that the command makes."""
        return str(directory / (text or f"{recipe}.sif"))

    def modules(self, job: Job) -> tuple[str, ...]:
        """Return the modules of the recipe's runtime, which builds the image or tests it."""
        return job.recipe.system.runtime.modules

    def exports(self, job: Job) -> tuple[str, ...]:
        """Return no shell lines, because the variables of the system are for programs in an image."""
        return ()
