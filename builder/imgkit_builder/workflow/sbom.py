"""List the packages in any image, as ``imgkit sbom`` prints them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.inventory import spdx
from imgkit_builder.inventory.collector import MAX_FILE_BYTES, SPDX_PATH, InventoryCollector
from imgkit_builder.oci.config import creation_time_s
from imgkit_builder.sif import entries, image, sqsh, unsquash
from imgkit_builder.sif.workspace import scratch
from imgkit_builder.workflow.baked import recorded_arch
from imgkit_builder.workflow.convert import source_of
from imgkit_entrypoints import json_text

if TYPE_CHECKING:
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.sif.entries import Source


def sbom_document(name: str, report: Reporter, *, unpack_limit_bytes: int | None = None) -> str:
    """Return the SPDX document of the image called `name`: JSON text that lists its packages.

    If imgkit stored a document in a .sif or .sqsh, that document is returned. Otherwise a document is made
    from the files of the image.

    Parameters
    ----------
    unpack_limit_bytes : the largest size of a compressed archive once it is unpacked.

    Raises
    ------
    UsageError : there is no such image.
    CheckFailed : the image is damaged.
    ToolMissing : there is no unsquashfs for the compression of a .sif or .sqsh, or no zstd for an archive.
    """
    path = Path(name)
    if name.endswith((".sif", ".sqsh")) or image.is_sif(path):
        report.stage(f"list the packages of {name}")
        return _read_or_make_file_document(path)
    with source_of(name) as (source, _):
        return _make_source_document(source, path, report, unpack_limit_bytes)


def _read_or_make_file_document(path: Path) -> str:
    """Return the SPDX document that is stored in the .sif or .sqsh `path`.

    If there is none, or it is not valid JSON, make a document from the files of the image.
    """
    stored_document = unsquash.read(path, [SPDX_PATH]).get(SPDX_PATH, b"")
    if _is_json(stored_document):
        return stored_document.decode()
    collector = _collect_files(path)
    inventory = collector.inventory(arch=recorded_arch(path), created_s=_read_creation_time_s(path))
    return spdx.spdx_document(inventory)


def _is_json(document: bytes) -> bool:
    """Return whether `document` is valid JSON. A missing document is empty, which is not valid."""
    try:
        json_text.parse(document, most_bytes=unsquash.MOST_BYTES)
    except ValueError:
        return False
    return True


def _read_creation_time_s(path: Path) -> int:
    """Return the Unix time at which the image in a .sif or .sqsh was created, or 0 if it is unknown.

    imgkit gives the squashfs with the image that time.
    """
    if not image.is_sif(path):
        return sqsh.check_structure(path).mkfs_time_s
    superblock = image.root_superblock(image.read(path))
    if superblock is None:  # the .sif has no squashfs
        return 0
    return superblock.mkfs_time_s


def _collect_files(path: Path) -> InventoryCollector:
    """Return a collector with the files of a .sif or .sqsh that describe its packages.

    Each read is a run of unsquashfs, which is slow. So one run lists all names, and a second run reads all
    relevant files, for example the metadata of Python packages.
    """
    collector = InventoryCollector()
    relevant_names = []
    for squashfs in unsquash.open_squashfs(path):
        for file in squashfs.list_files():
            is_regular = file.mode.startswith("-")  # "-rw-r--r--"
            if not is_regular or not collector.is_relevant(file.path):
                continue
            if int(file.size) > MAX_FILE_BYTES:
                collector.add(file.path, None)  # the inventory lists the file as left out
            else:
                relevant_names.append(file.path)
    for name, data in unsquash.read(path, relevant_names).items():
        collector.add(name, data)
    return collector


def _make_source_document(
    source: Source, path: Path, report: Reporter, unpack_limit_bytes: int | None
) -> str:
    """Make the SPDX document of an archive, an OCI folder or an image of the engine (Docker or Podman).

    All files of the image are read, which can take minutes.

    Parameters
    ----------
    path : the path of `source`. Temporary files are made beside it, unless a variable such as ``TMPDIR``
        names another folder. If there is no such path, the current folder is used.
    unpack_limit_bytes : the largest size of an archive once it is unpacked, or None for the default limit.
    """
    # An image in an engine is not saved first. Its files are read while the engine exports them.
    exports = isinstance(source, entries.EngineImage)
    collector = InventoryCollector()
    # `scratch` uses only the folder of this path. The last part of the path need not exist.
    beside = path.absolute() if path.exists() else Path.cwd() / "image"
    with (
        scratch(beside) as folder,
        entries.open_source(
            source, folder, report, exports=exports, unpack_limit_bytes=unpack_limit_bytes
        ) as opened,
        entries.image_entries(opened, folder, report, unpack_limit_bytes=unpack_limit_bytes) as file_entries,
    ):
        for file_entry in file_entries:
            entries.copy_for_inventory(file_entry, collector)
        created_s = creation_time_s(opened.config.created)
        return spdx.spdx_document(collector.inventory(arch=opened.config.arch, created_s=created_s))
