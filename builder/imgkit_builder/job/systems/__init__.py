"""From a job's scheduler to the module that writes its script; loaded by name, only when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol, cast

from imgkit_builder.job.request import Job, Record, Script

MODULES: Mapping[str, str] = {
    "slurm": "slurm",
    "pbs": "pbs",
    "runai": "runai",
    "mpi": "mpi",
    "standalone": "local",
}


class System(Protocol):
    """What such a module offers; words are argv tuples, nothing is run here."""

    def script(self, job: Job) -> Script:
        """What would be submitted."""

    def job_id(self, output: str) -> str:
        """The id in what the submission printed."""

    def status(self, record: Record) -> tuple[str, ...]:
        """Words that show the job."""

    def logs(self, record: Record) -> tuple[str, ...]:
        """Words that show its output."""

    def cancel(self, record: Record) -> tuple[str, ...]:
        """Words that end it."""

    def queues(self) -> tuple[tuple[str, ...], ...]:
        """Words that show the queues; the first program that exists is taken."""


def named(name: str) -> System:
    """The module `name` of `MODULES`' values."""
    return cast(System, importlib.import_module(f"imgkit_builder.job.systems.{name}"))


def name_for(job: Job) -> str:
    """The module that `job` is submitted by."""
    if job.recipe.system.scheduler == "runai" and job.request.format != "runai":
        return "kubeflow"
    return MODULES[job.recipe.system.scheduler]
