"""Build a recipe to a tested .sif at its final name: the order of the steps."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from imgkit_builder.apptainer import definition as definitions
from imgkit_builder.apptainer import rights, start
from imgkit_builder.apptainer.earlier import earlier
from imgkit_builder.apptainer.finish import finish
from imgkit_builder.apptainer.follow import Follower
from imgkit_builder.apptainer.request import BuildPlan, BuiltSif, Pack, Planned, SifRequest
from imgkit_builder.apptainer.rights import Rights
from imgkit_builder.apptainer.start import SifFile, Start
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.sif import conversion, convert, mksquashfs, runtime, runtime_build
from imgkit_builder.sif.conversion import Archive, Clock, Compression, ConversionJob, Options, Registry
from imgkit_builder.sif.runtime import RuntimeTool
from imgkit_builder.sif.workspace import tmp_base, workspace
from imgkit_entrypoints.errors import ToolFailed

if TYPE_CHECKING:
    from pathlib import Path

    from imgkit_builder.image.context import BuildContext

_DEFINITION = "imgkit.def"


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
    base = start.find(request.recipe, name=request.base, place=request.base_from, report=report)
    planned = _planned(request, base, pack, report) if base.known else None
    if planned and (done := earlier(request, base, planned, tool, packing)):
        return done
    if packing.note:
        report.note(packing.note)
    start.check_space(base, target, tmp_base(target, options.tmpdir))
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
    lacks = mksquashfs.lacks_zstd(mksquashfs.find())
    return conversion.choose_compression(tool.capabilities, options.compression, lacks_zstd=lacks)


def plan(request: SifRequest, pack: Pack, report: Reporter) -> BuildPlan:
    """What `build` would run: the definition and the command, with placeholders for temporary names."""
    options, target = request.options, request.target.absolute()
    convert.check_target(target, force=False)
    tool = runtime.find_runtime(options.runtime, module_hint=options.module_hint)
    packing = _packing(tool, options)
    base = start.find(request.recipe, name=request.base, place=request.base_from, report=report)
    part = files.temporary_name(target, "TOKEN")
    words = runtime_build.build_words(tool, packing, part, (*_flags(base, tool), f"../{_DEFINITION}"))
    planned = _planned(request, base, pack, report)
    return BuildPlan(
        context=planned.context,
        definition=planned.definition.text,
        base=base.image,
        command=shlex.join((str(tool.path), *words)),
    )


def _planned(request: SifRequest, base: Start, pack: Pack, report: Reporter) -> Planned:
    report.stage("context")
    context = pack(base.image)
    fresh = manifests.labels(
        context.manifest,
        context_sha256=context.label_sha256,
        created=manifests.time_of_build(context.source_date_epoch),
        locked=context.source_date_epoch is not None,
    )
    made = definitions.definition(request.recipe, base, fresh)
    return Planned(context=context, definition=made, labels=fresh)


def _brought(base: Start, job: ConversionJob) -> Start:
    """Put a base that is on this machine where the definition expects it, after comparing its digests."""
    folder = job.work.folder / "build"
    folder.mkdir()
    if isinstance(base.source, SifFile):
        job.clock.stage(f"check {base.source.path.name}")
        start.verify(base)
        (folder / start.FILE).symlink_to(base.source.path)
    elif base.bootstrap == "oci":
        assert not isinstance(base.source, Registry)  # noqa: S101 - for the type checker
        laid = runtime_build.lay_out(base.source, job)
        next(job.work.folder.glob("*/oci-layout")).parent.rename(folder / start.FOLDER)
        if isinstance(base.source, Archive) and not base.known:
            return start.identified(base, laid.config, laid.names)
    return base


def _unpack(context: BuildContext, folder: Path) -> None:
    """Write the context's files, and the two that only a build has."""
    script = definitions.links_script(context.unpack(folder))
    (folder / definitions.LOOK).write_text(definitions.look_program(), encoding="utf-8")
    (folder / definitions.LINKS).write_text(script, encoding="utf-8", errors="surrogateescape")


def _flags(base: Start, tool: RuntimeTool) -> tuple[str, ...]:
    """Options of the runtime that this base needs."""
    words = runtime_build.source_words(tool, base.source) if isinstance(base.source, Registry) else ("",)
    return words[:-1]


def _tool(job: ConversionJob) -> RuntimeTool:
    assert job.tool is not None  # noqa: S101 - for the type checker: `build` has found one
    return job.tool


def _run(request: SifRequest, base: Start, planned: Planned, job: ConversionJob, allowed: Rights) -> Follower:
    tool, definition = _tool(job), job.work.folder / _DEFINITION
    files.put(definition, planned.definition.text)
    job.log.write(planned.definition.text)
    follower = Follower(planned.definition, base_at=request.recipe.where("image", "base"), report=job.clock)
    job.clock.stage(f"unpack the base with {tool}")
    words = runtime_build.build_words(
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
