"""Submit jobs that create an image file on a node, to this machine's scheduler.

Such a job runs ``imgkit sif`` or ``imgkit build`` in the queue that the recipe sets under ``queue.sif``.
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from imgkit_builder.apptainer.definition import REGISTRY
from imgkit_builder.base import flags, process
from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.suffixes import RECIPE_SUFFIXES
from imgkit_builder.jobs import image_source, runtimes, systems
from imgkit_builder.jobs import submit as submission
from imgkit_builder.jobs.job import Argv, Job
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.request import JobRequest, SubmitRequest
from imgkit_builder.jobs.resolve import resolve_conversion
from imgkit_builder.jobs.submitted import SubmittedJob
from imgkit_builder.jobs.transport import Transport
from imgkit_builder.recipe import targets
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.targets import Target
from imgkit_builder.sif.conversion import Options
from imgkit_builder.workflow.build_request import SifBuildRequest
from imgkit_builder.workflow.convert import refuse_format
from imgkit_builder.workflow.names import name_stem
from imgkit_entrypoints.errors import UsageError

_OPTIONS = Options()
_BUILD = SifBuildRequest()


def prepare_conversion(
    archive: str | Path,
    request: SubmitRequest,
    output: Path | None = None,
    options: Options = _OPTIONS,
    *,
    verbose: bool = False,
) -> PreparedJob:
    """Return the job that converts `archive` to a .sif or .sqsh on a node. Nothing is written or run.

    The command of the job is ``imgkit sif``.

    Parameters
    ----------
    archive : an archive or an OCI folder, on a file system that the nodes share.
    output : the file to write. The default is NAME.sif or NAME.sqsh in the job's folder.
    options : how the image is packed. The compression ``auto`` is replaced by the one that the recipe's
        system sets.
    verbose : whether the command of the job gets ``--verbose``.

    Raises
    ------
    UsageError : no system with a queue for the job is named anywhere, or a value is not valid.
    """
    refuse_format(output, options)
    archive = Path(archive)
    recipe = _load_archive_recipe(archive, request)
    runtime = recipe.system.runtime
    image = request.directory.absolute() / (output or f"{name_stem(str(archive))}.{options.format}")
    if options.compression == "auto":
        options = dataclasses.replace(options, compression=runtime.compression)
    arguments = _packing_arguments(image, options)
    if verbose:
        arguments += ("--verbose",)
    command = ("imgkit", "sif", str(archive.absolute()), "-o", str(image), *arguments)
    warning = ""
    # Jobs of the recipe could not start a .sif if their runtime takes only a .sqsh, as pyxis does.
    if options.format == "sif" and runtimes.get_runtime(runtime.kind).image_suffix == ".sqsh":
        warning = f"{recipe.title} starts images by {runtime.kind}, which takes no .sif: --format sqsh"
    return _prepare_job(recipe, request, image, command, warning=warning)


def _packing_arguments(image: Path, options: Options) -> Argv:
    """Return the arguments of ``imgkit sif`` for `options`, such as ``("--compression", "zstd")``.

    The format is left out if the suffix of `image` implies it.
    """
    arguments = flags.option_arguments(Options, options)
    if image.suffix != f".{options.format}":
        arguments += ("--format", options.format)
    if options.unpack_limit_bytes is not None:
        arguments += ("--unpack-limit", str(options.unpack_limit_bytes / 1e9))  # the unit of the flag is GB
    return arguments


def prepare_build(
    recipe: str | Path,
    request: SubmitRequest,
    build: SifBuildRequest = _BUILD,
    *,
    verbose: bool = False,
) -> PreparedJob:
    """Return the job that builds the image of `recipe` as a .sif on a node. Nothing is written or run.

    The command of the job is ``imgkit build --with apptainer``.

    Parameters
    ----------
    recipe : a shipped name or a recipe's file. Its system takes the job, unless `request` names another
        system.
    build : the flags of ``imgkit build`` that are passed on to the job's command.
    verbose : whether the command of the job gets ``--verbose``.

    Raises
    ------
    UsageError : the system has no queue for the job or cannot start a .sif, or a value is not valid.
    """
    target = targets.load_target(request.system or recipe)
    kind = target.system.runtime.kind
    if runtimes.get_runtime(kind).image_suffix not in ("", ".sif"):
        raise UsageError(
            f"the job builds a .sif, and {kind} starts none",
            where="--submit",
            hint="build it with an engine elsewhere, and here: imgkit sif ARCHIVE --format sqsh --submit",
        )
    image = request.directory.absolute() / (build.output or f"{Path(recipe).stem}.sif")
    command = _build_command(recipe, build, image, verbose=verbose)
    return _prepare_job(target, request, image, command)


def _build_command(recipe: str | Path, build: SifBuildRequest, image: Path, *, verbose: bool) -> Argv:
    """Return the command ``imgkit build`` that writes the image of `recipe` to the file `image`."""
    file = Path(recipe)
    source = str(recipe)
    if file.suffix in RECIPE_SUFFIXES:  # any other text is the name of a recipe, and must stay as it is
        source = str(file.absolute())
    # The output is left out, because the command below names it by its absolute path.
    arguments = flags.option_arguments(SifBuildRequest, dataclasses.replace(build, output=None))
    if verbose:
        arguments += ("--verbose",)
    return ("imgkit", "build", source, "--with", "apptainer", *arguments, "-o", str(image))


def submit_conversion(prepared: PreparedJob, report: Reporter) -> SubmittedJob:
    """Submit a job of `prepare_conversion` or `prepare_build` on this machine, and return its saved record.

    Raises
    ------
    UsageError : this machine does not have the job's folder, or the files from which the image is created.
    ToolMissing : the scheduler's command is not on PATH.
    ToolFailed : the scheduler refused the job. The error quotes the scheduler's message.
    """
    job = prepared.job
    _refuse_missing_files(job)
    for warning in job.warnings:
        report.note(warning)
    hint = f"submit it on a login node of the system, or run it here: {shlex.join(job.command)}"
    process.require_program(prepared.script.submit[0], hint)
    return submission.start_job(prepared, Transport(), report)


def _prepare_job(
    recipe: Target, request: SubmitRequest, image: Path, command: Argv, *, warning: str = ""
) -> PreparedJob:
    """Return the job that creates `image` by `command` on the system of `recipe`, with its script."""
    request_fields = dataclasses.asdict(request)  # by the names of the fields
    del request_fields["system"]  # a JobRequest has no such field: `recipe` determines the system
    job = resolve_conversion(recipe, JobRequest.of(**request_fields, command=command), image)
    job = job.with_warning(warning)
    return PreparedJob(job=job, script=systems.get_system(job.system).conversion_script(job))


def _load_archive_recipe(archive: Path, request: SubmitRequest) -> Target:
    """Return the recipe whose system takes the job that converts `archive`.

    ``--system`` names the recipe. Otherwise it is the recipe with which imgkit built the image in the
    archive.

    Raises
    ------
    UsageError : there is no such archive or recipe, or no system is named anywhere.
    """
    if str(archive) == "-":  # "-" means the image on standard input
        hint = "a job has no standard input: save the image as an archive first"
        raise UsageError("--submit cannot be combined with -", where="--submit", hint=hint)
    if request.system:
        return targets.load_target(request.system)
    _refuse_missing_archive(archive)
    recipe = image_source.archive_target(archive)
    if recipe is None:
        hint = "name the recipe of a cluster: --system RECIPE"
        raise UsageError("no file beside this archive names its system", where=str(archive), hint=hint)
    return recipe


def _refuse_missing_files(job: Job) -> None:
    """Raise UsageError if the job's folder, or a file from which the job creates an image, is missing.

    These files are an archive, or a recipe and the base image of ``--base-from``. The nodes share the file
    system of this machine, so the job would fail as well.
    """
    if not job.directory.is_dir():
        raise UsageError(f"no folder {job.directory}", where="--directory")
    # "imgkit sif ARCHIVE ..." or "imgkit build RECIPE ..."
    _, verb, source, *arguments = job.command
    if verb == "sif":
        _refuse_missing_archive(Path(source))
        return
    load(source)  # raises an error if there is no such recipe
    if "--base-from" not in arguments:
        return
    base = arguments[arguments.index("--base-from") + 1]
    if base != REGISTRY and not (job.directory / base).exists():
        hint = "an archive or a .sif of the base where the nodes see it"
        raise UsageError(f"no file {job.directory / base}", where="--base-from", hint=hint)


def _refuse_missing_archive(archive: Path) -> None:
    """Raise UsageError if `archive` is neither a file nor an OCI folder."""
    if not archive.is_file() and not (archive / "oci-layout").is_file():
        hint = "a job converts an archive (imgkit save makes one) or an OCI folder"
        raise UsageError(f"no file {archive}", where="--submit", hint=hint)
