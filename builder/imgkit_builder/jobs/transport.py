"""Bring the files of a job to the machine that submits it, and run the scheduler's commands there.

There are three classes. `Transport` is for jobs that this machine submits, and `Ssh` for jobs that a remote
submits. `VolumeStore` is for jobs in pods: this machine submits them, but their files go to a remote that
shares a volume with the pods.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path

from imgkit_builder.base import files, process
from imgkit_builder.base.process import Finished
from imgkit_builder.base.progress import Reporter
from imgkit_builder.base.sizes import size_text
from imgkit_builder.data.folder import DataFolder
from imgkit_builder.jobs import added_packages, checks, code, data_mounts, delivery, entry_points, volume
from imgkit_builder.jobs.code import CodeFolder
from imgkit_builder.jobs.delivery import Delivery
from imgkit_builder.jobs.job import Argv, Job, Script
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.remote import interactive, packages, store, transfer
from imgkit_builder.jobs.remote import jobs as remote_jobs
from imgkit_builder.jobs.remote.connection import Connection
from imgkit_builder.jobs.remote.rsync import Transferred
from imgkit_builder.jobs.remote.store import RemoteImage, Store
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.submitted import SubmittedJob
from imgkit_builder.sif import image
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import WORKSPACE

# Name of the folder with the data of all projects, in imgkit's folder on a remote.
DATA_FOLDER = "data"
# Number of folders with earlier code in which rsync looks for equal files on the remote (--link-dest).
_MAX_SIMILAR_FOLDERS = 3


class Transport:
    """Bring the files of a job to the machine that submits it, and run commands there.

    This class is for jobs that this machine submits, where most files are already in place. `Ssh` and
    `VolumeStore` are for jobs whose files are on a remote.

    `submit.make_ready` calls the methods in a fixed order: image, data, code, entry points.
    """

    name = ""
    """Name of the remote that submits the job, or "" for this machine."""
    code_store_name = ".imgkit-code"  # `--code .` leaves it out
    """Name of the store of code in the job's folder. It has one folder for each version of the code."""

    def login(self) -> None:
        """Connect to the remote, so that ssh asks for a password now. On this machine, do nothing.

        This must happen before any progress is shown, because a progress bar would hide the question.
        """

    def run(self, argv: Sequence[str]) -> Finished:
        """Run a command on the machine that submits the job, and wait for its end.

        A command that fails does not raise an exception.

        Raises
        ------
        ToolMissing : `argv` is a command of this machine, and its program is not on PATH.
        Cut : the remote cannot be reached.
        """
        return process.run(argv, check=False)

    def run_script(self, script: str, args: Iterable[str], data: Iterable[bytes]) -> bytes:
        """Run a script of sh on the machine that has the job's files, and return its output.

        Parameters
        ----------
        args : the arguments of the script, ``$1`` and so on.
        data : the chunks of the script's standard input.

        Raises
        ------
        ToolFailed : the script failed, or the remote cannot be reached. If the script failed, the error
            quotes its standard error.
        """
        return b"".join(process.filter_through(("sh", "-c", script, "sh", *args), data))

    def prepare_image(self, prepared: PreparedJob, report: Reporter) -> PreparedJob:
        """Make the job's image available on the machine where the job starts.

        The result is the job with the paths on that machine. For a job of this machine, the image is only
        checked, and the file with its added packages is created if necessary.

        Raises
        ------
        ImgkitError : the image cannot be brought to that machine, or does not start there.
        """
        checks.before_submission(prepared.job)
        added_packages.make_ready(prepared.job, report)
        return dataclasses.replace(prepared, image_id=_image_id(prepared.job))

    def bring_data(self, prepared: PreparedJob, report: Reporter) -> Job:
        """Bring the job's data to the machine where the job starts, and return the job with its paths there.

        For a job of this machine, the data is only checked.

        Raises
        ------
        UsageError : a folder cannot be read there, or has changed while it was sent.
        ImgkitError : a folder cannot be sent.
        """
        data_mounts.refuse_missing(prepared.job.request, "this machine", self.run_script)
        return data_mounts.with_data(prepared.job, prepared.data)

    def put_code(self, code_folder: CodeFolder, home: Path, report: Reporter) -> None:
        """Write the code to its folder in the store of code, unless it is already there.

        The folder is named by the digest of the code, and gets its name only when it is complete. So a folder
        that exists need not be checked or written again.

        Parameters
        ----------
        home : the folder that contains the store, as `home_of` returns it.
        """
        write_folder(home / self.code_store_name / code_folder.record.sha256, code_folder.tree.write)

    def put_entry_points(self, job: Job, report: Reporter) -> None:
        """Write the entry points that are bound into the job's image, unless their folder already exists.

        The folder is named by a digest of its files. As with `put_code`, a folder that exists is complete.
        """
        write = functools.partial(entry_points.write_mounted_files, job)
        write_folder(entry_points.mounted_folder(job), write)

    def make_run_folder(self, job: Job, code_folder: CodeFolder | None, report: Reporter) -> None:
        """Create the run folder of a job that has no script which could create it, with a copy of the code.

        For a job of this machine, which starts at once, the code is copied here. For a job in pods, see
        `VolumeStore`.

        Parameters
        ----------
        code_folder : the code. Only for a job in pods, it can be None.
        """
        assert code_folder is not None  # noqa: S101 - without code, a job of this machine has no such folder
        folder = Path(job.run_folder)
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(mode=0o700)  # closed to other users, like the run folders that job scripts create
        # This file names the version of the code, for `imgkit resume`.
        files.write_file(folder / "code.json", f"{code_folder.record.text}\n")
        workspace = folder / WORKSPACE
        write_folder(workspace, code_folder.tree.write_copy)
        for link_name, data_path in runtime_of(job).data_links(job).items():
            # The code has an empty folder at this path, as the mount point for a container. Without a
            # container, a link to the data replaces it.
            mount_point = workspace / link_name
            mount_point.rmdir()
            mount_point.symlink_to(data_path)

    def home_of(self, job: Job) -> Path:
        """Return the folder with the code and the run folders, as a path on the machine that has it."""
        return job.directory

    def with_store(self, record: SubmittedJob, job: Job) -> SubmittedJob:
        """Return `record` with the paths of the job's files, if they are on another machine than this one."""
        return record

    def with_entry_points(self, prepared: PreparedJob) -> Job:
        """Return the job with imgkit's entry points bound into its image, if the image has none.

        To find out, Python is started once in the image, on the machine that has it.
        """
        job = prepared.job
        # An image for other processors cannot be started. The checks before the submission report this error.
        if runtime_of(job).arch_error(job) is not None:
            return job
        return entry_points.bind_entry_points(job)

    def start(self, job: Job, script: Script) -> Generator[bytes, None, None]:
        """Submit the script in the job's folder, and yield the output of the scheduler's command.

        Raises
        ------
        ToolMissing : the scheduler's command is not on PATH.
        ToolFailed : the scheduler refused the job, or the connection was lost. After a refusal, the error
            quotes the scheduler's message. After a lost connection, the job may be in the queue nevertheless.
        """
        process.require_program(
            script.submit[0],
            "run this on a login node of the system, or copy the output of imgkit run --dry-run there",
        )
        stdin = []
        if script.on_stdin:
            stdin.append(script.text.encode())
        folder = None
        if not runtime_of(job).is_isolated:  # otherwise the folder is a path in pods, and need not exist here
            folder = job.directory
        return process.filter_through(script.submit, stdin, cwd=folder)

    def foreground_argv(self, job: Job, script: Script) -> Argv:
        """Return the argv that runs the job in this terminal, in the job's folder.

        Only a script with `Script.foreground`, which is not queued, is run in this way. On this machine, it
        is the script's own command.

        Raises
        ------
        Cut : the job runs on a remote, which cannot be reached.
        """
        return script.submit


class Ssh(Transport):
    """The transport of jobs that a remote submits. Commands run there over ssh, and rsync sends the files."""

    code_store_name = "code"
    store: Store
    """What imgkit's folder on the remote contains. `open_store` sets it before any other method uses it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.name = connection.remote.name

    def open_store(self, program: str, code_folder: CodeFolder | None) -> Store:
        """Read what imgkit's folder on the remote contains, return it, and keep it as `self.store`.

        The methods that send files read `self.store`. So this method must be called before them, which
        `prepare_image` does.

        Parameters
        ----------
        program : a program that the job needs on the remote, such as ``sbatch``.
        code_folder : the job's code, or None. The result says whether the remote already has this version.

        Raises
        ------
        UsageError : the remote does not have `program`.
        """
        code_sha256 = ""
        if code_folder is not None:
            code_sha256 = code_folder.record.sha256
        self.store = store.open_store(self.connection, program=program, code=code_sha256)
        if not self.store.has_program:
            raise UsageError(
                f"{self.connection.remote.address} has no {program}",
                where="--on",
                hint=f"imgkit doctor --on {self.name}",
            )
        return self.store

    def login(self) -> None:
        """Connect to the remote. See `Transport`."""
        self.connection.login()

    def run(self, argv: Sequence[str]) -> Finished:
        """Run a command on the remote, in the environment of a login shell. See `Transport`."""
        return remote_jobs.run_scheduler_command(self.connection, argv)

    def run_script(self, script: str, args: Iterable[str], data: Iterable[bytes]) -> bytes:
        """Run a script on the remote. See `Transport`."""
        return b"".join(self.connection.stream(script, {}, args=args, data=data))

    def prepare_image(self, prepared: PreparedJob, report: Reporter) -> PreparedJob:
        """Make the job's image and its added packages available on the remote.

        What the remote does not have is built, converted and sent. The result is the job with the paths on
        the remote.
        """
        source = prepared.source
        assert source is not None  # noqa: S101 - `prepare` has been told the remote
        checks.check_environment(prepared.job)
        self.login()  # before any progress is shown, because ssh may ask for a password
        report.stage(f"look at {self.name}")
        # The first word is the program that submits, such as sbatch or qsub. A remote without it is refused
        # before anything is sent.
        remote_store = self.open_store(prepared.script.submit[0], prepared.code)
        image_path = source.remote_image  # "" unless the user names an image that is on the remote already
        sent_image = None
        if not image_path:
            image_delivery = Delivery(source=source, connection=self.connection, report=report)
            sent_image = image_delivery.bring(remote_store)
            image_path = sent_image.path
        image_id = ""
        # The job's record contains the id of the image only if imgkit built it.
        if sent_image is not None and not source.is_foreign:
            image_id = sent_image.image_id
        _report_left_out(prepared.code, source.sif, sent_image, report)
        report.stage(f"submit to {self.name}")
        job = source.job_on_remote(remote_store.home, image_path)
        job = packages.bring(job, image_id, self.connection, self.run, report)
        return dataclasses.replace(prepared, job=job, image_id=image_id)

    def bring_data(self, prepared: PreparedJob, report: Reporter) -> Job:
        """Send the folders of data that the remote does not have, and check the job's paths there.

        The result is the job with the paths of its data on the remote. `prepare_image` must have been called
        before.
        """
        job = data_mounts.with_data(prepared.job, prepared.data, f"{self.store.home}/{DATA_FOLDER}")
        # This comes first, so that a missing folder is reported before anything is sent.
        data_mounts.refuse_missing(job.request, self.name, self.run_script)
        self.send_data(prepared.data, report)
        return job

    def send_data(self, folders: Iterable[DataFolder], report: Reporter) -> None:
        """Send the folders of data that the remote does not have.

        `open_store` must have been called before.
        """
        for folder in folders:
            if folder.name not in self.store.data:
                self._send_data_folder(folder, report)

    def _send_data_folder(self, folder: DataFolder, report: Reporter) -> None:
        """Send one folder of data.

        Files that the remote has in an earlier version of the folder are not sent.
        """
        size = size_text(folder.size_bytes)
        report.note(f"to send: data: {folder.spec.source}, {folder.files} files, {size}")
        # Folders are named "DIGEST-PROJECT". All versions of one folder have the same second part, and the
        # newest version comes first.
        earlier = [name for name in self.store.data if name.endswith(f"-{folder.project_part}")]
        transferred = transfer.send_data(
            self.connection, folder, home=self.store.home, earlier=tuple(earlier[:1]), report=report
        )
        report.note(_sent_text("data", transferred))

    def put_code(self, code_folder: CodeFolder, home: Path, report: Reporter) -> None:
        """Send the code to the store on the remote with rsync, unless it is already there.

        Files that the remote has in an earlier version of the code are not sent again.
        """
        sha256 = code_folder.record.sha256
        if sha256 in self.store.code:
            report.note(f"to send: nothing of the code; {self.name} has that of {code_folder.folder}")
            return
        with tempfile.TemporaryDirectory(prefix="imgkit-") as work:
            # rsync reads a copy of the code. The copy has the right digest even if somebody edits a file
            # while it is sent.
            copy = Path(work, sha256)
            code_folder.tree.write(copy)
            transferred = transfer.send_folder(
                self.connection,
                copy,
                label="code",
                size_bytes=code_folder.tree.size_bytes,
                home=str(home),
                target=f"{self.code_store_name}/{sha256}",
                similar=self.store.code[:_MAX_SIMILAR_FOLDERS],
                is_prepared=sha256 == self.store.incoming_code,
                report=report,
            )
        report.note(_sent_text("code", transferred))

    def put_entry_points(self, job: Job, report: Reporter) -> None:
        """Send the entry points that are bound into the job's image, unless the remote already has them."""
        folder = entry_points.mounted_folder(job)
        # `self.store` does not list the folder of the entry points, so a command looks for it.
        output = self.connection.run('if [ -d "$folder" ]; then echo exists; fi\n', {"folder": str(folder)})
        if output == b"exists\n":
            return
        home = self.store.home
        with tempfile.TemporaryDirectory(prefix="imgkit-") as work:
            copy = Path(work, folder.name)
            entry_points.write_mounted_files(job, copy)
            transfer.send_folder(
                self.connection,
                copy,
                label="entry points",
                size_bytes=sum(len(data) for _, data in entry_points.mounted_files(job)),
                home=home,
                target=str(folder.relative_to(home)),
                report=report,
            )

    def with_entry_points(self, prepared: PreparedJob) -> Job:
        """Return the job with imgkit's entry points bound into its image, if the image has none.

        The image is inspected on the remote, unless imgkit has built it and so knows its content.
        """
        assert prepared.source is not None  # noqa: S101 - `prepare` has been told the remote
        if not prepared.source.has_unknown_entry_points:
            return prepared.job
        return entry_points.bind_entry_points(prepared.job, self.run)

    def start(self, job: Job, script: Script) -> Generator[bytes, None, None]:
        """Submit the script on the remote, in the job's folder. See `Transport`."""
        return remote_jobs.submit_script(self.connection, job, script)

    def foreground_argv(self, job: Job, script: Script) -> Argv:
        """Write the script to a file on the remote, and return the ssh command that runs it.

        See `Transport`.
        """
        return interactive.interactive_argv(self.connection, job, script)


class VolumeStore(Transport):
    """The transport of jobs in pods.

    This machine submits them, and a remote stores their files on a volume.
    """

    code_store_name = "code"

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._files = Ssh(connection)

    def login(self) -> None:
        """Connect to the remote. See `Transport`."""
        self._files.login()

    def prepare_image(self, prepared: PreparedJob, report: Reporter) -> PreparedJob:
        """Read imgkit's folder on the remote, and return the job with the paths that its pods see.

        The image itself needs no preparation, because pods pull it from a registry.
        """
        checks.before_submission(prepared.job)
        self.login()
        remote = self.connection.remote
        report.stage(f"look at {remote.name}")
        # Nothing is submitted on this remote, so the only program that it needs is a shell.
        remote_store = self._files.open_store(program="sh", code_folder=prepared.code)
        job = volume.job_with_pod_paths(remote_store, prepared.job, remote)
        return dataclasses.replace(prepared, job=job)

    def bring_data(self, prepared: PreparedJob, report: Reporter) -> Job:
        """Send the data to the remote. See `Transport`.

        Paths that exist only in the pods are not checked.
        """
        job = data_mounts.with_data(prepared.job, prepared.data, f"{prepared.job.directory}/{DATA_FOLDER}")
        self._files.send_data(prepared.data, report)
        return job

    def make_run_folder(self, job: Job, code_folder: CodeFolder | None, report: Reporter) -> None:
        """Send the code, and create the run folder with a script that copies the code into it."""
        if code_folder is not None:
            self._files.put_code(code_folder, self.home_of(job), report)
        volume.make_run_folder(self.connection, self._files.store, job)

    def run_script(self, script: str, args: Iterable[str], data: Iterable[bytes]) -> bytes:
        """Run a script on the remote, because the job's files are there. See `Transport`."""
        return self._files.run_script(script, args, data)

    def home_of(self, job: Job) -> Path:
        """Return imgkit's folder on the remote. See `Transport`."""
        return Path(self._files.store.home)

    def with_entry_points(self, prepared: PreparedJob) -> Job:
        """Return the job unchanged, because nothing can be bound into the image of a pod."""
        return prepared.job

    def with_store(self, record: SubmittedJob, job: Job) -> SubmittedJob:
        """Return `record` with the name of the remote and the paths of the job's files on the remote."""
        queued = dataclasses.replace(
            record.job,
            directory=Path(self._files.store.home),
            store=self.connection.remote.name,
            run_name=Path(job.run_folder).name,
        )
        return dataclasses.replace(record, job=queued)


def _refuse_unsafe_folder(path: Path) -> None:
    """Raise UsageError if `path` is a link or belongs to another user, who could change what jobs execute."""
    if path.is_symlink() or files.is_foreign_folder(path):
        message = "it is a link or belongs to another user, and the job would execute what is in it"
        raise UsageError(message, where=str(path), hint="remove it, or choose another --directory")


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Create the folder `target`, unless it exists. Other processes never see a half-written folder.

    The content is written under a temporary name beside `target`. A single rename then gives the folder its
    name.

    Parameters
    ----------
    fill : a function that writes the content to the folder which it gets as its argument.

    Raises
    ------
    UsageError : `target` is a link or belongs to another user, who could change what the job executes.
    """
    if os.path.lexists(target):
        _refuse_unsafe_folder(target)
        return
    target.parent.mkdir(exist_ok=True)
    temporary = files.temporary_name(target)
    try:
        fill(temporary)
        # The folder gets its final name only now, when it is complete.
        files.publish_file(temporary, target)
    except OSError:
        if not target.is_dir():  # otherwise another submission has created it meanwhile, which is fine
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sent_text(label: str, transferred: Transferred | None) -> str:
    """Return the line about what was sent: ``sent: code: 2 files, 100.0 kB``.

    Without numbers from rsync, the line ends after the label.

    Parameters
    ----------
    label : what was sent, such as ``code``.
    transferred : the numbers that rsync reported, or None.
    """
    if transferred is None:
        return f"sent: {label}"
    return f"sent: {label}: {transferred}"


def _report_left_out(
    code_folder: CodeFolder | None, sif: Path, sent_image: RemoteImage | None, report: Reporter
) -> None:
    """Report files that are not sent with the code although the job may need them.

    Parameters
    ----------
    sif : the path of the local .sif, which need not exist.
    sent_image : the job's image on the remote, or None if imgkit did not send it.
    """
    if code_folder is None:
        return
    image_file = None
    # The local .sif may come from an earlier build than the image on the remote. Then its list of files does
    # not count.
    if sent_image is not None and delivery.has_content(sif, sent_image):
        image_file = sif
    notice = code.left_out_notice(code_folder, image_file)
    if notice:
        report.note(notice)


def _image_id(job: Job) -> str:
    """Return the id of the job's image if it is a local .sif that imgkit built, or "" otherwise."""
    path = Path(job.container.image)
    if not image.is_sif(path):
        return ""
    record = image.read(path).record
    if record is None:
        return ""
    return record.image_id
