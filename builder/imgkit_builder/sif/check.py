"""Check a new .sif. Some runtimes have written 40 KB without the image's files, and reported success."""

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
from imgkit_builder.sif.runtime import RuntimeTool, choose_isolation, exec_arguments
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolFailed

# The runtime has mounted the image but found no program "true". An image of one static binary has none.
_NO_PROGRAM = re.compile(r'^FATAL:\s+"true": executable file not found', re.MULTILINE)
# Objects of a .sif that contain the labels, and the keys under which the labels are nested. A runtime writes
# the first and prints it with ``inspect``. imgkit writes the second.
_LABEL_OBJECTS = {
    "inspect-metadata.json": ("data", "attributes", "labels"),
    "oci-config.json": ("Labels",),
}
_MAX_PACKING_RATIO = 200
"""A root partition smaller than 1/200 of its layers has lost files. Text is compressed to about 1/5."""


def check_built(job: ConversionJob, config: ImageConfig, layer_bytes: int, *, can_run: bool) -> None:
    """Compare a .sif that a runtime has built with its image: size, architecture and labels.

    Parameters
    ----------
    config : configuration of the image that was converted.
    layer_bytes : size of the image's uncompressed layers.
    can_run : whether the runtime may start a shell of the image to read its labels.

    Raises
    ------
    CheckFailed : the .sif differs from the image.
    """
    path = job.work.new_file  # the file gets its final name only after this check
    sif = image.check_structure(path)
    root = sif.require_root()
    # Some runtimes that cannot read a layer write only their own 40 KB of files, and exit with 0.
    if root.size_bytes < layer_bytes // _MAX_PACKING_RATIO:
        raise CheckFailed(
            f"files are missing: the root partition has {root.size_bytes} bytes, the layers {layer_bytes}",
            where=str(path),
            hint="the runtime did not read the image's layers; try a newer one, or --writer imgkit",
        )
    # The header and the descriptor of the root partition contain the architecture. One match is enough.
    if config.arch not in (sif.arch, root.arch):
        raise CheckFailed(f"it is marked {sif.arch}, but the image is {config.arch}", where=str(path))
    if not config.labels:
        return
    labels = read_labels(sif)
    if labels is None and can_run:
        labels = _inspect_labels(job, path)
    if labels is not None:  # otherwise they cannot be read here, and are not compared
        compare_labels(labels, config.labels, path)


def _inspect_labels(job: ConversionJob, path: Path) -> dict[str, Any]:
    """Return the labels that the runtime's ``inspect`` prints for the .sif `path`.

    The runtime may start a shell of the image to read them.

    Raises
    ------
    CheckFailed : the output is not the expected JSON.
    """
    # `on_line` ignores the lines, so that the JSON does not appear on the user's screen.
    inspect_output = job.run("inspect", "--labels", "--json", path, on_line=lambda _: None)
    try:
        # Warnings of the runtime may come before the JSON.
        document = json_text.first_object(inspect_output)
        return dict(document["data"]["attributes"]["labels"] or {})
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable_labels_error(path, error) from error


def check_start(
    job: ConversionJob, tool: RuntimeTool, config: ImageConfig, *, is_built_by_runtime: bool
) -> None:
    """Test the new .sif by starting a program in it with the runtime `tool`.

    In an image that imgkit has built, the program is ``cat``. It prints the manifest (imgkit's description of
    the image), which must match the image's labels. In other images, the program is ``true``.

    Parameters
    ----------
    job : the conversion. It has the path of the new file, and runs the runtime.
    config : configuration of the image that was converted, with its labels.
    is_built_by_runtime : whether the runtime wrote the file. Runtimes have lost files, so a missing ``true``
        is an error then. If imgkit wrote it, the image may be a single static binary without ``true``.

    Raises
    ------
    CheckFailed : the manifest is missing, or does not match the labels.
    ToolFailed : the program does not run.
    """
    path = job.work.new_file  # the file gets its final name only after this test
    has_manifest = "imgkit.version" in config.labels  # imgkit sets this label when it builds an image
    program, *arguments = ["cat", manifest.MANIFEST_JSON] if has_manifest else ["true"]
    isolated = choose_isolation(tool)
    job.clock.note(isolated.description(program))
    try:
        program_output = job.run(*exec_arguments(path, (program, *arguments), isolated))
    except ToolFailed as error:
        may_lack_program = not has_manifest and not is_built_by_runtime
        # Only this one message shows that the runtime has mounted the image. Any other error is a real one.
        if may_lack_program and _NO_PROGRAM.search(error.hint or ""):
            job.clock.note("nothing run: the image has no program 'true'")
            return
        raise _start_error(program, error) from error
    if has_manifest:
        _check_manifest(program_output, config.labels, path)


def _start_error(program: str, error: ToolFailed) -> ToolFailed:
    return ToolFailed(
        f"{program!r} does not run in the new .sif: {error.what}",
        hint=f"{error.hint}\nwhere containers cannot start at all (no user namespaces): --no-test;\n"
        "where zstd squashfs cannot be mounted: --compression gzip",
    )


def read_labels(sif: SifImage) -> dict[str, Any] | None:
    """Return the labels of the image in the .sif, or None if no data object of the file contains them.

    imgkit and newer runtimes store such an object. Without it, the labels can be read only by starting a
    shell in the image. If the object contains no labels, the result is an empty dict.

    Raises
    ------
    CheckFailed : the object cannot be read.
    """
    descriptors = {descriptor.name: descriptor for descriptor in sif.descriptors}
    # The names under which a runtime or imgkit stores the object. The first one found is enough.
    for name, keys in _LABEL_OBJECTS.items():
        if name not in descriptors:
            continue
        data = image.read_object(sif, descriptors[name])
        try:
            values = json_text.parse(data)
            # Follow the nested keys. A missing or null value at any level means that there are no labels.
            for key in keys:
                values = values.get(key) or {}
            return dict(values)
        except (ValueError, AttributeError, TypeError) as error:
            raise _unreadable_labels_error(sif.path, error) from error
    return None


def _unreadable_labels_error(path: Path, error: Exception) -> CheckFailed:
    return CheckFailed(f"its labels cannot be read: {error!r}", where=str(path))


def compare_labels(labels: Mapping[str, Any], expected: Mapping[str, str], path: Path) -> None:
    """Raise CheckFailed if one of the `expected` labels is missing or different in `labels`.

    `labels` are those of the .sif `path`. It may have more labels than expected.
    """
    for name, expected_value in sorted(expected.items()):
        if str(labels.get(name, "")) != expected_value:
            raise CheckFailed(
                f"its label {name} is {labels.get(name)!r}, but {expected_value!r} in the image",
                where=str(path),
                hint="labels name the source of a .sif; the runtime lost them",
            )


def _check_manifest(output: str, labels: Mapping[str, str], path: Path) -> None:
    """Compare the manifest that a program of the image has printed with the image's `labels`.

    The manifest is imgkit's description of the image. Both must contain the same digest of the recipe. `path`
    is the .sif, for messages.

    Raises
    ------
    CheckFailed : the manifest cannot be read, or belongs to another recipe.
    """
    try:
        # Warnings of the runtime may come before the JSON.
        json_start = output.index("{")
        image_manifest = manifest.from_json(output[json_start:])
    except (ValueError, ImgkitError) as error:
        raise CheckFailed(
            f"{manifest.MANIFEST_JSON} in it cannot be read: {error}", where=str(path)
        ) from error
    expected_sha256 = labels.get("imgkit.recipe.sha256")
    if expected_sha256 is None:  # there is nothing to compare with, so every recipe is accepted
        return
    if image_manifest.recipe_sha256 != expected_sha256:
        raise CheckFailed(
            f"{manifest.MANIFEST_JSON} in it is of recipe {image_manifest.recipe_sha256}, "
            f"its label says {expected_sha256}",
            where=str(path),
        )
