"""Let a container runtime build the .sif, after refusing images with links that lead it out of the image.

A runtime unpacks layers safely. Then it writes its own files by plain paths into the unpacked tree, and the
kernel follows the links of the image. If ``etc`` is a link to ``/home/me``, Apptainer 1.4.5 writes
``/home/me/hosts``. If ``etc/resolv.conf`` is a link to a file of this machine, it empties that file. The
paths in `_WRITTEN_FOLDERS` and `_WRITTEN_FILES` are those that strace shows during a build.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from imgkit_builder.archive import oci_folder, tar_read
from imgkit_builder.archive.layers import LayerTree, SpecialFile
from imgkit_builder.archive.oci_folder import OciLayout
from imgkit_builder.archive.stored import StoredImage
from imgkit_builder.archive.tar_read import BLOCK, CHARACTER, FIFO
from imgkit_builder.sif import mksquashfs
from imgkit_builder.sif.conversion import Compression, ConversionJob
from imgkit_builder.sif.entries import OpenImage
from imgkit_builder.sif.runtime import RuntimeTool
from imgkit_builder.sif.runtime_files import META
from imgkit_entrypoints.errors import CheckFailed, ToolFailed

EMPTY_IMAGE = "Architecture not recognized"
"""The runtime prints this text for an image without programs, and still exits with 0."""
# Paths in the image to which the runtime writes.
_WRITTEN_FOLDERS = ("dev", "etc", "proc", "sys", "var")
_WRITTEN_FILES = ("etc/hosts", "etc/resolv.conf")
_SPECIAL_FILES = {CHARACTER: "a device", BLOCK: "a device", FIFO: "a FIFO"}


def write_oci_folder(image: OpenImage, job: ConversionJob) -> OciLayout:
    """Write `image` as an OCI folder into the folder for temporary files (workspace).

    The runtime builds the .sif from this OCI folder.

    Raises
    ------
    CheckFailed : a layer is damaged, or has a link through which the runtime would write into this machine.
    """
    assert isinstance(image.files, StoredImage)  # noqa: S101 - for the type checker: it was not exported
    job.clock.stage(f"write the layers of {image.name}")
    oci = oci_folder.write_layout(
        image.files,
        job.work.folder / folder_name(image.name),
        job.clock,
        unpack_limit_bytes=job.options.unpack_limit_bytes,
    )
    # Before the runtime starts, because it would write through such links.
    refuse_links(oci.layer_paths, image.name)
    return oci


def build_arguments(
    tool: RuntimeTool, compression: Compression, new_file: Path, source: str
) -> tuple[str, ...]:
    """Return the arguments that make the runtime build the .sif `new_file`.

    `source` is the URI of an image, or the path of a definition file.
    """
    # Without --force, the runtime would ask before it replaces a file.
    arguments = ["build", "--force"]
    if tool.capabilities.disable_cache:
        # The runtime's cache would keep a second copy of every layer.
        arguments.append("--disable-cache")
    arguments += compression.runtime_options(mksquashfs.gather_limits())
    return (*arguments, str(new_file), source)


def run_build(job: ConversionJob, tool: RuntimeTool, name: str) -> None:
    """Let the runtime build the .sif from the OCI folder that `write_oci_folder` wrote for the image `name`.

    Raises
    ------
    ToolFailed : the runtime failed, wrote no file, or wrote an image without programs. In the last two cases
        the runtime may still exit with 0.
    """
    job.clock.stage(f"build with {tool}")
    arguments = build_arguments(tool, job.compression, job.work.new_file, oci_address(name))
    build_output = job.run(*arguments)
    log_hint = f"the full log: {job.log.name}"
    if EMPTY_IMAGE in build_output:
        raise ToolFailed(
            f"{tool} did not read the layers: it found no programs in the image ({EMPTY_IMAGE!r})",
            hint=f"another version of it, or install mksquashfs and use --writer imgkit; {log_hint}",
        )
    if not job.work.new_file.exists():
        raise ToolFailed(f"{tool} succeeded but wrote no file", hint=log_hint)


def oci_address(name: str) -> str:
    """Return the URI of the OCI folder that `write_oci_folder` wrote: ``oci:FOLDER``.

    The folder is relative to the workspace, in which the runtime runs.
    """
    return f"oci:{folder_name(name)}"


def folder_name(image: str) -> str:
    """Return a folder name for the image: ``team/torch:2.3`` -> ``team_torch_2.3``.

    The runtime stores the name in a label of the .sif, as the source of the image.
    """
    # 100 characters, since the name of a file is limited. A name that has no allowed character gives "image".
    return re.sub(r"[^A-Za-z0-9._-]+", "_", image).strip("._-")[:100] or "image"


def refuse_links(layers: Iterable[Path], where: str) -> None:
    """Refuse an image with links or devices through which the runtime would write into this machine.

    A runtime writes its own files by plain paths into the unpacked image. If ``etc`` is a link to
    ``/home/me``, ``etc/hosts`` is written to ``/home/me/hosts``.

    Parameters
    ----------
    layers : the uncompressed layers, lowest first. Only their headers are read.
    where : name of the image, for messages.

    Raises
    ------
    CheckFailed : the image has such a link or device, or a layer is not a tar.
    """
    # The check needs the merged tree of all layers, since a later layer may replace or delete a link. The
    # layers must be added lowest first.
    tree = LayerTree(where)
    for layer in layers:
        tree.add_layer(tar_read.read_headers(layer))
    # In the runtime's own folder, nothing but plain files and folders is allowed.
    for file in tree.special_files(META):
        raise _special_file_error(file, "the runtime puts its own files there", where)
    for path in (*_WRITTEN_FOLDERS, *_WRITTEN_FILES):
        link = tree.find_escape(path)  # the first link through which the path leaves the image
        if link is not None:
            reason = f"the runtime would write to /{path} through it: into this machine"
            raise _special_file_error(link, reason, where)
    # A device or FIFO stays in the image, but writing to it reaches the host or blocks.
    for path in _WRITTEN_FILES:
        kind = tree.find_file_type(path)
        if kind in _SPECIAL_FILES:
            file = SpecialFile(path, kind, target="")
            raise _special_file_error(file, "the runtime would write to it", where)


def _special_file_error(file: SpecialFile, reason: str, where: str) -> CheckFailed:
    """Return the error for a file of an image through which a runtime would write into this machine.

    `reason` is the end of the message: what the runtime would do with the link, device or FIFO.
    """
    description = _SPECIAL_FILES.get(file.kind, f"a link to {file.target!r}")
    return CheckFailed(
        f"/{file.path} in the image is {description}, and {reason}",
        where=where,
        hint="do not use this image if you do not know its author; otherwise remove that file in the "
        f"image's recipe or Dockerfile: RUN rm /{file.path}",
    )
