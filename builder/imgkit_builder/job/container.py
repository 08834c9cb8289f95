"""The words that start a command in a container on the node where they are executed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import PurePath

from imgkit_builder.delta.descriptor import CODE_PLACE
from imgkit_builder.job.request import Job

GPU_OPTIONS = ("--nv", "--nvccli", "--rocm", "--gpus=all")
"""Options that a job without GPUs leaves out."""

QUIET = "--quiet"
"""Option of singularity and apptainer that leaves out INFO lines, on every node; warnings and errors stay."""

DOCKER_OPTIONS = (
    *("--gpus=all", "--ipc=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864"),
    "--network=host",  # NCCL and the rendezvous choose their own ports between the nodes
)
"""Docker's options if the recipe's runtime is another: NVIDIA's page of the image asks for them."""

OPEN_FILES = "--ulimit=nofile=16384"
"""Docker's option for every job: Docker 29 lowers the limit to 1,024, too few for data workers and a head.

A larger one would keep a container from starting where the engine's own limit is lower (rootless, sandboxes).
"""

_READ_ENV = (
    'while IFS= read -r text || [ "$text" ]; do case ${{text%%=*}} in "" | [0-9]* | *[!A-Za-z0-9_]*) ;; '
    '*) export "${{text?}}" ;; esac; done < {file}'
)
"""Reads lines NAME=VALUE without executing them, and skips all others."""


def start(job: Job, command: Sequence[str], *, forward: Sequence[str] = ()) -> tuple[str, ...]:
    """`command` in the job's image, with the user's variables set.

    Parameters
    ----------
    forward : variables that docker copies from its own environment; other runtimes copy all.
    """
    if job.run_by == "docker":
        words = (program(job), "run", "--rm", *options(job), *_docker_mounts(job, forward))
        return (*words, job.image, *command)
    # By env inside the container: apptainer and older versions of singularity execute $(...) in the values of
    # --env and SINGULARITYENV_*, and a variable that the image sets overrides an exported one.
    given = ("env", *(f"{name}={value}" for name, value in job.env.items())) if job.env else ()
    if job.run_by == "singularity":
        return (program(job), QUIET, "exec", *options(job), *_mounts(job), job.image, *given, *command)
    if command and command[0].startswith("dist-"):
        # Only images have dist-* programs; the installed package does not.
        python = f"{job.image}/bin/python3" if job.image else "python3"
        command = (python, "-I", "-m", "imgkit_entrypoints", *command)
    return (*given, *command)


def shell(job: Job) -> tuple[str, ...]:
    """A shell in the job's image."""
    if job.run_by == "singularity" and not job.env:
        return (program(job), QUIET, "shell", *options(job), *_mounts(job), job.image)
    return start(job, ("bash",))


def program(job: Job) -> str:
    """The runtime's command: the recipe's, unless the request names another runtime."""
    runtime = job.recipe.system.runtime
    return runtime.command if runtime.kind == job.run_by else job.run_by


def options(job: Job) -> tuple[str, ...]:
    """Options of the runtime at every start."""
    runtime = job.recipe.system.runtime
    usual = ("--nv",) if job.run_by == "singularity" else DOCKER_OPTIONS
    words = runtime.options if runtime.kind == job.run_by else usual
    if job.run_by == "docker" and not any("nofile" in word for word in (*words, *job.request.options)):
        words = (*words, OPEN_FILES)
    return words if job.gpus else tuple(word for word in words if word not in GPU_OPTIONS)


def modules(job: Job) -> tuple[str, ...]:
    """Environment modules that the start needs, in load order."""
    runtime = job.recipe.system.runtime
    if job.run_by == "host":
        return runtime.host_modules
    return runtime.modules if runtime.kind == job.run_by else ()


def exports(job: Job) -> tuple[str, ...]:
    """Shell lines that set variables of the runtime and of the launcher."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in job.settings.items()]
    lines += [_READ_ENV.format(file=shlex.quote(job.env_file))] if job.env_file else []
    libraries = ":".join(job.recipe.system.runtime.host_libs)
    # Expanded where it is used, to the image's own value: a plain value would replace it.
    inherited = "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    if job.run_by == "host":
        # There is no image, so the launcher has no system.json to read.
        lines += [f"export {name}={shlex.quote(value)}" for name, value in job.recipe.system.env.items()]
        lines += [f'export LD_LIBRARY_PATH="{libraries}{inherited}"'] if libraries else []
    elif job.run_by == "singularity" and libraries:
        prefix = "APPTAINERENV" if PurePath(program(job)).name == "apptainer" else "SINGULARITYENV"
        lines.append(f"export {prefix}_LD_LIBRARY_PATH='{libraries}{inherited}'")
    return tuple(lines)


def _mounts(job: Job) -> tuple[str, ...]:
    """Options that mount the deltas, the libraries and the folders; the last overlay is uppermost."""
    overlays = (*((job.overlay,) if job.overlay else ()), *job.code_files)
    layers = (word for overlay in overlays for word in ("--overlay", f"{overlay}:ro"))
    libraries = (f"{folder}:{folder}:ro" for folder in job.recipe.system.runtime.host_libs)
    binds = (word for bind in (*libraries, *job.binds, str(job.directory)) for word in ("--bind", bind))
    if job.code is None or not job.code.replace:
        return (*layers, *binds)
    # The folder itself, mounted from the delta: it hides what the overlay only adds to.
    folder = f"{job.code_files[-1]}:/{CODE_PLACE}:image-src=/{CODE_PLACE},ro"
    return (*layers, "--bind", folder, *binds)


def _docker_mounts(job: Job, forward: Sequence[str]) -> tuple[str, ...]:
    binds = (*job.binds, f"{job.directory}:{job.directory}")
    given = {**job.settings, **job.env}
    return (
        *(word for bind in binds for word in ("--volume", bind if ":" in bind else f"{bind}:{bind}")),
        *("--workdir", str(job.directory)),
        *(word for name, value in given.items() for word in ("--env", f"{name}={value}")),
        *(("--env-file", job.env_file) if job.env_file else ()),
        *(word for name in (*job.names, *forward) for word in ("--env", name)),
    )
