"""Run an image on a remote: build where needed, send the least that has to move, and submit."""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.base.progress import Reporter
from imgkit_builder.workflow.names import RECIPE_SUFFIXES, stem
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError

if TYPE_CHECKING:
    from imgkit_builder.delta.descriptor import Delta, Stack
    from imgkit_builder.job.code import CodeFolder
    from imgkit_builder.job.request import CodeRecord, Job, Request, Script, SubmittedJob
    from imgkit_builder.project.toml_file import ProjectFile
    from imgkit_builder.recipe.targets import Target
    from imgkit_builder.remote.connection import Connection
    from imgkit_builder.remote.store import Store

_WORTH = 0.5
"""A delta of more than this share of the .sif below it is not worth two files at every start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run on a remote, before anything is built or moved."""

    word: str
    """The word for what runs: the user's, that of imgkit.toml, or the remote's."""
    target: Target
    recipe: str
    """The user's word for the recipe; empty for an archive or a .sif."""
    sif: Path
    """The .sif here, which may have to be made."""
    request: Request
    archive: Path | None = None
    """The archive or OCI folder; None for a recipe or a .sif."""
    far_image: str = ""
    """Path of an image that is on the remote already; then nothing is built or sent."""
    foreign: bool = False
    """Whether imgkit did not build the image of `sif`."""

    home: str = "/imgkit"
    """The folder on the remote, or what stands for it before imgkit has looked there."""

    @property
    def early(self) -> Job:
        """The job, as far as it is known before imgkit has looked at the remote."""
        return self.resolved(self.home, self.far_image or "image.sif")

    def resolved(self, home: str, image: str) -> Job:
        """The job with the remote's folder and the path of the .sif, which may be in it."""
        from imgkit_builder.job.resolve import resolve

        request = dataclasses.replace(self.request, directory=Path(home), image=str(Path(home, image)))
        job = resolve(self.target, request)
        if job.recipe.system.queue.output == "joined":
            return job
        queue = dataclasses.replace(job.recipe.system.queue, output="joined")
        system = dataclasses.replace(job.recipe.system, queue=queue)
        recipe = dataclasses.replace(job.recipe, system=system)
        told = f"{recipe.where('system', 'queue', 'output')}: imgkit follows one file of a remote job: joined"
        return dataclasses.replace(job, recipe=recipe, warnings=(*job.warnings, told))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJob:
    """A job that was submitted on a remote."""

    record: SubmittedJob
    job: Job
    home: str
    """imgkit's folder there."""


def plan(recipe: str, given: Request, project: ProjectFile | None, default: str) -> RunPlan:
    """Decide what runs: `recipe`, or that of imgkit.toml, or the remote's `default`.

    Raises
    ------
    UsageError : none of them names a recipe, there is no such recipe, or no .sif runs on its system.
    """
    from imgkit_builder.remote import jobs

    planned = _chosen(recipe, given, project, default)
    jobs.refuse_runtime(planned.target, planned.request)
    return planned


def _chosen(recipe: str, given: Request, project: ProjectFile | None, default: str) -> RunPlan:
    from imgkit_builder.job import baked, bound
    from imgkit_builder.project import origins
    from imgkit_builder.recipe import targets
    from imgkit_builder.sif import image, sqsh

    word = recipe or (project.recipe if project else "") or default
    request = dataclasses.replace(origins.under(given, project), directory=given.directory)
    if not word:
        raise UsageError(
            "no recipe given, and the remote has no default recipe",
            where="RECIPE",
            hint="imgkit run RECIPE --on NAME ...",
        )
    file = Path(word)
    if request.image:
        return _far(word, request)
    if image.is_sif(file):
        foreign = not bound.has_manifest(file)
        target = _system_of(file, default) if foreign else baked.target(file)
        return RunPlan(word=word, target=target, recipe="", sif=file, request=request, foreign=foreign)
    if sqsh.is_sqsh(file):
        raise UsageError(
            "imgkit run sends a .sif, and this is a .sqsh",
            where=word,
            hint="name the recipe or the archive; or copy the file there (rsync -P), and: --image PATH",
        )
    folder = project.file.parent if project and project.recipe and not recipe else Path()
    sif = folder / f"{stem(word)}.sif"
    if Path(file, "oci-layout").exists() or (file.is_file() and file.suffix not in RECIPE_SUFFIXES):
        target = _target_of(file, default)
        return RunPlan(word=word, target=target, recipe="", sif=sif, request=request, archive=file)
    return RunPlan(word=word, target=targets.find(word), recipe=word, sif=sif, request=request)


def _far(word: str, request: Request) -> RunPlan:
    """The run of the image ``--image`` that is on the remote, on the system of the recipe `word`."""
    from imgkit_builder.recipe import targets
    from imgkit_builder.sif import image

    if not re.fullmatch(r"/[^\x00-\x1f\x7f:,]*", request.image):
        raise UsageError(
            f"{request.image!r} is not a path on the remote",
            where="--image",
            hint="the absolute path of an image there; for one that is here: imgkit run X.sif",
        )
    if image.is_sif(Path(word)):
        raise UsageError(
            f"--image cannot be combined with {word}", where="--image", hint="name a recipe, or use only one"
        )
    target = targets.find(word)
    return RunPlan(word=word, target=target, recipe="", sif=Path(), request=request, far_image=request.image)


def _target_of(archive: Path, default: str) -> Target:
    """The recipe's name and system that imgkit wrote beside the archive, or else the remote's `default`."""
    from imgkit_builder.archive import sidecar
    from imgkit_builder.recipe import targets

    described = None if archive.is_dir() else sidecar.read(archive)
    if described is not None and described.system is not None and described.manifest is not None:
        made, platforms = described.manifest, (described.image.platform,)
        return targets.checked(
            targets.Target(
                name=made.recipe,
                system=described.system,
                platforms=platforms,
                file=archive,
                projects=made.projects,
                workdir=made.workdir,
                base=made.base.name,
                base_env=tuple(made.base.env),
            )
        )
    return _system_of(archive, default)


def _system_of(file: Path, default: str) -> Target:
    """The remote's recipe `default`, for a file that does not name its system."""
    from imgkit_builder.recipe import targets

    if default:
        return targets.find(default)
    raise UsageError(
        "neither this file nor the remote names its system",
        where=str(file),
        hint="a remote with a recipe: imgkit remote add NAME USER@HOST:DIR --recipe RECIPE --replace",
    )


def check(planned: RunPlan) -> Script:
    """The script of the job, if a scheduler takes it over ssh.

    Raises
    ------
    UsageError : nothing there queues it, or a variable that it passes on is not set here.
    """
    from imgkit_builder.job import submit, systems
    from imgkit_builder.remote import jobs

    early = planned.early
    script = systems.named(early.system).script(early)
    jobs.refuse_script(early, script)
    submit.check_environment(early)
    return script


def run(
    planned: RunPlan,
    far: Connection,
    *,
    base: str | None,
    whole: bool,
    most_per_s: float | None,
    code: CodeFolder | None,
    report: Reporter,
) -> RemoteJob:
    """Bring the image to the remote, and submit the job.

    Parameters
    ----------
    base : another base than the recipe's.
    whole : send no delta.
    most_per_s : most bytes per second to send.
    code : a folder to lay over the image.

    Raises
    ------
    UsageError : as `check`; or the remote has no such scheduler, or imgkit did not make the .sif.
    ImgkitError : as of the build, the conversion, the transfer and the submission.
    """
    from imgkit_builder.job import bound, systems
    from imgkit_builder.remote import jobs

    if base and planned.far_image:
        raise UsageError(
            "--base cannot be combined with --image", where="--base", hint="nothing is built: leave it out"
        )
    request = _SendRequest(
        recipe=planned.recipe,
        base=base,
        sif=planned.sif,
        whole=whole,
        most_per_s=most_per_s,
        code=code,
        archive=planned.archive,
        far_image=planned.far_image,
    )
    sent = _bring(request, far, check(planned).submit[0], report)
    report.stage(f"submit to {far.remote.name}")
    job = sent.over(planned.resolved(sent.home, sent.image))
    if planned.far_image or planned.foreign or job.request.python or job.request.activate:
        job = bound.bind(job, lambda words: jobs.finished(far, words))
        jobs.send_entry_points(far, job)
    record = jobs.submit(far, job, systems.named(job.system).script(job))
    record = dataclasses.replace(record, image_id="" if planned.foreign else sent.image_id)
    return RemoteJob(record=record, job=job, home=sent.home)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SendRequest:
    """The image that the remote must have."""

    recipe: str
    """The user's word for its recipe; empty for an archive or a .sif."""
    base: str | None
    """Another base than the recipe's."""
    sif: Path
    """The .sif here, which may have to be made."""
    whole: bool
    """Send no delta."""
    most_per_s: float | None
    """Most bytes per second to send."""
    code: CodeFolder | None = None
    """A folder to lay over the image."""
    archive: Path | None = None
    """The archive or OCI folder of the image; None for a recipe or a .sif."""
    far_image: str = ""
    """Path of an image that is there already; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentImage:
    """The image on the remote."""

    home: str
    """imgkit's folder there."""
    image: str
    """Path of the .sif in it, or of an image elsewhere."""
    overlay: str = ""
    """Path of the delta over it; empty if there is none."""
    delta: Delta | None = None
    code: CodeRecord | None = None
    code_files: tuple[str, ...] = ()
    """Paths of the deltas of the code, lowest first."""

    @property
    def image_id(self) -> str:
        """The id of the image with its delta, which is in the name of its file; empty for others."""
        if Path(self.image).is_absolute():
            return ""
        return self.delta.image_id if self.delta else f"sha256:{Path(self.image).name.partition('-')[0]}"

    def over(self, job: Job) -> Job:
        """`job`, which has been resolved with the .sif alone, with the delta and the code over it."""
        from imgkit_builder.job import container

        if self.delta:
            job = container.laid_over(job, f"{self.home}/{self.overlay}", self.delta)
        if self.code:
            job = container.with_code(job, self.code, [f"{self.home}/{file}" for file in self.code_files])
        return job


def _bring(request: _SendRequest, far: Connection, program: str, report: Reporter) -> _SentImage:
    """Let the remote have the image: nothing, a delta or the .sif is sent, and then the code.

    Parameters
    ----------
    program : the program of the scheduler, which must be there.

    Raises
    ------
    UsageError : the remote has no such program, or imgkit did not make the .sif.
    ImgkitError : as of the build, the conversion and the transfer.
    """
    from imgkit_builder.remote import store

    name = image_id = ""
    if request.far_image:
        pass
    elif request.archive:
        name = _converted_archive(request, request.archive, far.remote.name, report)
        image_id = f"sha256:{name.partition('-')[0]}"
    elif request.recipe:
        image_id = _built(request, report)
    else:
        image_id, name = _identity(request.sif)
    report.stage(f"look at {far.remote.name}")
    there = store.look(far, image_id=image_id, program=program, wanted=name)
    if not there.has_program:
        raise UsageError(
            f"{far.remote.address} has no {program}",
            where="--on",
            hint=f"imgkit remote check {far.remote.name}",
        )
    if request.far_image:
        sent = _SentImage(home=there.home, image=request.far_image)
    else:
        sent = _image(request, far, there, image_id, name, report)
    if request.code is None:
        return sent
    files = _code(request, request.code, far, there, report)
    return dataclasses.replace(sent, code=request.code.record, code_files=files)


def _identity(sif: Path) -> tuple[str, str]:
    """The image id of the .sif and its name in the store; without a record, its digest stands for both."""
    from imgkit_builder.sif import image

    record = image.read(sif).record
    if record is not None:
        return record.image_id, image.store_name(record)
    digest = image.root_sha256(sif)
    return f"sha256:{digest}", f"{digest}-{digest[:12]}.sif"


def _image(
    request: _SendRequest, far: Connection, there: Store, image_id: str, name: str, report: Reporter
) -> _SentImage:
    """Send the image if the remote lacks it; `name` is that of a .sif in the store."""
    if sent := _present(there, whole=request.whole):
        report.note(f"to send: nothing; {far.remote.name} has the image")
        return sent
    if (
        request.recipe
        and not name
        and not request.whole
        and (sent := _by_delta(request, far, there, image_id, report))
    ):
        return sent
    if request.recipe and not name:
        name = _converted(request, report)
    _send(request, far, there, request.sif, f"images/{name}", report)
    return _SentImage(home=there.home, image=f"images/{name}")


def _code(
    request: _SendRequest, code: CodeFolder, far: Connection, there: Store, report: Reporter
) -> tuple[str, ...]:
    """Upload what the remote lacks of the code; the result is the paths of its deltas, lowest first."""
    from imgkit_builder.remote import code as far_code
    from imgkit_builder.sif.conversion import Options

    with far_code.plan(code, there, Options(), report) as plan:
        if plan.file is None:
            report.note(f"to send: no code; {far.remote.name} has that of {code.folder}")
        else:
            _send(request, far, there, plan.file, plan.targets[-1], report)
    return plan.targets


def _present(there: Store, *, whole: bool) -> _SentImage | None:
    """The image as the remote has it; None if it does not."""
    for name in there.images:
        return _SentImage(home=there.home, image=f"images/{name}")
    for held in () if whole else there.deltas:
        overlay = f"deltas/{held.name}"
        return _SentImage(home=there.home, image=f"images/{held.base}", overlay=overlay, delta=held.delta)
    return None


def _send(
    request: _SendRequest, far: Connection, there: Store, file: Path, target: str, report: Reporter
) -> None:
    from imgkit_builder.remote import transfer

    size = file.stat().st_size
    shown = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    report.note(f"to send: {file}, {shown}")
    transfer.upload(far, file, home=there.home, target=target, report=report, most_per_s=request.most_per_s)


def _built(request: _SendRequest, report: Reporter) -> str:
    """Return the id of the recipe's image after a build."""
    from imgkit_builder.workflow.build import BuildRequest, build

    return build(request.recipe, BuildRequest(base=request.base), report=report).id


def _converted(request: _SendRequest, report: Reporter) -> str:
    """Make the .sif here; the result is its name in the store."""
    from imgkit_builder.sif import convert, image
    from imgkit_builder.sif.conversion import Options
    from imgkit_builder.workflow.convert import compression_for, engine_image
    from imgkit_builder.workflow.names import system_of

    with engine_image(request.recipe) as source:
        options = Options(compression=compression_for(system_of(request.recipe)))
        return image.store_name(convert.convert(source, request.sif, options, report).record)


def _converted_archive(request: _SendRequest, archive: Path, remote: str, report: Reporter) -> str:
    """Make the .sif of the archive here; the result is its name in the store."""
    from imgkit_builder.sif import image
    from imgkit_builder.workflow.convert import convert

    try:
        done = convert(archive, request.sif, report=report)
    except ToolMissing as error:
        there = f"imgkit run RECIPE --sif {shlex.quote(archive.name)}"
        hint = f"{error.hint}\nor copy it to {remote}, and there: {there}, then imgkit run RECIPE"
        raise ToolMissing(error.what, where=str(archive), hint=hint) from error
    return image.store_name(done.record)


def _by_delta(
    request: _SendRequest, far: Connection, there: Store, image_id: str, report: Reporter
) -> _SentImage | None:
    """Send a delta over the .sif that is both here and there; None where there is none, or it is large."""
    from imgkit_builder.delta import descriptor
    from imgkit_builder.remote import store

    try:
        stack = descriptor.stack(request.sif)
    except (CheckFailed, UsageError):
        return None
    base = store.base_name(stack.base)
    if base not in there.names or stack.base.image_id == image_id:
        return None
    try:
        file, delta = _difference(request, stack, image_id, report)
    except CheckFailed as error:
        report.note(f"no delta over {request.sif}: {error.what}")
        return None
    if file.stat().st_size > _WORTH * stack.sif.size_bytes:
        size = file.stat().st_size / 1e6
        report.note(f"the delta over {request.sif} has {size:.1f} MB: a new .sif goes instead")
        return None
    overlay = f"deltas/{store.delta_name(delta)}"
    _send(request, far, there, file, overlay, report)
    return _SentImage(home=there.home, image=f"images/{base}", overlay=overlay, delta=delta)


def _difference(request: _SendRequest, stack: Stack, image_id: str, report: Reporter) -> tuple[Path, Delta]:
    """The delta of the image over the .sif here; one that an earlier run has made is used again."""
    from imgkit_builder.delta import descriptor
    from imgkit_builder.delta.make import make
    from imgkit_builder.sif.conversion import Options
    from imgkit_builder.workflow.convert import engine_image

    file = request.sif.with_suffix(".imgdelta")
    if descriptor.is_delta(file):
        known = descriptor.read(file)
        if known.image_id == image_id and known.base == stack.base:
            return file, known
    with engine_image(request.recipe) as source:
        return file, make(source, request.sif, file, Options(), report).delta
