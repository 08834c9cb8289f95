"""Build a recipe without an engine to a tested .sif at its final name.

The runtime runs the rendered definition. Record, configuration and smoke test then complete the file. The
.sif of an earlier build from the same input is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.apptainer import definition, rights
from imgkit_builder.apptainer.definition import Follower, Registry, SifFile, Start
from imgkit_builder.apptainer.rights import Rights
from imgkit_builder.base import checks, files
from imgkit_builder.base.checks import Check
from imgkit_builder.base.progress import Reporter
from imgkit_builder.image import smoke
from imgkit_builder.image.instructions import Definition
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_builder.recipe.model import Recipe
from imgkit_builder.sif import check, conversion, convert, entries, frame, mksquashfs, runtime, runtime_build
from imgkit_builder.sif import image as sif_image
from imgkit_builder.sif.conversion import Clock, Compression, ConversionJob, Options, Stage
from imgkit_builder.sif.entries import Archive
from imgkit_builder.sif.frame import NewObject
from imgkit_builder.sif.image import DataType, ImgkitRecord, SifImage
from imgkit_builder.sif.runtime import RuntimeTool
from imgkit_builder.sif.workspace import remove_leftovers, tmp_base, workspace
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import CheckFailed, ToolFailed

if TYPE_CHECKING:
    from imgkit_builder.image.context import BuildContext

_DEFINITION = "imgkit.def"
_LOCAL_REGISTRIES = ("localhost", "127.0.0.1", "[::1]")


def build(request: SifRequest, pack: Pack, report: Reporter) -> BuiltSif:
    """Build the .sif `request.target`, which afterwards is whole and tested, or as it was before.

    Raises
    ------
    UsageError : a definition cannot express the recipe, there is no such base, or the target is no .sif.
    ToolMissing : there is no runtime.
    ToolFailed : a step failed; names the recipe's line, quotes its last lines and names the log.
    CheckFailed : this user cannot build here, the base is damaged, or the result fails its smoke test.
    """
    target, options = request.target.absolute(), request.options
    convert.check_target(target, force=False)
    tool = runtime.find_runtime(options.runtime, module_hint=options.module_hint)
    allowed = rights.needed(tool)
    packing = _packing(tool, options)
    report.stage(f"base {request.base or request.recipe.image.base}")
    base = definition.find_base(request.recipe, name=request.base, place=request.base_from, report=report)
    planned = _planned(request, base, pack, report) if base.known else None
    if planned and (done := earlier(request, base, planned, tool, packing)):
        return done
    if packing.note:
        report.note(packing.note)
    definition.check_space(base, target, tmp_base(target, options.tmpdir))
    with (
        workspace(target, tmp_base(target, options.tmpdir)) as work,
        runtime.log_file(target.stem) as log,
    ):
        clock = Clock(report)
        job = ConversionJob(tool=tool, options=options, compression=packing, work=work, clock=clock, log=log)
        base = _brought(base, job)
        if planned is None:
            planned = _planned(request, base, pack, clock)
            if done := earlier(request, base, planned, tool, packing):
                return done
        clock.stage("unpack the context")
        _unpack(planned.context, work.folder / "build")
        follower = _run(request, base, planned, job, allowed)
        return finish(request, base, planned, job, follower)


def _packing(tool: RuntimeTool, options: Options) -> Compression:
    zstd_error = mksquashfs.zstd_error(mksquashfs.find())
    return conversion.choose_compression(tool.capabilities, options.compression, zstd_error=zstd_error)


def plan(request: SifRequest, pack: Pack, report: Reporter) -> BuildPlan:
    """What `build` would run: the definition and the command, with placeholders for temporary names."""
    options, target = request.options, request.target.absolute()
    convert.check_target(target, force=False)
    tool = runtime.find_runtime(options.runtime, module_hint=options.module_hint)
    packing = _packing(tool, options)
    base = definition.find_base(request.recipe, name=request.base, place=request.base_from, report=report)
    part = files.temporary_name(target, "TOKEN")
    words = runtime_build.arguments(tool, packing, part, (*_flags(base, tool), f"../{_DEFINITION}"))
    planned = _planned(request, base, pack, report)
    return BuildPlan(
        context=planned.context,
        definition=planned.definition.text,
        base=base.image,
        command=shlex.join((str(tool.path), *words)),
    )


def _planned(request: SifRequest, base: Start, pack: Pack, report: Reporter) -> _Planned:
    report.stage("context")
    context = pack(base.image)
    fresh = manifests.labels(
        context.manifest,
        context_sha256=context.sha256,
        created=manifests.time_of_build(),
        locked=context.is_locked,
    )
    made = definition.definition(request.recipe, base, fresh)
    return _Planned(context=context, definition=made, labels=fresh)


def _brought(base: Start, job: ConversionJob) -> Start:
    """Put a base that is on this machine where the definition expects it, after comparing its digests."""
    folder = job.work.folder / "build"
    folder.mkdir()
    if isinstance(base.source, SifFile):
        job.clock.stage(f"check {base.source.path.name}")
        definition.verify_base(base)
        (folder / definition.FILE).symlink_to(base.source.path)
    elif base.bootstrap == "oci":
        assert not isinstance(base.source, Registry)  # noqa: S101 - for the type checker
        limit = job.options.unpack_limit_bytes
        with entries.opened(base.source, job.work.folder, job.clock, unpack_limit_bytes=limit) as image:
            laid = runtime_build.lay_out(image, job)
        next(job.work.folder.glob("*/oci-layout")).parent.rename(folder / definition.FOLDER)
        if isinstance(base.source, Archive) and not base.known:
            return definition.identified(base, laid.config, laid.names)
    return base


def _unpack(context: BuildContext, folder: Path) -> None:
    """Write the context's files, and the two that only a build has."""
    script = definition.links_script(context.unpack(folder))
    (folder / definition.LOOK).write_text(definition.look_program(), encoding="utf-8")
    (folder / definition.LINKS).write_text(script, encoding="utf-8", errors="surrogateescape")


def _flags(base: Start, tool: RuntimeTool) -> tuple[str, ...]:
    """Options of the runtime that this base needs."""
    if not isinstance(base.source, Registry):
        return ()
    host = base.source.reference.split("/", 1)[0].rsplit(":", 1)[0]
    return ("--no-https",) if host in _LOCAL_REGISTRIES and tool.capabilities.no_https else ()


def _tool(job: ConversionJob) -> RuntimeTool:
    assert job.tool is not None  # noqa: S101 - for the type checker: `build` has found one
    return job.tool


def _run(
    request: SifRequest, base: Start, planned: _Planned, job: ConversionJob, allowed: Rights
) -> Follower:
    tool, definition = _tool(job), job.work.folder / _DEFINITION
    files.put(definition, planned.definition.text)
    job.log.write(planned.definition.text)
    follower = Follower(planned.definition, base_at=request.recipe.where("image", "base"), report=job.clock)
    job.clock.stage(f"unpack the base with {tool}")
    words = runtime_build.arguments(
        tool, job.compression, job.work.part, (*_flags(base, tool), str(definition))
    )
    try:
        job.run(
            *words,
            folder=job.work.folder / "build",
            on_line=follower.line,
            namespace=allowed.namespace,
        )
    except ToolFailed as error:
        raise follower.failed(error) from error
    if not job.work.part.exists():
        raise ToolFailed(f"{tool} succeeded but wrote no file", hint=f"the full log: {job.log.name}")
    return follower


Pack = Callable[[BaseImage], "BuildContext"]
"""Makes the build context for a base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SifRequest:
    """What to build from, and where to."""

    recipe: Recipe
    target: Path
    options: Options
    base: str | None = None
    """Name of the base instead of the recipe's."""
    base_from: str | None = None
    """A file, an OCI folder, or ``registry``, which is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltSif:
    """A whole and tested .sif."""

    path: Path
    size_bytes: int
    arch: str
    base: BaseImage
    record: ImgkitRecord
    labels: Mapping[str, str]
    checks: tuple[Check, ...]
    up_to_date: bool
    stages: tuple[Stage, ...] = ()
    log: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """What one build runs."""

    context: BuildContext
    definition: Definition
    labels: Mapping[str, str]
    """Those that only a build knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What a build would run."""

    context: BuildContext
    definition: str
    base: BaseImage
    command: str


def earlier(
    request: SifRequest, base: Start, planned: _Planned, tool: RuntimeTool, packing: Compression
) -> BuiltSif | None:
    """The result without work, if the target was built from the same definition, context and base."""

    def same(sif: SifImage, record: ImgkitRecord) -> bool:
        if (record.route, record.runtime, record.compression) != (_ROUTE, str(tool), str(packing)):
            return False
        texts = (one for one in sif.descriptors if one.datatype == DataType.DEFFILE)
        old = b"".join(sif_image.data(sif, one) for one in texts).decode("utf-8", "surrogateescape")
        # Of the definition that the runtime has kept, only the time of the build may differ.
        dated = {**planned.labels, manifests.CREATED_LABEL: definition.created(old)}
        return definition.definition(request.recipe, base, dated).text.strip() == old.strip()

    target = request.target.absolute()
    sif = None if request.options.force else sif_image.intact(target, same)
    if sif is None or sif.record is None:
        return None
    remove_leftovers(target)  # a run that was killed after it had put the file in place
    return BuiltSif(
        path=target,
        size_bytes=sif.size_bytes,
        arch=sif.arch,
        base=base.image,
        record=sif.record,
        labels=definition.labels(sif),
        checks=(),
        up_to_date=True,
    )


_ROUTE = "definition"
"""The route in the record of such a .sif."""
_CONFIG_OBJECT = "imgkit-config"
"""Name of the JSON object with the configuration whose digest is the image id."""


def finish(
    request: SifRequest, base: Start, planned: _Planned, job: ConversionJob, seen: Follower
) -> BuiltSif:
    """Check, describe, test, publish."""
    part, clock, target = job.work.part, job.clock, request.target.absolute()
    clock.stage("check")
    sif = sif_image.structure(part)
    labels = {name: str(value) for name, value in definition.labels(sif).items()}
    check.compare_labels(labels, {name: value for name, value in planned.labels.items() if value}, part)
    record = _described(request, part, sif, labels, job)
    manifest = planned.context.manifest
    known = dataclasses.replace(
        manifest.base, probe=seen.probe, env=manifest.base.env or dict(sorted(seen.env.items()))
    )
    manifest = dataclasses.replace(manifest, base=known)
    tested = _smoke(part, sif.arch, manifest, job) if request.options.test else ()
    clock.stage("make durable")
    files.publish(part, target)
    clock.finish()
    return BuiltSif(
        path=target,
        size_bytes=target.stat().st_size,
        arch=sif.arch,
        base=base.image,
        record=record,
        labels=labels,
        checks=tuple(tested),
        up_to_date=False,
        stages=tuple(clock.stages),
        log=Path(job.log.name),
    )


def _described(
    request: SifRequest,
    part: Path,
    sif: sif_image.SifImage,
    labels: Mapping[str, str],
    job: ConversionJob,
) -> ImgkitRecord:
    """Write the configuration and the record into the part file."""
    root = sif_image.root_sha256(part, advance=job.clock.advance)
    diff_ids = (f"sha256:{root}",)
    config = {
        "architecture": sif.arch,
        "os": "linux",
        "created": labels.get(manifests.CREATED_LABEL, ""),
        "config": {"Labels": dict(sorted(labels.items()))},
        "rootfs": {"type": "squashfs", "diff_ids": list(diff_ids)},
    }
    raw = json.dumps(config, indent=1, sort_keys=True).encode()
    group = sif.require_root().group
    frame.add(part, NewObject(datatype=DataType.JSON, name=_CONFIG_OBJECT, group=group, data=raw))
    record = ImgkitRecord(
        image_id=f"sha256:{hashlib.sha256(raw).hexdigest()}",
        diff_ids=diff_ids,
        root_sha256=root,
        runtime=str(job.tool),
        compression=str(job.compression),
        route=_ROUTE,
        imgkit=__version__,
        source=request.recipe.name,
    )
    frame.put_record(part, record)
    return record


def _smoke(part: Path, arch: str, manifest: Manifest, job: ConversionJob) -> Sequence[Check]:
    assert job.tool is not None  # noqa: S101 - for the type checker: a runtime has built it
    tool = job.tool
    job.clock.stage("smoke test")
    isolated = runtime.isolation(tool)
    job.clock.note(isolated.description("python3"))
    results = smoke.check(
        lambda argv: runtime.attempt(tool, runtime.exec_arguments(part, argv, isolated)),
        arch=arch,
        manifest=manifest,
    )
    if not checks.passed(results):
        raise CheckFailed(
            "the .sif was built, but its smoke test failed; an older file stays as it is",
            hint="\n".join(checks.table(results)) + "\nto keep it anyway: --no-test",
        )
    return results
