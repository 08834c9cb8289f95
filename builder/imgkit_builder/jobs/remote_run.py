"""Run an image on a remote: build it if what goes into it has changed, send what is missing, and submit."""

from __future__ import annotations

import dataclasses
import re
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.workflow.names import RECIPE_SUFFIXES, stem
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing, UsageError

if TYPE_CHECKING:
    from imgkit_builder.jobs.code import CodeFolder
    from imgkit_builder.jobs.job import Job, Script
    from imgkit_builder.jobs.records import SubmittedJob
    from imgkit_builder.jobs.remote.config import Remote
    from imgkit_builder.jobs.remote.connection import Connection
    from imgkit_builder.jobs.remote.store import RemoteImage, Store
    from imgkit_builder.jobs.request import JobRequest
    from imgkit_builder.recipe.targets import Target


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
    request: JobRequest
    archive: Path | None = None
    """The archive or OCI folder; None for a recipe or a .sif."""
    remote_image: str = ""
    """Path of an image that is on the remote already; then nothing is built or sent."""
    is_foreign: bool = False
    """Whether imgkit did not build the image of `sif`."""
    project_folder: Path = Path()
    """Folder of imgkit.toml, or the current one: older images that its runs sent are removed."""

    home: str = "/imgkit"
    """The folder on the remote, or what stands for it before imgkit has looked there."""

    @property
    def early(self) -> Job:
        """The job, as far as it is known before imgkit has looked at the remote."""
        return self.resolved(self.home, self.remote_image or "image.sif")

    def resolved(self, home: str, image: str) -> Job:
        """Return the job with the remote's folder and the path of the .sif, which may be in it."""
        from imgkit_builder.jobs.resolve import resolve

        request = self.request.changed(directory=Path(home), image=str(Path(home, image)))
        job = resolve(self.target, request)
        if job.recipe.system.queue.output == "joined":
            return job
        queue = dataclasses.replace(job.recipe.system.queue, output="joined")
        system = dataclasses.replace(job.recipe.system, queue=queue)
        recipe = dataclasses.replace(job.recipe, system=system)
        key = recipe.where("system", "queue", "output")
        warning = f"{key}: imgkit follows one file of a remote job: joined"
        return dataclasses.replace(job, recipe=recipe, warnings=(*job.warnings, warning))


def plan(recipe: str, request: JobRequest, default: str) -> RunPlan:
    """Decide what runs: `recipe`, or that of imgkit.toml, or the remote's `default`.

    Raises
    ------
    UsageError : none of them names a recipe, there is no such recipe, or no .sif runs on its system.
    """
    from imgkit_builder.jobs.remote import jobs

    planned = _plan(recipe, request, default)
    if request.project is not None:
        planned = dataclasses.replace(planned, project_folder=request.project.file.parent)
    jobs.refuse_runtime(planned.target, planned.request)
    return planned


def _plan(recipe: str, request: JobRequest, default: str) -> RunPlan:
    from imgkit_builder.recipe import targets
    from imgkit_builder.sif import image, sqsh
    from imgkit_builder.workflow import baked

    project = request.project
    source = recipe or (project.recipe if project else "") or default
    if not source:
        raise UsageError(
            "no recipe given, and the remote has no default recipe",
            where="RECIPE",
            hint="imgkit run RECIPE --on NAME ...",
        )
    file = Path(source)
    if request.container.image:
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


def _plan_remote_image(source: str, request: JobRequest) -> RunPlan:
    """Return the run of the image ``--image`` that is on the remote, on the system of the recipe `source`."""
    from imgkit_builder.recipe import targets
    from imgkit_builder.sif import image

    if not re.fullmatch(r"/[^\x00-\x1f\x7f:,]*", request.container.image):
        raise UsageError(
            f"{request.container.image!r} is not a path on the remote",
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
        remote_image=request.container.image,
    )


def _archive_target(archive: Path, default: str) -> Target:
    """Return the recipe's name and system that imgkit wrote beside the archive, or the remote's `default`."""
    from imgkit_builder.archive import sidecar
    from imgkit_builder.workflow import baked

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
    from imgkit_builder.jobs.systems import fanout

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
    from imgkit_builder.jobs import submit, systems
    from imgkit_builder.jobs.remote import jobs

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
    rebuild: bool = False,
) -> tuple[SubmittedJob, Job]:
    """Bring the image to the remote, and submit the job; return its record, and the job as it was resolved.

    Parameters
    ----------
    base : another base than the recipe's.
    code : a folder to mount over the image.
    rebuild : ask the engine for the image, even if nothing that goes into the build has changed.

    Raises
    ------
    UsageError : as `check`; or the image would not run the code, the remote has no such scheduler, or imgkit
        did not make the .sif.
    ImgkitError : as of the build, the conversion, the transfer and the submission.
    """
    from imgkit_builder.jobs import bound, container, systems
    from imgkit_builder.jobs import code as code_of
    from imgkit_builder.jobs.remote import jobs
    from imgkit_builder.jobs.remote.code import upload

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
    delivery = _Delivery(planned=planned, connection=connection, base=base, rebuild=rebuild, report=report)
    store, image = delivery.bring(check(planned).submit[0], code.record.sha256 if code else "")
    job = planned.resolved(store.home, image.path if image else planned.remote_image)
    if code:
        if image and _has_content(planned.sif, image):
            for warning in code_of.hidden_file_warnings(code, planned.sif):
                report.note(warning)
        folder = upload(connection, code, store, report)
        job = container.with_code(job, code.record, f"{store.home}/{folder}")
    report.stage(f"submit to {connection.remote.name}")
    if (
        planned.remote_image
        or planned.is_foreign
        or job.request.container.python
        or job.request.container.activate
    ):
        job = bound.bind(job, lambda argv: jobs.finished(connection, argv))
        jobs.send_entry_points(connection, job, report)
    record = jobs.submit(connection, job, systems.named(job.system).script(job))
    image_id = image.image_id if image and not planned.is_foreign else ""
    return dataclasses.replace(record, image_id=image_id), job


def _has_content(sif: Path, image: RemoteImage) -> bool:
    """Return whether the local .sif is the image there; that of a recipe may be of an earlier build."""
    from imgkit_builder.jobs.remote import store

    try:
        return store.describe_sif(sif).root_sha256 == image.root_sha256
    except CheckFailed:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delivery:
    """Make the image available on the remote. An image that is there is not sent again."""

    planned: RunPlan
    connection: Connection
    base: str | None
    rebuild: bool
    report: Reporter

    def bring(self, program: str, code: str) -> tuple[Store, RemoteImage | None]:
        """Return the store, and the image in it. Return no image if the run names one that lies elsewhere.

        Parameters
        ----------
        program : the program of the scheduler, which must be there.
        code : digest of the code that the job uses.

        Raises
        ------
        UsageError : the remote has no such program.
        ImgkitError : as of the build, the conversion and the transfer.
        """
        from imgkit_builder.jobs.remote import store

        remote = self.connection.remote
        self.report.stage(f"look at {remote.name}")
        contents = store.look(self.connection, program=program, code=code)
        if not contents.has_program:
            raise UsageError(
                f"{remote.address} has no {program}",
                where="--on",
                hint=f"imgkit remote check {remote.name}",
            )
        planned = self.planned
        if planned.remote_image:
            return contents, None
        if planned.recipe:
            return contents, self._bring_recipe(contents)
        if planned.archive:
            self._convert_archive(planned.archive)
        return contents, self._send_unless_present(contents, self._describe_sif())

    def _bring_recipe(self, store: Store) -> RemoteImage:
        """Return the image of the recipe; build and send it if the build's input has changed."""
        from imgkit_builder.workflow.build import BuildRequest, build, plan
        from imgkit_builder.workflow.build_record import built_image_id

        request = BuildRequest(base=self.base)
        if not self.rebuild:
            input_sha256 = plan(self.planned.recipe, request).input_sha256
            built_id = built_image_id(input_sha256)
            image = store.find_image(built_id) if built_id else store.find_built(input_sha256)
            if image is not None:
                self._report_present()
                return image
        built = build(self.planned.recipe, request, report=self.report)
        image = store.find_image(built.id)
        if image is not None:
            self._report_present()
            return image
        self._convert_recipe()
        return self._send(store, self._describe_sif(built.input_sha256))

    def _send_unless_present(self, store: Store, image: RemoteImage) -> RemoteImage:
        present = store.find_image(image.image_id, image.root_sha256)
        if present is None:
            return self._send(store, image)
        self._report_present()
        return present

    def _report_present(self) -> None:
        self.report.note(f"to send: nothing; {self.connection.remote.name} has the image")

    def _describe_sif(self, input_sha256: str = "") -> RemoteImage:
        from imgkit_builder.jobs.remote import store

        project = f"{socket.gethostname()}:{self.planned.project_folder.absolute()}"
        return store.describe_sif(self.planned.sif, input_sha256=input_sha256, project=project)

    def _send(self, store: Store, image: RemoteImage) -> RemoteImage:
        """Send the local .sif, and remove older images of the project that nothing needs."""
        from imgkit_builder.jobs.remote import transfer

        basis = store.closest_image(image)
        similar = f"; {self.connection.remote.name} has most of {basis.title}" if basis else ""
        self.report.note(f"to send: image: {self.planned.sif}, {size_text(image.sif_bytes)}{similar}")
        sent = transfer.send_image(
            self.connection, self.planned.sif, image, home=store.home, basis=basis, report=self.report
        )
        if sent:
            self.report.note(f"sent: {size_text(sent.new_bytes)} of {size_text(image.sif_bytes)}")
        self._remove_superseded(store, image)
        return image

    def _remove_superseded(self, store: Store, image: RemoteImage) -> None:
        """Remove older images of the project that nothing needs; a failure does not keep the job back."""
        from imgkit_builder.jobs.remote import gc

        try:
            unused, images = gc.find_superseded(self.connection, store.images, image)
            removed = gc.remove(self.connection, unused)
        except ToolFailed as error:
            self.report.note(f"older images were not removed: {error.what}")
            return
        for path in removed:
            older = images[path]
            title = f"{older.title.removesuffix('.sif')}-{older.image_id.removeprefix('sha256:')[:4]}.sif"
            self.report.note(f"removed {title}, {size_text(older.sif_bytes)}")

    def _convert_recipe(self) -> None:
        """Make the local .sif of the recipe's image."""
        from imgkit_builder.sif import convert
        from imgkit_builder.sif.conversion import Options
        from imgkit_builder.workflow.convert import compression_for, engine_image
        from imgkit_builder.workflow.names import system_of

        with engine_image(self.planned.recipe) as source:
            options = Options(compression=compression_for(system_of(self.planned.recipe)))
            convert.convert(source, self.planned.sif, options, self.report)

    def _convert_archive(self, archive: Path) -> None:
        """Make the local .sif of the archive."""
        from imgkit_builder.workflow.convert import convert

        try:
            convert(archive, self.planned.sif, report=self.report)
        except ToolMissing as error:
            command = f"imgkit run RECIPE --sif {shlex.quote(archive.name)}, then imgkit run RECIPE"
            hint = f"{error.hint}\nor copy it to {self.connection.remote.name}, and there: {command}"
            raise ToolMissing(error.what, where=str(archive), hint=hint) from error
