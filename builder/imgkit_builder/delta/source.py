"""Open any image as one tree of files.

The image is an engine's, an archive, an OCI folder, a .sif or a .sqsh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imgkit_builder.archive import oci_folder, stored
from imgkit_builder.archive.oci_folder import Laid
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import descriptor, tree
from imgkit_builder.delta.layers import Tar
from imgkit_builder.delta.read_squashfs import SquashfsLayer
from imgkit_builder.inventory import spdx
from imgkit_builder.inventory.collector import DOCUMENT, InventoryCollector
from imgkit_builder.inventory.packages import Inventory
from imgkit_builder.oci.config import ImageConfig, epoch
from imgkit_builder.sif import image, runtime_files, sqsh
from imgkit_builder.sif.entries import Archive, EngineImage, OciFolder
from imgkit_builder.sif.image import SifImage, root_sha256
from imgkit_builder.sif.workspace import scratch
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed

OWN = frozenset(
    {runtime_files.META, ".exec", ".run", ".shell", ".test", "environment", "singularity", DOCUMENT}
)
"""Paths that a conversion or a runtime adds to every image; a delta does not get them from layers."""
NEVER = OWN | {"dev", "etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/mtab", "proc", "sys"}
"""Paths that are never part of a difference; the engine or the runtime makes them and mounts over them."""

ENGINE_FILES = frozenset({".dockerenv", "run/.containerenv", "run/secrets"})
"""Paths that an engine makes in a container, beside those of `NEVER`."""

ReadFrom = Literal["export", "sif"]
"""What was read: the engine's export of the image, or the newer .sif."""

_MOST_DOCUMENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """The tree that exists, and the tree to reach."""

    old: tree.Stack
    new: tree.Stack
    read_from: ReadFrom


def trees(
    image: EngineImage, base: descriptor.Stack, added: tree.Layer, work: Path, report: Reporter
) -> Trees:
    """Return the tree of `base`, as a runtime mounts it, and that of `image`, from one pass over its export.

    `added` is what a runtime adds to an image without files. It lies below the image's own, as in a .sif:
    what the runtime adds is never deleted.

    Raises
    ------
    CheckFailed : they have no layer in common, or the export is damaged.
    """
    if image.config.diff_ids[:1] != base.diff_ids[:1]:
        size = f"{image.size_bytes / 1e6:.1f} MB before compression"
        raise CheckFailed(
            f"{image.name} shares no layer with it: a delta would be the whole image",
            where=str(base.sif.path),
            hint=f"a full transfer, {size}: imgkit sif {image.name}",
        )
    report.stage(f"export {image.name} from the engine")
    exported, count = work / "export.tar", 0
    with image.export() as chunks, exported.open("wb") as stream:
        for chunk in chunks:
            count += stream.write(chunk)
            report.advance(count, image.size_bytes)
    return Trees(old=mounted(base.sif), new=(Tar(exported), added), read_from="export")


def mounted(sif: SifImage) -> tree.Stack:
    """The layers that a runtime mounts: the deltas of a .sif over its root partition.

    Raises
    ------
    CheckFailed : there is no root partition, or a partition is no squashfs.
    ToolMissing : this machine cannot unpack its compression.
    """
    if sif.root is None:
        raise CheckFailed("it has no root partition", where=str(sif.path), hint="copy it again")
    places = (sif.root.offset, *(partition.offset for partition in sif.overlays))
    return tuple(SquashfsLayer(sif.path, offset) for offset in reversed(places))


def refuse_damaged(stack: descriptor.Stack, report: Reporter) -> None:
    """Raise CheckFailed if the root partition or a delta of the .sif has another sha256 than recorded."""
    path = stack.sif.path
    damaged = "root partition"
    whole = root_sha256(path, advance=report.advance) == stack.base.root_sha256
    for number, (delta, partition) in enumerate(zip(stack.deltas, stack.partitions, strict=True), 1):
        if whole:
            damaged = f"delta {number}"
            whole = descriptor.sha256(path, delta, start=partition.offset) == delta.sha256
    if not whole:
        raise CheckFailed(
            f"the .sif is damaged: its {damaged} has another sha256 than recorded",
            where=str(path),
            hint=f"copy it again, or convert it again; imgkit verify {path.name} lists what is damaged",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedImage:
    """An image whose files can be read as long as it is open."""

    name: str
    arch: str
    created_s: int
    """Seconds since 1970; a .sif that a runtime built says when that was."""
    layers: tuple[tuple[str, tree.Layer], ...]
    """Digest and files of each layer, the lowest first; empty for a .sif or .sqsh, which keeps none."""
    stack: tree.Stack


@contextlib.contextmanager
def opened(
    found: Archive | OciFolder | EngineImage | Path,
    report: Reporter,
    *,
    unpack_limit_bytes: int | None = None,
) -> Iterator[OpenedImage]:
    """Yield what `found` holds; a path is a .sif or .sqsh.

    An archive and an engine's image are unpacked into a temporary folder.

    Raises
    ------
    CheckFailed : damaged, or no image.
    ToolMissing : this machine cannot unpack its compression.
    """
    if isinstance(found, Path):
        yield _of_sqsh(found) if sqsh.is_sqsh(found) else _of_sif(found)
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
        if entry.kind == "file" and collector.wants(path):
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
    stack = mounted(sif)
    made = image.squashfs(sif)
    return OpenedImage(
        name=str(path),
        arch=sif.arch,
        created_s=made.mkfs_time_s if made else 0,
        layers=(),
        stack=stack,
    )


def _of_sqsh(path: Path) -> OpenedImage:
    arch, stack = in_file(path)
    return OpenedImage(
        name=str(path),
        arch=arch,
        created_s=sqsh.structure(path).mkfs_time_s,
        layers=(),
        stack=stack,
    )


def in_file(path: Path) -> tuple[str, tree.Stack]:
    """Architecture and layers of the .sif or .sqsh `path`; another program's .sqsh does not state the first.

    Raises
    ------
    CheckFailed, ToolMissing : as of `mounted`.
    """
    if sqsh.is_sqsh(path):
        sqsh.structure(path)
        record = sqsh.record(path)
        return record.arch if record else "unknown", (SquashfsLayer(path),)
    sif = image.read(path)
    return sif.arch, mounted(sif)


def _of_layers(name: str, config: ImageConfig, layers: Sequence[tree.Layer]) -> OpenedImage:
    return OpenedImage(
        name=name,
        arch=config.arch,
        created_s=epoch(config.created),
        layers=tuple(zip(config.diff_ids, layers, strict=True)),
        stack=tuple(reversed(layers)),
    )


def _laid(
    found: Archive | OciFolder | EngineImage, folder: Path, report: Reporter, unpack_limit_bytes: int | None
) -> Laid:
    folder.mkdir(parents=True)
    if isinstance(found, EngineImage):
        report.stage(f"save {found.name} from the engine")
        plain, total = folder / "spool.tar", found.size_bytes
        with found.save() as chunks:
            digests = stored.spool(
                chunks, plain, where=found.name, advance=lambda done: report.advance(done, total)
            )
        saved = stored.open_image(plain, where=found.name, digests=digests)
        laid = oci_folder.write_layout(saved, folder, report, unpack_limit_bytes=unpack_limit_bytes)
        plain.unlink()
        return laid
    report.stage(f"read {found.path.name}")
    with stored.opened(
        found.path, folder, advance=report.advance, unpack_limit_bytes=unpack_limit_bytes
    ) as image:
        return oci_folder.write_layout(image, folder, report, unpack_limit_bytes=unpack_limit_bytes)
