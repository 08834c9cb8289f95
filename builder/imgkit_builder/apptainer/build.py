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
from imgkit_builder.apptainer.definition import Follower, Start
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
_ROUTE = "definition"
"""The route in the record of such a .sif."""
_CONFIG_OBJECT = "imgkit-config"
"""Name of the JSON object with the configuration whose digest is the image id."""

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
    checks: tuple[Check, ...] = ()
    up_to_date: bool = False
    stages: tuple[Stage, ...] = ()
    log: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What a build runs."""

    context: BuildContext
    definition: Definition
    labels: Mapping[str, str]
    """Those that only a build knows."""
    command: str = ""
    """The runtime's command, with placeholders for temporary names; only `plan` states it."""


def build(request: SifRequest, pack: Pack, report: Reporter) -> BuiltSif:
    """Build the .sif `request.target`, which afterwards is complete and tested, or as it was before.

    Raises
    ------
    UsageError : a definition cannot express the recipe, there is no such base, or the target is no .sif.
    ToolMissing : there is no runtime.
    ToolFailed : a step failed; names the recipe's line, quotes its last lines and names the log.
    CheckFailed : this user cannot build here, the base is damaged, or the result fails its smoke test.
    """
    target, options = request.target.absolute(), request.options
    tool, compression = _find_tools(request)
    # Before anything is fetched or written: an administrator may have to change something first.
    user_rights = rights.require(tool)
    report.stage(f"base {request.base or request.recipe.image.base}")
    base = definition.find_base(request.recipe, name=request.base, base_from=request.base_from, report=report)
    planned = _plan(request, base, pack, report) if base.is_identified else None
    if planned and (result := _up_to_date_result(request, base, planned, tool, compression)):
        return result
    if compression.note:
        report.note(compression.note)
    temporary = tmp_base(target, options.tmpdir)
    definition.check_space(base, target, temporary)
    with workspace(target, temporary) as work, runtime.log_file(target.stem) as log:
        clock = Clock(report)
        job = ConversionJob(
            tool=tool, options=options, compression=compression, work=work, clock=clock, log=log
        )
        base = _place_base(base, job)
        if planned is None:
            # The identity of a compressed archive is known only now.
            planned = _plan(request, base, pack, clock)
            if result := _up_to_date_result(request, base, planned, tool, compression):
                return result
        clock.stage("unpack the context")
        folder = work.folder / "build"
        links = definition.links_script(planned.context.unpack(folder))
        (folder / definition.LOOK).write_text(definition.look_program(), encoding="utf-8")
        # Names of links may have any bytes.
        (folder / definition.LINKS).write_text(links, encoding="utf-8", errors="surrogateescape")
        follower = _run_definition(request, base, planned, job, namespace=user_rights.namespace)
        return _finish(request, base, planned, job, follower)


def plan(request: SifRequest, pack: Pack, report: Reporter) -> BuildPlan:
    """Return what `build` would run; the command has placeholders for temporary names."""
    tool, compression = _find_tools(request)
    base = definition.find_base(request.recipe, name=request.base, base_from=request.base_from, report=report)
    part = files.temporary_name(request.target.absolute(), "TOKEN")
    source = (*_registry_flags(base, tool), f"../{_DEFINITION}")
    argv = (str(tool.path), *runtime_build.arguments(tool, compression, part, source))
    return dataclasses.replace(_plan(request, base, pack, report), command=shlex.join(argv))


def _find_tools(request: SifRequest) -> tuple[RuntimeTool, Compression]:
    """Return the runtime, and how it compresses. Raises UsageError if the target exists and is no .sif."""
    convert.check_target(request.target.absolute(), force=False)
    options = request.options
    tool = runtime.find_runtime(options.runtime, module_hint=options.module_hint)
    zstd_error = mksquashfs.zstd_error(mksquashfs.find())
    compression = conversion.choose_compression(tool.capabilities, options.compression, zstd_error=zstd_error)
    return tool, compression


def _plan(request: SifRequest, base: Start, pack: Pack, report: Reporter) -> BuildPlan:
    report.stage("context")
    context = pack(base.image)
    labels = manifests.labels(
        context.manifest,
        context_sha256=context.sha256,
        created=manifests.time_of_build(),
        locked=context.is_locked,
    )
    text = definition.definition(request.recipe, base, labels)
    return BuildPlan(context=context, definition=text, labels=labels)


def _up_to_date_result(
    request: SifRequest, base: Start, planned: BuildPlan, tool: RuntimeTool, compression: Compression
) -> BuiltSif | None:
    """Return the result without work if the target was built from the same definition, context and base."""

    def is_same(sif: SifImage, record: ImgkitRecord) -> bool:
        if (record.route, record.runtime, record.compression) != (_ROUTE, str(tool), str(compression)):
            return False
        texts = (item for item in sif.descriptors if item.datatype == DataType.DEFFILE)
        old = b"".join(sif_image.data(sif, item) for item in texts).decode("utf-8", "surrogateescape")
        # Of the definition that the runtime has kept, only the time of the build may differ.
        labels = {**planned.labels, manifests.CREATED_LABEL: definition.created(old)}
        return definition.definition(request.recipe, base, labels).text.strip() == old.strip()

    target = request.target.absolute()
    sif = None if request.options.force else sif_image.intact(target, is_same)
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
        up_to_date=True,
    )


def _place_base(base: Start, job: ConversionJob) -> Start:
    """Put a base that is on this machine where the definition expects it, after comparing its digests.

    Raises
    ------
    CheckFailed : it has changed since it was made.
    """
    folder = job.work.folder / "build"
    folder.mkdir()
    if isinstance(base.source, Path):
        job.clock.stage(f"check {base.source.name}")
        sif_image.refuse_damaged(base.source)
        # A link, not a copy: the definition has a fixed name for it, and a base may have many GB.
        (folder / definition.FILE).symlink_to(base.source)
    elif base.source is not None:
        limit = job.options.unpack_limit_bytes
        with entries.opened(base.source, job.work.folder, job.clock, unpack_limit_bytes=limit) as image:
            layout = runtime_build.lay_out(image, job)
        next(job.work.folder.glob("*/oci-layout")).parent.rename(folder / definition.FOLDER)
        if isinstance(base.source, Archive) and not base.is_identified:
            return definition.identified(base, base.source, layout.config, layout.names)
    return base


def _registry_flags(base: Start, tool: RuntimeTool) -> tuple[str, ...]:
    """Return the option that lets the runtime pull from a registry of this machine, which has no TLS."""
    host = base.image.name.split("/", 1)[0].rsplit(":", 1)[0]
    is_local = base.source is None and host in _LOCAL_REGISTRIES
    return ("--no-https",) if is_local and tool.capabilities.no_https else ()


def _run_definition(
    request: SifRequest, base: Start, planned: BuildPlan, job: ConversionJob, *, namespace: bool
) -> Follower:
    tool, file = _tool(job), job.work.folder / _DEFINITION
    files.put(file, planned.definition.text)
    # A failure quotes the log, in which one can then look up the step.
    job.log.write(planned.definition.text)
    follower = Follower(planned.definition, base_line=request.recipe.where("image", "base"), report=job.clock)
    job.clock.stage(f"unpack the base with {tool}")
    source = (*_registry_flags(base, tool), str(file))
    argv = runtime_build.arguments(tool, job.compression, job.work.part, source)
    try:
        job.run(*argv, folder=job.work.folder / "build", on_line=follower.line, namespace=namespace)
    except ToolFailed as error:
        raise follower.failed(error) from error
    if not job.work.part.exists():
        raise ToolFailed(f"{tool} succeeded but wrote no file", hint=f"the full log: {job.log.name}")
    return follower


def _tool(job: ConversionJob) -> RuntimeTool:
    assert job.tool is not None  # noqa: S101 - for the type checker: `build` has found one
    return job.tool


def _finish(
    request: SifRequest, base: Start, planned: BuildPlan, job: ConversionJob, follower: Follower
) -> BuiltSif:
    """Check, describe, test and publish the part file."""
    part, clock, target = job.work.part, job.clock, request.target.absolute()
    clock.stage("check")
    sif = sif_image.structure(part)
    labels = {name: str(value) for name, value in definition.labels(sif).items()}
    check.compare_labels(labels, {name: value for name, value in planned.labels.items() if value}, part)
    record = _write_record(request, part, sif, labels, job)
    manifest = planned.context.manifest
    # What the step inside the base has written into the image's manifest; the comparison expects the same.
    env = manifest.base.env or dict(sorted(follower.env.items()))
    base_image = dataclasses.replace(manifest.base, probe=follower.probe, env=env)
    manifest = dataclasses.replace(manifest, base=base_image)
    results = _smoke_test(part, sif.arch, manifest, job) if request.options.test else ()
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
        checks=tuple(results),
        stages=tuple(clock.stages),
        log=Path(job.log.name),
    )


def _write_record(
    request: SifRequest, part: Path, sif: SifImage, labels: Mapping[str, str], job: ConversionJob
) -> ImgkitRecord:
    """Write the configuration and the record into the part file."""
    # A definition has no layers: the one squashfs stands for them.
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


def _smoke_test(part: Path, arch: str, manifest: Manifest, job: ConversionJob) -> Sequence[Check]:
    tool = _tool(job)
    job.clock.stage("smoke test")
    isolation = runtime.isolation(tool)
    job.clock.note(isolation.description("python3"))
    results = smoke.check(
        lambda argv: runtime.attempt(tool, runtime.exec_arguments(part, argv, isolation)),
        arch=arch,
        manifest=manifest,
    )
    if not checks.passed(results):
        raise CheckFailed(
            "the .sif was built, but its smoke test failed; an older file stays as it is",
            hint="\n".join(checks.table(results)) + "\nto keep it anyway: --no-test",
        )
    return results
