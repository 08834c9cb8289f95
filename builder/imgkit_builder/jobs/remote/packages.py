"""Bring the added packages of a job to a remote, or install them there.

The files with the packages stay beside the image on the remote, where later jobs with the same requirements
find them.
"""

from __future__ import annotations

import posixpath
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.jobs import added_packages
from imgkit_builder.jobs.job import Job, Runner
from imgkit_builder.jobs.remote.connection import FIND_PROGRAM, Connection
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.packages import add, record
from imgkit_builder.packages.add import AddRequest, ImageMachine
from imgkit_builder.packages.record import PackagesRecord

# Write the standard input to a new file, whose path is the argument. The file gets its name when it is
# complete.
_WRITE = 'umask 077; cat > "$1.part" && mv -f -- "$1.part" "$1"\n'


def machine_of(connection: Connection, program: str, modules: Sequence[str] = ()) -> ImageMachine:
    """Return the remote as the machine on which `add.add` runs pip.

    Parameters
    ----------
    program : the program of the container runtime on the remote, such as ``singularity``.
    modules : the environment modules that the program needs.
    """

    def run_script(script: str, args: Sequence[str], data: Iterable[bytes]) -> Generator[bytes, None, None]:
        values = {"program": program}
        # `ImageMachine` requires that the script's input stays open until the script ends, so `hold` is set.
        return connection.stream(FIND_PROGRAM + script, values, args=args, data=data, hold=True)

    return ImageMachine(
        run=run_script, program=program, modules=tuple(modules), remote=connection.remote.name
    )


def bring(job: Job, image_id: str, connection: Connection, run: Runner, report: Reporter) -> Job:
    """Return `job` with the paths of its added packages on the remote.

    Added packages are files (.sqsh) with Python packages that the container mounts. A file that the user
    names is sent to the remote. For the ``packages`` of imgkit.toml, pip creates the file on the remote,
    unless an earlier job has done so.

    Parameters
    ----------
    image_id : the id of the job's image, or "" if it is unknown. Packages that were made for another image
        are refused.
    run : runs a command on the remote.

    Raises
    ------
    ImgkitError : a file was made for another image, or the packages cannot be installed on the remote.
    """
    job = added_packages.with_packages(job)
    if not job.container.packages:
        return job
    image = job.container.image
    image_digest = runtime_of(job).image_digest(job, run)
    # The file is beside an image in the store (imgkit's folder there), so that both are removed together. For
    # an image outside of the store, the file is in the job's folder.
    folder = str(job.directory)
    if image.startswith(f"{folder}/images/"):
        folder = posixpath.dirname(image)
    # Files of --packages take the place of the `packages` of imgkit.toml.
    local_paths = job.request.container.packages
    if local_paths:
        records = [_bring_file(path, folder, connection, report) for path in local_paths]
    else:
        request = _add_request(job, folder, image_digest)
        add_result = add.add(request, report, machine=_machine_of_job(job, connection), image_id=image_id)
        records = [(str(add_result.path), add_result.record)]
    # Both checks need the records of the files, which a file on the remote provides only now.
    record.refuse_unfit(records, image=image, digests=[image_digest, image_id])
    added_packages.refuse_unseen(job, [stored for _, stored in records])
    return job.with_container(packages=tuple(path for path, _ in records))


def _machine_of_job(job: Job, connection: Connection) -> ImageMachine:
    """Return the remote as the machine on which pip runs, with the container runtime of the job."""
    runtime = runtime_of(job)
    return machine_of(connection, runtime.program(job.recipe), runtime.modules(job))


def _add_request(job: Job, folder: str, image_digest: str) -> AddRequest:
    """Return the request to install the packages of imgkit.toml into a file in `folder` on the remote."""
    image = job.container.image
    requirements = job.request.container.requirements
    name = added_packages.file_name(image, requirements, image_digest)
    return AddRequest(requirements=requirements, image=Path(image), output=Path(folder, name))


def _bring_file(
    path: str, folder: str, connection: Connection, report: Reporter
) -> tuple[str, PackagesRecord]:
    """Return the path of a file with packages on the remote, and the record of how it was made.

    If this machine has the file `path`, it is sent to `folder` on the remote, unless the remote already has
    it. Otherwise, `path` is a path on the remote.
    """

    def run_script(script: str, args: Sequence[str], data: Iterable[bytes] = ()) -> bytes:
        return b"".join(connection.stream(script, {}, args=args, data=data))

    local_file = Path(path)
    if not local_file.exists():
        # The record is at the end of the file.
        record_bytes = run_script('tail -c "$2" -- "$1"\n', (path, str(record.END_BYTES)))
        return path, record.parse_end(record_bytes, path)
    stored = record.read_record(local_file)
    # The name is a digest of the content, so an existing file need not be compared.
    remote_path = f"{folder}/{stored.squashfs_sha256}.sqsh"
    answer = run_script('if [ -e "$1" ]; then echo there; fi\n', (remote_path,))
    if not answer:
        report.note(f"to send: packages: {path}")
        with files.open_regular(local_file) as stream:
            chunks = iter(lambda: stream.read(files.CHUNK_BYTES), b"")  # until the end of the file
            run_script(_WRITE, (remote_path,), chunks)
    return remote_path, stored
