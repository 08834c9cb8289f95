"""Mount the files of `imgkit add` into a job.

Such a file is a squashfs image with Python packages that the job's image lacks. The user names the files by
``--packages``. Without that flag, imgkit.toml can list packages. The file with these packages is then
mounted, and created if it does not exist.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path, PurePath

from imgkit_builder.base.progress import Reporter
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.packages import add, record
from imgkit_builder.packages.add import AddRequest
from imgkit_builder.packages.record import PackagesRecord
from imgkit_entrypoints.errors import UsageError

# Hexadecimal digits of a digest of the packages, in a file's name: the "3f2a91c0" of "pytorch+3f2a91c0.sqsh".
_NAME_DIGITS = 8


def with_packages(job: Job) -> Job:
    """Return `job` with the files of its added packages mounted.

    The user names these files by ``--packages``, or imgkit.toml lists packages for a single file. Files that
    the user names are checked if they and the image are all on this machine. The file for imgkit.toml need
    not exist yet, because `make_ready` creates and checks it.

    Raises
    ------
    UsageError : the runtime cannot mount a squashfs or the path of a file, or a file does not fit the image.
    """
    requested = job.request.container
    file_names = requested.packages  # those of --packages take precedence over imgkit.toml
    where = "--packages"
    if not file_names and requested.requirements:
        file_names = (file_name(job.container.image, requested.requirements),)
        where = "packages"
    if not file_names:
        return job
    paths = tuple(str(job.directory / name) for name in file_names)
    _refuse_unmountable(job, paths, where)
    job = job.with_container(packages=paths)
    # For a job on a remote, the image and the files may exist only there. They are then checked there.
    are_on_this_machine = all(Path(path).exists() for path in (*paths, job.container.image))
    if requested.packages and are_on_this_machine:
        _refuse_unfit(job)
    return job


def _refuse_unmountable(job: Job, paths: Sequence[str], where: str) -> None:
    """Raise UsageError if the job's runtime cannot mount the files with packages at `paths`.

    Parameters
    ----------
    where : the flag, or the key of imgkit.toml, that requests the packages. Error messages name it.
    """
    runtime = runtime_of(job)
    if not runtime.squashfs_options:
        raise UsageError(
            f"{runtime.kind} mounts no squashfs, and packages are in one",
            where=where,
            hint="--runtime singularity; or build them into the image: image.pip of the recipe",
        )
    for path in paths:
        if not record.is_mountable(path):
            hint = "rename it: no colons, commas and quotes"
            raise UsageError(f"{path} cannot be mounted", where=where, hint=hint)


def file_name(image_path: str, requirements: Sequence[str], image_digest: str = "") -> str:
    """Return the name of the file that contains these packages, for example ``pytorch+3f2a91c0.sqsh``.

    The name consists of the image's name and a digest of the packages. So a different list of packages is in
    another file.

    Parameters
    ----------
    requirements : the packages, as pip takes them.
    image_digest : a digest that distinguishes images of the same name. It is empty for an image on this
        machine.
    """
    digest = hashlib.sha256("\n".join((image_digest, *requirements)).encode()).hexdigest()
    return f"{PurePath(image_path).stem}+{digest[:_NAME_DIGITS]}.sqsh"


def make_ready(job: Job, report: Reporter) -> None:
    """Check the files with added packages that the job mounts. Create the file of imgkit.toml before that.

    The user has created the files of ``--packages``. The packages that imgkit.toml lists are in a single
    file, which imgkit creates if it is missing or outdated.

    Raises
    ------
    ImgkitError : the packages cannot be installed, or a file is missing or does not fit the image.
    """
    file_paths = job.container.packages
    if not file_paths:
        return
    if not job.request.container.packages:  # without --packages, the only file is that of imgkit.toml
        _update_listed_packages(job, Path(file_paths[0]), report)
    _refuse_unfit(job)


def _update_listed_packages(job: Job, path: Path, report: Reporter) -> None:
    """Install the packages that imgkit.toml lists into the file `path`, unless it contains them already."""
    request = AddRequest(
        requirements=job.request.container.requirements, image=Path(job.container.image), output=path
    )
    if not add.add(request, report).up_to_date:
        report.note(f"packages: {path}")


def _refuse_unfit(job: Job) -> None:
    """Raise UsageError if a file with packages is missing, or does not fit the image or the command."""
    records = record.read_records_for(job.container.packages, Path(job.container.image))
    refuse_unseen(job, records)


def refuse_unseen(job: Job, records: Sequence[PackagesRecord]) -> None:
    """Raise UsageError if dist-train would need a function from added packages, which it cannot import.

    The user names such a function by ``--model=PACKAGE.X:FUNCTION``. Python finds added packages through
    PYTHONPATH. But dist-train starts Python with ``-I``, which ignores that variable, so the job would fail
    on the nodes.

    Parameters
    ----------
    records : the records of the files with packages. They name the modules in these files.
    """
    if job.command[:1] != ("dist-train",):
        return
    packages: set[str] = set()
    for packages_record in records:
        packages.update(packages_record.modules)
    for argument in job.command[1:]:
        # "--model=PACKAGE.MODULE:FUNCTION" or "PACKAGE.MODULE:FUNCTION" -> "PACKAGE.MODULE"
        function_path = argument.rpartition("=")[2]
        module, colon, _ = function_path.partition(":")
        package = module.partition(".")[0]
        if colon and package in packages:
            raise UsageError(
                f"dist-train does not see {package}: its Python ignores PYTHONPATH, the way to packages",
                where="COMMAND",
                hint="build it into the image (image.pip); or run a program of yours: -- dist-run train.py",
            )
