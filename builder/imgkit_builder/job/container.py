"""The words that start a command in a container on the node where they are executed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePath

from imgkit_builder.job.request import Job

GPU_OPTIONS = ("--nv", "--nvccli", "--rocm", "--gpus=all")
"""Options of every start that make no sense in a job without GPUs."""

DOCKER_OPTIONS = (
    *("--gpus=all", "--ipc=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864"),
    "--network=host",  # NCCL and the rendezvous open ports of their own choice between the nodes
)
"""Of a start by docker where the recipe's runtime is another: what NVIDIA's page of the image asks for."""


def start(job: Job, command: Sequence[str], *, forward: Sequence[str] = ()) -> tuple[str, ...]:
    """`command` in the job's image, with the user's variables set.

    Parameters
    ----------
    forward : variables that docker takes over from its own environment; the others pass all on.
    """
    if job.run_by == "docker":
        words = (program(job), "run", "--rm", *options(job), *_docker_mounts(job, forward))
        return (*words, job.image, *command)
    # By env inside the container: apptainer and older singularities run what stands in $(...) in the value of
    # --env and SINGULARITYENV_*, and an exported variable loses against one that the image sets.
    given = ("env", *(f"{name}={value}" for name, value in job.env.items())) if job.env else ()
    if job.run_by == "singularity":
        return (program(job), "exec", *options(job), *_mounts(job), job.image, *given, *command)
    if command and command[0].startswith("dist-"):
        # The installed package has no dist-* programs, only images have.
        python = f"{job.image}/bin/python3" if job.image else "python3"
        command = (python, "-I", "-m", "imgkit_entrypoints", *command)
    return (*given, *command)


def shell(job: Job) -> tuple[str, ...]:
    """A shell in the job's image."""
    if job.run_by == "singularity" and not job.env:
        return (program(job), "shell", *options(job), *_mounts(job), job.image)
    return start(job, ("bash",))


def program(job: Job) -> str:
    """The runtime's command; the recipe's, unless another runtime is asked for."""
    runtime = job.recipe.system.runtime
    return runtime.command if runtime.kind == job.run_by else job.run_by


def options(job: Job) -> tuple[str, ...]:
    """Options of every start."""
    runtime = job.recipe.system.runtime
    usual = ("--nv",) if job.run_by == "singularity" else DOCKER_OPTIONS
    words = runtime.options if runtime.kind == job.run_by else usual
    return words if job.gpus else tuple(word for word in words if word not in GPU_OPTIONS)


def modules(job: Job) -> tuple[str, ...]:
    """Environment modules that the start needs, in load order."""
    runtime = job.recipe.system.runtime
    if job.run_by == "host":
        return runtime.host_modules
    return runtime.modules if runtime.kind == job.run_by else ()


def exports(job: Job) -> tuple[str, ...]:
    """Shell lines that set what start and launcher are told by variables, where those are inherited."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in job.settings.items()]
    libraries = ":".join(job.recipe.system.runtime.host_libs)
    # Expanded where it is used, to what the image has there: a plain value would take that one's place.
    inherited = "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    if job.run_by == "host":
        # No image whose system.json the launcher would read.
        lines += [f"export {name}={shlex.quote(value)}" for name, value in job.recipe.system.env.items()]
        lines += [f'export LD_LIBRARY_PATH="{libraries}{inherited}"'] if libraries else []
    elif job.run_by == "singularity" and libraries:
        prefix = "APPTAINERENV" if PurePath(program(job)).name == "apptainer" else "SINGULARITYENV"
        lines.append(f"export {prefix}_LD_LIBRARY_PATH='{libraries}{inherited}'")
    return tuple(lines)


def _mounts(job: Job) -> tuple[str, ...]:
    """The delta, libraries, and folders."""
    libraries = (f"{folder}:{folder}:ro" for folder in job.recipe.system.runtime.host_libs)
    binds = (word for bind in (*libraries, *job.binds, str(job.directory)) for word in ("--bind", bind))
    return (*(("--overlay", f"{job.overlay}:ro") if job.overlay else ()), *binds)


def _docker_mounts(job: Job, forward: Sequence[str]) -> tuple[str, ...]:
    binds = (*job.binds, f"{job.directory}:{job.directory}")
    given = {**job.settings, **job.env}
    return (
        *(word for bind in binds for word in ("--volume", bind if ":" in bind else f"{bind}:{bind}")),
        *("--workdir", str(job.directory)),
        *(word for name, value in given.items() for word in ("--env", f"{name}={value}")),
        *(word for name in forward for word in ("--env", name)),
    )
