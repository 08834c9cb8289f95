"""Where the image of a job on a remote comes from: a recipe, an archive, a .sif, or a file that is there."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import sidecar
from imgkit_builder.base import process
from imgkit_builder.base.flags import flags_in
from imgkit_builder.jobs import runtimes
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve
from imgkit_builder.jobs.systems import fanout
from imgkit_builder.recipe import targets
from imgkit_builder.recipe.targets import Target
from imgkit_builder.sif import image, sqsh
from imgkit_builder.workflow import baked
from imgkit_builder.workflow.names import RECIPE_SUFFIXES, stem
from imgkit_entrypoints.errors import UsageError

UNKNOWN_HOME = "/imgkit"
"""Stands for imgkit's folder on a remote before imgkit has looked there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """The image of a job on a remote, before anything is built or sent."""

    title: str
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
    base: str = ""
    """Another base image than the recipe's."""
    rebuild: bool = False
    """Whether the engine is asked for the image even if nothing that goes into it has changed."""

    @property
    def given_sif(self) -> Path | None:
        """The .sif that the user named; None if it is made, or lies on the remote."""
        is_given = not (self.recipe or self.archive or self.remote_image)
        return self.sif if is_given else None

    @property
    def project_folder(self) -> Path:
        """The folder of imgkit.toml, or the current one: older images that its runs sent are removed."""
        project = self.request.project
        return project.file.parent if project else Path()

    @property
    def has_unknown_entry_points(self) -> bool:
        """Whether the image has to be looked into for imgkit's entry points."""
        container = self.request.container
        return bool(self.remote_image or self.is_foreign or container.python or container.activate)

    @property
    def early(self) -> Job:
        """The job, as far as it is known before imgkit has looked at the remote."""
        return self.resolved(UNKNOWN_HOME, self.remote_image or "image.sif")

    def resolved(self, home: str, image: str) -> Job:
        """Return the job with the remote's folder and the path of the .sif, which may be in it."""

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


def find(recipe: str, request: JobRequest, default: str) -> ImageSource:
    """Decide what runs: `recipe`, or that of imgkit.toml, or the remote's `default`.

    Raises
    ------
    UsageError : none of them names a recipe, or there is no such recipe.
    """

    project = request.project
    title = recipe or (project.recipe if project else "") or default
    if not title:
        raise UsageError(
            "no recipe given, and the remote has no default recipe",
            where="RECIPE",
            hint="imgkit run RECIPE --on NAME ...",
        )
    file = Path(title)
    if request.container.image:
        return _find_remote_image(title, request)
    if image.is_sif(file):
        is_foreign = not baked.has_manifest(file)
        target = _default_target(file, default) if is_foreign else baked.target(file)
        return ImageSource(
            title=title, target=target, recipe="", sif=file, request=request, is_foreign=is_foreign
        )
    if sqsh.is_sqsh(file):
        raise UsageError(
            "imgkit run sends a .sif, and this is a .sqsh",
            where=title,
            hint="name the recipe or the archive; or copy the file there (rsync -P), and: --image PATH",
        )
    folder = project.file.parent if project and project.recipe and not recipe else Path()
    sif = folder / f"{stem(title)}.sif"
    if Path(file, "oci-layout").exists() or (file.is_file() and file.suffix not in RECIPE_SUFFIXES):
        target = _archive_target(file, default)
        return ImageSource(title=title, target=target, recipe="", sif=sif, request=request, archive=file)
    return ImageSource(title=title, target=targets.find(title), recipe=title, sif=sif, request=request)


def _find_remote_image(title: str, request: JobRequest) -> ImageSource:
    """Return the run of the image ``--image`` that is on the remote, on the system of the recipe `title`."""

    if not re.fullmatch(r"/[^\x00-\x1f\x7f:,]*", request.container.image):
        raise UsageError(
            f"{request.container.image!r} is not a path on the remote",
            where="--image",
            hint="the absolute path of an image there; for one that is here: imgkit run X.sif",
        )
    if image.is_sif(Path(title)):
        raise UsageError(
            f"--image cannot be combined with {title}",
            where="--image",
            hint="name a recipe, or use only one",
        )
    return ImageSource(
        title=title,
        target=targets.find(title),
        recipe="",
        sif=Path(),
        request=request,
        remote_image=request.container.image,
    )


def _archive_target(archive: Path, default: str) -> Target:
    """Return the recipe's name and system that imgkit wrote beside the archive, or the remote's `default`."""

    description = None if archive.is_dir() else sidecar.read(archive)
    if description is None or description.system is None or description.manifest is None:
        return _default_target(archive, default)
    return baked.target_of(description.manifest, description.system, description.image.platform, archive)


def _default_target(file: Path, default: str) -> Target:
    """Return the remote's recipe `default`, for a file that does not name its system."""

    if default:
        return targets.find(default)
    raise UsageError(
        "neither this file nor the remote names its system",
        where=str(file),
        hint="a remote with a recipe: imgkit remote add NAME USER@HOST:DIR --recipe RECIPE --replace",
    )


def with_transfer_host(remote: Remote, source: ImageSource) -> Remote:
    """Return `remote` with the system's host for files, unless the user names another one.

    The user's name there is that on the login host.
    """

    host = source.target.system.transfer.host
    if remote.transfer or not fanout.is_host(host):
        return remote
    config = process.run(("ssh", "-G", "--", remote.address), check=False).output
    values = dict(line.partition(" ")[::2] for line in config.splitlines())
    if host == values.get("hostname"):
        return remote
    address = host if "@" in host else f"{values.get('user', '')}@{host}".lstrip("@")
    return dataclasses.replace(remote, transfer=address)


_ONLY_HERE = ("--interactive", "--directory", "--sif", "--build", "--base-from")
"""Flags for jobs of this machine: on a remote, imgkit chooses the folder and sends the image itself."""


def refuse_flags(request: JobRequest, base: str) -> None:
    """Raise UsageError for a flag of a job that no remote takes."""
    flags = [name for name in flags_in(request) if name in _ONLY_HERE]
    if request.project is not None and request.project.sets_directory:
        flags = [name for name in flags if name != "--directory"]
    if flags:
        raise UsageError(
            f"{flags[0]} cannot be combined with a remote",
            where=flags[0],
            hint="leave it out; or, on the cluster itself, imgkit run --on here ...",
        )
    if base and request.container.image:
        raise UsageError(
            "--base cannot be combined with --image", where="--base", hint="nothing is built: leave it out"
        )


def refuse_runtime(source: ImageSource) -> None:
    """Raise UsageError for a system on which no .sif runs."""
    runtime = runtimes.named(source.request.container.runtime or source.target.system.runtime.kind)
    if runtime.image_suffix != ".sif":
        raise _no_queue(source.target)


def refuse_script(job: Job, script: Script) -> None:
    """Raise UsageError for a job that waits in no queue."""
    if script.foreground or script.remote or not script.on_stdin:
        raise _no_queue(job.recipe)


def _no_queue(target: Target) -> UsageError:
    system = target.system
    return UsageError(
        f"{system.title or target.name} ({system.scheduler}, {system.runtime.kind}) has no queue that takes "
        "a .sif over ssh",
        where="--on",
        hint="a recipe with scheduler: slurm or pbs and runtime: singularity; or submit it there",
    )
