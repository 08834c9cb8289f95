"""Convert any source to a checked .sif at its final name: the order of the steps."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shutil import disk_usage

from imgkit_builder import __version__
from imgkit_builder.archive import compressed, oci_folder
from imgkit_builder.base import files
from imgkit_builder.base.platform import host_arch, runs_here
from imgkit_builder.base.progress import Reporter
from imgkit_builder.image.config import ImageConfig
from imgkit_builder.sif import check, compression, export, image, limits, links, mksquashfs
from imgkit_builder.sif.compression import Compression
from imgkit_builder.sif.conversion_job import Clock, ConversionJob, cache_flags, folder_name
from imgkit_builder.sif.image import IMGKIT_OBJECT, ImgkitRecord, SifImage
from imgkit_builder.sif.options import Archive, Converted, EngineImage, OciFolder, Options, Registry, Source
from imgkit_builder.sif.runtime import RuntimeTool, find_runtime, log_file
from imgkit_builder.sif.workspace import tmp_base, workspace
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError

SPACE_FACTOR = 3.3
"""Peak of the temporary files per image byte: layers, the runtime's copy, files and squashfs."""
PACKED_SHARE = 0.5
"""Size of a .sif per image byte, with a margin: measured 0.26 to 0.4."""
_UNPACKED_FACTOR = 3.0
"""Guessed ratio of a compressed archive."""
_RECORD_WORDS = ("sif", "add", "--datatype", "6", "--filename", IMGKIT_OBJECT)
_LOCAL_REGISTRIES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """Facts about the image once the part file exists."""

    name: str
    config: ImageConfig | None
    layer_bytes: int | None


def convert(source: Source, target: Path, options: Options, report: Reporter) -> Converted:
    """Convert `source` to the .sif `target`, which afterwards is whole and checked, or as it was before.

    Raises
    ------
    UsageError : the target is another kind of file, the archive has several images, or there is no temporary
        folder.
    ToolMissing : no runtime; with ``direct``, no mksquashfs 4.5; for a zstd archive, no zstd program.
    ToolFailed : the runtime failed; quotes its last lines and names the log.
    CheckFailed : no space, a damaged source, or a result that differs from the image.
    """
    target = target.absolute()
    check_target(target, force=options.force)
    tool = find_runtime(options.runtime, module_hint=options.module_hint)
    given, (options, why) = options, _with_route(source, options, tool)
    packing = compression.choose(tool.capabilities, options.compression, direct=bool(options.direct))
    known = _known_config(source)
    if known and (done := _up_to_date(target, known, tool, packing, given)):
        return done
    if why:
        report.note(why)
    if packing.note:
        report.note(packing.note)
    base = tmp_base(target, options.tmpdir)
    _check_space(source, target, base, direct=bool(options.direct))
    with workspace(target, base) as work, log_file(target.stem) as log:
        job = ConversionJob(
            tool=tool, options=options, compression=packing, work=work, clock=Clock(report), log=log
        )
        if isinstance(source, EngineImage) and options.direct:
            _tell_arch(source.config, report)
            export.make(job, source)
            made = _Made(name=source.name, config=source.config, layer_bytes=source.size_bytes)
        elif isinstance(source, Registry):
            _build(job, _build_source(tool, source))
            made = _Made(name=source.reference, config=None, layer_bytes=None)
        else:
            made = _lay_out(source, job)
            config = made.config
            if config and not known and (done := _up_to_date(target, config, tool, packing, options)):
                return done
            if config:
                _tell_arch(config, report)
            _build(job, _build_source(tool, source, made.name))
        return _finish(job, made, target)


def _with_route(source: Source, options: Options, tool: RuntimeTool) -> tuple[Options, str]:
    """`options` with the route that works here where they leave it open, and the reason for people."""
    if options.direct is not None:
        return options, ""
    if not isinstance(source, EngineImage):
        return replace(options, direct=False), ""
    if obstacle := export.obstacle(tool):
        why = f"the runtime builds the .sif from the image's layers (slower): {obstacle}"
        return replace(options, direct=False), why
    why = "the engine's export goes straight into the .sif (faster); --from layers: the runtime builds it"
    return replace(options, direct=True), why


def plan(source: Source, target: Path, options: Options) -> tuple[str, ...]:
    """The commands that `convert` would run, for people; temporary names are placeholders.

    Raises
    ------
    UsageError, ToolMissing : as in `convert`, as far as imgkit can tell before the work.
    """
    target = target.absolute()
    check_target(target, force=options.force)
    tool = find_runtime(options.runtime, module_hint=options.module_hint)
    options, why = _with_route(source, options, tool)
    packing = compression.choose(tool.capabilities, options.compression, direct=bool(options.direct))
    part = target.with_name(f".{target.name}.TOKEN.part")
    lines = [f"# {why}"] if why else []
    lines.append(f"cd {tmp_base(target, options.tmpdir)}/.imgkit-sif.TOKEN")
    if isinstance(source, EngineImage) and options.direct:
        squashed = shlex.join(
            mksquashfs.squash_argv(Path("root.sqfs"), packing.options, source.config.created)
        )
        lines += [f"docker export CONTAINER-OF-{source.name} | {squashed}"]
        lines += [f"{tool.path} sif new {part}", f"{tool.path} sif add ... {part} root.sqfs"]
    else:
        words = _build_words(tool, packing, part, _build_source(tool, source))
        if not isinstance(source, Registry):
            lines.append("# lay out the image as an OCI folder with uncompressed layers")
        lines.append(shlex.join([str(tool.path), *words]))
    if tool.capabilities.edits_sif:
        lines.append(shlex.join([str(tool.path), *_RECORD_WORDS, str(part), f"{IMGKIT_OBJECT}.json"]))
    return (*lines, f"mv {part} {target}")


def _lay_out(source: Archive | OciFolder | EngineImage, job: ConversionJob) -> _Made:
    """Write an OCI folder into the workspace, under the name of the image."""
    folder, clock, limit = job.work.folder / "layout", job.clock, job.options.unpack_limit_bytes
    if isinstance(source, Archive):
        clock.stage(f"read {source.path.name}")
        laid = oci_folder.from_archive(source.path, folder, clock, unpack_limit_bytes=limit)
    elif isinstance(source, OciFolder):
        clock.stage(f"read {source.path.name}")
        laid = oci_folder.from_folder(source.path, folder, clock, unpack_limit_bytes=limit)
    else:
        clock.stage(f"save {source.name} from the engine")
        with source.save() as chunks:
            laid = oci_folder.from_chunks(
                chunks, folder, name=source.name, report=clock, expected_bytes=source.size_bytes
            )
    name = _name(source, laid.names)
    layers = (laid.folder / "blobs/sha256" / one.removeprefix("sha256:") for one in laid.config.diff_ids)
    links.check(layers, where=name)
    folder.rename(job.work.folder / folder_name(name))
    return _Made(name=name, config=laid.config, layer_bytes=laid.layer_bytes)


def _name(source: Archive | OciFolder | EngineImage, names: tuple[str, ...]) -> str:
    if isinstance(source, EngineImage):
        return source.name
    return names[0] if names else source.path.name.split(".tar", 1)[0]


def _build_words(
    tool: RuntimeTool, packing: Compression, part: Path, source: tuple[str, ...]
) -> tuple[str, ...]:
    """Arguments of the runtime; the last word of `source` is the image, the others are options."""
    options = list(cache_flags(tool))
    if packing.options:
        options += ["--mksquashfs-args", compression.arguments_for_runtime(packing, limits.gather())]
    return ("build", "--force", *options, *source[:-1], str(part), source[-1])


def _build(job: ConversionJob, source: tuple[str, ...]) -> None:
    """``singularity build`` into the part file."""
    job.clock.stage(f"build with {job.tool}")
    output = job.run(*_build_words(job.tool, job.compression, job.work.part, source))
    if check.EMPTY_IMAGE in output:
        raise ToolFailed(
            f"{job.tool} did not read the layers: it found no programs in the image ({check.EMPTY_IMAGE!r})",
            hint=f"another version of it, or --from daemon on the build host; the full log: {job.log.name}",
        )
    if not job.work.part.exists():
        raise ToolFailed(f"{job.tool} succeeded but wrote no file", hint=f"the full log: {job.log.name}")


def _build_source(tool: RuntimeTool, source: Source, name: str = "IMAGE") -> tuple[str, ...]:
    if not isinstance(source, Registry):
        return (f"oci:{folder_name(name)}",)
    host = source.reference.split("/", 1)[0].rsplit(":", 1)[0]
    plain = host in _LOCAL_REGISTRIES and tool.capabilities.no_https
    return (*(("--no-https",) if plain else ()), f"docker://{source.reference}")


def _finish(job: ConversionJob, made: _Made, target: Path) -> Converted:
    """Check, describe, publish."""
    part, clock = job.work.part, job.clock
    clock.stage("check")
    sif, _ = check.structure(part, config=made.config, layer_bytes=made.layer_bytes)
    record = _record(job, made, image.root_sha256(part, advance=clock.advance))
    if job.tool.capabilities.edits_sif:
        add_record(job, record)
    else:
        clock.note(f"{job.tool} has no `sif add`: the file gets no record of its image id and layers")
    _check_content(job, made, sif)
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


def add_record(job: ConversionJob, record: ImgkitRecord) -> None:
    """Add `record` to the part file.

    Raises
    ------
    ToolFailed : it cannot be read back.
    """
    data = job.work.folder / f"{IMGKIT_OBJECT}.json"
    data.write_text(json.dumps({"schema": 1, **asdict(record)}, indent=1, sort_keys=True), encoding="utf-8")
    job.run(*_RECORD_WORDS, job.work.part, data)
    if image.read(job.work.part).record != record:
        raise ToolFailed(f"{job.tool} sif add wrote other data than it got", hint="please report this")


def _check_content(job: ConversionJob, made: _Made, sif: SifImage) -> None:
    executes = runs_here(sif.arch)
    if job.options.test and not executes:
        job.clock.note(f"not executed: the image is {sif.arch}, this machine {host_arch()}")
    check.content(job, made.config, execute=job.options.test and executes)


def _record(job: ConversionJob, made: _Made, root_sha256: str) -> ImgkitRecord:
    config = made.config
    return ImgkitRecord(
        image_id=config.image_id if config else "",
        diff_ids=config.diff_ids if config else (),
        root_sha256=root_sha256,
        runtime=str(job.tool),
        compression=str(job.compression),
        route=_route(job.options),
        imgkit=__version__,
        source=made.name,
    )


def _route(options: Options) -> str:
    return "export" if options.direct else "layers"


def _up_to_date(
    target: Path, config: ImageConfig, tool: RuntimeTool, packing: Compression, options: Options
) -> Converted | None:
    """The result without work, if `target` already has the right bytes."""
    if options.force or not image.is_sif(target):
        return None
    try:
        sif = image.read(target)
        record = sif.record
        if record is None or record.deltas:
            return None
        # Both routes give the same image: where the user leaves it open, either will do.
        route = record.route if options.direct is None and record.route != "flatten" else _route(options)
        wanted = (config.image_id, str(tool), str(packing), route)
        if (record.image_id, record.runtime, record.compression, record.route) != wanted:
            return None
        if image.root_sha256(target) != record.root_sha256:
            return None
    except CheckFailed:
        return None
    return Converted(
        path=target,
        size_bytes=sif.size_bytes,
        arch=sif.arch,
        record=record,
        up_to_date=True,
        stages=(),
        log=None,
    )


def _known_config(source: Source) -> ImageConfig | None:
    """The image configuration, if imgkit can get it without reading layers."""
    if isinstance(source, EngineImage):
        return source.config
    return oci_folder.peek(source.path) if isinstance(source, Archive) else None


def check_target(target: Path, *, force: bool) -> None:
    """Raise UsageError if a .sif cannot be written to `target`."""
    if target.is_dir():
        raise UsageError("the target is a folder", where=str(target), hint=f"-o {target}/NAME.sif")
    if not target.parent.is_dir():
        raise UsageError(
            f"the folder {target.parent} does not exist", where=str(target), hint=f"mkdir -p {target.parent}"
        )
    if target.exists() and not force and not image.is_sif(target):
        raise UsageError(
            "the target exists and is no .sif; imgkit replaces only a .sif",
            where=str(target),
            hint="another name with -o, or --force",
        )


def _tell_arch(config: ImageConfig, report: Reporter) -> None:
    if config.arch != host_arch():
        report.note(
            f"the image is {config.arch}, this machine {host_arch()}: the .sif runs on {config.arch} only"
        )


def source_bytes(source: Source) -> int | None:
    """Size of the uncompressed image, estimated if it is compressed; None if unknown."""
    if isinstance(source, EngineImage):
        return source.size_bytes
    if isinstance(source, OciFolder):
        return sum(path.stat().st_size for path in source.path.glob("blobs/sha256/*"))
    if isinstance(source, Archive):
        size = source.path.stat().st_size
        return size if compressed.kind(source.path) == "none" else int(size * _UNPACKED_FACTOR)
    return None


def _check_space(source: Source, target: Path, base: Path, *, direct: bool) -> None:
    size = source_bytes(source)
    if size is None:
        return
    packed = int(size * PACKED_SHARE)
    needs = {base: packed if direct else int(size * SPACE_FACTOR)}
    if base.stat().st_dev == target.parent.stat().st_dev:
        needs[base] += packed
    else:
        needs[target.parent] = packed
    for folder, needed in needs.items():
        free = disk_usage(folder).free
        if free < needed:
            raise CheckFailed(
                f"{free / 1e9:.1f} GB are free, an image of {size / 1e9:.1f} GB needs {needed / 1e9:.1f}",
                where=str(folder),
                hint="--tmpdir DIR on a larger disk" if folder == base else "-o FILE.sif on a larger disk",
            )
