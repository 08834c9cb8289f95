"""Checks that are possible only where a job is submitted: files, folders, hosts."""

from __future__ import annotations

import os
from pathlib import Path

from imgkit_builder.delta import descriptor
from imgkit_builder.delta.descriptor import Delta
from imgkit_builder.job import systems
from imgkit_builder.job.request import Job, Request
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rollcall import secret


def before_submission(job: Job) -> None:
    """Check the image and the folder before anything waits in a queue.

    Raises
    ------
    UsageError : the image does not exist, or is for other nodes.
    """
    if job.run_by != "kubernetes" and not job.directory.is_dir():  # pods have folders of their own
        raise UsageError(f"no folder {job.directory}", where="--directory")
    check_environment(job)
    systems.named(job.system).before_submission(job)
    if job.request.archive is not None:
        if not job.request.archive.is_file():
            raise UsageError(f"no file {job.request.archive}", where="--sif", hint="imgkit save makes one")
    elif job.request.build:
        _check_build(job.request)
    elif job.run_by == "singularity":
        _check_sif(job)
    elif job.run_by == "host" and job.image and not os.path.lexists(f"{job.image}/bin/python3"):
        # It is not run: a login node can have another processor than the nodes it was made on.
        raise UsageError(
            f"no virtual environment {job.image}",
            where="--image",
            hint=f"on a node: python3 -m venv {job.image}",
        )


def check_environment(job: Job) -> None:
    """Raise UsageError for variables that the job takes from here, and that are not set."""
    for name in job.names if job.run_by != "kubernetes" else ():
        if name not in os.environ:
            raise UsageError(
                f"{name} is not set here", where="--env", hint=f"export {name}=..., or --env-file FILE"
            )
        if "\n" in os.environ[name]:
            raise UsageError(f"{name} holds a line break", where="--env", hint="put it into a file")
    if job.env_file and os.path.lexists(job.env_file):  # it may be on the nodes alone
        os.close(secret.open_private(Path(job.env_file), purpose="the file of --env-file"))


def signed_files(job: Job) -> tuple[Path, ...]:
    """The files that can carry a signature which imgkit checks: the .sif and its delta, or the archive.

    Raises
    ------
    UsageError : the job runs something else.
    """
    if job.request.archive is not None:
        return (job.request.archive,)
    if job.request.build or job.run_by != "singularity" or Path(job.image).is_dir():
        does = f"builds {job.image}" if job.request.build else f"runs {job.image or 'no image'}"
        raise UsageError(
            f"imgkit checks the signatures of .sif files, and this job {does}",
            where="--require-signature",
            hint="for an image in a registry: cosign, or an admission policy of the cluster",
        )
    return (Path(job.image), *([Path(job.overlay)] if job.overlay else []))


def _check_build(request: Request) -> None:
    """Read the recipe and look for the base here, before the job waits for a node."""
    from imgkit_builder.recipe import whole

    whole.find(request.build)
    if request.base_from is not None and not request.base_from.exists():
        raise UsageError(
            f"no file {request.base_from}",
            where="--base-from",
            hint="an archive or a .sif of the base where the nodes see it; singularity pull makes one",
        )


def _check_delta(job: Job, delta: Delta) -> None:
    if not Path(job.overlay).is_file():
        raise UsageError(f"no file {job.overlay}", where="--delta", hint="copy it there, beside the .sif")
    found = descriptor.stack(Path(job.image)).base
    if found != delta.base:
        raise UsageError(
            f"{job.overlay} lies over {delta.base}, but {job.image} is {found}",
            where="--delta",
            hint=f"imgkit delta {job.recipe.name} --base {Path(job.image).name}, for this .sif",
        )


def _check_sif(job: Job) -> None:
    from imgkit_builder.sif import image

    path = Path(job.image)
    if not path.exists():
        raise UsageError(
            f"no image {path}", where="--image", hint=f"imgkit sif {job.recipe.name}, or --image PATH"
        )
    if path.is_dir():
        return  # a sandbox: singularity runs it too
    if job.delta is not None:
        _check_delta(job, job.delta)
    arch = image.read(path).arch
    wanted = {platform.removeprefix("linux/") for platform in job.recipe.platforms}
    if arch not in wanted:
        raise UsageError(
            f"the image is for {arch}, but the nodes are {' or '.join(sorted(wanted))}",
            where=str(path),
            hint=f"imgkit build {job.recipe.name} --platform {min(wanted)}, then imgkit sif",
        )
