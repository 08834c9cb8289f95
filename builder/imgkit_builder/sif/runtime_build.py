"""Let the runtime build the .sif, after a check of the links through which it would write into this machine.

A runtime unpacks layers safely. Then it writes its own files by plain paths into the unpacked tree, and the
kernel follows the image's links. With ``etc`` as a link to ``/home/me``, Apptainer 1.4.5 writes
``/home/me/hosts``; with ``etc/resolv.conf`` as a link to a file of this machine, it empties that file. The
paths in `_FOLDERS` and `_FILES` are those of its build, seen with strace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from imgkit_builder.archive import oci_folder, tar_read
from imgkit_builder.archive.layers import LayerTree
from imgkit_builder.archive.oci_folder import OciFolder
from imgkit_builder.archive.stored import StoredImage
from imgkit_builder.archive.tar_read import BLOCK, CHARACTER, FIFO
from imgkit_builder.sif import mksquashfs
from imgkit_builder.sif.conversion import Compression, ConversionJob
from imgkit_builder.sif.entries import OpenImage
from imgkit_builder.sif.runtime import RuntimeTool
from imgkit_builder.sif.runtime_files import META
from imgkit_entrypoints.errors import CheckFailed, ToolFailed

EMPTY_IMAGE = "Architecture not recognized"
"""The runtime prints this for a root without programs, and still exits 0."""
_FOLDERS = ("dev", "etc", "proc", "sys", "var")
_FILES = ("etc/hosts", "etc/resolv.conf")
_SPECIAL = {CHARACTER: "a device", BLOCK: "a device", FIFO: "a FIFO"}


def lay_out(image: OpenImage, job: ConversionJob) -> OciFolder:
    """Write the layers of `image` as an OCI folder into the workspace, under its name.

    Raises
    ------
    CheckFailed : a layer is damaged, or a link in it leads out of the image.
    """
    assert isinstance(image.files, StoredImage)  # noqa: S101 - for the type checker: it was not exported
    job.clock.stage(f"write the layers of {image.name}")
    laid = oci_folder.write_layout(
        image.files,
        job.work.folder / folder_name(image.name),
        job.clock,
        unpack_limit_bytes=job.options.unpack_limit_bytes,
    )
    blobs = laid.folder / "blobs/sha256"
    refuse_links((blobs / diff_id.removeprefix("sha256:") for diff_id in laid.config.diff_ids), image.name)
    return laid


def arguments(tool: RuntimeTool, compression: Compression, part: Path, source: str) -> tuple[str, ...]:
    """Return the arguments with which the runtime builds `part` from `source`, an image or a definition."""
    # The runtime's cache would keep a second copy of every layer.
    cache = ("--disable-cache",) if tool.capabilities.disable_cache else ()
    packing = compression.runtime_options(mksquashfs.gather_limits())
    return ("build", "--force", *cache, *packing, str(part), source)


def build(job: ConversionJob, tool: RuntimeTool, name: str) -> None:
    """Run ``singularity build`` on the folder of the image `name`, into the part file.

    Raises
    ------
    ToolFailed : it failed, or made an empty image.
    """
    job.clock.stage(f"build with {tool}")
    output = job.run(*arguments(tool, job.compression, job.work.part, address(name)))
    if EMPTY_IMAGE in output:
        raise ToolFailed(
            f"{tool} did not read the layers: it found no programs in the image ({EMPTY_IMAGE!r})",
            hint=f"another version of it, or install mksquashfs and use --writer imgkit; "
            f"the full log: {job.log.name}",
        )
    if not job.work.part.exists():
        raise ToolFailed(f"{tool} succeeded but wrote no file", hint=f"the full log: {job.log.name}")


def address(name: str) -> str:
    """Return where the runtime finds the image called `name`, which `lay_out` has written."""
    return f"oci:{folder_name(name)}"


def folder_name(image: str) -> str:
    """Return a folder name for `image`; the runtime writes it into the label that names the .sif's source."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", image).strip("._-")[:100] or "image"


def refuse_links(layers: Iterable[Path], where: str) -> None:
    """Read the headers of the uncompressed `layers`, the lowest first, and refuse what leads out.

    Raises
    ------
    CheckFailed : a link leads out of the image, or a layer is no tar.
    """
    # The tree that the layers form together: a later layer may replace or delete a link.
    tree = LayerTree(where)
    for layer in layers:
        tree.add_layer(tar_read.read_headers(layer))
    for path, kind, target in tree.special_files(META):
        raise _refused(path, kind, target, "the runtime puts its own files there", where)
    for path in (*_FOLDERS, *_FILES):
        if link := tree.find_escape(path):
            reason = f"the runtime would write to /{path} through it: into this machine"
            raise _refused(link[0], b"", link[1], reason, where)
    for path in _FILES:
        file_kind = tree.file_type(path)
        if file_kind in _SPECIAL:
            raise _refused(path, file_kind, "", "the runtime would write to it", where)


def _refused(path: str, kind: bytes | None, target: str, reason: str, where: str) -> CheckFailed:
    special = _SPECIAL.get(kind or b"", f"a link to {target!r}")
    return CheckFailed(
        f"/{path} in the image is {special}, and {reason}",
        where=where,
        hint="do not use this image if you do not know its author; otherwise remove that file in the "
        f"image's recipe or Dockerfile: RUN rm /{path}",
    )
