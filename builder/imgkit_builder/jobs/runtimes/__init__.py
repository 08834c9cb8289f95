"""Runtimes: the ways to start a job's command on a node, such as Singularity, Docker or no container.

Each runtime is a class. It writes argument lists and shell lines, and reads image files on this machine. It
runs no commands itself. Only `image_digest` runs one, through a function of its caller.
"""

from __future__ import annotations

from collections.abc import Mapping

from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.runtimes.base import Runtime
from imgkit_builder.jobs.runtimes.docker import Docker
from imgkit_builder.jobs.runtimes.host import Host, NoContainer
from imgkit_builder.jobs.runtimes.pod import Pod
from imgkit_builder.jobs.runtimes.pyxis import Pyxis
from imgkit_builder.jobs.runtimes.singularity import Singularity

__all__ = ["Runtime", "get_runtime", "runtime_of"]

_RUNTIMES: Mapping[str, Runtime] = {
    runtime.kind: runtime for runtime in (Singularity(), Docker(), Pyxis(), Host(), Pod(), NoContainer())
}


def get_runtime(kind: str) -> Runtime:
    """Return the runtime with this name, a value of ``system.runtime.kind`` or ``--runtime``."""
    return _RUNTIMES[kind]


def runtime_of(job: Job) -> Runtime:
    """Return the runtime that starts the command of `job`."""
    return get_runtime(job.container.runtime)
