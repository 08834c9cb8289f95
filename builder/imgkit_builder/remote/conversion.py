"""Let a job on a remote convert an archive: send it with the one-file tool, submit, wait, look again.

The store alone says whether the image is there, however a job ended. So two runs at once that convert the
same archive need not know of each other. The conversion locks its file, one of the two jobs fails, and the
run of that one waits for the other one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shlex
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import digests, sidecar, stored
from imgkit_builder.base.progress import Reporter
from imgkit_builder.job import systems
from imgkit_builder.job.request import Job, Request, Script, SubmittedJob
from imgkit_builder.job.resolve import resolve
from imgkit_builder.recipe.targets import Target, checked
from imgkit_builder.remote import converter, gc, jobs
from imgkit_builder.remote.connection import Connection, Cut
from imgkit_builder.remote.converter import Converter
from imgkit_builder.remote.store import Store
from imgkit_builder.sif import locked, workspace
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, UsageError

TIME = "01:00:00"
"""The time limit of the job. The run's own says nothing about a conversion, which takes minutes."""
_LATE_S = 60
"""A file of a node can be so late on the login node: NFS keeps lists of folders that long."""
_PAUSE_S = 3.0
_SHOWN_BYTES = 1 << 16
_SHOWN_LINES = 12

_JOBS = """\
cd -- "$home/jobs" || exit 1
grep -l "^archives/$image-[0-9a-f]*[.]tar\\$" -- * 2> /dev/null | while IFS= read -r id; do
    echo "$id $(sed -n 1p "$id") $(sed -n 2p "$id")"
done
"""
_REMOVE = 'cd -- "$home" && exec rm -f -- "$@"\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveHere:
    """A saved image on this machine: an archive, or an OCI folder."""

    path: Path
    image_id: str
    """``sha256:...`` of the image's configuration."""
    size_bytes: int

    @property
    def digest(self) -> str:
        """The image id as names in the store have it."""
        return self.image_id.removeprefix("sha256:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """An archive to convert on a remote."""

    archive: ArchiveHere
    target: Target
    request: Request
    """The run's; its account pays for the conversion, too."""
    write_tool: Callable[[Path], object]
    """Writes the one-file tool."""
    keep: Callable[[SubmittedJob], None]
    """Keeps the record of the job, so that its id is enough to follow it."""


def read(path: Path, report: Reporter) -> ArchiveHere:
    """Find out which image `path` holds; a compressed archive is read to its end.

    Raises
    ------
    UsageError : several images, none, or no image at all.
    CheckFailed : damaged.
    ToolMissing : it is zstd-compressed and there is no ``zstd``.
    """
    compress = None if path.is_dir() else digests.archive_compression(path)
    if compress in (None, "none"):
        config = stored.open_image(path).selected.config
    else:
        report.stage(f"read {path.name}")
        found = digests.digest_archive(path, compress=compress, report=report)
        if found.image is None:
            raise CheckFailed(found.problem, where=str(path))
        config = found.image.config
    parts = path.rglob("*") if path.is_dir() else (path,)
    size = sum(part.stat().st_size for part in parts if part.is_file())
    return ArchiveHere(path=path, image_id=locked.settled(config).image_id, size_bytes=size)


def target_of(path: Path) -> Target | None:
    """The recipe's name and system that imgkit wrote beside the archive `path`; None if it did not.

    Raises
    ------
    UsageError : what is written there cannot be read, or no recipe may have such values.
    """
    described = None if path.is_dir() else sidecar.read(path)
    if described is None or described.system is None or described.manifest is None:
        return None
    name, platforms = described.manifest.recipe, (described.image.platform,)
    return checked(Target(name=name, system=described.system, platforms=platforms, file=path))


def job(wanted: Conversion, home: str, words: Sequence[str], *, modules: Sequence[str] = ()) -> Job:
    """The job that converts: one node, with the options of the system for such jobs.

    Parameters
    ----------
    words : what it runs.
    modules : modules that it loads beside those of the runtime.

    Raises
    ------
    UsageError : as of `resolve`.
    """
    given = wanted.request
    request = Request(
        archive=wanted.archive.path,
        name=given.name,
        account=given.account,
        queue=given.queue,
        qos=given.qos,
        time=given.time,
        templates=given.templates,
        directory=Path(home),
    )
    made = resolve(wanted.target, request)
    system = made.recipe.system
    runtime = dataclasses.replace(system.runtime, modules=(*system.runtime.modules, *modules))
    recipe = dataclasses.replace(made.recipe, system=dataclasses.replace(system, runtime=runtime))
    return dataclasses.replace(made, recipe=recipe, time=TIME, maker=tuple(words))


def sketch(wanted: Conversion, home: str) -> Script:
    """The script of that job before the names of its files are known.

    Raises
    ------
    UsageError : the system has no nodes for such jobs, or a value that it cannot satisfy.
    """
    made = job(wanted, home, ("imgkit", "sif", str(wanted.archive.path), "--store", f"{home}/images"))
    return systems.named(made.system).script(made)


def convert(
    wanted: Conversion,
    far: Connection,
    there: Store,
    *,
    look: Callable[[], Store],
    send: Callable[[Path, str], None],
    report: Reporter,
) -> tuple[Store, str]:
    """Let the remote, whose store is `there`, convert the archive; the result is its store then, and the job.

    Parameters
    ----------
    look : sees what the store has.
    send : makes a file appear at a path in the store.

    Raises
    ------
    UsageError : the system has no nodes for it, or the remote lacks Python 3.10 or mksquashfs.
    CheckFailed : the archive differs from its checksum.
    ToolFailed : the scheduler refused, or the conversion failed; quotes the end of its output.
    Cut : the connection was lost too often; the job goes on.
    """
    record = _unfinished(wanted, far, there)
    if record is None:
        report.stage(f"look for Python and mksquashfs on {far.remote.name}")
        found = converter.find(far, wanted.target.system.runtime.modules)
        if found.lack:
            raise _refusal(wanted, far, found)
        sketch(wanted, there.home)
        files = _sent(wanted, there, send, report)
        try:
            record = _submitted(wanted, far, there, found, files, report)
        except ToolFailed:
            # The run of somebody who converts the same archive may have removed it a moment ago.
            if (after := look()).images:
                return after, ""
            raise
    while True:
        well, said = _followed(wanted, far, record, report)
        after = _awaited(look, well=well)
        if after.images:
            return after, record.handle
        other = _unfinished(wanted, far, there)
        if other is None or other.id == record.id:
            raise ToolFailed(
                f"the conversion on {far.remote.name} has failed: job {record.handle}",
                where=str(wanted.archive.path),
                hint=f"the end of its output:\n{said or '(it is empty)'}\n"
                "the archive stays there, and the same command converts it again",
            )
        record = other


def remove_archives(far: Connection, there: Store) -> None:
    """Remove the archives of an image that the store has as a .sif."""
    paths = [path for path in there.sent if path.startswith("archives/")]
    if paths:
        b"".join(far.stream(_REMOVE, {"home": there.home}, words=paths))


def _refusal(wanted: Conversion, far: Connection, found: Converter) -> UsageError:
    path, name = wanted.archive.path, far.remote.name
    return UsageError(
        f"{path} is no .sif, and {name} lacks what converts it: {found.lack}",
        where="RECIPE",
        hint=f"imgkit sif {shlex.quote(str(path))} -o X.sif, then imgkit run X.sif --on {name}\n"
        f"what is there: imgkit remote check {name}",
    )


def _sent(
    wanted: Conversion, there: Store, send: Callable[[Path, str], None], report: Reporter
) -> tuple[str, str]:
    """Send what the store lacks; the result is the paths of the one-file tool and of the archive in it."""
    with tempfile.TemporaryDirectory(prefix="imgkit-") as folder, _one_file(wanted, report) as archive:
        report.stage(f"compute the sha256 of {wanted.archive.path.name}")
        sha256 = digests.sha256(archive, report=report)
        stated = sidecar.read_sha256(archive)
        if stated not in (None, sha256):
            raise CheckFailed(
                "it differs from the checksum beside it",
                where=str(archive),
                hint=f"imgkit verify {shlex.quote(str(archive))}; then save it again",
            )
        report.stage("write the one-file tool")
        tool = Path(folder, "imgkit.pyz")
        wanted.write_tool(tool)
        tool_path = f"tools/imgkit-{hashlib.sha256(tool.read_bytes()).hexdigest()}.pyz"
        path = f"archives/{wanted.archive.digest}-{sha256[:12]}.tar"
        for source, place in ((tool, tool_path), (archive, path)):
            if place not in there.sent:
                send(source, place)
        if path in there.sent:
            report.note(f"to send: nothing of {wanted.archive.path}, which is there already")
    return tool_path, path


@contextlib.contextmanager
def _one_file(wanted: Conversion, report: Reporter) -> Iterator[Path]:
    """Yield the archive; of an OCI folder a tar, which has the same bytes each time, so that it can go on."""
    source = wanted.archive.path
    if source.is_file():
        yield source
        return
    base = workspace.tmp_base(source.absolute(), None)
    with tempfile.TemporaryDirectory(prefix=".imgkit-", dir=base) as folder:
        report.stage(f"pack {source.name}")
        packed = Path(folder, f"{source.name}.tar")
        with tarfile.open(packed, mode="w") as tar:
            for path in sorted(path for path in source.rglob("*") if path.is_file()):
                member = tarfile.TarInfo(str(path.relative_to(source)))
                member.size = path.stat().st_size
                with path.open("rb") as stream:
                    tar.addfile(member, stream)
        yield packed


def _submitted(
    wanted: Conversion,
    far: Connection,
    there: Store,
    found: Converter,
    files: tuple[str, str],
    report: Reporter,
) -> SubmittedJob:
    home = there.home
    tool, archive = (f"{home}/{path}" for path in files)
    report.stage(f"submit the conversion to {far.remote.name}")
    words = (found.python, tool, "sif", archive, "--store", f"{home}/images")
    modules = (found.module,) if found.module else ()
    made = job(wanted, home, words, modules=modules)
    record = jobs.submit(far, made, systems.named(made.system).script(made), uses=(archive, tool))
    record = dataclasses.replace(record, image_id=wanted.archive.image_id)
    wanted.keep(record)
    return record


def _unfinished(wanted: Conversion, far: Connection, there: Store) -> SubmittedJob | None:
    """The last job that converts an archive of this image and has not ended; None if there is none."""
    output = far.run(_JOBS, home=there.home, image=wanted.archive.digest).decode(errors="replace")
    rows = [row.split(" ", 2) for row in output.splitlines() if row.count(" ") >= 2]
    for name in dict.fromkeys(row[1] for row in rows):
        waiting, _ = gc.unfinished(far, name)
        for job_id, title in ((row[0], row[2]) for row in reversed(rows) if row[1] == name):
            if job_id in (waiting or ()):
                return SubmittedJob(
                    id=job_id,
                    system=name,
                    name=title,
                    recipe=wanted.target.name,
                    directory=Path(there.home),
                    remote=far.remote.name,
                )
    return None


def _followed(
    wanted: Conversion, far: Connection, record: SubmittedJob, report: Reporter
) -> tuple[bool | None, str]:
    """Wait for the end of the job; the result is whether it ended well, and the end of its output."""
    again = "the same command takes what it makes"
    tail = bytearray()

    def write(chunk: bytes) -> None:
        tail.extend(chunk)
        del tail[:-_SHOWN_BYTES]

    try:
        report.note(f"job {record.handle} converts {wanted.archive.path}; Ctrl-C leaves it, and {again}")
        report.stage(f"convert on {far.remote.name}")
        jobs.follow(far, record, write, report.note)
    except KeyboardInterrupt:
        report.note(f"the conversion goes on, and {again}; imgkit logs|cancel {record.handle}")
        raise
    except Cut as error:
        hint = f"the conversion {record.handle} goes on, and {again}\n     {error.hint}"
        raise Cut(error.what, where=error.where, hint=hint) from error
    system = systems.named(record.system)
    words = system.outcome(record)
    well = system.succeeded(jobs.finished(far, words).output) if words else None
    lines = tail.decode(errors="replace").splitlines()[-_SHOWN_LINES:]
    return well, "\n".join(f"  {line}" for line in lines)


def _awaited(look: Callable[[], Store], *, well: bool | None) -> Store:
    """The store after a job that ended well, or nobody knows how: its file may be late."""
    began = time.monotonic()
    while True:
        after = look()
        if after.images or well is False or time.monotonic() - began > _LATE_S:
            return after
        time.sleep(_PAUSE_S)
