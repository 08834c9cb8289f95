"""Open any image to look into it: an engine's, an archive, an OCI folder or a .sif, as one tree of files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import oci_folder
from imgkit_builder.archive.oci_folder import Laid
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import source, tree
from imgkit_builder.delta.folders import Folder
from imgkit_builder.delta.tars import Tar
from imgkit_builder.inventory import spdx
from imgkit_builder.inventory.collector import DOCUMENT, InventoryCollector
from imgkit_builder.inventory.packages import Inventory
from imgkit_builder.oci.config import ImageConfig, epoch
from imgkit_builder.sif import entries, image, locked
from imgkit_builder.sif.conversion import Archive, EngineImage, OciFolder
from imgkit_builder.sif.workspace import scratch
from imgkit_entrypoints import json_text

_MOST_DOCUMENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedImage:
    """An image whose files can be read as long as it is open."""

    name: str
    arch: str
    created_s: int
    """Seconds since 1970; a .sif that a runtime built says when that was."""
    env: tuple[tuple[str, str], ...]
    """Variables that the image sets, sorted."""
    layers: tuple[tuple[str, tree.Layer], ...]
    """Digest and files of each layer, the lowest first; empty for a .sif, which keeps none."""
    stack: tree.Stack


@contextlib.contextmanager
def opened(
    found: Archive | OciFolder | EngineImage | Path,
    report: Reporter,
    *,
    unpack_limit_bytes: int | None = None,
) -> Iterator[OpenedImage]:
    """Yield what `found` holds; a path is a .sif.

    An archive, and an engine's image that only the engine can read, are unpacked into a temporary folder.

    Raises
    ------
    CheckFailed : damaged, or no image.
    ToolMissing : this machine cannot unpack its compression.
    """
    if isinstance(found, Path):
        yield _of_sif(found)
        return
    if isinstance(found, EngineImage) and (folders := found.folders(found.config.diff_ids)):
        yield _of_layers(found.name, found.config, [Folder(folder) for folder in folders])
        return
    beside = Path.cwd() if isinstance(found, EngineImage) else found.path.absolute()
    with scratch(beside) as folder:
        laid = _laid(found, folder / "image", report, unpack_limit_bytes)
        name = found.name if isinstance(found, EngineImage) else str(found.path)
        blobs = laid.folder / "blobs/sha256"
        tars = [Tar(blobs / one.removeprefix("sha256:")) for one in laid.config.diff_ids]
        yield _of_layers(name, laid.config, tars)


def inventory(found: OpenedImage) -> Inventory:
    """The packages in an open image."""
    collector = InventoryCollector()
    for path, entry in tree.everything(found.stack):
        if entry.kind == "symlink":
            collector.add_link(path, entry.link)
        elif entry.kind == "file" and collector.wants(path):
            small = entry.size_bytes <= collector.most_bytes(path)
            collector.add(path, b"".join(entry.layer.content(entry)) if small else None)
    return collector.inventory(arch=found.arch, created_s=found.created_s)


def document(found: OpenedImage) -> str:
    """The SPDX document of an open image: its own one if it has one."""
    if not found.layers and (own := tree.content(found.stack, DOCUMENT, _MOST_DOCUMENT_BYTES)):
        with contextlib.suppress(ValueError):
            json_text.parse(own, most_bytes=_MOST_DOCUMENT_BYTES)
            return own.decode()
    return spdx.document(inventory(found))


def _of_sif(path: Path) -> OpenedImage:
    sif = image.read(path)
    stack = source.mounted(sif)
    made = image.squashfs(sif)
    script = tree.content(stack, entries.ENVIRONMENT) or b""
    return OpenedImage(
        name=str(path),
        arch=sif.arch,
        created_s=made.mkfs_time_s if made else 0,
        env=tuple(sorted(entries.variables(script.decode("utf-8", "replace")).items())),
        layers=(),
        stack=stack,
    )


def _of_layers(name: str, config: ImageConfig, layers: Sequence[tree.Layer]) -> OpenedImage:
    return OpenedImage(
        name=name,
        arch=config.arch,
        created_s=epoch(locked.settled(config).created),
        env=tuple(sorted((key, value or "") for key, value in dict(config.env).items())),
        layers=tuple(zip(config.diff_ids, layers, strict=True)),
        stack=tuple(reversed(layers)),
    )


def _laid(
    found: Archive | OciFolder | EngineImage, folder: Path, report: Reporter, unpack_limit_bytes: int | None
) -> Laid:
    if isinstance(found, Archive):
        report.stage(f"unpack {found.path.name}")
        return oci_folder.from_archive(found.path, folder, report, unpack_limit_bytes=unpack_limit_bytes)
    if isinstance(found, OciFolder):
        report.stage(f"read {found.path.name}")
        return oci_folder.from_folder(found.path, folder, report, unpack_limit_bytes=unpack_limit_bytes)
    report.stage(f"save {found.name} from the engine")
    report.note(f"{found.why_unreadable()}: imgkit reads the whole image")
    with found.save() as chunks:
        return oci_folder.from_chunks(
            chunks, folder, name=found.name, report=report, expected_bytes=found.size_bytes
        )
