"""Runtimes, which start a job's command on a node. Each one is a class.

A runtime writes argv and lines of shell, and reads image files that are on this machine. It runs no commands,
except that `image_digest` runs one with the function that its caller passes.
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
    """Return the runtime of this kind, which the recipe's ``system.runtime.kind`` or ``--runtime`` names."""
    return _RUNTIMES[kind]


def runtime_of(job: Job) -> Runtime:
    """Return the runtime that starts the command of `job`."""
    return get_runtime(job.container.runtime)
