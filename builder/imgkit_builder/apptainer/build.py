"""Build a .sif from a recipe without a container engine (``imgkit build --with apptainer``).

The runtime (Singularity or Apptainer) runs a definition file that is made from the recipe, and writes a
temporary .sif. imgkit adds a configuration and its own record to the .sif, runs the smoke test in it, and
moves it to its final name.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.apptainer import definition, rights
from imgkit_builder.apptainer.definition import DefinitionBase
from imgkit_builder.base import checks, files
from imgkit_builder.base.checks import Check
from imgkit_builder.base.progress import Reporter
from imgkit_builder.image import smoke
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.recipe.model import Recipe
from imgkit_builder.sif import (
    check,
    conversion,
    convert,
    entries,
    mksquashfs,
    objects,
    runtime,
    runtime_build,
)
from imgkit_builder.sif import image as sif_image
from imgkit_builder.sif.conversion import Clock, Compression, ConversionJob, Options, Stage
from imgkit_builder.sif.entries import Archive
from imgkit_builder.sif.image import DataType, ImgkitRecord, SifImage
from imgkit_builder.sif.objects import NewObject
from imgkit_builder.sif.runtime import RuntimeTool
from imgkit_builder.sif.workspace import tmp_base, workspace
from imgkit_entrypoints import __version__
from imgkit_entrypoints.errors import CheckFailed, ToolFailed

if TYPE_CHECKING:
    from imgkit_builder.image.context import BuildContext

# The file name of the definition in the workspace, the folder for temporary files.
_DEFINITION_NAME = "imgkit.def"
# The folder in the workspace with the base and the build context. The runtime starts in this folder.
_BUILD_FOLDER = "build"
_ROUTE = "definition"
"""The value of `route` in the record of a .sif that this module builds."""
_CONFIG_OBJECT = "imgkit-config"
"""The name of the object in a .sif that holds the configuration. Its digest is the image id (ADR 14)."""

Pack = Callable[[BaseImage], "BuildContext"]
"""A function that packs the build context for the given base image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SifRequest:
    """The recipe to build, its base, the file to write, and the options of the conversion."""

    recipe: Recipe
    target: Path
    options: Options
    base: str | None = None
    """The name of a base to use in place of the recipe's. None means the recipe's base."""
    base_from: str | None = None
    """The path of a file or an OCI folder with the base, or ``registry``. None means ``registry``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltSif:
    """A complete .sif at its final path. It has passed its smoke test, unless the test was skipped."""

    path: Path
    size_bytes: int
    arch: str
    base: BaseImage
    record: ImgkitRecord
    labels: Mapping[str, str]
    checks: tuple[Check, ...]
    """The checks of the smoke test. Empty if the test was skipped."""
    stages: tuple[Stage, ...]
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """The build context and the definition of a build."""

    context: BuildContext
    definition: str
    labels: Mapping[str, str]
    """The labels that only a build knows; see `oci.manifest.labels`."""


def build_sif(request: SifRequest, pack: Pack, report: Reporter) -> BuiltSif:
    """Build the .sif `request.target`, test it, and return it.

    If an error is raised, the target is left as it was before.

    Raises
    ------
    UsageError : a definition cannot express the recipe, there is no such base, or the target exists and is
        not a .sif.
    ToolMissing : there is no runtime.
    ToolFailed : a step failed. The error quotes the runtime's last lines and names the log.
    CheckFailed : this user cannot build on this machine, the base is damaged, or the result fails its smoke
        test.
    """
    target = request.target.absolute()
    options = request.options
    convert.check_target(target, force=None)  # None: this command has no option --force
    tool, compression = _find_tools(options)
    # The rights are checked before anything is downloaded or written, because an administrator may have to
    # change a setting first.
    user_rights = rights.inspect_rights()
    if not user_rights.way:
        message = f"{tool} cannot build for this user: {user_rights.problem}"
        raise CheckFailed(message, hint=user_rights.hint)
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
        build_plan = _make_build_plan(request, base, pack, clock)
        _unpack_context(build_plan.context, job)
        _run_definition(build_plan.definition, job, tool, needs_namespace=user_rights.needs_namespace)
        return _finish_sif(request, base, build_plan, job, tool)


def _unpack_context(context: BuildContext, job: ConversionJob) -> None:
    """Unpack the build context into the workspace, and add the two files that imgkit's own steps run."""
    job.clock.stage("unpack the context")
    folder = job.work.folder / _BUILD_FOLDER
    links = definition.make_links_script(context.unpack(folder))
    program = definition.make_inspection_program()
    (folder / definition.INSPECTION_PROGRAM).write_text(program, encoding="utf-8")
    # File names on Linux may contain any bytes. Python reads bytes that are not UTF-8 as surrogates, and this
    # option writes them back unchanged.
    (folder / definition.LINKS_SCRIPT).write_text(links, encoding="utf-8", errors="surrogateescape")


def _run_definition(
    definition_text: str, job: ConversionJob, tool: RuntimeTool, *, needs_namespace: bool
) -> None:
    """Let the runtime `tool` build the new .sif from a definition and the unpacked build context.

    Raise ToolFailed if a step failed, or if the runtime wrote no file.
    """
    work = job.work
    definition_path = work.folder / _DEFINITION_NAME
    files.write_file(definition_path, definition_text)
    # The log begins with the definition, so that a user can look up the step that failed.
    job.log.write(definition_text)
    job.clock.stage(f"build with {tool}")
    argv = runtime_build.build_arguments(tool, job.compression, work.new_file, str(definition_path))
    job.run(*argv, folder=work.folder / _BUILD_FOLDER, namespace=needs_namespace)
    if not work.new_file.exists():
        raise ToolFailed(f"{tool} succeeded but wrote no file", hint=f"the full log: {job.log.name}")


def plan_build(request: SifRequest, pack: Pack, report: Reporter) -> tuple[BuildPlan, str]:
    """Return the plan of `build_sif`, and the command line of the runtime, without building.

    A build writes to a file beside the target whose name contains a random token. The command has the word
    TOKEN in its place.
    """
    target = request.target.absolute()
    convert.check_target(target, force=None)  # None: this command has no option --force
    tool, compression = _find_tools(request.options)
    base = definition.find_base(request.recipe, name=request.base, base_from=request.base_from, report=report)
    new_sif = files.temporary_name(target, "TOKEN")
    # The runtime runs in the folder of the build context. The definition is in the folder above it.
    definition_path = f"../{_DEFINITION_NAME}"
    arguments = runtime_build.build_arguments(tool, compression, new_sif, definition_path)
    build_plan = _make_build_plan(request, base, pack, report)
    return build_plan, shlex.join([str(tool.path), *arguments])


def _find_tools(options: Options) -> tuple[RuntimeTool, Compression]:
    """Return the runtime to use, and the compression of the .sif that it can write.

    Raises
    ------
    ToolMissing : there is no runtime.
    UsageError : zstd was requested and is not possible.
    """
    tool = runtime.find_runtime(options.runtime, module_hint=options.module_hint)
    # A sentence for the user, or "" if mksquashfs can compress with zstd.
    zstd_error = mksquashfs.zstd_error(mksquashfs.find_any())
    compression = conversion.choose_compression(tool.capabilities, options.compression, zstd_error=zstd_error)
    return tool, compression


def _make_build_plan(request: SifRequest, base: DefinitionBase, pack: Pack, report: Reporter) -> BuildPlan:
    """Pack the build context with `pack`, and render the definition for the given base.

    The build context is the files that the build gets. The definition is the build script of the runtime.
    """
    report.stage("context")
    context = pack(base.image)
    labels = manifests.labels(
        context.manifest,
        context_sha256=context.sha256,
        created=manifests.time_of_build(),
        locked=context.is_locked,
    )
    definition_text = definition.render_definition(request.recipe, base, labels)
    return BuildPlan(context=context, definition=definition_text, labels=labels)


def _place_base(base: DefinitionBase, job: ConversionJob) -> DefinitionBase:
    """Check a base that is a file on this machine, and put it where the definition expects it.

    A .sif is linked, and an archive or OCI folder is unpacked to an OCI folder. Unpacking an archive reads
    its name and id, so the base is returned with these values. A base in a registry is returned unchanged,
    because the runtime pulls it.

    Raises
    ------
    CheckFailed : the content of the base does not match its digests, or an archive is for another platform.
    """
    folder = job.work.folder / _BUILD_FOLDER
    folder.mkdir()
    source = base.source
    if source is None:  # a base in a registry
        return base
    if isinstance(source, Path):  # a .sif
        job.clock.stage(f"check {source.name}")
        sif_image.refuse_damaged(source)
        # The base is linked and not copied, because it may have many GB.
        (folder / definition.SIF_NAME).symlink_to(source)
        return base
    limit = job.options.unpack_limit_bytes
    with entries.open_source(source, job.work.folder, job.clock, unpack_limit_bytes=limit) as image:
        layout = runtime_build.write_oci_folder(image, job)
    # Both folders are in the same temporary folder, so nothing is copied.
    layout.folder.rename(folder / definition.LAYOUT_NAME)
    if not isinstance(source, Archive):  # the image in an OCI folder was identified before the build
        return base
    # A compressed archive could not be identified before: its platform is known and checked only now.
    return definition.identify_base(source, layout.config, layout.names)


def _finish_sif(
    request: SifRequest, base: DefinitionBase, planned: BuildPlan, job: ConversionJob, tool: RuntimeTool
) -> BuiltSif:
    """Complete the .sif that the runtime has built, and move it to the target.

    The file is checked and gets imgkit's record. Then it must pass the smoke test, unless the test is
    switched off. If it fails, the target is left as it was.

    Parameters
    ----------
    job : the running build, with its temporary folder (`work`), its log and the clock that times its stages.

    Raises
    ------
    CheckFailed : the file is damaged, lacks labels, or fails its smoke test.
    """
    new_sif = job.work.new_file
    clock = job.clock
    target = request.target.absolute()
    clock.stage("check")
    sif = sif_image.check_structure(new_sif)
    labels = {name: str(value) for name, value in (check.read_labels(sif) or {}).items()}
    # Empty labels only replace those of the base, and are not compared.
    expected_labels = {name: value for name, value in planned.labels.items() if value}
    check.compare_labels(labels, expected_labels, new_sif)
    record = _write_record(request, new_sif, sif, labels, job)
    test_results = _run_smoke_test(new_sif, sif.arch, job, tool) if request.options.test else ()
    # The target appears only now, under its name and complete.
    clock.stage("make durable")
    files.publish_file(new_sif, target)
    clock.finish()  # before its stages are read
    return BuiltSif(
        path=target,
        size_bytes=target.stat().st_size,
        arch=sif.arch,
        base=base.image,
        record=record,
        labels=labels,
        checks=test_results,
        stages=tuple(clock.stages),
        log=Path(job.log.name),
    )


def _write_record(
    request: SifRequest, new_sif: Path, sif: SifImage, labels: Mapping[str, str], job: ConversionJob
) -> ImgkitRecord:
    """Add two objects to the .sif `new_sif`: a configuration and imgkit's record. Return the record.

    The digest of the configuration becomes the id of the image. The record says how the .sif was made, and
    has the digest of its files, with which ``imgkit verify`` compares them.
    """
    # A definition does not make layers, and there is no configuration of an engine. So imgkit writes a
    # configuration in the OCI format, with the root partition as its only layer (ADR 14).
    root_sha256 = sif_image.root_sha256(new_sif, advance=job.clock.advance)
    diff_id = f"sha256:{root_sha256}"
    config = {
        "architecture": sif.arch,
        "os": "linux",
        "created": labels.get(manifests.CREATED_LABEL, ""),
        "config": {"Labels": dict(sorted(labels.items()))},
        "rootfs": {"type": "squashfs", "diff_ids": [diff_id]},
    }
    config_json = json.dumps(config, indent=1, sort_keys=True).encode()
    # Objects of the same group belong to the same image in the .sif.
    group = sif.require_root().group
    objects.add_object(
        new_sif, NewObject(datatype=DataType.JSON, name=_CONFIG_OBJECT, group=group, data=config_json)
    )
    record = ImgkitRecord(
        image_id=f"sha256:{hashlib.sha256(config_json).hexdigest()}",
        diff_ids=(diff_id,),
        root_sha256=root_sha256,
        runtime=str(job.tool),
        compression=str(job.compression),
        route=_ROUTE,
        imgkit=__version__,
        source=request.recipe.name,
    )
    objects.put_record(new_sif, record)
    return record


def _run_smoke_test(new_sif: Path, arch: str, job: ConversionJob, tool: RuntimeTool) -> tuple[Check, ...]:
    """Run the smoke test in `new_sif`, and return its checks.

    Raises
    ------
    CheckFailed : a check failed.
    """
    job.clock.stage("smoke test")
    isolation = runtime.choose_isolation(tool)
    job.clock.note(isolation.description("python3"))
    test_results = smoke.check_image(
        lambda argv: runtime.attempt(tool, runtime.exec_arguments(new_sif, argv, isolation)),
        arch=arch,
        manifest=None,  # the versions are compared with the manifest in the image itself
    )
    if not checks.passed(test_results):
        raise CheckFailed(
            "the .sif was built, but its smoke test failed; an older file stays as it is",
            hint="\n".join(checks.table(test_results)) + "\nto keep it anyway: --no-test",
        )
    return test_results
