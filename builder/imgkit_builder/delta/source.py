"""Open any image as one tree of files, and choose where to read the layers of two trees: the fastest place.

The image is an engine's, an archive, an OCI folder or a .sif.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import oci_folder
from imgkit_builder.archive.oci_folder import Laid
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import descriptor, tree
from imgkit_builder.delta.layers import Folder, Graft, Tar
from imgkit_builder.delta.read_squashfs import SquashfsLayer
from imgkit_builder.inventory import spdx
from imgkit_builder.inventory.collector import DOCUMENT, InventoryCollector
from imgkit_builder.inventory.packages import Inventory
from imgkit_builder.oci.config import ImageConfig, epoch
from imgkit_builder.sif import coverage, entries, image, locked
from imgkit_builder.sif.conversion import Archive, EngineImage, OciFolder
from imgkit_builder.sif.image import SifImage, root_sha256
from imgkit_builder.sif.workspace import scratch
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed

OWN = frozenset({entries.META, ".exec", ".run", ".shell", ".test", "environment", "singularity", DOCUMENT})
"""Paths that a conversion or a runtime adds to every image; a delta does not get them from layers."""
NEVER = OWN | {"dev", "etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/mtab", "proc", "sys"}
"""Paths that are never part of a difference; the engine or the runtime makes them and mounts over them."""

_MOST_DOCUMENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """The tree that exists, and the tree to reach."""

    old: tree.Stack
    new: tree.Stack
    read_from: str
    """``overlay2``, ``copy``, ``save`` or ``sif``."""


def trees(
    image: EngineImage, base: descriptor.Stack, added: tree.Layer, work: Path, report: Reporter
) -> Trees:
    """The layers of `image` and those of `base`, where common lower layers are the same objects.

    `added` is what a runtime adds to an image without files. It lies below the layers of both trees, as in a
    .sif: what the runtime adds is never deleted.

    Raises
    ------
    CheckFailed : they have no layer in common, or a layer is damaged.
    """
    wanted, have = image.config.diff_ids, base.diff_ids
    shared = _common(wanted, have)
    if not shared:
        size = f"{image.size_bytes / 1e6:.1f} MB before compression"
        raise CheckFailed(
            f"{image.name} shares no layer with it: a delta would be the whole image",
            where=str(base.sif.path),
            hint=f"a full transfer, {size}: imgkit sif {image.name}",
        )
    folders = image.folders(wanted)
    new: list[tree.Layer]
    rest: list[tree.Layer] | None = []
    """Layers of `base` above the common ones; None if the engine no longer has them."""
    if folders:
        new = [Folder(folder) for folder in folders]
        if shared < len(have):
            others = image.folders(have)
            rest = [Folder(folder) for folder in others[shared:]] if others else None
    elif copies := _copies(image, base, shared, work):
        return copies
    else:
        report.note(f"{image.why_unreadable()}: imgkit reads the whole image")
        new = _saved(image, work / "new", report)
        if shared < len(have):
            other = image.other(base.base.image_id, base.diff_ids)
            rest = _saved(other, work / "old", report)[shared:] if other else None
    way = "overlay2" if folders else "save"
    if rest is None:
        report.note(
            f"the engine no longer has the image of {base.sif.path.name}: imgkit compares every file of both"
        )
        return Trees(old=mounted(base.sif), new=(*reversed(new), added), read_from=way)
    return Trees(old=(*reversed([*new[:shared], *rest]), added), new=(*reversed(new), added), read_from=way)


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
    if whole and (faults := coverage.check(path, root_sha256=stack.base.root_sha256).faults):
        damaged, whole = faults[0], False
    if not whole:
        raise CheckFailed(
            f"the .sif is damaged: its {damaged} has another sha256 than recorded",
            where=str(path),
            hint=f"copy it again, or convert it again; imgkit verify {path.name} lists what is damaged",
        )


def _copies(image: EngineImage, base: descriptor.Stack, shared: int, work: Path) -> Trees | None:
    """Trees of the folders into which the layers above the common ones copy; None if they do more."""
    targets = image.copied(len(image.config.diff_ids) - shared)
    if len(base.diff_ids) > shared and targets is not None:
        other = image.other(base.base.image_id, base.diff_ids)
        before = other.copied(len(base.diff_ids) - shared) if other else None
        targets = (*targets, *before) if before is not None else None
    if targets is None:
        return None
    paths = _outermost(posixpath.normpath(target).strip("/") for target in targets)
    old = mounted(base.sif)
    if "" in paths or any(_through_a_link(old, path) for path in paths):
        return None
    tars = image.fetch([f"/{path}" for path in paths], work)
    new = (*(Graft(path, tar) for path, tar in zip(paths, tars, strict=True)), *old)
    return Trees(old=old, new=new, read_from="copy")


def _outermost(paths: Iterable[str]) -> list[str]:
    found: list[str] = []
    for path in sorted(set(paths), key=tree.order):
        if not found or not f"{path}/".startswith(f"{found[-1]}/"):
            found.append(path)
    return found


def _through_a_link(stack: tree.Stack, path: str) -> bool:
    """Whether `path` or a folder above it is a symlink: the copied files then lie elsewhere."""
    parts = path.split("/")
    nodes = (tree.find(stack, "/".join(parts[:count])) for count in range(1, len(parts) + 1))
    return any(node is not None and node.entry.kind == "symlink" for node in nodes)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _saved(image: EngineImage, folder: Path, report: Reporter) -> list[tree.Layer]:
    report.stage(f"save {image.name} from the engine")
    with image.save() as chunks:
        laid = oci_folder.from_chunks(
            chunks, folder, name=image.name, report=report, expected_bytes=image.size_bytes
        )
    # Equal layers are one file, but need one object each: their places in the stack differ.
    return [Tar(folder / "blobs/sha256" / one.removeprefix("sha256:")) for one in laid.config.diff_ids]


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
    stack = mounted(sif)
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
