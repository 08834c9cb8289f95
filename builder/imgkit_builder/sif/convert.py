"""Convert any source to a checked .sif or .sqsh: choose the method, check the disks, run the steps."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Literal

from imgkit_builder.archive import compressed, oci_folder
from imgkit_builder.archive.stored import StoredImage
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.oci.config import ImageConfig, epoch
from imgkit_builder.oci.platform import host_arch, runs_here
from imgkit_builder.sif import (
    check,
    conversion,
    coverage,
    image,
    mksquashfs,
    runtime_build,
    sqsh,
    squashers,
    stream,
)
from imgkit_builder.sif.conversion import (
    PACKED_SHARE,
    Archive,
    Clock,
    Compression,
    ConversionJob,
    Converted,
    EngineImage,
    Format,
    OciFolder,
    Options,
    Piped,
    Source,
    Squasher,
    SquashOrder,
    name_of,
)
from imgkit_builder.sif.image import ImgkitRecord, SifImage
from imgkit_builder.sif.runtime import RuntimeTool, find_runtime, log_file, runtime_if_any
from imgkit_builder.sif.workspace import remove_leftovers, tmp_base, workspace
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError

Method = Literal["stream", "export", "layers"]
"""How the files travel; the record calls it the route."""

_LAYOUT_SHARE = 3.3
"""Peak of the temporary files per image byte where a runtime builds: layers, its copy, files and squashfs."""
UNPACKED_FACTOR = 3.0
"""Guessed ratio of a compressed archive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """Facts about the image once the part file exists."""

    name: str
    config: ImageConfig
    layer_bytes: int


def convert(source: Source, target: Path, options: Options, report: Reporter) -> Converted:
    """Convert `source` to the file `target`, which afterwards is whole and checked, or as it was before.

    Raises
    ------
    UsageError : the target is another kind of file, the archive has several images, there is no temporary
        folder, or a .sqsh cannot hold a variable of the image.
    ToolMissing : neither a mksquashfs that reads a tar nor a runtime; for a zstd archive, no zstd program.
    ToolFailed : mksquashfs or the runtime failed; quotes its last lines and names the log.
    CheckFailed : no space, a damaged source, or a result that differs from the image.
    """
    target = target.absolute()
    check_target(target, force=options.force, format=options.format)
    means = _choose_method(source, options)
    known = _known_config(source)
    if known and (done := _up_to_date(target, known, means, options)):
        remove_leftovers(target)  # a run that was killed after it had put the file in place
        return done
    for note in means.notes:
        report.note(note)
    base = tmp_base(target, options.tmpdir)
    _check_space(source, target, base, means)
    with workspace(target, base) as work, log_file(target.stem) as log:
        job = ConversionJob(
            tool=means.tool,
            options=options,
            compression=means.packing,
            work=work,
            clock=Clock(report),
            log=log,
            squasher=means.squasher,
        )
        return _converted(job, source, target, means)


def _converted(job: ConversionJob, source: Source, target: Path, means: Means) -> Converted:
    if means.method == "export":
        made = _exported(job, source)
    elif means.method == "layers":
        made = _built(job, source)
    else:
        with stream.stored_image(job, source) as image_here:
            config = image_here.selected.config
            if _known_config(source) is None and (done := _up_to_date(target, config, means, job.options)):
                return done
            _tell_arch(config, job)
            room = _room_for_layers(image_here, target, job.work.folder.parent, means.squasher)
            stream.write_layers(job, image_here, room_bytes=room)
        name = name_of(source, image_here.selected.names)
        made = _Made(name=name, config=config, layer_bytes=image_here.stored_bytes)
    return _finish(job, made, target, means.method)


def _exported(job: ConversionJob, source: Source) -> _Made:
    assert isinstance(source, EngineImage)  # noqa: S101 - for the type checker: only those can be exported
    _tell_arch(source.config, job)
    stream.write_export(job, source)
    return _Made(name=source.name, config=source.config, layer_bytes=source.size_bytes)


def _built(job: ConversionJob, source: Source) -> _Made:
    """Let the runtime build."""
    tool = job.tool
    assert tool is not None  # noqa: S101 - for the type checker: this method has one
    laid = runtime_build.lay_out(source, job)
    name = name_of(source, laid.names)
    _tell_arch(laid.config, job)
    runtime_build.build(job, tool, runtime_build.address(name))
    return _Made(name=name, config=laid.config, layer_bytes=laid.layer_bytes)


def _finish(job: ConversionJob, made: _Made, target: Path, method: Method) -> Converted:
    """Check, describe, publish."""
    part, clock = job.work.part, job.clock
    clock.stage("check")
    if job.options.format == "sqsh":
        return _finish_sqsh(job, made, target, method)
    # What squashes got every byte, and its names were counted: an image of zeros is whole.
    expected = made.layer_bytes if method == "layers" else None
    sif, _ = check.structure(part, config=made.config, layer_bytes=expected)
    record = _record(job, made, method, image.root_sha256(part, advance=clock.advance))
    coverage.put_record(part, record)
    _check_content(job, made, sif, method)
    clock.stage("make durable")
    files.publish(part, target)
    clock.finish()
    return Converted(
        path=target,
        size_bytes=target.stat().st_size,
        arch=sif.arch,
        record=record,
        up_to_date=False,
        stages=tuple(clock.stages),
        log=Path(job.log.name),
    )


def _finish_sqsh(job: ConversionJob, made: _Made, target: Path, method: Method) -> Converted:
    part, clock = job.work.part, job.clock
    sqsh.structure(part)
    record, sha256 = sqsh.describe(part, lambda root: _record(job, made, method, root), advance=clock.advance)
    clock.stage("make durable")
    sqsh.publish(part, target, sha256)
    clock.finish()
    return Converted(
        path=target,
        format="sqsh",
        size_bytes=target.stat().st_size,
        arch=made.config.arch,
        record=record,
        up_to_date=False,
        stages=tuple(clock.stages),
        log=Path(job.log.name),
    )


def _check_content(job: ConversionJob, made: _Made, sif: SifImage, method: Method) -> None:
    executes = job.options.test and runs_here(sif.arch) and job.tool is not None
    if job.options.test and not executes:
        why = (
            "no singularity here"
            if job.tool is None
            else f"the image is {sif.arch}, this machine {host_arch()}"
        )
        job.clock.note(f"not run: {why}")
    check.content(job, made.config, built=method == "layers", runner=job.tool if executes else None)


def _record(job: ConversionJob, made: _Made, method: Method, root_sha256: str) -> ImgkitRecord:
    config = made.config
    return ImgkitRecord(
        image_id=config.image_id,
        diff_ids=config.diff_ids,
        root_sha256=root_sha256,
        runtime=str(job.tool) if method == "layers" else f"imgkit {__version__}",
        compression=str(job.compression),
        route=method,
        imgkit=__version__,
        arch=config.arch if job.options.format == "sqsh" else "",
        source=made.name,
    )


def _up_to_date(target: Path, config: ImageConfig, means: Means, options: Options) -> Converted | None:
    """The result without work, if `target` already has the right bytes."""

    def wanted(record: ImgkitRecord) -> bool:
        return (
            _is_wanted(record, means, options)
            and record.image_id == config.image_id
            and _is_packed_well(record, means, options)
        )

    if options.force:
        return None
    if options.format == "sqsh":
        record = sqsh.undamaged(target, wanted)
    else:
        found = coverage.undamaged(target, lambda _, record: wanted(record))
        record = found[1] if found else None
    if record is None:
        return None
    return Converted(
        path=target,
        format=options.format,
        size_bytes=target.stat().st_size,
        arch=config.arch,
        record=record,
        up_to_date=True,
        stages=(),
        log=None,
    )


def _is_wanted(record: ImgkitRecord, means: Means, options: Options) -> bool:
    """Whether a file that was made so is as good as what would be made now."""
    if means.method == "layers":
        return record.route != "flatten" and record.runtime == str(means.tool)
    if options.writer == "imgkit" and record.route == "layers":
        return False
    # All methods give the same files: where the user leaves it open, any will do.
    return record.route == means.method if options.direct is not None else record.route != "flatten"


def _is_packed_well(record: ImgkitRecord, means: Means, options: Options) -> bool:
    """Whether the compression is the one wanted; where the user leaves it open, gzip mounts everywhere."""
    if record.compression == str(means.packing):
        return True
    kind = record.compression.split(" ")[0]
    return means.method != "layers" and options.compression == "auto" and kind in ("gzip", "runtime")


def _known_config(source: Source) -> ImageConfig | None:
    """The image configuration, if imgkit can get it without reading layers."""
    if isinstance(source, EngineImage):
        return source.config
    return oci_folder.peek(source.path) if isinstance(source, Archive) else None


def check_target(target: Path, *, force: bool, format: Format = "sif") -> None:
    """Raise UsageError if a file of this format cannot be written to `target`."""
    if target.is_dir():
        raise UsageError("the target is a folder", where=str(target), hint=f"-o {target}/NAME.{format}")
    if not target.parent.is_dir():
        raise UsageError(
            f"the folder {target.parent} does not exist", where=str(target), hint=f"mkdir -p {target.parent}"
        )
    is_one = sqsh.is_sqsh if format == "sqsh" else image.is_sif
    if target.exists() and not force and not is_one(target):
        raise UsageError(
            f"target exists and is not a .{format}; refusing to overwrite it",
            where=str(target),
            hint="choose another name with -o, or --force",
        )


def _tell_arch(config: ImageConfig, job: ConversionJob) -> None:
    if config.arch != host_arch():
        job.clock.note(
            f"the image is {config.arch}, this machine {host_arch()}: the .{job.options.format} runs on "
            f"{config.arch} only"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a conversion works with."""

    method: Method
    packing: Compression
    squasher: Squasher | None
    """None where a runtime builds."""
    tool: RuntimeTool | None
    """The runtime that builds, or else the one that tests the file, where there is one."""
    notes: tuple[str, ...]
    """Sentences for the user."""


def _choose_method(source: Source, options: Options) -> Means:
    """The best method that works here.

    Raises
    ------
    ToolMissing : nothing here squashes, and no runtime builds.
    UsageError : the compression that was asked for is not possible.
    """
    if options.writer == "runtime":
        if options.format == "sqsh":
            raise UsageError("no runtime writes a .sqsh", where="--writer runtime", hint="leave --writer out")
        if options.direct:
            raise UsageError(
                "--from daemon cannot be combined with --writer runtime, which builds from layers",
                where="--writer runtime",
                hint="--from layers",
            )
        return _by_runtime(options, "--writer runtime")
    try:
        squasher = squashers.choose()
    except ToolMissing as error:
        install = _install_hint(source)
        if options.format == "sqsh":
            raise ToolMissing(error.what, hint=install) from error
        if options.direct or options.writer == "imgkit":
            hint = f"{install}\nor let a runtime build: --from layers"
            raise ToolMissing(error.what, hint=hint) from error
        return _by_runtime(options, error.what, install=install)
    method: Method = "export" if isinstance(source, EngineImage) and options.direct is not False else "stream"
    straight = f"the engine's export is written straight into the .{options.format}"
    exported = f"{straight} (--from layers uses the layers)"
    packing = conversion.choose_compression(
        None,
        # unsquashfs of RHEL 8 reads no zstd, and the user's machine cannot tell what the nodes have.
        "gzip" if options.format == "sqsh" and options.compression == "auto" else options.compression,
        lacks_zstd=squasher.lacks_zstd,
    )
    why = "--writer imgkit" if options.writer == "imgkit" else "it keeps all owners and needs no runtime"
    writer = f"writer: imgkit, with {squasher}: {why}"
    notes = (writer, exported if method == "export" else "", squasher.note, packing.note)
    return Means(
        method=method,
        packing=packing,
        squasher=squasher,
        tool=runtime_if_any(options.runtime) if options.test and options.format == "sif" else None,
        notes=tuple(filter(None, notes)),
    )


def _install_hint(source: Source) -> str:
    """Return what helps where nothing here squashes."""
    if not isinstance(source, EngineImage):
        return squashers.INSTALL
    elsewhere = "or convert on the cluster: imgkit save IMAGE here, imgkit sif IMAGE.tar there"
    return f"{squashers.INSTALL}\n{elsewhere}"


def _by_runtime(options: Options, why: str, *, install: str = "") -> Means:
    """Return the means of the runtime, which builds for the reason `why`.

    `install` is the hint for a machine where nothing squashes.
    """
    try:
        builder = find_runtime(options.runtime, module_hint=options.module_hint)
    except ToolMissing as error:
        if not install:
            raise
        more = f"or without a runtime: {install}"
        raise ToolMissing(error.what, hint=f"{error.hint}; {more}") from error
    lacks = mksquashfs.lacks_zstd(mksquashfs.find())
    packing = conversion.choose_compression(builder.capabilities, options.compression, lacks_zstd=lacks)
    slower = " (slower)" if install else ""
    writer = f"writer: {builder}, started through spython{slower}: {why}"
    return Means(
        method="layers",
        packing=packing,
        squasher=None,
        tool=builder,
        notes=tuple(filter(None, (writer, packing.note))),
    )


def commands(source: Source, target: Path, options: Options) -> tuple[str, ...]:
    """What a conversion would run, for people; temporary names are placeholders.

    Raises
    ------
    UsageError, ToolMissing : as in `choose`.
    """
    means = _choose_method(source, options)
    part = files.temporary_name(target, "TOKEN")
    folder = tmp_base(target, options.tmpdir) / f"{files.TEMPORARY}sif.TOKEN"
    lines = [f"# {note}" for note in means.notes]
    if means.squasher is None:
        assert means.tool is not None  # noqa: S101 - for the type checker: this method has one
        words = runtime_build.arguments(means.tool, means.packing, part, (runtime_build.address("IMAGE"),))
        lines += [f"cd {folder}", "# lay out the image as an OCI folder with uncompressed layers"]
        lines.append(shlex.join([str(means.tool.path), *words]))
    else:
        squashed = means.squasher.shown(_order(part, folder, means.packing))
        name = name_of(source)
        if means.method == "export":
            lines.append(f"docker export CONTAINER-OF-{name} | {squashed}")
        else:
            lines += [f"# merge the layers of {name} into one stream", f"... | {squashed}"]
    if options.format == "sqsh":
        name = shlex.quote(target.name)
        lines.append("# add the record of the image")
        return (*lines, f"mv {part} {target}", f"sha256sum {name} > {shlex.quote(f'{target.name}.sha256')}")
    lines.append("# add the record of the image, and digests of everything in the file")
    return (*lines, f"mv {part} {target}")


def _order(part: Path, folder: Path, packing: Compression) -> SquashOrder:
    """An order that is only shown."""
    return SquashOrder(
        target=part,
        offset=0,
        created_s=epoch(""),
        compression=packing,
        folder=folder,
        log=sys.stderr,
        on_line=lambda _: None,
        note=lambda _: None,
    )


def temporary_share(squasher: Squasher | None) -> float:
    """Bytes of temporary files per byte of the image; None is a runtime that builds."""
    return squasher.disk_share if squasher else _LAYOUT_SHARE


def source_bytes(source: Source) -> int | None:
    """Size of the uncompressed image, estimated if it is compressed; None if unknown."""
    if isinstance(source, EngineImage):
        return source.size_bytes
    if isinstance(source, OciFolder):
        return sum(path.stat().st_size for path in source.path.glob("blobs/sha256/*"))
    if isinstance(source, Archive):
        size = source.path.stat().st_size
        return size if compressed.kind(source.path) == "none" else int(size * UNPACKED_FACTOR)
    return _rest_of(source)


def _rest_of(source: Piped) -> int | None:
    """Bytes that standard input still has where it is a file, as in ``imgkit sif - < X.tar``."""
    try:
        about = os.fstat(source.stream.fileno())
    except (OSError, ValueError):
        return None
    return about.st_size if stat.S_ISREG(about.st_mode) else None


def _room_for_layers(image: StoredImage, target: Path, base: Path, squasher: Squasher | None) -> int:
    """Bytes of `base` that plain layers may take; 0 where compressed ones would probably not fit."""
    plain = image.stored_bytes + int(image.packed_bytes * (UNPACKED_FACTOR - 1))
    share = temporary_share(squasher)
    if base.stat().st_dev == target.parent.stat().st_dev:
        share += PACKED_SHARE
    room = disk_usage(base).free - int(plain * share)
    return room if room >= image.packed_bytes * UNPACKED_FACTOR else 0


def _check_space(source: Source, target: Path, base: Path, means: Means) -> None:
    """Raise CheckFailed if the disk of `target`, or of `base` for temporary files, has too little space."""
    size = source_bytes(source)
    if size is None:
        return
    spool = size if means.squasher and stream.is_spooled(source, means.method) else 0
    need_space(size, int(size * temporary_share(means.squasher)) + spool, target, base)


def need_space(size: int, temporary: int, target: Path, base: Path) -> None:
    """Raise CheckFailed if an image of `size` bytes, with `temporary` ones in `base`, has no space."""
    packed = int(size * PACKED_SHARE)
    one_disk = base.stat().st_dev == target.parent.stat().st_dev
    needs = {base: temporary + packed} if one_disk else {base: temporary, target.parent: packed}
    free = {folder: disk_usage(folder).free for folder in needs}
    short = [folder for folder in needs if free[folder] < needs[folder]]
    if not short:
        return
    # All options at once: with one of two alone, the next attempt would end here again.
    ways = ["--tmpdir DIR"] if base in short else []
    ways += ["-o FILE.sif"] if one_disk or target.parent in short else []
    first, *others = short
    also = "".join(
        f"; {size_text(needs[one])} in {one}, where {size_text(free[one])} are free" for one in others
    )
    here = size_text(free[first])
    raise CheckFailed(
        f"{here} are free, an image of {size_text(size)} needs {size_text(needs[first])}{also}",
        where=str(first),
        hint=f"{' and '.join(ways)} on a larger disk",
    )
