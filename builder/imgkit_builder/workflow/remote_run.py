"""Run an image on a remote: build if needed, upload the minimum and submit."""

from __future__ import annotations

import dataclasses
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.workflow.names import RECIPE_SUFFIXES, stem
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError

if TYPE_CHECKING:
    from imgkit_builder.delta.descriptor import Delta
    from imgkit_builder.job.code import CodeFolder
    from imgkit_builder.job.request import Job, Request, Script, SubmittedJob
    from imgkit_builder.project.toml_file import ProjectFile
    from imgkit_builder.recipe.targets import Target
    from imgkit_builder.remote.config import Remote
    from imgkit_builder.remote.connection import Connection
    from imgkit_builder.remote.store import Store
    from imgkit_builder.sif.entries import EngineImage
    from imgkit_builder.sif.image import SifImage

_MAX_DELTA_SHARE = 0.5
"""A delta of more than this share of the .sif below it is not worth two files at every start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run on a remote, before anything is built or moved."""

    source: str
    """What runs: from the command line, imgkit.toml or the remote."""
    target: Target
    recipe: str
    """The user's word for the recipe; empty for an archive or a .sif."""
    sif: Path
    """The local .sif, which may have to be made."""
    request: Request
    archive: Path | None = None
    """The archive or OCI folder; None for a recipe or a .sif."""
    remote_image: str = ""
    """Path of an image that is on the remote already; then nothing is built or sent."""
    is_foreign: bool = False
    """Whether imgkit did not build the image of `sif`."""

    home: str = "/imgkit"
    """The folder on the remote, or what stands for it before imgkit has looked there."""

    @property
    def early(self) -> Job:
        """The job, as far as it is known before imgkit has looked at the remote."""
        return self.resolved(self.home, self.remote_image or "image.sif")

    def resolved(self, home: str, image: str) -> Job:
        """Return the job with the remote's folder and the path of the .sif, which may be in it."""
        from imgkit_builder.job.resolve import resolve

        request = dataclasses.replace(self.request, directory=Path(home), image=str(Path(home, image)))
        job = resolve(self.target, request)
        if job.recipe.system.queue.output == "joined":
            return job
        queue = dataclasses.replace(job.recipe.system.queue, output="joined")
        system = dataclasses.replace(job.recipe.system, queue=queue)
        recipe = dataclasses.replace(job.recipe, system=system)
        key = recipe.where("system", "queue", "output")
        warning = f"{key}: imgkit follows one file of a remote job: joined"
        return dataclasses.replace(job, recipe=recipe, warnings=(*job.warnings, warning))


def plan(recipe: str, request: Request, project: ProjectFile | None, default: str) -> RunPlan:
    """Decide what runs: `recipe`, or that of imgkit.toml, or the remote's `default`.

    Raises
    ------
    UsageError : none of them names a recipe, there is no such recipe, or no .sif runs on its system.
    """
    from imgkit_builder.remote import jobs

    planned = _plan(recipe, request, project, default)
    jobs.refuse_runtime(planned.target, planned.request)
    return planned


def _plan(recipe: str, request: Request, project: ProjectFile | None, default: str) -> RunPlan:
    from imgkit_builder.job import baked
    from imgkit_builder.project import origins
    from imgkit_builder.recipe import targets
    from imgkit_builder.sif import image, sqsh

    source = recipe or (project.recipe if project else "") or default
    request = dataclasses.replace(origins.under(request, project), directory=request.directory)
    if not source:
        raise UsageError(
            "no recipe given, and the remote has no default recipe",
            where="RECIPE",
            hint="imgkit run RECIPE --on NAME ...",
        )
    file = Path(source)
    if request.image:
        return _plan_remote_image(source, request)
    if image.is_sif(file):
        is_foreign = not baked.has_manifest(file)
        target = _default_target(file, default) if is_foreign else baked.target(file)
        return RunPlan(
            source=source, target=target, recipe="", sif=file, request=request, is_foreign=is_foreign
        )
    if sqsh.is_sqsh(file):
        raise UsageError(
            "imgkit run sends a .sif, and this is a .sqsh",
            where=source,
            hint="name the recipe or the archive; or copy the file there (rsync -P), and: --image PATH",
        )
    folder = project.file.parent if project and project.recipe and not recipe else Path()
    sif = folder / f"{stem(source)}.sif"
    if Path(file, "oci-layout").exists() or (file.is_file() and file.suffix not in RECIPE_SUFFIXES):
        target = _archive_target(file, default)
        return RunPlan(source=source, target=target, recipe="", sif=sif, request=request, archive=file)
    return RunPlan(source=source, target=targets.find(source), recipe=source, sif=sif, request=request)


def _plan_remote_image(source: str, request: Request) -> RunPlan:
    """Return the run of the image ``--image`` that is on the remote, on the system of the recipe `source`."""
    from imgkit_builder.recipe import targets
    from imgkit_builder.sif import image

    if not re.fullmatch(r"/[^\x00-\x1f\x7f:,]*", request.image):
        raise UsageError(
            f"{request.image!r} is not a path on the remote",
            where="--image",
            hint="the absolute path of an image there; for one that is here: imgkit run X.sif",
        )
    if image.is_sif(Path(source)):
        raise UsageError(
            f"--image cannot be combined with {source}",
            where="--image",
            hint="name a recipe, or use only one",
        )
    return RunPlan(
        source=source,
        target=targets.find(source),
        recipe="",
        sif=Path(),
        request=request,
        remote_image=request.image,
    )


def _archive_target(archive: Path, default: str) -> Target:
    """Return the recipe's name and system that imgkit wrote beside the archive, or the remote's `default`."""
    from imgkit_builder.archive import sidecar
    from imgkit_builder.job import baked

    description = None if archive.is_dir() else sidecar.read(archive)
    if description is None or description.system is None or description.manifest is None:
        return _default_target(archive, default)
    return baked.target_of(description.manifest, description.system, description.image.platform, archive)


def _default_target(file: Path, default: str) -> Target:
    """Return the remote's recipe `default`, for a file that does not name its system."""
    from imgkit_builder.recipe import targets

    if default:
        return targets.find(default)
    raise UsageError(
        "neither this file nor the remote names its system",
        where=str(file),
        hint="a remote with a recipe: imgkit remote add NAME USER@HOST:DIR --recipe RECIPE --replace",
    )


def with_transfer_host(remote: Remote, planned: RunPlan) -> Remote:
    """Return `remote` with the system's host for files, unless the user names another one.

    The user's name there is that on the login host.
    """
    from imgkit_builder.base import process
    from imgkit_builder.job.ssh import fanout

    host = planned.target.system.transfer.host
    if remote.transfer or not fanout.is_host(host):
        return remote
    config = process.run(("ssh", "-G", "--", remote.address), check=False).output
    values = dict(line.partition(" ")[::2] for line in config.splitlines())
    if host == values.get("hostname"):
        return remote
    address = host if "@" in host else f"{values.get('user', '')}@{host}".lstrip("@")
    return dataclasses.replace(remote, transfer=address)


def check(planned: RunPlan) -> Script:
    """Return the script of the job, if a scheduler takes it over ssh.

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
    connection: Connection,
    *,
    base: str | None,
    code: CodeFolder | None,
    report: Reporter,
) -> tuple[SubmittedJob, Job]:
    """Bring the image to the remote, and submit the job; return its record, and the job as it was resolved.

    Parameters
    ----------
    base : another base than the recipe's.
    code : a folder to mount over the image.

    Raises
    ------
    UsageError : as `check`; or the image would not run the code, the remote has no such scheduler, or imgkit
        did not make the .sif.
    ImgkitError : as of the build, the conversion, the transfer and the submission.
    """
    from imgkit_builder.job import bound, container, systems
    from imgkit_builder.job import code as code_of
    from imgkit_builder.remote import jobs
    from imgkit_builder.remote.code import upload

    if base and planned.remote_image:
        raise UsageError(
            "--base cannot be combined with --image", where="--base", hint="nothing is built: leave it out"
        )
    if code:
        is_sif = not (planned.recipe or planned.archive or planned.remote_image)
        code_of.refuse_unused(code, planned.target, planned.sif if is_sif else None)
    for warning in planned.early.warnings:
        report.note(warning)
    connection.login()  # before the first stage, whose progress bar would hide a question of ssh
    delivery = _Delivery(planned=planned, connection=connection, base=base, report=report)
    store, image = delivery.bring(check(planned).submit[0], code.record.sha256 if code else "")
    job = planned.resolved(store.home, image.path)
    if image.delta:
        job = container.laid_over(job, f"{store.home}/{image.overlay}", image.delta)
    if code:
        # The .sif of a recipe that lies here may be that of an earlier build.
        if planned.is_foreign or _store_name(planned.sif) == Path(image.path).name:
            for warning in code_of.hidden_file_warnings(code, planned.sif):
                report.note(warning)
        folder = upload(connection, code, store, report)
        job = container.with_code(job, code.record, f"{store.home}/{folder}")
    report.stage(f"submit to {connection.remote.name}")
    if planned.remote_image or planned.is_foreign or job.request.python or job.request.activate:
        job = bound.bind(job, lambda argv: jobs.finished(connection, argv))
        jobs.send_entry_points(connection, job, report)
    record = jobs.submit(connection, job, systems.named(job.system).script(job))
    return dataclasses.replace(record, image_id="" if planned.is_foreign else image.image_id), job


def _store_name(sif: Path) -> str:
    """Return the name of the local .sif in a store; empty if there is none that imgkit made."""
    from imgkit_builder.sif import image

    try:
        record = image.read(sif).record
    except (CheckFailed, UsageError):
        return ""
    return image.store_name(record) if record else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteImage:
    """The image on the remote."""

    path: str
    """Path of the .sif in imgkit's folder there, or of an image elsewhere."""
    overlay: str = ""
    """Path of the delta over it; empty if there is none."""
    delta: Delta | None = None

    @property
    def image_id(self) -> str:
        """The id of the image with its delta, which is in the name of its file; empty for others."""
        if Path(self.path).is_absolute():
            return ""
        return self.delta.image_id if self.delta else f"sha256:{Path(self.path).name.partition('-')[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delivery:
    """Make the image available on the remote: send nothing, a delta or the whole .sif."""

    planned: RunPlan
    connection: Connection
    base: str | None
    report: Reporter

    def bring(self, program: str, code: str) -> tuple[Store, _RemoteImage]:
        """Return the store, and the image in it.

        Parameters
        ----------
        program : the program of the scheduler, which must be there.
        code : digest of the code that the job uses.

        Raises
        ------
        UsageError : the remote has no such program, or imgkit did not make the .sif.
        ImgkitError : as of the build, the conversion and the transfer.
        """
        from imgkit_builder.remote import store

        image_id, name = self._identify()
        remote = self.connection.remote
        self.report.stage(f"look at {remote.name}")
        contents = store.look(self.connection, image_id=image_id, program=program, file_name=name, code=code)
        if not contents.has_program:
            raise UsageError(
                f"{remote.address} has no {program}",
                where="--on",
                hint=f"imgkit remote check {remote.name}",
            )
        if self.planned.remote_image:
            return contents, _RemoteImage(path=self.planned.remote_image)
        return contents, self._send_image(contents, image_id, name)

    def _identify(self) -> tuple[str, str]:
        """Return the image's id, and the name of its .sif in the store where that is known already."""
        from imgkit_builder.sif import image

        planned = self.planned
        if planned.remote_image:
            return "", ""
        if planned.recipe:
            from imgkit_builder.workflow.build import BuildRequest, build

            return build(planned.recipe, BuildRequest(base=self.base), report=self.report).id, ""
        if planned.archive:
            name = self._convert_archive(planned.archive)
            return f"sha256:{name.partition('-')[0]}", name
        record = image.read(planned.sif).record
        if record is not None:
            return record.image_id, image.store_name(record)
        # An image of others has no record: its digest stands for both.
        digest = image.root_sha256(planned.sif)
        return f"sha256:{digest}", image.name_in_store(digest, digest)

    def _send_image(self, store: Store, image_id: str, name: str) -> _RemoteImage:
        """Send the image if the remote lacks it; `name` is empty where the .sif has to be made first."""
        # Somebody whose cluster cannot mount a delta names the .sif.
        deltas = () if name else store.deltas
        if store.images or deltas:
            self.report.note(f"to send: nothing; {self.connection.remote.name} has the image")
            if store.images:
                return _RemoteImage(path=f"images/{store.images[0]}")
            stored = deltas[0]
            return _RemoteImage(
                path=f"images/{stored.base}", overlay=f"deltas/{stored.name}", delta=stored.delta
            )
        if not name and (image := self._send_delta(store, image_id)):
            return image
        path = f"images/{name or self._convert_recipe()}"
        self._upload(store, self.planned.sif, "image", path)
        return _RemoteImage(path=path)

    def _upload(self, store: Store, file: Path, label: str, target: str) -> None:
        from imgkit_builder.remote import transfer

        source = transfer.Source(path=file, label=label, size_bytes=file.stat().st_size)
        self.report.note(f"to send: {label}: {file}, {size_text(source.size_bytes)}")
        transfer.upload(self.connection, source, home=store.home, target=target, report=self.report)

    def _convert_recipe(self) -> str:
        """Make the local .sif; return its name in the store."""
        from imgkit_builder.sif import convert, image
        from imgkit_builder.sif.conversion import Options
        from imgkit_builder.workflow.convert import compression_for, engine_image
        from imgkit_builder.workflow.names import system_of

        with engine_image(self.planned.recipe) as source:
            options = Options(compression=compression_for(system_of(self.planned.recipe)))
            return image.store_name(convert.convert(source, self.planned.sif, options, self.report).record)

    def _convert_archive(self, archive: Path) -> str:
        """Make the local .sif of the archive; return its name in the store."""
        from imgkit_builder.sif import image
        from imgkit_builder.workflow.convert import convert

        try:
            return image.store_name(convert(archive, self.planned.sif, report=self.report).record)
        except ToolMissing as error:
            command = f"imgkit run RECIPE --sif {shlex.quote(archive.name)}, then imgkit run RECIPE"
            hint = f"{error.hint}\nor copy it to {self.connection.remote.name}, and there: {command}"
            raise ToolMissing(error.what, where=str(archive), hint=hint) from error

    def _send_delta(self, store: Store, image_id: str) -> _RemoteImage | None:
        """Send a delta over the closest .sif there; None if there is none, or the delta is large."""
        from imgkit_builder.delta import descriptor
        from imgkit_builder.delta.descriptor import CODE_PLACE
        from imgkit_builder.remote import store as remote_store
        from imgkit_builder.workflow.convert import engine_image

        if not store.names:
            return None
        with engine_image(self.planned.recipe) as new:
            config = new.config
            base = remote_store.closest_base(self.connection, config.diff_ids, config.arch)
            if base is None or base.record is None or base.record.image_id == image_id:
                return None
            try:
                file, delta = self._make_delta(new, base)
            except CheckFailed as error:
                self.report.note(f"no delta over {base.path}: {error.what}")
                return None
        size_bytes = file.stat().st_size
        if size_bytes > _MAX_DELTA_SHARE * base.size_bytes:
            size = size_text(size_bytes)
            self.report.note(f"the delta over {base.path} has {size}: a new .sif goes instead")
            return None
        overlay = f"deltas/{remote_store.delta_name(delta)}"
        self._upload(store, file, "delta", overlay)
        if descriptor.is_code(file, delta):
            sif, remote = shlex.quote(self.planned.sif.name), self.connection.remote.name
            command = f"imgkit run {sif} --on {remote} --code DIR"
            self.report.note(f"only files in /{CODE_PLACE} differ: {command} sends them without a build")
        return _RemoteImage(path=f"images/{base.path}", overlay=overlay, delta=delta)

    def _make_delta(self, new: EngineImage, base: SifImage) -> tuple[Path, Delta]:
        """Return the delta of the image over a .sif there, if possible that of an earlier run."""
        from imgkit_builder.delta import descriptor
        from imgkit_builder.delta.make import base_from, make
        from imgkit_builder.sif.conversion import Options

        file = self.planned.sif.with_suffix(".imgdelta")
        if descriptor.is_delta(file):
            delta = descriptor.read(file)
            if delta.image_id == new.config.image_id and delta.base == descriptor.base_of(base):
                return file, delta
        return file, make(new, base_from(base, self._manifest_of(base)), file, Options(), self.report).delta

    def _manifest_of(self, base: SifImage) -> bytes | None:
        """Return the file manifest of a .sif there; from the local one if that is the same."""
        from imgkit_builder.remote.store import read_manifest
        from imgkit_builder.sif import file_manifest

        if _store_name(self.planned.sif) == base.path.name:
            return file_manifest.read(self.planned.sif)
        self.report.stage(f"read the file manifest of {base.path} on {self.connection.remote.name}")
        return read_manifest(self.connection, base)
