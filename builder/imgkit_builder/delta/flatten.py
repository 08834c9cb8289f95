"""Convert a .sif with deltas to one without: everything in one root file system."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder import __version__
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import apply, descriptor, source, tree, write_squashfs
from imgkit_builder.sif import check, convert, coverage, image
from imgkit_builder.sif.conversion import Clock, ConversionJob, Options, Stage
from imgkit_builder.sif.image import ImgkitRecord
from imgkit_builder.sif.runtime import log_file
from imgkit_builder.sif.workspace import tmp_base, workspace
from imgkit_entrypoints.errors import CheckFailed, UsageError


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
    apply.note_signatures(stack, report)
    compression = write_squashfs.compression_of(stack.sif, options)
    with workspace(target, tmp_base(target, options.tmpdir)) as work, log_file(target.stem) as log:
        clock = Clock(report)
        job = ConversionJob(
            tool=None, options=options, compression=compression, work=work, clock=clock, log=log
        )
        clock.stage("compare digests")
        source.refuse_damaged(stack, clock)
        clock.stage("squash")
        around = _frame(stack)
        write_squashfs.make(
            job, work.part, _entries(stack), created=stack.deltas[-1].created, offset=around.root_at
        )
        image.surround(work.part, around)
        record = _record(job, stack, image.root_sha256(work.part, advance=clock.advance))
        coverage.put_record(work.part, record)
        clock.stage("check")
        flat, _ = check.structure(work.part, config=None, layer_bytes=None)
        if (
            tree.children(source.mounted(flat), "").keys()
            != tree.children(source.mounted(stack.sif), "").keys()
        ):
            raise CheckFailed("the new file shows another tree than the deltas did", where=str(work.part))
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


def _frame(stack: descriptor.Stack) -> image.Frame:
    """The base's definition. A runtime would show the base's labels and environment from its JSON objects."""
    texts = (one for one in stack.sif.descriptors if one.datatype == image.DataType.DEFFILE)
    definition = b"".join(image.data(stack.sif, one) for one in texts)
    return image.Frame(arch=stack.sif.arch, definition=definition, oci_config=b"")


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
