"""Check a new .sif: runtimes have written 40 KB of nothing and reported success."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imgkit_builder.image import manifest
from imgkit_builder.image.config import ImageConfig
from imgkit_builder.sif import image
from imgkit_builder.sif.conversion_job import ConversionJob
from imgkit_builder.sif.image import SifImage, Superblock
from imgkit_builder.sif.runtime import RuntimeTool, exec_arguments, isolation
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolFailed

EMPTY_IMAGE = "Architecture not recognized"
"""The runtime prints this for a root without programs, and still exits 0."""
_NO_PROGRAM = re.compile(r'^FATAL:\s+"true": executable file not found', re.MULTILINE)
"""The runtime mounted the root and looked for the program: images of one static binary have none."""
_METADATA = "inspect-metadata.json"
"""Name of the object in which a runtime keeps what its ``inspect`` prints."""
_LEAST_SHARE = 200
"""A root partition below 1/200 of its layers has lost files (text packs to about 1/5)."""


def structure(
    path: Path, *, config: ImageConfig | None, layer_bytes: int | None
) -> tuple[SifImage, Superblock]:
    """Header, root partition, architecture and size, without running anything.

    Raises
    ------
    CheckFailed : names the fault.
    """
    sif = image.read(path)
    root, superblock = sif.root, image.squashfs(sif)
    if root is None or superblock is None:
        raise CheckFailed("the runtime made a .sif without a squashfs root partition", where=str(path))
    if superblock.used_bytes > root.size_bytes:
        raise CheckFailed(
            f"its root partition has {root.size_bytes} of {superblock.used_bytes} bytes: cut short",
            where=str(path),
        )
    if layer_bytes is not None and root.size_bytes < layer_bytes // _LEAST_SHARE:
        raise CheckFailed(
            f"files are missing: the root partition has {root.size_bytes} bytes, the layers {layer_bytes}",
            where=str(path),
            hint="the runtime did not read the image's layers; try a newer one, or --from daemon",
        )
    if config is not None and config.arch not in (sif.arch, root.arch):
        raise CheckFailed(f"it is marked {sif.arch}, but the image is {config.arch}", where=str(path))
    return sif, superblock


def content(
    job: ConversionJob, config: ImageConfig | None, *, built: bool, runner: RuntimeTool | None
) -> None:
    """Check labels where a runtime has `built` it, and by `runner` a program and the manifest in it.

    Raises
    ------
    CheckFailed : a label or the manifest is missing or differs.
    ToolFailed : no program runs in it.
    """
    labels, path = dict(config.labels) if config else {}, job.work.part
    if labels and built and (found := _labels(job, path, execute=runner is not None)) is not None:
        _check_labels(found, labels, path)
    if runner is None:
        return
    baked = "imgkit.version" in labels
    argv = ("cat", manifest.MANIFEST_JSON) if baked else ("true",)
    isolated = isolation(runner)
    job.clock.note(isolated.said(argv[0]))
    try:
        output = job.run(*exec_arguments(path, argv, isolated))
    except ToolFailed as error:
        if not baked and not built and _NO_PROGRAM.search(error.hint or ""):
            job.clock.note("nothing run: the image has no program 'true'")
            return
        raise ToolFailed(
            f"{argv[0]!r} does not run in the new .sif: {error.what}",
            hint=f"{error.hint}\nwhere containers cannot start at all (no user namespaces): --no-test;\n"
            "where zstd squashfs cannot be mounted: --compression gzip",
        ) from error
    if baked:
        _check_manifest(output, labels, path)


def _labels(job: ConversionJob, path: Path, *, execute: bool) -> dict[str, Any] | None:
    """The labels in the new .sif; None where only its own programs could tell them and must not run."""
    sif = image.read(path)
    described = next((one for one in sif.descriptors if one.name == _METADATA), None)
    if described is None and not execute:
        return None
    try:
        if described is not None:
            answer = json_text.parse(image.data(sif, described))
        else:
            # Without that object the runtime runs a shell of the image. Its warnings precede the answer.
            output = job.run("inspect", "--labels", "--json", path, on_line=lambda _: None)
            answer = json_text.first_object(output)
        return dict(answer["data"]["attributes"]["labels"] or {})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckFailed(f"its labels cannot be read: {error!r}", where=str(path)) from error


def _check_labels(found: Mapping[str, Any], expected: Mapping[str, str], path: Path) -> None:
    for name, value in sorted(expected.items()):
        if str(found.get(name, "")) != value:
            raise CheckFailed(
                f"its label {name} is {found.get(name)!r}, but {value!r} in the image",
                where=str(path),
                hint="labels name the source of a .sif; the runtime lost them",
            )


def _check_manifest(output: str, labels: Mapping[str, str], path: Path) -> None:
    try:
        baked = manifest.from_json(output[output.index("{") :])
    except (ValueError, ImgkitError) as error:
        raise CheckFailed(
            f"{manifest.MANIFEST_JSON} in it cannot be read: {error}", where=str(path)
        ) from error
    expected = labels.get("imgkit.recipe.sha256", baked.recipe_sha256)
    if baked.recipe_sha256 != expected:
        raise CheckFailed(
            f"{manifest.MANIFEST_JSON} in it is of recipe {baked.recipe_sha256}, its label says {expected}",
            where=str(path),
        )
