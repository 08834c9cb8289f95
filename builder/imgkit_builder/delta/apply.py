"""Put a delta into a copy of a .sif, or convert a .sif with deltas to one without.

The result is verified before it is renamed into place. The overlay partition has the group of the root
partition: a runtime silently ignores one of another group. A .sif mounts each of its deltas at
every start, so more than `MOST` are merged into one.
"""

from __future__ import annotations

import dataclasses
import fcntl
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import descriptor, source, tree, write_squashfs
from imgkit_builder.delta.descriptor import BaseSif, Delta, Stack
from imgkit_builder.delta.make import require_shown
from imgkit_builder.delta.read_squashfs import SquashfsLayer
from imgkit_builder.sif import convert, frame, image
from imgkit_builder.sif.conversion import Clock, ConversionJob, Options, Stage
from imgkit_builder.sif.image import ImgkitRecord
from imgkit_builder.sif.runtime import RuntimeTool, log_file, runtime_if_any, setting
from imgkit_builder.sif.workspace import tmp_base, workspace
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import CheckFailed, UsageError

MOST = 4
"""Largest number of deltas in a .sif; each costs 25 ms at every start."""
_CLONE = 0x40049409
"""The FICLONE request of Linux: both files share their blocks until one is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A .sif with one more delta in it."""

    path: Path
    size_bytes: int
    deltas: tuple[Delta, ...]
    merged: bool
    """Whether the deltas were merged into one."""
    stages: tuple[Stage, ...]


def apply(delta_file: Path, base: Path, target: Path, options: Options, report: Reporter) -> Applied:
    """Write `base` with the delta to `target`, which afterwards is whole and checked, or as it was before.

    Raises
    ------
    UsageError : the .sif already has the delta, or the target is another kind of file.
    CheckFailed : the delta has another base or is damaged; `base` is damaged; the runtime ignores
        the delta in the new file.
    ToolMissing, ToolFailed : the new file does not run; for a merge, nothing here squashes.
    """
    base, target = base.absolute(), target.absolute()
    convert.check_target(target, force=options.force)
    delta, stack = descriptor.read(delta_file), descriptor.stack(base)
    _check(delta, delta_file, stack)
    _note_signatures(stack, report)
    tool = runtime_if_any(options.runtime)
    if tool is not None:
        _refuse_overlays_off(tool, base)
    compression = write_squashfs.compression_of(stack.sif, options)
    with workspace(target, tmp_base(target, options.tmpdir)) as work, log_file(target.stem) as log:
        clock = Clock(report)
        job = ConversionJob(
            tool=tool, options=options, compression=compression, work=work, clock=clock, log=log
        )
        clock.stage("compare digests")
        _check_delta(delta, delta_file)
        source.refuse_damaged(stack, clock)
        merged = len(stack.deltas) >= MOST
        if merged:
            clock.stage(f"merge {len(stack.deltas) + 1} deltas")
            top, delta_file = SquashfsLayer(delta_file), work.folder / "merged"
            delta = _merge(job, delta, top, stack, delta_file)
        clock.stage(f"copy {base.name}")
        clone(base, work.part)
        clock.stage("add")
        _add(job, delta, delta_file, stack, merged=merged)
        clock.stage("read it back")
        require_shown(source.mounted(image.read(work.part)), delta, work.part)
        clock.stage("make durable")
        # At the end: a file that its owner may only read cannot be changed either.
        work.part.chmod(base.stat().st_mode & 0o777)
        files.publish(work.part, target)
        clock.finish()
    return Applied(
        path=target,
        size_bytes=target.stat().st_size,
        deltas=descriptor.stack(target).deltas,
        merged=merged,
        stages=tuple(clock.stages),
    )


def clone(original: Path, copy: Path) -> None:
    """Copy a file, immediately if the file system can share blocks."""
    with files.open_regular(original) as reading, files.create(copy) as writing:
        try:
            fcntl.ioctl(writing, _CLONE, reading.fileno())
        except OSError:
            shutil.copyfileobj(reading, writing, 1 << 20)


def _note_signatures(stack: Stack, report: Reporter) -> None:
    """Say what happens to the signatures of the .sif: they cover the old file, so the new one has none."""
    if count := len(stack.sif.signatures):
        what = "its signature" if count == 1 else f"its {count} signatures"
        report.note(
            f"{stack.sif.path.name} is signed, but the new .sif does not keep {what}. "
            "Sign it again: apptainer sign NEW.sif"
        )


def _check(delta: Delta, path: Path, stack: Stack) -> None:
    if delta.image_id == stack.base.image_id:
        raise UsageError(
            f"it already has {path.name}",
            where=str(stack.sif.path),
            hint="list its deltas: imgkit show FILE.sif",
        )
    if delta.base != stack.base:
        raise CheckFailed(
            f"the delta is for {delta.base}; {stack.sif.path.name} is {stack.base}",
            where=str(path),
            hint="apply deltas in the order in which they were made, or make one for this .sif: "
            f"imgkit delta {delta.source} --against {stack.sif.path.name}",
        )


def _refuse_overlays_off(tool: RuntimeTool, base: Path) -> None:
    if setting(tool, "enable overlay") == "no":
        raise CheckFailed(
            f"{tool} would silently ignore the delta: its configuration has `enable overlay = no`",
            where=str(base),
            hint="only an admin can change that; until then convert the whole image: imgkit sif",
        )


def _check_delta(delta: Delta, path: Path) -> None:
    if descriptor.sha256(path, delta) != delta.sha256:
        raise CheckFailed(
            "the delta is damaged: its squashfs has another sha256 than recorded",
            where=str(path),
            hint="copy it again",
        )


def _merge(job: ConversionJob, delta: Delta, top: SquashfsLayer, stack: Stack, target: Path) -> Delta:
    """Merge the deltas of `stack` and `delta` into one over the root partition alone."""
    record = stack.sif.record
    assert record is not None  # noqa: S101 - for the type checker: a stack has one
    mounted = source.mounted(stack.sif)
    found = tree.changes(mounted[-1:], (top, *mounted))
    write_squashfs.make(job, target, found.items())
    alone = BaseSif(image_id=record.image_id, root_sha256=record.root_sha256, deltas=())
    merged = dataclasses.replace(delta, base=alone, size_bytes=target.stat().st_size)
    merged = descriptor.with_sha256(merged, target)
    descriptor.append(target, merged)
    return merged


def _add(job: ConversionJob, delta: Delta, delta_file: Path, stack: Stack, *, merged: bool) -> None:
    """Put the delta into the part file and its record; if `merged`, it replaces the deltas there.

    Signatures of the base go: they do not cover the new file.
    """
    part, root, record = job.work.part, stack.sif.root, stack.sif.record
    assert root is not None  # noqa: S101 - for the type checker: a stack has both
    assert record is not None  # noqa: S101
    gone = [one.id for one in (*(stack.partitions if merged else ()), *stack.sif.signatures)]
    frame.remove(part, gone)
    partition = frame.NewObject(
        datatype=image.DataType.PARTITION,
        name="delta.sqfs",
        group=root.group,
        data=delta_file,
        extra=image.partition_extra(image.PartitionType.OVERLAY, stack.sif.arch),
        align=frame.PARTITION_ALIGN_BYTES,
    )
    frame.add(part, partition)
    deltas = (delta.sha256,) if merged else (*record.deltas, delta.sha256)
    frame.put_record(part, dataclasses.replace(record, deltas=deltas))
    if descriptor.stack(part).base.deltas != deltas:
        raise CheckFailed("the deltas in the new .sif do not match its record", where=str(part))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flattened:
    """A .sif without deltas."""

    path: Path
    size_bytes: int
    record: ImgkitRecord
    folded: int
    """Number of deltas that were in it."""
    stages: tuple[Stage, ...]


def flatten(path: Path, target: Path, options: Options, report: Reporter) -> Flattened:
    """Write the tree that the .sif `path` shows to `target`, which is whole and checked, or as it was before.

    Raises
    ------
    UsageError : the .sif has no delta, or the target is another kind of file.
    CheckFailed : no record in it, or damaged.
    ToolMissing, ToolFailed : nothing here squashes, or it failed, or the new file does not run.
    """
    path, target = path.absolute(), target.absolute()
    convert.check_target(target, force=options.force)
    stack = descriptor.stack(path)
    if not stack.deltas:
        raise UsageError("the .sif has no delta", where=str(path), hint="imgkit apply adds one")
    _note_signatures(stack, report)
    compression = write_squashfs.compression_of(stack.sif, options)
    with workspace(target, tmp_base(target, options.tmpdir)) as work, log_file(target.stem) as log:
        clock = Clock(report)
        job = ConversionJob(
            tool=None, options=options, compression=compression, work=work, clock=clock, log=log
        )
        clock.stage("compare digests")
        source.refuse_damaged(stack, clock)
        clock.stage("squash")
        around = _frame_of(stack)
        write_squashfs.make(
            job, work.part, _entries(stack), created=stack.deltas[-1].created, offset=around.root_offset
        )
        frame.surround(work.part, around)
        record = _record(job, stack, image.root_sha256(work.part, advance=clock.advance))
        frame.put_record(work.part, record)
        clock.stage("check")
        flat = image.structure(work.part)
        if (
            tree.children(source.mounted(flat), "").keys()
            != tree.children(source.mounted(stack.sif), "").keys()
        ):
            raise CheckFailed(
                "the files in the new .sif differ from those of the deltas", where=str(work.part)
            )
        clock.stage("make durable")
        files.publish(work.part, target)
        clock.finish()
    return Flattened(
        path=target,
        size_bytes=target.stat().st_size,
        record=record,
        folded=len(stack.deltas),
        stages=tuple(clock.stages),
    )


def _frame_of(stack: descriptor.Stack) -> frame.Frame:
    """The base's definition. A runtime would show the base's labels and environment from its JSON objects."""
    texts = (one for one in stack.sif.descriptors if one.datatype == image.DataType.DEFFILE)
    definition = b"".join(image.data(stack.sif, one) for one in texts)
    return frame.Frame(arch=stack.sif.arch, definition=definition, oci_config=b"")


def _entries(stack: descriptor.Stack) -> Iterator[tuple[str, tree.TreeEntry]]:
    """The whole tree, without the mark of a delta."""
    for path, entry in tree.everything(source.mounted(stack.sif)):
        if path != descriptor.INSIDE:
            yield path, entry


def _record(job: ConversionJob, stack: descriptor.Stack, root_sha256: str) -> ImgkitRecord:
    top, record = stack.deltas[-1], stack.sif.record
    assert record is not None  # noqa: S101 - for the type checker: a stack has one
    return dataclasses.replace(
        record,
        image_id=top.image_id,
        diff_ids=top.diff_ids,
        root_sha256=root_sha256,
        runtime=f"imgkit {__version__}",
        compression=str(job.compression),
        route="flatten",
        imgkit=__version__,
        source=top.source,
        deltas=(),
    )
