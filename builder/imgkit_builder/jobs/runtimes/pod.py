"""Pods of Kubernetes, which itself starts the command in the image.

Folders and variables are fields of a pod, so this runtime sets none.
"""

from __future__ import annotations

from pathlib import Path

from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.runtimes.base import Runtime, check_reference
from imgkit_entrypoints.errors import UsageError


class Pod(Runtime):
    """Pods of Kubernetes, which pull their image from a registry."""

    kind = "kubernetes"
    is_isolated = True
    no_mounts_hint = "build an image with that one as its base"

    def image(self, reference: str, recipe_name: str, directory: Path) -> str:
        """Return the name of the image in a registry. Raise UsageError if the user has not named an image."""
        if not reference:
            example = f"REGISTRY/{recipe_name}:1"
            raise UsageError(
                "pods pull their image from a registry, but no image is given",
                where="--image",
                hint=f"imgkit push {recipe_name} {example}, then --image {example}",
            )
        return check_reference(reference)

    def check(self, job: Job) -> None:
        """Raise UsageError if the job needs files of this machine, which pods cannot read."""
        super().check(job)
        env_file = job.request.container.env_file
        if env_file is not None:
            raise UsageError(
                "pods cannot read a file from here",
                where="--env-file",
                hint=f"kubectl create secret generic imgkit --from-env-file={env_file}, and --env NAME for "
                "each variable",
            )
