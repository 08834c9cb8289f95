"""What can be known only where a job is submitted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from imgkit_builder.delta import descriptor
from imgkit_builder.delta.descriptor import Delta
from imgkit_builder.job.request import Job
from imgkit_builder.job.ssh import hostlist
from imgkit_entrypoints.errors import UsageError


def before_submission(job: Job) -> None:
    """Look at the image and the folder before anything waits in a queue.

    Raises
    ------
    UsageError : the image is not there, or is for other nodes.
    """
    if job.run_by != "kubernetes" and not job.directory.is_dir():  # there it is a folder of the pods
        raise UsageError(f"no folder {job.directory}", where="--directory")
    if job.recipe.system.scheduler == "mpi" and not job.request.ssh:
        _check_order(job.request.hosts)
    if job.request.archive is not None:
        if not job.request.archive.is_file():
            raise UsageError(f"no file {job.request.archive}", where="--sif", hint="imgkit save makes one")
    elif job.run_by == "singularity":
        _check_sif(job)
    elif job.run_by == "host" and job.image and not os.path.lexists(f"{job.image}/bin/python3"):
        # Not whether it runs: login nodes may have another processor than the nodes it was made on.
        raise UsageError(
            f"no virtual environment {job.image}",
            where="--image",
            hint=f"on a node: python3 -m venv {job.image}",
        )


def _check_order(hosts: Sequence[str]) -> None:
    # Open MPI 4.1 puts the host that it runs on before all others, wherever it stands in -H or a hostfile.
    here = next((host for host in hosts if hostlist.is_here(host)), "")
    if here and here != hosts[0]:
        own_first = ",".join((here, *(host for host in hosts if host != here)))
        raise UsageError(
            f"this is {here}, and mpirun gives rank 0 to its own host, not to {hosts[0]}",
            where="--hosts",
            hint=f"--hosts {own_first}; or start it on {hosts[0]}",
        )


def _check_delta(job: Job, delta: Delta) -> None:
    if not Path(job.overlay).is_file():
        raise UsageError(f"no file {job.overlay}", where="--delta", hint="copy it there, beside the .sif")
    found = descriptor.stack(Path(job.image)).base
    if found != delta.base:
        raise UsageError(
            f"{job.overlay} lies over {delta.base}; {job.image} is {found}",
            where="--delta",
            hint=f"imgkit delta {job.recipe.name} --base {Path(job.image).name}, of the .sif that is meant",
        )


def _check_sif(job: Job) -> None:
    from imgkit_builder.sif import image

    path = Path(job.image)
    if not path.exists():
        raise UsageError(
            f"no image {path}", where="--image", hint=f"imgkit sif {job.recipe.name}, or --image PATH"
        )
    if path.is_dir():
        return  # a sandbox: singularity runs it as well
    if job.request.overlay is not None:
        _check_delta(job, job.request.overlay.delta)
    arch = image.read(path).arch
    wanted = {platform.removeprefix("linux/") for platform in job.recipe.image.platforms}
    if arch not in wanted:
        raise UsageError(
            f"the image is for {arch}, the nodes are {' or '.join(sorted(wanted))}",
            where=str(path),
            hint=f"imgkit build {job.recipe.name} --platform {min(wanted)}, then imgkit sif",
        )
