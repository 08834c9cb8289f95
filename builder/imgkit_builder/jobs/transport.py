"""Where a job is submitted: on this machine, or on a remote over ssh."""

from __future__ import annotations

import abc
import dataclasses
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import process
from imgkit_builder.base.process import Finished
from imgkit_builder.base.progress import Reporter
from imgkit_builder.jobs import bound, checks, code, delivery
from imgkit_builder.jobs.delivery import Delivery
from imgkit_builder.jobs.job import Job, Script
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.remote import jobs as remote_jobs
from imgkit_builder.jobs.remote import transfer
from imgkit_builder.jobs.remote.connection import Connection
from imgkit_builder.jobs.remote.store import Store
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.sif import image

CODE_FOLDER = ".imgkit-code"
"""Folder of the code in that of a job of this machine; `--code .` leaves it out."""
_SIMILAR = 3
"""Number of folders of code on a remote in which rsync looks for equal files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder that a job mounts; its name follows from its content, so it is written once."""

    path: str
    """Its absolute path where the job runs."""
    label: str
    """What messages call it."""
    source: str
    """Where its content comes from; empty: from imgkit."""
    size_bytes: int
    write: Callable[[Path], None]
    """Writes the content to a folder that does not exist."""


class Transport(abc.ABC):
    """How commands and files get to the machine that submits a job."""

    name: str = ""
    """The remote; empty: this machine."""

    @abc.abstractmethod
    def run(self, argv: Sequence[str]) -> Finished:
        """Run a command there, to its end.

        Raises
        ------
        ToolMissing : it is a command of this machine, and not on PATH.
        Cut : the remote cannot be reached.
        """

    @abc.abstractmethod
    def login(self) -> None:
        """Connect now where a person may be asked something, so that no progress bar hides the question."""

    @abc.abstractmethod
    def bring_image(self, prepared: PreparedJob, report: Reporter) -> PreparedJob:
        """Bring the job's image there, and return the job with the paths that it has there.

        Raises
        ------
        ImgkitError : the image cannot be brought there, or does not start there.
        """

    @abc.abstractmethod
    def code_folder(self, job: Job) -> Path:
        """Return the folder that holds folders of code."""

    @abc.abstractmethod
    def put(self, folder: Folder, report: Reporter) -> None:
        """Make the folder appear complete or not at all, unless it is there."""

    @abc.abstractmethod
    def with_entry_points(self, prepared: PreparedJob) -> Job:
        """Return the job with imgkit's entry points bound into an image that has none."""

    @abc.abstractmethod
    def start(self, job: Job, script: Script) -> Generator[bytes, None, None]:
        """Submit the script; yield what the scheduler prints.

        Raises
        ------
        ToolMissing : the scheduler's command is not on PATH.
        ToolFailed : the scheduler refused; quotes its message. Or the connection was lost, and the job may
            wait.
        """


class Local(Transport):
    """This machine."""

    def login(self) -> None:
        """Do nothing. See `Transport`."""

    def run(self, argv: Sequence[str]) -> Finished:
        """Run a command. See `Transport`."""
        return process.run(argv, check=False)

    def bring_image(self, prepared: PreparedJob, report: Reporter) -> PreparedJob:
        """Check the image, which is here already. See `Transport`."""
        del report  # there is nothing to bring
        checks.before_submission(prepared.job)
        return dataclasses.replace(prepared, image_id=_image_id(prepared.job))

    def code_folder(self, job: Job) -> Path:
        """Return a hidden folder in that of the job."""
        return job.directory / CODE_FOLDER

    def put(self, folder: Folder, report: Reporter) -> None:
        """Write the folder. See `Transport`."""
        del report  # a folder of code takes a second
        bound.write_folder(Path(folder.path), folder.write)

    def with_entry_points(self, prepared: PreparedJob) -> Job:
        """Look into an image that imgkit did not build. See `Transport`."""
        job = prepared.job
        if job.makes_image or runtime_of(job).arch_error(job):  # the submission refuses that
            return job
        return bound.bind(job)

    def start(self, job: Job, script: Script) -> Generator[bytes, None, None]:
        """Submit the script in the job's folder. See `Transport`."""
        process.need(
            script.submit[0],
            "run this on a login node of the system, or copy the output of imgkit run --dry-run there",
        )
        folder = None if runtime_of(job).is_isolated else job.directory
        return process.through(script.submit, [script.text.encode()] if script.on_stdin else [], cwd=folder)


class Ssh(Transport):
    """A cluster that ssh reaches."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.name = connection.remote.name
        self.store: Store | None = None
        """imgkit's folder there, once `bring_image` has looked."""

    def login(self) -> None:
        """Connect. See `Transport`."""
        self.connection.login()

    def run(self, argv: Sequence[str]) -> Finished:
        """Run a command in the environment of a login shell. See `Transport`."""
        return remote_jobs.finished(self.connection, argv)

    def bring_image(self, prepared: PreparedJob, report: Reporter) -> PreparedJob:
        """Build, convert and send the image as far as the remote lacks it. See `Transport`."""
        source, code_folder = prepared.source, prepared.code
        assert source is not None  # noqa: S101 - `prepare` has been told the remote
        checks.check_environment(prepared.job)
        self.login()
        digest = code_folder.record.sha256 if code_folder else ""
        bringing = Delivery(source=source, connection=self.connection, report=report)
        self.store, sent = bringing.bring(prepared.script.submit[0], digest)
        if code_folder and sent and delivery.has_content(source.sif, sent):
            for warning in code.hidden_file_warnings(code_folder, source.sif):
                report.note(warning)
        report.stage(f"submit to {self.name}")
        return dataclasses.replace(
            prepared,
            job=source.resolved(self.store.home, sent.path if sent else source.remote_image),
            image_id=sent.image_id if sent and not source.is_foreign else "",
        )

    def code_folder(self, job: Job) -> Path:
        """Return the store's folder of code."""
        return job.directory / "code"

    def put(self, folder: Folder, report: Reporter) -> None:
        """Send the folder by rsync. See `Transport`."""
        assert self.store is not None  # noqa: S101 - `bring_image` comes first
        parent, _, name = folder.path.rpartition("/")
        is_code = parent == f"{self.store.home}/code"
        if is_code and name in self.store.code:
            report.note(f"to send: nothing of the code; {self.name} has that of {folder.source}")
            return
        if not is_code and self._exists(folder.path):
            return
        with tempfile.TemporaryDirectory(prefix="imgkit-") as work:
            # A copy: what rsync reads is what the digest names, even if somebody edits a file meanwhile.
            copy = Path(work, name)
            folder.write(copy)
            sent = transfer.send_folder(
                self.connection,
                copy,
                label=folder.label,
                size_bytes=folder.size_bytes,
                home=self.store.home if is_code else parent,
                target=f"code/{name}" if is_code else f"./{name}",
                similar=self.store.code[:_SIMILAR] if is_code else (),
                report=report,
            )
        if is_code:
            report.note(f"sent: code{f': {sent}' if sent else ''}")

    def _exists(self, path: str) -> bool:
        answer = self.connection.run('if [ -d "$folder" ]; then echo exists; fi\n', {"folder": path})
        return answer == b"exists\n"

    def with_entry_points(self, prepared: PreparedJob) -> Job:
        """Look into an image that imgkit may not have built. See `Transport`."""
        assert prepared.source is not None  # noqa: S101 - `prepare` has been told the remote
        if not prepared.source.has_unknown_entry_points:
            return prepared.job
        return bound.bind(prepared.job, self.run)

    def start(self, job: Job, script: Script) -> Generator[bytes, None, None]:
        """Submit the script in the job's folder. See `Transport`."""
        return remote_jobs.start(self.connection, job, script)


def _image_id(job: Job) -> str:
    """Return the id of the image of a .sif here. Return "" where it is not known, or still to be made."""
    path = Path(job.container.image)
    if job.makes_image or not image.is_sif(path):
        return ""
    record = image.read(path).record
    return record.image_id if record else ""
