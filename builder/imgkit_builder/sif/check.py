"""Check a new .sif: runtimes have written 40 KB of nothing and reported success."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imgkit_builder.oci import manifest
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.sif import image
from imgkit_builder.sif.conversion import ConversionJob
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
_OCI_CONFIG = "oci-config.json"
"""Name of the object in which imgkit keeps them."""
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
        compare_labels(found, labels, path)
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
    stated = stated_labels(image.read(path))
    if stated is not None or not execute:
        return stated
    try:
        # Without that object the runtime runs a shell of the image. Its warnings precede the answer.
        output = job.run("inspect", "--labels", "--json", path, on_line=lambda _: None)
        return dict(json_text.first_object(output)["data"]["attributes"]["labels"] or {})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckFailed(f"its labels cannot be read: {error!r}", where=str(path)) from error


def stated_labels(sif: SifImage) -> dict[str, Any] | None:
    """The labels that an object of the .sif states; None where none does. Runs nothing.

    Raises
    ------
    CheckFailed : the object cannot be read.
    """
    for name, below in ((_METADATA, ("data", "attributes", "labels")), (_OCI_CONFIG, ("Labels",))):
        described = next((one for one in sif.descriptors if one.name == name), None)
        if described is None:
            continue
        try:
            found = json_text.parse(image.data(sif, described))
            for key in below:
                found = found.get(key) or {}
            return dict(found)
        except (ValueError, AttributeError, TypeError) as error:
            raise CheckFailed(f"its labels cannot be read: {error!r}", where=str(sif.path)) from error
    return None


def compare_labels(found: Mapping[str, Any], expected: Mapping[str, str], path: Path) -> None:
    """Raise CheckFailed where a label of the .sif `path` is not as `expected`."""
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
