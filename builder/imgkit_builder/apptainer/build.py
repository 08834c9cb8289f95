"""Build a recipe without an engine to a tested .sif at its final name.

The runtime runs the rendered definition. Record, configuration and smoke test then complete the file.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.apptainer import definition, rights
from imgkit_builder.apptainer.definition import Start
from imgkit_builder.base import checks, files
from imgkit_builder.base.checks import Check
from imgkit_builder.base.progress import Reporter
from imgkit_builder.image import smoke
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.recipe.model import Recipe
from imgkit_builder.sif import check, conversion, convert, entries, frame, mksquashfs, runtime, runtime_build
from imgkit_builder.sif import image as sif_image
from imgkit_builder.sif.conversion import Clock, Compression, ConversionJob, Options, Stage
from imgkit_builder.sif.entries import Archive
from imgkit_builder.sif.frame import NewObject
from imgkit_builder.sif.image import DataType, ImgkitRecord, SifImage
from imgkit_builder.sif.runtime import RuntimeTool
from imgkit_builder.sif.workspace import tmp_base, workspace
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import CheckFailed, ToolFailed

if TYPE_CHECKING:
    from imgkit_builder.image.context import BuildContext

_DEFINITION = "imgkit.def"
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
    checks: tuple[Check, ...]
    stages: tuple[Stage, ...]
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What a build runs."""

    context: BuildContext
    definition: str
    labels: Mapping[str, str]
    """Those that only a build knows."""


def build_sif(request: SifRequest, pack: Pack, report: Reporter) -> BuiltSif:
    """Build the .sif `request.target`, which afterwards is complete and tested, or as it was before.

    Raises
    ------
    UsageError : a definition cannot express the recipe, there is no such base, or the target is no .sif.
    ToolMissing : there is no runtime.
    ToolFailed : a step failed; quotes the runtime's last lines and names the log.
    CheckFailed : this user cannot build here, the base is damaged, or the result fails its smoke test.
    """
    target, options = request.target.absolute(), request.options
    tool, compression = _find_tools(request)
    # Before anything is fetched or written: an administrator may have to change something first.
    user_rights = rights.require_rights(tool)
    report.stage(f"base {request.base or request.recipe.image.base}")
    base = definition.find_base(request.recipe, name=request.base, base_from=request.base_from, report=report)
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
        planned = _plan_build(request, base, pack, clock)
        clock.stage("unpack the context")
        folder = work.folder / "build"
        links = definition.links_script(planned.context.unpack(folder))
        (folder / definition.LOOK).write_text(definition.look_program(), encoding="utf-8")
        # Names of links may have any bytes.
        (folder / definition.LINKS).write_text(links, encoding="utf-8", errors="surrogateescape")
        _run_definition(planned.definition, job, tool, namespace=user_rights.namespace)
        return _finish_sif(request, base, planned, job, tool)


def plan_build(request: SifRequest, pack: Pack, report: Reporter) -> tuple[BuildPlan, str]:
    """Return what `build_sif` would run, and the runtime's command with placeholders for temporary names."""
    tool, compression = _find_tools(request)
    base = definition.find_base(request.recipe, name=request.base, base_from=request.base_from, report=report)
    part = files.temporary_name(request.target.absolute(), "TOKEN")
    argv = (str(tool.path), *runtime_build.build_arguments(tool, compression, part, f"../{_DEFINITION}"))
    return _plan_build(request, base, pack, report), shlex.join(argv)


def _find_tools(request: SifRequest) -> tuple[RuntimeTool, Compression]:
    """Return the runtime, and how it compresses. Raises UsageError if the target exists and is no .sif."""
    convert.check_target(request.target.absolute(), force=False)
    options = request.options
    tool = runtime.find_runtime(options.runtime, module_hint=options.module_hint)
    zstd_error = mksquashfs.zstd_error(mksquashfs.find_any())
    compression = conversion.choose_compression(tool.capabilities, options.compression, zstd_error=zstd_error)
    return tool, compression


def _plan_build(request: SifRequest, base: Start, pack: Pack, report: Reporter) -> BuildPlan:
    report.stage("context")
    context = pack(base.image)
    labels = manifests.labels(
        context.manifest,
        context_sha256=context.sha256,
        created=manifests.time_of_build(),
        locked=context.is_locked,
    )
    text = definition.render_definition(request.recipe, base, labels)
    return BuildPlan(context=context, definition=text, labels=labels)


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
        with entries.open_source(base.source, job.work.folder, job.clock, unpack_limit_bytes=limit) as image:
            layout = runtime_build.write_oci_folder(image, job)
        next(job.work.folder.glob("*/oci-layout")).parent.rename(folder / definition.FOLDER)
        if isinstance(base.source, Archive):
            return definition.identify_base(base.source, layout.config, layout.names)
    return base


def _run_definition(text: str, job: ConversionJob, tool: RuntimeTool, *, namespace: bool) -> None:
    file = job.work.folder / _DEFINITION
    files.write_file(file, text)
    # A failure quotes the log, in which one can then look up the step.
    job.log.write(text)
    job.clock.stage(f"build with {tool}")
    argv = runtime_build.build_arguments(tool, job.compression, job.work.part, str(file))
    job.run(*argv, folder=job.work.folder / "build", namespace=namespace)
    if not job.work.part.exists():
        raise ToolFailed(f"{tool} succeeded but wrote no file", hint=f"the full log: {job.log.name}")


def _finish_sif(
    request: SifRequest, base: Start, planned: BuildPlan, job: ConversionJob, tool: RuntimeTool
) -> BuiltSif:
    """Check, describe, test and publish the part file."""
    part, clock, target = job.work.part, job.clock, request.target.absolute()
    clock.stage("check")
    sif = sif_image.check_structure(part)
    labels = {name: str(value) for name, value in (check.stated_labels(sif) or {}).items()}
    check.compare_labels(labels, {name: value for name, value in planned.labels.items() if value}, part)
    record = _write_record(request, part, sif, labels, job)
    results = _smoke_test(part, sif.arch, job, tool) if request.options.test else ()
    clock.stage("make durable")
    files.publish_file(part, target)
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
    frame.add_object(part, NewObject(datatype=DataType.JSON, name=_CONFIG_OBJECT, group=group, data=raw))
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


def _smoke_test(part: Path, arch: str, job: ConversionJob, tool: RuntimeTool) -> Sequence[Check]:
    job.clock.stage("smoke test")
    isolation = runtime.isolation(tool)
    job.clock.note(isolation.description("python3"))
    results = smoke.check_image(
        lambda argv: runtime.attempt(tool, runtime.exec_arguments(part, argv, isolation)),
        arch=arch,
        manifest=None,
    )
    if not checks.passed(results):
        raise CheckFailed(
            "the .sif was built, but its smoke test failed; an older file stays as it is",
            hint="\n".join(checks.table(results)) + "\nto keep it anyway: --no-test",
        )
    return results
