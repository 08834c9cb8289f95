"""Determine where the image of a job on a remote comes from, and refuse what cannot run on a remote.

The image is built from a recipe, converted from an archive, sent as a .sif, or is already on the remote.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import sidecar
from imgkit_builder.base import process
from imgkit_builder.base.suffixes import RECIPE_SUFFIXES
from imgkit_builder.jobs import runtimes, systems
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.jobs.runtimes.host import Host
from imgkit_builder.jobs.runtimes.pod import Pod
from imgkit_builder.jobs.systems import fanout
from imgkit_builder.recipe import targets
from imgkit_builder.recipe.targets import Target
from imgkit_builder.sif import image, sqsh
from imgkit_builder.workflow import baked
from imgkit_builder.workflow.names import name_stem
from imgkit_entrypoints.errors import UsageError

# Path that stands for imgkit's folder on a remote until imgkit has connected to the remote.
UNKNOWN_HOME = "/imgkit"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """The recipe, archive or file that provides the image of a job on a remote.

    It describes the image before anything is built or sent.
    """

    title: str
    """The recipe, archive or .sif, as it is named on the command line, in imgkit.toml or for the remote."""
    target: Target
    recipe: str = ""
    """The recipe as the user names it, or "" if the image does not come from a recipe."""
    sif: Path = Path()
    """The local .sif.

    It may not exist yet, because an archive or a recipe's image is first converted to it.
    """
    request: JobRequest
    archive: Path | None = None
    """The archive or OCI folder, or None if the image does not come from one."""
    remote_image: str = ""
    """Absolute path of an image that is already on the remote, or "". It is not built or sent."""
    is_foreign: bool = False
    """Whether `sif` was not built by imgkit."""
    base: str = ""
    """The base image that replaces the recipe's (``--base``), or ""."""

    @property
    def given_sif(self) -> Path | None:
        """The local .sif if the user named it, or None.

        For a recipe, an archive or an image on the remote, the result is None even if the file `sif` exists.
        """
        if self.recipe or self.archive or self.remote_image:
            return None
        return self.sif

    @property
    def has_unknown_entry_points(self) -> bool:
        """Whether imgkit must start Python in the image to find out if it has imgkit's entry points.

        An image that imgkit built has them in its own Python. Nothing is known about another image, or about
        another Python that the user chooses.
        """
        return bool(self.remote_image or self.is_foreign or self.request.container.python_flag)

    @property
    def provisional_job(self) -> Job:
        """The job before imgkit has connected to the remote.

        In the paths of the job, `UNKNOWN_HOME` stands for imgkit's folder on the remote.
        """
        # The name of the .sif on the remote is unknown so far, too.
        return self.job_on_remote(UNKNOWN_HOME, self.remote_image or "image.sif")

    def job_on_remote(self, home: str, image: str) -> Job:
        """Return the job with its paths on the remote.

        Parameters
        ----------
        home : absolute path of imgkit's folder on the remote, in which the job runs.
        image : path of the .sif, either absolute or relative to `home`.
        """
        request = self.request.changed(directory=Path(home), image=str(Path(home, image)))
        return _with_joined_output(resolve_job(self.target, request))


def _with_joined_output(job: Job) -> Job:
    """Return `job` with stdout and stderr in a single file, because imgkit follows only one file on a remote.

    If the recipe asks for two files, the job gets a warning.
    """
    queue = job.recipe.system.queue
    if queue.output == "joined":
        return job
    key = job.recipe.where("system", "queue", "output")
    job = job.with_system_facts(queue=dataclasses.replace(queue, output="joined"))
    return job.with_warning(f"{key}: imgkit follows one file of a remote job: joined")


def find_image_source(recipe: str, request: JobRequest, default: str) -> ImageSource:
    """Return where a job on a remote gets its image: a recipe, an archive, a .sif, or a file on the remote.

    The command line names the source. Otherwise imgkit.toml names it, and otherwise the remote's default
    recipe is used.

    Parameters
    ----------
    recipe : a recipe, an archive, an OCI folder or a .sif, or "" if the command line names none.
    default : the default recipe of the remote, or "" if it has none.

    Raises
    ------
    UsageError : no recipe is named anywhere, there is no such recipe, or the file names no system.
    """
    title = find_title(recipe, request, default)
    if request.container.image:  # --image names a file on the remote
        return _find_remote_image(title, request)
    file = Path(title)
    if image.is_sif(file):
        return _find_local_sif(title, request, default)
    if sqsh.is_sqsh(file):
        raise UsageError(
            "imgkit run sends a .sif, and this is a .sqsh",
            where=title,
            hint="name the recipe or the archive; or copy the file there (rsync -P), and: --image PATH",
        )
    # From here on, the .sif is the result of a build or conversion. The .sif of the project's recipe is
    # beside imgkit.toml. The .sif of any other recipe is in the current folder.
    is_from_project = not recipe and request.project is not None and request.project.recipe != ""
    folder = request.project_folder if is_from_project else Path()
    sif = folder / f"{name_stem(title)}.sif"
    if _is_archive(file):
        target = archive_target(file) or _default_target(file, default)
        return ImageSource(title=title, target=target, sif=sif, request=request, archive=file)
    return ImageSource(title=title, target=targets.load_target(title), recipe=title, sif=sif, request=request)


def _is_archive(file: Path) -> bool:
    """Return whether `file` is an OCI folder or an archive.

    A file that is not a recipe must be an archive.
    """
    if Path(file, "oci-layout").exists():
        return True
    return file.is_file() and file.suffix not in RECIPE_SUFFIXES


def find_title(recipe: str, request: JobRequest, default: str) -> str:
    """Return the recipe, archive or .sif that the command line, imgkit.toml or the remote names.

    The command line takes precedence over imgkit.toml, and imgkit.toml over the remote.

    Parameters
    ----------
    recipe : the value on the command line, or "".
    default : the default recipe of the remote, or "" if it has none.

    Raises
    ------
    UsageError : none of the three names a recipe.
    """
    project_recipe = ""
    if request.project:
        project_recipe = request.project.recipe
    title = recipe or project_recipe or default
    if not title:
        raise UsageError(
            "no recipe given, and the remote has no default recipe",
            where="RECIPE",
            hint="imgkit run RECIPE --on NAME ...",
        )
    return title


def _find_local_sif(title: str, request: JobRequest, default: str) -> ImageSource:
    """Return the source for the local .sif `title`.

    An image that imgkit did not build does not say for which system it is. It runs on the system of the
    remote's default recipe, `default`.
    """
    sif = Path(title)
    is_foreign = not baked.has_manifest(sif)
    target = _default_target(sif, default) if is_foreign else baked.read_target(sif)
    return ImageSource(title=title, target=target, sif=sif, request=request, is_foreign=is_foreign)


def _find_remote_image(title: str, request: JobRequest) -> ImageSource:
    """Return the source for an image that is already on the remote. The recipe `title` names the system."""
    remote_image = request.container.image
    # In an option that mounts the path, a colon or comma would end it.
    if not re.fullmatch(r"/[^\x00-\x1f\x7f:,]*", remote_image):
        raise UsageError(
            f"{remote_image!r} is not a path on the remote",
            where="--image",
            hint="the absolute path of an image there; for one that is here: imgkit run X.sif",
        )
    if image.is_sif(Path(title)):
        raise UsageError(
            f"--image cannot be combined with {title}",
            where="--image",
            hint="name a recipe, or use only one",
        )
    target = targets.load_target(title)
    return ImageSource(title=title, target=target, request=request, remote_image=remote_image)


def archive_target(archive: Path) -> Target | None:
    """Return the name and system of the recipe from which an archive was made, or None.

    imgkit writes them to a file beside the archive, ``X.tar.manifest.json``. The result is None for an OCI
    folder, and for an archive without this file.
    """
    # Only an archive that `imgkit save` has written has a file beside it. An OCI folder has none.
    if archive.is_dir():
        return None
    description = sidecar.read_sidecar(archive)
    if description is None or description.system is None or description.manifest is None:
        return None
    return baked.target_of(description.manifest, description.system, description.image.platform, archive)


def _default_target(file: Path, default: str) -> Target:
    """Return the remote's default recipe, for an image that does not say for which system it is.

    Parameters
    ----------
    file : the archive or .sif, for the error message.
    default : the default recipe of the remote, or "" if it has none.

    Raises
    ------
    UsageError : the remote has no default recipe.
    """
    if default:
        return targets.load_target(default)
    raise UsageError(
        "neither this file nor the remote names its system",
        where=str(file),
        hint="a remote with a recipe: imgkit remote add NAME USER@HOST:DIR --recipe RECIPE --replace",
    )


def with_transfer_host(remote: Remote, source: ImageSource) -> Remote:
    """Return `remote` with the host that its system has for file transfers.

    If the user has named such a host for the remote, or if the system has no host other than the login host,
    `remote` is returned unchanged. The user name on the host is the same as on the login host, unless the
    system names another one.
    """
    if remote.transfer:  # the user has named a host
        return remote
    address = source.target.system.transfer.host
    if not fanout.is_host(address):  # for example "", if the system names no host for transfers
        return remote
    ssh_config = _read_ssh_config(remote.address)
    if address == ssh_config.get("hostname"):  # the login host itself is the host for transfers
        return remote
    login_user = ssh_config.get("user", "")
    if login_user and "@" not in address:
        address = f"{login_user}@{address}"
    return dataclasses.replace(remote, transfer=address)


def _read_ssh_config(address: str) -> dict[str, str]:
    """Return the options that ssh uses for `address`: ``{"hostname": "glogin1.bsc.es", "user": "me", ...}``.

    They include the settings in ~/.ssh/config. The result is empty if ssh fails.
    """
    # With -G, ssh prints its options instead of connecting, one on each line: "hostname glogin1.bsc.es".
    output = process.run(("ssh", "-G", "--", address), check=False).output
    options = {}
    for line in output.splitlines():
        name, _, value = line.partition(" ")
        options[name] = value
    return options


def refuse_flags(request: JobRequest, base: str) -> None:
    """Raise UsageError for ``--directory`` with a remote, or for ``--base`` with ``--image``.

    On a remote, imgkit itself chooses the folder. An image that is already on the remote is not built, so it
    needs no base image.
    """
    if request.names_directory:
        raise UsageError(
            "--directory cannot be combined with a remote",
            where="--directory",
            hint="leave it out; or, on the cluster itself, imgkit run --on here ...",
        )
    if base and request.container.image:
        raise UsageError(
            "--base cannot be combined with --image", where="--base", hint="nothing is built: leave it out"
        )


def refuse_runtime(source: ImageSource) -> None:
    """Raise UsageError if the job's runtime cannot start a .sif, the only format that imgkit sends.

    ``--runtime`` chooses the runtime, or otherwise the recipe's system.
    """
    target = source.target
    requested = source.request.container.runtime
    runtime = runtimes.get_runtime(requested or target.system.runtime.kind)
    if runtime.kind == Host.kind:
        where = "--runtime"
        if not requested:
            where = target.where("system", "runtime", "kind")
        raise UsageError(
            "runtime host cannot be used with a remote: what imgkit sends, image and code, needs a container",
            where=where,
            hint="--runtime singularity; or, on the cluster itself, imgkit run --on here --runtime host ...",
        )
    if runtime.image_suffix != ".sif":
        raise _no_remote_jobs_error(target)


def refuse_script(job: Job, script: Script) -> None:
    """Raise UsageError if imgkit cannot submit the script to the job's scheduler over ssh.

    The scheduler must have a command such as ``sbatch`` that submits jobs. Unless the job is interactive,
    this command must read the script from its standard input.
    """
    has_queue = systems.get_system(job.system).queue.submit != ""
    if not has_queue or not (script.on_stdin or job.is_interactive):
        raise _no_remote_jobs_error(job.recipe)


def _no_remote_jobs_error(target: Target) -> UsageError:
    """Return the error for a system whose jobs imgkit cannot submit over ssh."""
    system = target.system
    title = system.title or target.name
    if system.runtime.kind == Pod.kind:
        hint = "a remote that stores files for pods: imgkit remote add NAME USER@HOST:/DIR --pvc CLAIM:/PATH"
    else:
        hint = "a recipe with scheduler: slurm or pbs and runtime: singularity; or submit it there"
    return UsageError(
        f"{title} ({system.scheduler}, {system.runtime.kind}) has no queue that takes a .sif over ssh",
        where="--on",
        hint=hint,
    )
