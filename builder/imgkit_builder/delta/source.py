"""Choose where to read the layers of both trees: the fastest place that is readable."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import oci_folder
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import descriptor, tree
from imgkit_builder.delta.folders import Folder
from imgkit_builder.delta.grafts import Graft
from imgkit_builder.delta.read_squashfs import SquashfsLayer
from imgkit_builder.delta.tars import Tar
from imgkit_builder.inventory.collector import DOCUMENT
from imgkit_builder.sif import coverage, entries
from imgkit_builder.sif.conversion import EngineImage
from imgkit_builder.sif.image import SifImage, root_sha256
from imgkit_entrypoints.errors import CheckFailed

OWN = frozenset({entries.META, ".exec", ".run", ".shell", ".test", "environment", "singularity", DOCUMENT})
"""Paths that a conversion or a runtime adds to every image; a delta does not get them from layers."""
NEVER = OWN | {"dev", "etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/mtab", "proc", "sys"}
"""Paths that are never part of a difference; the engine or the runtime makes them and mounts over them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """The tree that exists, and the tree to reach."""

    old: tree.Stack
    new: tree.Stack
    way: str
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
        return Trees(old=mounted(base.sif), new=(*reversed(new), added), way=way)
    return Trees(old=(*reversed([*new[:shared], *rest]), added), new=(*reversed(new), added), way=way)


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
    return Trees(old=old, new=new, way="copy")


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
