"""Convert an image from any source to a .sif or .sqsh, and check the result."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imgkit_builder.archive import sidecar
from imgkit_builder.archive.stored import StoredImage
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.oci.platform import host_arch, runs_here
from imgkit_builder.sif import check, entries, mksquashfs, runtime_build, squash
from imgkit_builder.sif.baked_facts import BakedFacts, BakedFactsCollector
from imgkit_builder.sif.conversion import (
    Clock,
    Compression,
    ConversionJob,
    Converted,
    Format,
    FormatName,
    Options,
    Stage,
    choose_compression,
)
from imgkit_builder.sif.entries import EngineImage, ImageEntry, OpenImage, Source
from imgkit_builder.sif.image import ImgkitRecord
from imgkit_builder.sif.objects import Sif
from imgkit_builder.sif.runtime import RuntimeTool, find_runtime, log_file, runtime_if_any
from imgkit_builder.sif.sqsh import Sqsh
from imgkit_builder.sif.squash import Squasher, SquashTarget
from imgkit_builder.sif.workspace import check_space, remove_leftovers, spare_bytes, tmp_base, workspace
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import ToolMissing, UsageError

FORMATS: Mapping[FormatName, Format] = {"sif": Sif(), "sqsh": Sqsh()}
RUNTIME_DISK_SHARE = 3.3
"""Maximum size of the temporary files per byte of the image, if a runtime builds the .sif.

At the maximum, the disk contains imgkit's layers, the runtime's copy of them, the unpacked files and the
squashfs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """How an image will be converted. The plan is made before anything is read or written."""

    method: Literal["stream", "export", "layers"]
    """``stream``: imgkit merges the layers. ``export``: imgkit reads an engine's export. ``layers``: a
    runtime builds the file from the layers."""
    compression: Compression
    squasher: Squasher | None
    """The mksquashfs that writes the file; None if a runtime builds it."""
    tool: RuntimeTool | None
    """The runtime that builds the file, if `squasher` is None. Else the runtime that tests it, or None."""
    notes: tuple[str, ...]
    """Sentences for the user."""

    @property
    def disk_share(self) -> float:
        """Bytes of temporary files per byte of the image."""
        if self.squasher is None:
            return RUNTIME_DISK_SHARE
        return self.squasher.disk_share

    def accepts(self, record: ImgkitRecord, options: Options) -> bool:
        """Return whether an existing file is good enough to skip the conversion.

        `record` says how the existing file was made. The file may differ from a part of the plan that the
        user did not choose. For example, a gzip file is accepted if the plan uses zstd only by default.
        """
        # A compression is "zstd 3", "gzip 6", or "runtime" if a runtime has chosen it.
        is_packed_as_planned = record.compression == str(self.compression)
        if self.squasher is None:  # a runtime builds the file: it must be the same runtime as before
            return is_packed_as_planned and record.runtime == str(self.tool)
        is_built_by_runtime = record.route == "layers"
        if options.writer == "imgkit" and is_built_by_runtime:
            return False
        if is_packed_as_planned:
            return True
        # If the user has chosen no compression, gzip will do, because every machine can mount it. A runtime
        # that chooses the compression uses gzip by default.
        return options.compression == "auto" and record.compression.startswith(("gzip", "runtime"))


def convert(source: Source, target: Path, options: Options, report: Reporter) -> Converted:
    """Convert `source` to the .sif or .sqsh `target`, and check it.

    The new file is written beside `target` and renamed at the end. After an error, `target` is unchanged.

    Raises
    ------
    UsageError : the target is another kind of file, the archive has several images, there is no temporary
        folder, or a .sqsh cannot hold a variable of the image.
    ToolMissing : this machine has neither mksquashfs nor a runtime, or no program zstd for a zstd archive.
    ToolFailed : mksquashfs or the runtime failed. The error quotes the last lines and names the log.
    CheckFailed : there is too little space, the source is damaged, or the result differs from the image.
    """
    target = target.absolute()
    check_target(target, force=options.force, format=options.format)
    plan = make_plan(source, options)
    # None for a stream or a compressed archive: its configuration is known only after it was unpacked to
    # disk, in `_run_conversion`.
    config = entries.peek_config(source)
    if config is not None:
        existing = _find_existing(target, config, plan, options)
        if existing is not None:
            # A run may have been killed after it renamed the file and before it removed its temporary files.
            remove_leftovers(target)
            return existing
    for note in plan.notes:
        report.note(note)
    temporary_base = tmp_base(target, options.tmpdir)
    _check_space(source, target, temporary_base, plan)
    # `work.new_file` is the new file under a temporary name, and `work.folder` has all other temporary files.
    with workspace(target, temporary_base) as work, log_file(target.stem) as log:
        clock = Clock(report)
        job = ConversionJob(
            tool=plan.tool, options=options, compression=plan.compression, work=work, clock=clock, log=log
        )
        return _run_conversion(source, target, job, plan, is_compared=config is not None)


def _run_conversion(
    source: Source, target: Path, job: ConversionJob, plan: ConversionPlan, *, is_compared: bool
) -> Converted:
    """Write the new file, check it, and rename it to `target`.

    If `is_compared` is False, an existing `target` is compared with the image first, and kept if it matches.
    """
    clock = job.clock
    new_file = job.work.new_file
    with files.flush_in_background(new_file):
        with entries.open_source(
            source,
            job.work.folder,
            clock,
            exports=plan.method == "export",
            unpack_limit_bytes=job.options.unpack_limit_bytes,
        ) as image:
            if not is_compared:
                existing = _find_existing(target, image.config, plan, job.options)
                if existing is not None:
                    return existing
            _note_foreign_arch(image.config.arch, job)
            # The end of this block removes the unpacked copy of a stream or compressed archive. The runtime
            # starts after the block, because it needs the space for its own copies.
            facts = None
            layer_bytes = 0
            if plan.squasher:
                facts = _squash_image(image, job, plan)
            else:
                layer_bytes = runtime_build.write_oci_folder(image, job).layer_bytes
        record, checksum = _complete_file(image, facts, job, plan)
    _check_result(image.config, layer_bytes, job, plan)
    clock.stage("make durable")
    _publish(new_file, target, checksum)
    clock.finish()
    return _make_result(target, job.options, image.config, record, tuple(clock.stages), Path(job.log.name))


def _complete_file(
    image: OpenImage, facts: BakedFacts | None, job: ConversionJob, plan: ConversionPlan
) -> tuple[ImgkitRecord, str]:
    """Complete the squashfs, or let the runtime build the file, and add imgkit's record to the new file.

    `facts` are what imgkit and pip recorded in the image, or None if a runtime builds the file. Return the
    record, and the checksum of the file or ``""``, as `Format.put_record` does.
    """
    format = FORMATS[job.options.format]
    new_file = job.work.new_file
    if plan.squasher:
        format.complete(new_file, image.config)
    else:
        assert plan.tool is not None  # noqa: S101 - for the type checker: there is no squasher
        runtime_build.run_build(job, plan.tool, image.name)
    job.clock.stage("check")
    # Add the record before the test run, so that the tested file is exactly the file that the user gets.
    record = _make_record(image, plan, facts)
    return format.put_record(new_file, record, job.clock.advance)


def _note_foreign_arch(arch: str, job: ConversionJob) -> None:
    """Tell the user if the image is for another processor, so that it cannot run on this machine."""
    if arch != host_arch():
        format = job.options.format
        job.clock.note(f"the image is {arch}, this machine {host_arch()}: the .{format} runs on {arch} only")


def _make_result(
    target: Path,
    options: Options,
    config: ImageConfig,
    record: ImgkitRecord,
    stages: tuple[Stage, ...] = (),
    log: Path | None = None,
) -> Converted:
    """Return the result for the complete file `target`.

    `log` is None if the file was already up to date, so that there was no conversion.
    """
    return Converted(
        path=target,
        format=options.format,
        size_bytes=target.stat().st_size,
        arch=config.arch,
        record=record,
        up_to_date=log is None,
        stages=stages,
        log=log,
    )


def _publish(new_file: Path, target: Path, checksum: str) -> None:
    """Rename the complete file `new_file` to `target`, and write its checksum file.

    `checksum` is the sha256 of the file in hex, or ``""`` for a format without a checksum file.
    """
    if not checksum:
        files.publish_file(new_file, target)
        return
    # Remove the old checksum first: if this process is killed, it must not be left beside the new file.
    files.remove_file(sidecar.sha256_path(target))
    files.publish_file(new_file, target)
    files.write_file(sidecar.sha256_path(target), f"{checksum}  {target.name}\n")


def _squash_image(image: OpenImage, job: ConversionJob, plan: ConversionPlan) -> BakedFacts:
    """Write the squashfs of `image` with `plan.squasher` into the new file of `job`.

    In a .sif, free space for the header is left before the squashfs. A .sqsh has no header.

    Returns
    -------
    The facts that imgkit and pip recorded in the image, such as its manifest. They are collected from the
    files while these are written.
    """
    assert plan.squasher is not None  # noqa: S101 - for the type checker: the caller has checked it
    config = image.config
    collector = BakedFactsCollector()
    spool_bytes = _compute_spool_limit(image, job, plan)
    with file_entries(image, job, spool_bytes=spool_bytes) as stream:
        squash.write(
            collector.observe(stream),
            job,
            job.work.new_file,
            created=config.created,
            offset=FORMATS[job.options.format].squashfs_offset(config),
            squasher=plan.squasher,
        )
    # The facts are complete only now, since the collector sees each entry when it is sent to mksquashfs. The
    # caller stores them in the record of the file.
    return collector.facts(config.search_path)


@contextlib.contextmanager
def file_entries(image: OpenImage, job: ConversionJob, *, spool_bytes: int) -> Iterator[Iterator[ImageEntry]]:
    """Yield an iterator over the entries of `image` that will be in the squashfs.

    imgkit adds the files that the format needs and a list of the installed packages. It leaves out entries
    that the format cannot hold, such as devices in a .sqsh.

    Parameters
    ----------
    spool_bytes : how many bytes of unpacked layers may be written to disk. Layers that fit need to be
        unpacked only once.

    Raises
    ------
    UsageError : the format cannot hold a value of the image. The error is raised before anything is read.
    CheckFailed : a layer is damaged, or contains something that is not allowed in an image.
    """
    format = FORMATS[job.options.format]
    note = job.clock.note
    added = format.added_files(image.config, note)
    with entries.image_entries(
        image,
        job.work.folder,
        job.clock,
        spool_bytes=spool_bytes,
        unpack_limit_bytes=job.options.unpack_limit_bytes,
    ) as image_files:
        # The package list comes last, so that it describes the files that really are in the result.
        all_files = entries.with_added_files(image_files, added.replacing, added.if_missing)
        storable_files = format.filter_entries(all_files, note)
        yield entries.with_package_list(storable_files, image.config)


def _make_record(image: OpenImage, plan: ConversionPlan, facts: BakedFacts | None) -> ImgkitRecord:
    """Return the record that imgkit stores in the new file: the source of the file, and how it was made.

    `facts` are what imgkit and pip recorded in the image, or None if a runtime has built the file.
    """
    writer = f"imgkit {__version__}"
    if plan.squasher is None:
        writer = str(plan.tool)
    return ImgkitRecord(
        image_id=image.config.image_id,
        diff_ids=image.config.diff_ids,
        root_sha256="",  # `Format.put_record` sets it
        runtime=writer,
        compression=str(plan.compression),
        route=plan.method,
        imgkit=__version__,
        arch=image.config.arch,
        source=image.name,
        facts=facts,
    )


def _check_result(config: ImageConfig, layer_bytes: int, job: ConversionJob, plan: ConversionPlan) -> None:
    """Check the new file, and test it by starting a program in it if this machine can do that.

    Size, architecture and labels are checked only if a runtime has built the file. `layer_bytes` is the size
    of the uncompressed layers. A much smaller file has lost some of them.
    """
    is_built_by_runtime = plan.squasher is None  # otherwise imgkit has written it with a mksquashfs
    tester = _choose_tester(config, job, plan)
    if is_built_by_runtime:
        check.check_built(job, config, layer_bytes, can_run=tester is not None)
    if tester is not None:
        check.check_start(job, tester, config, is_built_by_runtime=is_built_by_runtime)


def _choose_tester(config: ImageConfig, job: ConversionJob, plan: ConversionPlan) -> RuntimeTool | None:
    """Return the runtime that can test the image on this machine, or None if no test is possible.

    If the user wants a test that is not possible, a note gives the reason: this machine has no runtime, or
    the image is for another processor.
    """
    if not job.options.test or not FORMATS[job.options.format].is_started_here:
        return None
    if plan.tool is None:
        job.clock.note("not run: no singularity here")
        return None
    if not runs_here(config.arch):
        job.clock.note(f"not run: the image is {config.arch}, this machine {host_arch()}")
        return None
    return plan.tool  # the runtime that has built the file, or one that was only looked up for the test


def _find_existing(
    target: Path, config: ImageConfig, plan: ConversionPlan, options: Options
) -> Converted | None:
    """Return the result for `target` if it need not be converted again, else None.

    The existing file must contain the same image, be made as `plan` says, and be undamaged. To find damage,
    its digest is compared with the recorded one.
    """
    if options.force:
        return None

    def accepts(record: ImgkitRecord) -> bool:
        is_same_image = record.image_id == config.image_id and record.diff_ids == config.diff_ids
        return is_same_image and plan.accepts(record, options)

    record = FORMATS[options.format].intact_record(target, config, accepts)
    if record is None:
        return None
    return _make_result(target, options, config, record)


def check_target(target: Path, *, force: bool | None, format: FormatName = "sif") -> None:
    """Raise UsageError if a file of this format cannot be written to `target`.

    Parameters
    ----------
    force : whether a file of another format may be replaced. None means that the command has no option
        ``--force``, so that the hint must not mention it.
    """
    if target.is_dir():
        raise UsageError("the target is a folder", where=str(target), hint=f"-o {target}/NAME.{format}")
    if not target.parent.is_dir():
        raise UsageError(
            f"the folder {target.parent} does not exist", where=str(target), hint=f"mkdir -p {target.parent}"
        )
    if force or not target.exists() or FORMATS[format].matches(target):
        return
    hint = "choose another name with -o"
    if force is not None:
        hint += ", or --force"
    message = f"target exists and is not a .{format}; refusing to overwrite it"
    raise UsageError(message, where=str(target), hint=hint)


def make_plan(source: Source, options: Options) -> ConversionPlan:
    """Decide how to convert: with the mksquashfs of this machine, or else with a container runtime.

    mksquashfs is preferred, because it keeps the owners of all files and needs no runtime.

    Raises
    ------
    ToolMissing : this machine has neither a mksquashfs nor a runtime that could be used.
    UsageError : the requested compression or writer is not possible.
    """
    format = FORMATS[options.format]
    if options.writer == "runtime":
        if not format.is_started_here:
            raise UsageError(
                f"no runtime writes a .{format.name}", where="--writer runtime", hint="leave --writer out"
            )
        return _plan_runtime(options, "--writer runtime")
    try:
        squasher = squash.choose()
    except ToolMissing as error:
        return _plan_without_mksquashfs(source, options, error)
    return _plan_squash(source, options, squasher)


def _plan_without_mksquashfs(source: Source, options: Options, error: ToolMissing) -> ConversionPlan:
    """Return a plan in which a runtime builds the file. `error` says why mksquashfs cannot be used.

    Raise ToolMissing if there is no runtime for the format, or if the user wants imgkit to write the file.
    """
    is_written_by_runtimes = FORMATS[options.format].is_started_here
    hint = squash.INSTALL
    if isinstance(source, EngineImage):
        hint += "\nor convert on the cluster: imgkit save IMAGE here, imgkit sif IMAGE.tar there"
    if options.writer == "auto" and is_written_by_runtimes:
        return _plan_runtime(options, error.what, install_hint=hint)
    if is_written_by_runtimes:
        hint += "\nor let a runtime build: --writer runtime"
    raise ToolMissing(error.what, hint=hint) from error


def _plan_squash(source: Source, options: Options, squasher: Squasher) -> ConversionPlan:
    """Return a plan in which imgkit writes the file with `squasher`."""
    format = FORMATS[options.format]
    requested = options.compression
    if requested == "auto":
        requested = format.default_compression
    compression = choose_compression(None, requested, zstd_error=squasher.zstd_error)
    reason = "it keeps all owners and needs no runtime"
    if options.writer == "imgkit":
        reason = "--writer imgkit"
    notes = [f"writer: imgkit, with {squasher}: {reason}"]
    is_export = isinstance(source, EngineImage)
    if is_export:
        notes.append(f"the engine's export is written straight into the .{format.name}")
    if squasher.note:
        notes.append(squasher.note)
    tool = None  # the runtime that tests the file
    if options.test and format.is_started_here:
        tool = runtime_if_any(options.runtime)
    return ConversionPlan(
        method="export" if is_export else "stream",
        compression=compression,
        squasher=squasher,
        tool=tool,
        notes=tuple(notes),
    )


def _plan_runtime(options: Options, reason: str, *, install_hint: str = "") -> ConversionPlan:
    """Return a plan in which Singularity or Apptainer builds the .sif from the layers of the image.

    Parameters
    ----------
    reason : why a runtime builds the file, for a note to the user.
    install_hint : how to install mksquashfs, if it is missing and a runtime is only the second choice. It is
        empty if the user chose the runtime.

    Raises
    ------
    ToolMissing : this machine has no runtime.
    """
    is_second_choice = bool(install_hint)
    try:
        tool = find_runtime(options.runtime, module_hint=options.module_hint)
    except ToolMissing as error:
        if not is_second_choice:
            raise
        raise ToolMissing(error.what, hint=f"{error.hint}; or without a runtime: {install_hint}") from error
    # The runtime runs one of the machine's mksquashfs programs. Which one it chooses is not known.
    zstd_error = mksquashfs.zstd_error(mksquashfs.find_any())
    compression = choose_compression(tool.capabilities, options.compression, zstd_error=zstd_error)
    slower = " (slower)" if is_second_choice else ""
    notes = [f"writer: {tool}, started through spython{slower}: {reason}"]
    if compression.note:
        notes.append(compression.note)
    return ConversionPlan(
        method="layers", compression=compression, squasher=None, tool=tool, notes=tuple(notes)
    )


def list_commands(source: Source, target: Path, options: Options) -> tuple[str, ...]:
    """Return the commands that a conversion would run, as lines of text for the user.

    Temporary files have placeholders as names, such as ``.imgkit-sif.TOKEN``.

    Raises
    ------
    ToolMissing : this machine has neither a mksquashfs nor a runtime that could be used.
    UsageError : the requested compression or writer is not possible.
    """
    plan = make_plan(source, options)
    new_file = files.temporary_name(target, "TOKEN")
    folder = tmp_base(target, options.tmpdir) / f"{files.TEMPORARY}sif.TOKEN"
    lines = [f"# {note}" for note in plan.notes]
    if plan.squasher:  # imgkit writes the file with this mksquashfs
        lines += _list_squash_commands(plan, plan.squasher, source, new_file, folder)
    elif plan.tool:  # otherwise there is always a runtime that builds the file
        lines += _list_build_commands(plan, plan.tool, new_file, folder)
    lines.append("# add the record of the image, with the digest of its squashfs")
    lines.append(shlex.join(("mv", str(new_file), str(target))))
    if FORMATS[options.format].has_checksum:
        name = shlex.quote(target.name)
        checksum_name = shlex.quote(f"{target.name}.sha256")
        lines.append(f"sha256sum {name} > {checksum_name}")
    return tuple(lines)


def _list_squash_commands(
    plan: ConversionPlan, squasher: Squasher, source: Source, new_file: Path, folder: Path
) -> list[str]:
    """Return the commands with which imgkit writes the squashfs `new_file`.

    `folder` is the folder for temporary files.
    """
    # The time 0 is only a placeholder: the image has not been read yet.
    squashfs = SquashTarget(path=new_file, created_s=0, compression=plan.compression, folder=folder)
    producer = "merged layers of"
    if plan.method == "export":
        producer = "docker export CONTAINER-OF"
    return [f"# {producer} {source.name} |", shlex.join(squasher.argv(squashfs))]


def _list_build_commands(plan: ConversionPlan, tool: RuntimeTool, new_file: Path, folder: Path) -> list[str]:
    """Return the commands with which a runtime builds the .sif `new_file` in the temporary `folder`."""
    image = runtime_build.oci_address("IMAGE")
    arguments = runtime_build.build_arguments(tool, plan.compression, new_file, image)
    return [
        shlex.join(("cd", str(folder))),
        "# lay out the image as an OCI folder with uncompressed layers",
        shlex.join([str(tool.path), *arguments]),
    ]


def _check_space(source: Source, target: Path, temporary_base: Path, plan: ConversionPlan) -> None:
    """Raise CheckFailed if there is too little space for `target`, or for files in `temporary_base`.

    If the source is a stream of unknown size, nothing is checked.
    """
    image_bytes = source.size_bytes
    if image_bytes is None:  # a stream
        return
    temporary_bytes = int(image_bytes * plan.disk_share)  # the share depends on who writes the file
    # A stream or a compressed archive is first unpacked to disk. If imgkit merges the layers ("stream"), it
    # reads them from that copy. A runtime starts only after the copy is removed, so `disk_share` is enough.
    needs_copy_until_end = plan.method == "stream" and entries.is_spooled(source)
    if needs_copy_until_end:
        temporary_bytes += image_bytes
    check_space(image_bytes, temporary_bytes, target, temporary_base)


def _compute_spool_limit(image: OpenImage, job: ConversionJob, plan: ConversionPlan) -> int:
    """Return how many bytes of unpacked layers may be written to the temporary folder of `job`.

    imgkit reads each layer twice: once for its headers and digest, and once for its files. If unpacked
    layers are on disk, they need to be unpacked only once. If they would probably not fit, the result is 0.
    Then none of them is written to disk.
    """
    if not isinstance(image.files, StoredImage):  # an engine's export has no layers
        return 0
    packed_bytes = image.files.packed_bytes
    # This is an estimate. The true size is known only after unpacking.
    unpacked_bytes = int(packed_bytes * entries.UNPACKED_FACTOR)
    unpacked_image_bytes = image.size_bytes - packed_bytes + unpacked_bytes
    temporary_base = job.work.folder.parent
    # What the conversion itself needs is already subtracted.
    free_bytes = spare_bytes(unpacked_image_bytes, plan.disk_share, job.work.new_file, temporary_base)
    if free_bytes < unpacked_bytes:
        return 0
    return free_bytes
