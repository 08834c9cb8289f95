"""Make a delta file from an image and an older .sif: the order of the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive.tar_read import REGULAR
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import descriptor, source, tree, write_squashfs
from imgkit_builder.delta.descriptor import Delta, Stack
from imgkit_builder.delta.layers import Memory
from imgkit_builder.delta.read_squashfs import SquashfsLayer
from imgkit_builder.delta.source import ReadFrom, Trees
from imgkit_builder.delta.tree import Changes, TreeEntry
from imgkit_builder.inventory.collector import DOCUMENT
from imgkit_builder.oci.config import epoch
from imgkit_builder.oci.manifest import CREATED_LABEL
from imgkit_builder.sif import check, runtime_files
from imgkit_builder.sif.conversion import Clock, ConversionJob, Options, Stage
from imgkit_builder.sif.entries import EngineImage, ImageEntry
from imgkit_builder.sif.image import SifImage
from imgkit_builder.sif.runtime import log_file
from imgkit_builder.sif.workspace import tmp_base, workspace
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import CheckFailed, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenDelta:
    """A finished delta."""

    path: Path
    size_bytes: int
    delta: Delta
    changed: int
    """Number of new or different entries, without folders and the runtime's own files."""
    deleted: int
    """Number of whiteouts."""
    read_from: ReadFrom
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Newer:
    """The image that base and delta form together."""

    name: str
    image_id: str
    diff_ids: tuple[str, ...]
    arch: str
    created: str
    trees: Callable[[Stack, Path, Reporter], Trees]
    """The tree of a base, and its own; gets a folder for temporary files."""
    changes: Callable[[Stack, Trees], Changes]
    """What lies over a base, with the runtime's own files."""


def make(image: EngineImage, base: Path, target: Path, options: Options, report: Reporter) -> WrittenDelta:
    """Write the changes of `image` over the .sif `base` to the delta `target`, which is whole or absent.

    Raises
    ------
    UsageError : the target is another kind of file, or `base` holds this very image.
    CheckFailed : `base` has no record, another architecture or no common layer.
    ToolMissing, ToolFailed : as in a conversion.
    """
    config = image.config
    created_s = epoch(config.created)
    links, folders = runtime_files.runtime_links(created_s), runtime_files.mount_points(created_s)
    box = Memory((*runtime_files.runtime_files(config), *links, *folders))

    def changes(stack: Stack, trees: Trees) -> Changes:
        found = tree.changes(trees.old, trees.new, skip=source.NEVER | source.ENGINE_FILES)
        return found | _runtimes(box, stack, trees.new)

    newer = _Newer(
        name=image.name,
        image_id=config.image_id,
        diff_ids=config.diff_ids,
        arch=config.arch,
        created=config.created,
        trees=lambda stack, work, clock: source.trees(image, stack, box, work, clock),
        changes=changes,
    )
    return _make(newer, base, target, options, report)


def between(newer: Path, base: Path, target: Path, options: Options, report: Reporter) -> WrittenDelta:
    """Write the changes of the .sif `newer` over the .sif `base` to the delta `target`, as `make` does.

    Both are compared file by file: a .sif that no engine made keeps no layers.

    Raises
    ------
    UsageError : the target is another kind of file, or both hold the same image.
    CheckFailed : one of them has no record, they are of two architectures, or `newer` is damaged.
    ToolMissing, ToolFailed : as in a conversion.
    """
    stack = descriptor.stack(newer.absolute())
    source.refuse_damaged(stack, report)
    record = stack.sif.record
    image = _Newer(
        name=(record.source if record else "") or newer.name,
        image_id=stack.base.image_id,
        diff_ids=stack.diff_ids,
        arch=stack.sif.arch,
        created=stack.deltas[-1].created if stack.deltas else _created(stack.sif),
        trees=lambda below, work, clock: Trees(
            old=source.mounted(below.sif), new=source.mounted(stack.sif), read_from="sif"
        ),
        changes=lambda below, trees: tree.changes(trees.old, trees.new, skip=source.NEVER - source.OWN),
    )
    return _make(image, base, target, options, report)


def _created(sif: SifImage) -> str:
    return str((check.stated_labels(sif) or {}).get(CREATED_LABEL, ""))


def _make(newer: _Newer, base: Path, target: Path, options: Options, report: Reporter) -> WrittenDelta:
    target = target.absolute()
    check_target(target)
    stack = descriptor.stack(base.absolute())
    _check_images(newer, stack)
    compression = write_squashfs.compression_of(stack.sif, options)
    tmp = tmp_base(target, options.tmpdir)
    with workspace(target, tmp) as work, log_file(target.stem) as log:
        clock = Clock(report)
        job = ConversionJob(
            tool=None, options=options, compression=compression, work=work, clock=clock, log=log
        )
        trees = newer.trees(stack, work.folder, clock)
        clock.stage(f"compare with {base.name}")
        found = newer.changes(stack, trees)
        kinds = [entry.kind if entry else None for path, entry in found.items() if not _is_own(path)]
        _mark(found, trees.new, newer.image_id)
        _hide_document(found, stack)
        clock.stage("squash")
        write_squashfs.make(job, work.part, ((path, found[path]) for path in sorted(found, key=tree.order)))
        delta = _described(newer, stack, work.part)
        descriptor.append(work.part, delta)
        clock.stage("read it back")
        require_shown((SquashfsLayer(work.part), *source.mounted(stack.sif)), delta, work.part)
        files.publish(work.part, target)
        clock.finish()
    return WrittenDelta(
        path=target,
        size_bytes=target.stat().st_size,
        delta=delta,
        changed=len(kinds) - kinds.count(None) - kinds.count("dir"),
        deleted=kinds.count(None),
        read_from=trees.read_from,
        stages=tuple(clock.stages),
    )


def _is_own(path: str) -> bool:
    """Whether a conversion or a runtime makes the file, and not the image's author."""
    return path == DOCUMENT or path.partition("/")[0] in source.OWN


def check_target(target: Path) -> None:
    """Raise UsageError if a delta cannot be written to `target`."""
    if not target.parent.is_dir():
        raise UsageError(
            f"the folder {target.parent} does not exist", where="--output", hint=f"mkdir -p {target.parent}"
        )
    if target.exists() and not descriptor.is_delta(target):
        raise UsageError(
            "target exists and is not a delta; refusing to overwrite it",
            where=str(target),
            hint="choose another name with -o",
        )


def require_shown(layers: tree.Stack, delta: Delta, where: Path) -> None:
    """Read the delta's mark through `layers`, the uppermost first, with imgkit's own reader.

    Raises
    ------
    CheckFailed : the layers do not show the delta.
    """
    if tree.content(layers, descriptor.INSIDE) != descriptor.inside(delta.image_id):
        raise CheckFailed(
            "the new file does not contain the delta",
            where=str(where),
            hint="mksquashfs or the runtime did not store the data that it received: try another version",
        )


def _check_images(image: _Newer, stack: Stack) -> None:
    where = str(stack.sif.path)
    if image.arch != stack.sif.arch:
        raise CheckFailed(f"it is for {stack.sif.arch}, but {image.name} is for {image.arch}", where=where)
    if image.image_id == stack.base.image_id:
        raise UsageError(
            f"it already holds this image ({image.name}): there is no difference",
            where=where,
            hint="build the changed image first: imgkit build RECIPE",
        )


def _runtimes(box: Memory, stack: Stack, new: tree.Stack) -> Changes:
    """Environment, runscript and labels of `box` over those of `stack`.

    Files of `new` in the same folder stay, as in a conversion.
    """
    shown = tree.children((box, *new), "")
    found: Changes = {}
    for name in source.OWN & shown.keys():
        found[name] = shown[name].entry
        found |= dict(tree.everything(shown[name].layers, name))
    for path, _ in tree.everything(_below(source.mounted(stack.sif)), runtime_files.META):
        # Another version of the runtime wrote it, and this one would source it.
        if path not in found and found.get(path.rpartition("/")[0]) is not None:
            found[path] = None
    return found


def _below(stack: tree.Stack) -> tree.Stack:
    node = tree.find(stack, runtime_files.META)
    return node.layers if node else ()


def _mark(found: Changes, new: tree.Stack, image_id: str) -> None:
    """Put `descriptor.INSIDE` and the folders above it into `found`."""
    folders = descriptor.INSIDE.split("/")[:-1]
    folder, _, name = descriptor.INSIDE.rpartition("/")
    data = descriptor.inside(image_id)
    mark = ImageEntry(names=(descriptor.INSIDE,), kind=REGULAR, mode=0o644).with_content(data)
    layer = Memory([mark])
    for count in range(1, len(folders) + 1):
        path = "/".join(folders[:count])
        node = tree.find(new, path)
        if node and node.entry.kind != "dir":
            raise CheckFailed(f"/{path} in the image is not a folder, but a delta needs /{descriptor.INSIDE}")
        found[path] = node.entry if node else TreeEntry(layer=layer, kind="dir", mode=0o755)
    found[descriptor.INSIDE] = layer.children(folder)[name]


def _hide_document(found: Changes, stack: Stack) -> None:
    """Let `found` hide the list of packages in the .sif of `stack`, unless it brings another one."""
    if found.get(DOCUMENT) is None and tree.find(source.mounted(stack.sif), DOCUMENT):
        found[DOCUMENT] = None


def _described(image: _Newer, stack: Stack, path: Path) -> Delta:
    known = Delta(
        image_id=image.image_id,
        diff_ids=image.diff_ids,
        arch=image.arch,
        created=image.created,
        source=image.name,
        base=stack.base,
        sha256="",
        size_bytes=path.stat().st_size,
        imgkit=__version__,
    )
    return descriptor.with_sha256(known, path)
