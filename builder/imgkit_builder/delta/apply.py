"""Put a delta into a copy of its .sif: one file again, whose overlay partition a runtime mounts.

The overlay partition has the group of the root partition: a runtime silently ignores one of another group.
"""

from __future__ import annotations

import dataclasses
import fcntl
import shutil
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import descriptor
from imgkit_builder.delta.descriptor import Delta
from imgkit_builder.sif import convert, frame, image
from imgkit_builder.sif.conversion import Clock, Options, Stage
from imgkit_builder.sif.image import SifImage
from imgkit_builder.sif.runtime import RuntimeTool, runtime_if_any, setting
from imgkit_builder.sif.workspace import tmp_base, workspace
from imgkit_entrypoints.errors import CheckFailed

_CLONE = 0x40049409
"""The FICLONE request of Linux: both files share their blocks until one is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A .sif with a delta in it."""

    path: Path
    size_bytes: int
    delta: Delta
    stages: tuple[Stage, ...]


def apply(delta_file: Path, base: Path, target: Path, options: Options, report: Reporter) -> Applied:
    """Write `base` with the delta to `target`, which afterwards is whole and checked, or as it was before.

    Raises
    ------
    UsageError : the .sif has a delta already, or the target is another kind of file.
    CheckFailed : the delta has another base or is damaged; `base` is damaged; a runtime here ignores deltas.
    """
    base, target = base.absolute(), target.absolute()
    convert.check_target(target, force=options.force)
    delta, sif = descriptor.read(delta_file), image.read(base)
    _check(delta, delta_file, sif)
    if count := len(sif.signatures):
        signature_text = "its signature" if count == 1 else f"its {count} signatures"
        report.note(
            f"{base.name} is signed, but the new .sif does not keep {signature_text}. "
            "Sign it again: apptainer sign NEW.sif"
        )
    tool = runtime_if_any(options.runtime)
    if tool is not None:
        _refuse_overlays_off(tool, base)
    with workspace(target, tmp_base(target, options.tmpdir)) as work:
        clock = Clock(report)
        clock.stage("compare digests")
        image.refuse_damaged(base)
        _refuse_damaged(delta, delta_file)
        clock.stage(f"copy {base.name}")
        clone(base, work.part)
        clock.stage("add")
        _add(delta, delta_file, sif, work.part)
        clock.stage("make durable")
        # At the end: a file that its owner may only read cannot be changed either.
        work.part.chmod(base.stat().st_mode & 0o777)
        files.publish(work.part, target)
        clock.finish()
    size_bytes = target.stat().st_size
    return Applied(path=target, size_bytes=size_bytes, delta=delta, stages=tuple(clock.stages))


def clone(original: Path, copy: Path) -> None:
    """Copy a file, immediately if the file system can share blocks."""
    with files.open_regular(original) as reading, files.create(copy) as writing:
        try:
            fcntl.ioctl(writing, _CLONE, reading.fileno())
        except OSError:
            shutil.copyfileobj(reading, writing, 1 << 20)


def _check(delta: Delta, path: Path, sif: SifImage) -> None:
    base = descriptor.plain_base_of(sif)
    if delta.base != base:
        raise CheckFailed(
            f"the delta is for {delta.base}; {sif.path.name} is {base}",
            where=str(path),
            hint=f"make one for this .sif: imgkit delta {delta.source} --against {sif.path.name}",
        )


def _refuse_overlays_off(tool: RuntimeTool, base: Path) -> None:
    if setting(tool, "enable overlay") == "no":
        raise CheckFailed(
            f"{tool} would silently ignore the delta: its configuration has `enable overlay = no`",
            where=str(base),
            hint="only an admin can change that; until then convert the whole image: imgkit sif",
        )


def _refuse_damaged(delta: Delta, path: Path) -> None:
    descriptor.manifest(path, delta)
    if descriptor.sha256(path, delta) != delta.sha256:
        raise CheckFailed(
            "the delta is damaged: its squashfs has another sha256 than recorded",
            where=str(path),
            hint="copy it again",
        )


def _add(delta: Delta, delta_file: Path, sif: SifImage, part: Path) -> None:
    """Put the delta into the part file and its record. Signatures go: they do not cover the new file."""
    root, record = sif.require_root(), sif.record
    assert record is not None  # noqa: S101 - for the type checker: a base has one
    frame.remove(part, [signature.id for signature in sif.signatures])
    partition = frame.NewObject(
        datatype=image.DataType.PARTITION,
        name="delta.sqfs",
        group=root.group,
        data=delta_file,
        extra=image.partition_extra(image.PartitionType.OVERLAY, sif.arch),
        align=frame.PARTITION_ALIGN_BYTES,
    )
    frame.add(part, partition)
    frame.put_record(part, dataclasses.replace(record, delta_sha256=delta.sha256))
    new = image.read(part)
    if (
        descriptor.applied(new) != delta
        or descriptor.sha256(part, delta, start=new.overlays[0].offset) != delta.sha256
    ):
        raise CheckFailed(
            "the new .sif does not hold the delta as it was read", where=str(part), hint="please report this"
        )
