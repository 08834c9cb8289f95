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
from imgkit_builder.sif.image import SifImage
from imgkit_builder.sif.runtime import RuntimeTool, exec_arguments, isolation
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolFailed

# The runtime mounted the root and looked for the program: images of one static binary have none.
_NO_PROGRAM = re.compile(r'^FATAL:\s+"true": executable file not found', re.MULTILINE)
# Objects that state the labels, with the keys to them: what a runtime's ``inspect`` prints, and imgkit's.
_LABEL_OBJECTS = (
    ("inspect-metadata.json", ("data", "attributes", "labels")),
    ("oci-config.json", ("Labels",)),
)
# A root partition below 1/200 of its layers has lost files (text packs to about 1/5).
_MIN_SHARE = 200


def check_built(job: ConversionJob, config: ImageConfig, layer_bytes: int, *, can_run: bool) -> None:
    """Check size, architecture and labels of a .sif that a runtime has built.

    Raises
    ------
    CheckFailed : names the fault.
    """
    path = job.work.part
    sif = image.check_structure(path)
    root = sif.require_root()
    # A runtime that could not read a layer has written its own 40 KB of files, and exited 0.
    if root.size_bytes < layer_bytes // _MIN_SHARE:
        raise CheckFailed(
            f"files are missing: the root partition has {root.size_bytes} bytes, the layers {layer_bytes}",
            where=str(path),
            hint="the runtime did not read the image's layers; try a newer one, or --writer imgkit",
        )
    if config.arch not in (sif.arch, root.arch):
        raise CheckFailed(f"it is marked {sif.arch}, but the image is {config.arch}", where=str(path))
    if not config.labels:
        return
    labels = stated_labels(sif)
    if labels is None and can_run:
        # Without such an object the runtime runs a shell of the image. Its warnings precede the answer.
        output = job.run("inspect", "--labels", "--json", path, on_line=lambda _: None)
        try:
            labels = dict(json_text.first_object(output)["data"]["attributes"]["labels"] or {})
        except (ValueError, KeyError, TypeError) as error:
            raise CheckFailed(f"its labels cannot be read: {error!r}", where=str(path)) from error
    if labels is not None:
        compare_labels(labels, config.labels, path)


def check_start(job: ConversionJob, tool: RuntimeTool, config: ImageConfig, *, is_built: bool) -> None:
    """Start a program of the image by `tool`, and compare the manifest in it with the labels.

    Raises
    ------
    CheckFailed : the manifest is missing or differs.
    ToolFailed : no program runs in it; one without `true` passes, except where a runtime has built it.
    """
    path = job.work.part
    has_manifest = "imgkit.version" in config.labels
    # An image of imgkit states what is in it; of others nothing is known but that most have `true`.
    argv = ("cat", manifest.MANIFEST_JSON) if has_manifest else ("true",)
    isolated = isolation(tool)
    job.clock.note(isolated.description(argv[0]))
    try:
        output = job.run(*exec_arguments(path, argv, isolated))
    except ToolFailed as error:
        if not has_manifest and not is_built and _NO_PROGRAM.search(error.hint or ""):
            job.clock.note("nothing run: the image has no program 'true'")
            return
        raise ToolFailed(
            f"{argv[0]!r} does not run in the new .sif: {error.what}",
            hint=f"{error.hint}\nwhere containers cannot start at all (no user namespaces): --no-test;\n"
            "where zstd squashfs cannot be mounted: --compression gzip",
        ) from error
    if has_manifest:
        _check_manifest(output, config.labels, path)


def stated_labels(sif: SifImage) -> dict[str, Any] | None:
    """Return the labels that an object of the .sif states, or None where none does. No program is run.

    Raises
    ------
    CheckFailed : the object cannot be read.
    """
    objects = {descriptor.name: descriptor for descriptor in sif.descriptors}
    for name, keys in _LABEL_OBJECTS:
        if name not in objects:
            continue
        try:
            values = json_text.parse(image.read_object(sif, objects[name]))
            for key in keys:
                values = values.get(key) or {}
            return dict(values)
        except (ValueError, AttributeError, TypeError) as error:
            raise CheckFailed(f"its labels cannot be read: {error!r}", where=str(sif.path)) from error
    return None


def compare_labels(labels: Mapping[str, Any], expected: Mapping[str, str], path: Path) -> None:
    """Raise CheckFailed where a label of the .sif `path` is not as `expected`."""
    for name, value in sorted(expected.items()):
        if str(labels.get(name, "")) != value:
            raise CheckFailed(
                f"its label {name} is {labels.get(name)!r}, but {value!r} in the image",
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
