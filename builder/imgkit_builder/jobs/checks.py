"""What is checked of a job of this machine before anything waits in a queue."""

from __future__ import annotations

import os
from pathlib import Path

from imgkit_builder.jobs import pyxis, systems
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.recipe.load import load
from imgkit_builder.sif import image, sqsh
from imgkit_builder.workflow import baked
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rollcall import secret


def before_submission(job: Job) -> None:
    """Check the image and the folder before anything waits in a queue.

    Raises
    ------
    UsageError : the image does not exist, or is for other nodes.
    CheckFailed : a .sqsh is cut short.
    """
    if job.container.runtime != "kubernetes" and not job.directory.is_dir():  # pods have folders of their own
        raise UsageError(f"no folder {job.directory}", where="--directory")
    if job.makes_image:
        _check_source(job.request)
        return
    check_environment(job)
    for _ in systems.named(job.system).check(job, is_submitted=True):
        pass  # the warnings have been shown
    if job.container.runtime == "singularity":
        _check_sif(job)
    elif job.container.runtime == "pyxis" and pyxis.is_file(job.container.image):
        if not sqsh.is_sqsh(Path(job.container.image)):
            problem = "is not a .sqsh" if Path(job.container.image).exists() else "does not exist"
            hint = f"imgkit sif {job.recipe.name} -o {job.recipe.name}.sqsh, or --image PATH"
            raise UsageError(f"the image {problem}", where=job.container.image, hint=hint)
        sqsh.structure(Path(job.container.image))
        if foreign := foreign_image(job):
            raise foreign
    elif (
        job.container.runtime == "host"
        and job.container.image
        and not os.path.lexists(f"{job.container.image}/bin/python3")
    ):
        # It is not run: a login node can have another processor than the nodes it was made on.
        raise UsageError(
            f"no virtual environment {job.container.image}",
            where="--image",
            hint=f"on a node: python3 -m venv {job.container.image}",
        )


def check_environment(job: Job) -> None:
    """Raise UsageError for a variable that the job takes from here, and that is not set or means trouble."""
    if job.container.runtime == "pyxis":
        pyxis.check_environment(os.environ)
    for name in job.container.names if job.container.runtime != "kubernetes" else ():
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


def _check_sif(job: Job) -> None:
    path = Path(job.container.image)
    if not path.exists():
        raise UsageError(
            f"no image {path}", where="--image", hint=f"imgkit sif {job.recipe.name}, or --image PATH"
        )
    if path.is_dir():
        return  # a sandbox: singularity runs it too
    if foreign := foreign_image(job):
        raise foreign


def foreign_image(job: Job) -> UsageError | None:
    """The error for a .sif here of another architecture than the nodes'; None if it fits or is not here."""
    path, arch = Path(job.container.image), ""
    if job.makes_image:
        return None
    if job.container.runtime == "singularity" and image.is_sif(path):
        arch = image.read(path).arch
    elif job.container.runtime in ("pyxis", "singularity") and sqsh.is_sqsh(path):
        arch = baked.arch(path)
    if not arch:
        return None
    archs = {platform.removeprefix("linux/") for platform in job.recipe.platforms}
    if arch in archs:
        return None
    return UsageError(
        f"the image is for {arch}, but the nodes are {' or '.join(sorted(archs))}",
        where=str(path),
        hint=f"imgkit build {job.recipe.name} --platform {min(archs)}, then imgkit sif",
    )
