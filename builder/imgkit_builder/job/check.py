"""What can be known only where a job is submitted."""

from __future__ import annotations

from pathlib import Path

from imgkit_builder.job.request import Job
from imgkit_entrypoints.errors import UsageError


def before_submission(job: Job) -> None:
    """Look at the image and the folder before anything waits in a queue.

    Raises
    ------
    UsageError : the image is not there, or is for other nodes.
    """
    if not job.directory.is_dir():
        raise UsageError(f"no folder {job.directory}", where="--directory")
    if job.request.archive is not None:
        if not job.request.archive.is_file():
            raise UsageError(f"no file {job.request.archive}", where="--sif", hint="imgkit save makes one")
    elif job.run_by == "singularity":
        _check_sif(job)


def _check_sif(job: Job) -> None:
    from imgkit_builder.sif import image

    path = Path(job.image)
    if not path.exists():
        raise UsageError(
            f"no image {path}", where="--image", hint=f"imgkit sif {job.recipe.name}, or --image PATH"
        )
    if path.is_dir():
        return  # a sandbox: singularity runs it as well
    arch = image.read(path).arch
    wanted = {platform.removeprefix("linux/") for platform in job.recipe.image.platforms}
    if arch not in wanted:
        raise UsageError(
            f"the image is for {arch}, the nodes are {' or '.join(sorted(wanted))}",
            where=str(path),
            hint=f"imgkit build {job.recipe.name} --platform {min(wanted)}, then imgkit sif",
        )
