"""The container of a job: its image, the delta over it, mounts and variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from imgkit_builder.delta import descriptor
from imgkit_builder.delta.descriptor import Delta
from imgkit_builder.job import fields
from imgkit_builder.job.request import Request, RunBy
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import delta_check


def image(recipe: Target, request: Request, run_by: RunBy, directory: Path) -> str:
    """Path of a .sif, an image reference, or the virtual environment of a run without a container."""
    image = request.image
    if any(ord(letter) < 32 for letter in image):
        raise UsageError(f"{image!r} holds a control character", where="--image")
    if run_by == "singularity":
        return str(directory / (image or f"{recipe.name}.sif"))
    if run_by == "kubernetes" and not image:
        raise UsageError(
            "pods pull their image from a registry, but no image is given",
            where="--image",
            hint=f"imgkit push {recipe.name} REGISTRY/{recipe.name}:1, then --image REGISTRY/{recipe.name}:1",
        )
    if run_by == "host":
        return str(directory / image) if image else ""
    if image.startswith("-"):
        raise UsageError(f"{image!r} is not an image", where="--image")
    return image or f"{recipe.name}:latest"


def overlay(request: Request, run_by: RunBy, directory: Path) -> tuple[str, Delta | None]:
    """Path of the delta and its descriptor, which is read here or in the folder of the job."""
    if request.delta is None:
        return "", None
    delta = descriptor.read(request.delta if request.delta.exists() else directory / request.delta)
    if run_by != "singularity":
        raise UsageError(
            f"a delta lies over a .sif, but {run_by} does not run a .sif",
            where="--delta",
            hint="leave it out",
        )
    return fields.check("--delta", str(directory / request.delta)), delta


def environment(request: Request, run_by: RunBy, image: str, delta: Delta | None) -> Mapping[str, str]:
    """Variables that are set inside the container; the user's own win."""
    return {**_delta_id(run_by, Path(image), delta), **dict(_variable(text) for text in request.env)}


def _delta_id(run_by: RunBy, image: Path, delta: Delta | None) -> Mapping[str, str]:
    """The image id that the container's commands must find, if there are deltas: given, or in the local .sif.

    It is set inside the container, because ``--cleanenv`` of a runtime must not switch the check off.
    """
    from imgkit_builder.sif import image as sif

    if delta is not None:
        return {delta_check.VARIABLE: delta.image_id}
    if run_by != "singularity" or not sif.is_sif(image):
        return {}
    record = sif.read(image).record
    if record is None or not record.deltas:
        return {}
    return {delta_check.VARIABLE: descriptor.stack(image).base.image_id}


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"{text!r} is not a variable", where="--env", hint="NAME=VALUE")
    if any(ord(letter) < 32 and letter != "\t" for letter in value):
        raise UsageError(f"{name} holds a line break or control character", where="--env")
    return name, value


def binds(recipe: Target, request: Request) -> tuple[str, ...]:
    """The recipe's mounts, then the user's."""
    from imgkit_builder.recipe import rules

    for text in request.binds:
        for what, hint in (*rules.printable(text), *rules.bind(text)):
            raise UsageError(what, where="--bind", hint=hint)
    return (*recipe.system.runtime.binds, *request.binds)
