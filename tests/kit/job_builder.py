"""Jobs as a user requests them, on the systems of shipped recipes and of a test's own recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from imgkit_builder.jobs import systems
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.request import JobRequest, SystemFlags
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_builder.recipe.targets import Target, load_target

MANIFEST = Manifest(
    imgkit="0.3.0",
    recipe="cpu",
    recipe_sha256="ab",
    base=BaseImage(name="example.org/base:1"),
    platform="linux/amd64",
    wheel_sha256="cd",
)
"""The manifest of an image that imgkit has built."""
Recipe = Target | Path | str
REQUEST = JobRequest.of(command=("dist-hello",), directory=Path("/w"))
NEEDED: dict[str, dict[str, Any]] = {
    "slurm": {"account": "a", "qos": "acc_debug", "time": "10m"},
    "pbs": {"time": "10m"},
    "runai": {"directory": Path()},
}
"""By scheduler, values of a request without which the shipped recipes refuse it."""


def make_job(recipe: Recipe = "mn5", flags: SystemFlags | None = None, **options: Any) -> Job:
    """Return the job ``dist-hello`` in /w. Each of `options` replaces a value of its request."""
    target = recipe if isinstance(recipe, Target) else load_target(recipe)
    request = REQUEST.changed(**NEEDED.get(target.system.scheduler, {}))
    if flags:
        request = request.changed(system_flags=(flags,))
    return resolve_job(target, request.changed(**options))


def make_script(recipe: Recipe = "mn5", flags: SystemFlags | None = None, **options: Any) -> Script:
    """Return the script of the job of `make_job`."""
    job = make_job(recipe, flags, **options)
    return systems.get_system(job.system).script(job)


def write_recipe(folder: Path, text: str) -> Path:
    """Write a recipe with this text into `folder`."""
    file = folder / "mine.yaml"
    file.write_text(text)
    return file
