"""Make a delta file from an image and an older .sif: the order of the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder import __version__
from imgkit_builder.base import files
from imgkit_builder.base.platform import runs_here
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import descriptor, source, tree, write_squashfs
from imgkit_builder.delta.descriptor import Delta
from imgkit_builder.delta.folders import Folder
from imgkit_builder.delta.tree import Changes, TreeEntry
from imgkit_builder.image.config import epoch
from imgkit_builder.sif import export
from imgkit_builder.sif.conversion_job import Clock, ConversionJob
from imgkit_builder.sif.options import EngineImage, Options, Stage
from imgkit_builder.sif.runtime import exec_arguments, find_runtime, log_file
from imgkit_builder.sif.workspace import tmp_base, workspace
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A finished delta."""

    path: Path
    size_bytes: int
    delta: Delta
    changed: int
    """Number of new or different entries, without folders and the runtime's own files."""
    deleted: int
    """Number of whiteouts."""
    way: str
    """Source of the layers: ``overlay2``, ``copy`` or ``save``."""
    stages: tuple[Stage, ...]


class Memory:
    """A layer of files in memory."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents

    def entry(self, path: str) -> TreeEntry:
        """A file that root owns and everybody may read."""
        return TreeEntry(
            layer=self, kind="file", mode=0o644, size_bytes=len(self._contents[path]), place=path
        )

    def children(self, path: str) -> Mapping[str, TreeEntry]:
        """Empty: nobody lists this layer, its entries are taken one by one."""
        return {}

    def content(self, entry: TreeEntry) -> Iterator[bytes]:
        """The bytes of a file."""
        yield self._contents[str(entry.place)]

    def names(self, group: int) -> tuple[str, ...]:
        """Empty: no file has two names."""
        return ()


def make(image: EngineImage, base: Path, target: Path, options: Options, report: Reporter) -> Made:
    """Write the changes of `image` over the .sif `base` to the delta `target`, which is whole or absent.

    Raises
    ------
    UsageError : the target is another kind of file, or `base` holds this very image.
    CheckFailed : `base` has no record, another architecture or no common layer, or the delta is ignored.
    ToolMissing, ToolFailed : as in a conversion.
    """
    target = target.absolute()
    check_target(target)
    stack = descriptor.stack(base.absolute())
    _check_images(image, stack)
    tool = find_runtime(options.runtime, module_hint=options.module_hint)
    compression = write_squashfs.compression_of(stack.sif, tool)
    tmp = tmp_base(target, options.tmpdir)
    with workspace(target, tmp) as work, log_file(target.stem) as log:
        clock = Clock(report)
        job = ConversionJob(
            tool=tool, options=options, compression=compression, work=work, clock=clock, log=log
        )
        clock.stage("the runtime's own files")
        box = Folder(export.runtime_files(job, image), owner=(0, 0), mtime_s=epoch(image.config.created))
        trees = source.trees(image, stack, box, work.folder, clock)
        clock.stage(f"compare with {base.name}")
        found = tree.changes(trees.old, trees.new, skip=source.NEVER)
        kinds = [entry.kind if entry else None for entry in found.values()]
        found |= _runtimes(box, stack, trees.new)
        _mark(found, trees.new, image.config.image_id)
        clock.stage("squash")
        write_squashfs.make(job, work.part, ((path, found[path]) for path in sorted(found, key=tree.order)))
        delta = _described(image, stack, work.part)
        descriptor.append(work.part, delta)
        if options.test and runs_here(stack.sif.arch):
            clock.stage("look whether it is there")
            see(job, base.absolute(), delta, overlay=work.part)
        files.publish(work.part, target)
        clock.finish()
    return Made(
        path=target,
        size_bytes=target.stat().st_size,
        delta=delta,
        changed=len(kinds) - kinds.count(None) - kinds.count("dir"),
        deleted=kinds.count(None),
        way=trees.way,
        stages=tuple(clock.stages),
    )


def check_target(target: Path) -> None:
    """Raise UsageError if a delta cannot be written to `target`."""
    if not target.parent.is_dir():
        raise UsageError(
            f"the folder {target.parent} does not exist", where="--output", hint=f"mkdir -p {target.parent}"
        )
    if target.exists() and not descriptor.is_delta(target):
        raise UsageError(
            "the target exists and is no delta; imgkit replaces only a delta",
            where=str(target),
            hint="another name with -o",
        )


def see(job: ConversionJob, sif: Path, delta: Delta, *, overlay: Path | None = None) -> None:
    """Run a program in `sif` as the calling user, and check that `delta` shows.

    Raises
    ------
    ToolFailed : no program runs.
    CheckFailed : a program runs, but without the delta.
    """
    words = exec_arguments(sif, ("cat", f"/{descriptor.INSIDE}"))
    if overlay:
        words = (words[0], "--overlay", f"{overlay}:ro", *words[1:])
    mark = descriptor.inside(delta.image_id).decode()
    try:
        output = job.run(*words, on_line=lambda _: None)
    except ToolFailed as error:
        if f"/{descriptor.INSIDE}: No such file" not in str(error.hint):
            raise
        output = ""
    if mark not in output:
        raise CheckFailed(
            f"{job.tool} silently ignored the delta",
            where=str(overlay or sif),
            hint="its configuration has `enable overlay = no`, which only an admin can change; until then "
            "convert the whole image: imgkit sif",
        )


def _check_images(image: EngineImage, stack: descriptor.Stack) -> None:
    where = str(stack.sif.path)
    if image.config.arch != stack.sif.arch:
        raise CheckFailed(
            f"it is for {stack.sif.arch}, but {image.name} is for {image.config.arch}", where=where
        )
    if image.config.image_id == stack.base.image_id:
        raise UsageError(
            f"it holds this very image ({image.name}): there is no difference",
            where=where,
            hint="build the changed image first: imgkit build RECIPE",
        )


def _runtimes(box: Folder, stack: descriptor.Stack, new: tree.Stack) -> Changes:
    """Environment, runscript and labels as the runtime wrote them to `box`, over those of `stack`.

    Files of `new` in the same folder stay, as in a conversion.
    """
    shown = tree.children((box, *new), "")
    found: Changes = {}
    for name in source.OWN & shown.keys():
        found[name] = shown[name].entry
        found |= dict(tree.everything(shown[name].layers, name))
    for path, _ in tree.everything(_below(source.mounted(stack.sif)), export.META):
        # Another version of the runtime wrote it, and this one would source it.
        if path not in found and found.get(path.rpartition("/")[0]) is not None:
            found[path] = None
    return found


def _below(stack: tree.Stack) -> tree.Stack:
    node = tree.find(stack, export.META)
    return node.layers if node else ()


def _mark(found: Changes, new: tree.Stack, image_id: str) -> None:
    """Put `descriptor.INSIDE` and the folders above it into `found`."""
    folders = descriptor.INSIDE.split("/")[:-1]
    mark = Memory({descriptor.INSIDE: descriptor.inside(image_id)})
    for count in range(1, len(folders) + 1):
        path = "/".join(folders[:count])
        node = tree.find(new, path)
        if node and node.entry.kind != "dir":
            raise CheckFailed(f"/{path} in the image is no folder, but a delta needs /{descriptor.INSIDE}")
        found[path] = node.entry if node else TreeEntry(layer=mark, kind="dir", mode=0o755)
    found[descriptor.INSIDE] = mark.entry(descriptor.INSIDE)


def _described(image: EngineImage, stack: descriptor.Stack, path: Path) -> Delta:
    config = image.config
    known = Delta(
        image_id=config.image_id,
        diff_ids=config.diff_ids,
        arch=config.arch,
        created=config.created,
        source=image.name,
        base=stack.base,
        sha256="",
        size_bytes=path.stat().st_size,
        imgkit=__version__,
    )
    return descriptor.with_sha256(known, path)
