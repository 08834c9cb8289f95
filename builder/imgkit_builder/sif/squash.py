"""Write a stream of entries as a squashfs with mksquashfs, old or new, and check the result.

mksquashfs from 4.5 on reads a tar from its standard input, and writes directly into the .sif.

mksquashfs 4.3 and 4.4 (RHEL 8 and 9) cannot read a tar, so imgkit first unpacks the files to disk. An
ordinary user cannot change the owner of files or create devices. So the files are unpacked with the user's
uid, and a file with pseudo-file definitions tells mksquashfs the owners, modes and devices. Only this user
can access the unpacked tree. No entry is written through a link: every folder on its path must have been
created here.

mksquashfs 4.5.1 loses files of a tar and still exits with 0, so imgkit counts the names in the squashfs. The
table of folders has a list of names for each folder. The lists follow each other without gaps, so one pass
over the table finds every name. mksquashfs 4.5.1 also makes the calling user the owner of the root folder.
imgkit changes the owner to root, because two users would otherwise get two different files.

The option ``-noI`` stores inodes, owners and folders uncompressed. The kernel's
Documentation/filesystems/squashfs.rst describes the format.
"""

from __future__ import annotations

import abc
import contextlib
import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from imgkit_builder.archive import tar_read, tar_write
from imgkit_builder.archive.tar_read import CAPABILITY, DIRECTORY, FIFO, HARD_LINK, REGULAR, SYMLINK
from imgkit_builder.base import files
from imgkit_builder.base.process import bound_to_parent, kill_hint, last_lines
from imgkit_builder.oci.config import creation_time_s
from imgkit_builder.sif import image, mksquashfs
from imgkit_builder.sif.conversion import Compression, ConversionJob
from imgkit_builder.sif.entries import ImageEntry
from imgkit_builder.sif.image import Superblock
from imgkit_builder.sif.workspace import PACKED_SHARE, remove_tree
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing

INSTALL = "apt install squashfs-tools, dnf install squashfs-tools, or brew install squashfs"

_PIPE_BYTES = 1 << 20  # the largest pipe that an unprivileged user may set
_MAX_TIME_S = (1 << 32) - 1  # a squashfs stores times in 32 bits
# Characters that must be escaped in the names of a pseudo file.
_PSEUDO_SPECIAL = re.compile(rb'[\s\\"#]')
_DEVICES = {tar_read.CHARACTER: "c", tar_read.BLOCK: "b"}
# mksquashfs prints this for an extended attribute that no squashfs can hold, such as an access list.
_HARMLESS = re.compile(r"Unrecognised (tar )?xattr prefix ")

_OFFSET = struct.Struct("<Q")
_BLOCK_HEADER = struct.Struct("<H")
# This bit is set in the header of a metadata block that is not compressed. The lower bits are its size.
_UNCOMPRESSED_BIT = 0x8000
# Size of an uncompressed metadata block, without its header.
_METADATA_BYTES = 8192
_LIST_HEADER = struct.Struct("<I8x")  # the number of names, and two numbers that are not needed
_LIST_ENTRY = struct.Struct("<6xH")  # the length of the name that follows
# The offset of a table that the squashfs does not have.
_NO_TABLE = (1 << 64) - 1
# Position in the superblock of the time at which the squashfs was written.
_MKFS_TIME_OFFSET = 8
# The types of a folder's inode: basic and extended.
_FOLDER_TYPES = (1, 8)
# Offsets in an inode, which begins with type, mode, uid and gid in two bytes each. uid and gid are positions
# in the table of owners.
_INODE_OWNERS, _INODE_TIME = 4, 8

# Names in the temporary folder of a conversion with an old mksquashfs: its input, its output, and the file
# after its option -pf.
_TREE_NAME, _SQUASHFS_NAME, _PSEUDO_FILE_NAME = "tree", "root.sqfs", "owners"


@dataclass(frozen=True, slots=True, kw_only=True)
class SquashTarget:
    """Where a squashfs is written, and how it is compressed."""

    path: Path
    offset: int = 0
    """Byte of `path` at which the squashfs begins."""
    created_s: int
    """Creation time of the squashfs, and time of its root folder."""
    compression: Compression
    folder: Path
    """Folder for temporary files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Squasher(abc.ABC):
    """A way to write a squashfs with a certain program mksquashfs of this machine."""

    program: Path
    note: str = ""
    """A sentence for the user if the best program is missing: what is done instead, and why. Else empty."""
    disk_share = 0.0
    """Bytes of temporary files per byte of the image."""

    def __str__(self) -> str:
        return f"mksquashfs {mksquashfs.read_version(self.program)} at {self.program}"

    @property
    def zstd_error(self) -> str:
        """Why this mksquashfs cannot compress with zstd, or ``""`` if it can. Version 4.3 cannot."""
        return mksquashfs.zstd_error(self.program)

    @abc.abstractmethod
    def argv(self, target: SquashTarget) -> list[str]:
        """Return the program and its arguments."""

    @abc.abstractmethod
    def write(self, entries: Iterator[ImageEntry], target: SquashTarget, job: ConversionJob) -> int:
        """Write `entries` as a squashfs, and return the number of their names.

        The caller compares this number with the number of names in the squashfs.

        Raises
        ------
        ToolFailed : the program failed, or printed a message that is not known to be harmless.
        """

    def _options(self, target: SquashTarget) -> tuple[str, ...]:
        """Return the options that every mksquashfs gets."""
        return (
            *("-noappend", "-no-progress"),
            *target.compression.options,
            *mksquashfs.gather_limits().mksquashfs_options(),
            # `set_root` can change only uncompressed inodes. The file becomes 0.3 % larger.
            "-noI",
        )


def choose() -> Squasher:
    """Return the best mksquashfs of this machine: one that reads a tar, or else an old one.

    Raises
    ------
    ToolMissing : there is no mksquashfs, or none that can store the owners of files.
    """
    tar_reader = mksquashfs.find_tar_reader()
    if tar_reader is not None:
        return TarMksquashfs(program=tar_reader)
    obstacle = mksquashfs.describe_obstacle()
    # The option -pf reads owners from a file. Without it, all files of the squashfs would belong to this
    # user.
    for program in mksquashfs.find_programs():
        if mksquashfs.has_option(program, r"-pf\b"):
            note = f"the files are written to disk once, and squashed from there (slower): {obstacle}"
            return OldMksquashfs(program=program, note=note)
    raise ToolMissing(obstacle, hint=INSTALL)


def write(
    entries: Iterator[ImageEntry],
    job: ConversionJob,
    path: Path,
    *,
    created: str,
    offset: int,
    squasher: Squasher,
) -> None:
    """Write `entries` as a squashfs to byte `offset` of `path`, with the program of `squasher`.

    Afterwards, the names in the squashfs are counted, because mksquashfs 4.5.1 loses files and still exits
    with 0. `created` is the time of the squashfs and its root folder, in RFC 3339. An empty text means 1970.

    Raises
    ------
    ToolFailed : mksquashfs failed or printed something unexpected.
    CheckFailed : the squashfs has more or fewer names than were sent.
    """
    created_s = creation_time_s(created)
    target = SquashTarget(
        path=path,
        offset=offset,
        created_s=created_s,
        compression=job.compression,
        folder=job.work.folder,
    )
    sent_count = squasher.write(strip_attributes(entries, job.clock.note), target, job)
    stored_count = _count_names(path, offset)
    # Compare before `set_root` changes the file, and before anything else uses it.
    if stored_count != sent_count:
        raise CheckFailed(
            f"the squashfs has other names than were sent: {stored_count} of {sent_count}",
            where=str(path),
            hint="please report this",
        )
    # mksquashfs 4.5.1 ignores its options for the root folder: it gets the current time and this user.
    set_root(path, created_s, offset=offset)


def strip_attributes(entries: Iterator[ImageEntry], note: Callable[[str], None]) -> Iterator[ImageEntry]:
    """Yield `entries` with no extended attributes except file capabilities.

    If an attribute was removed, `note` receives a sentence for the user at the end.
    """
    stripped_count = 0
    for entry in entries:
        if not entry.xattrs.keys() - {CAPABILITY}:
            yield entry
            continue
        stripped_count += 1
        # Engines export only capabilities. An image from an engine and the same image from an archive must
        # give the same files.
        capability = {name: value for name, value in entry.xattrs.items() if name == CAPABILITY}
        yield entry.changed(xattrs=capability)
    if stripped_count:
        note(f"{stripped_count} files lose extended attributes: a squashfs of imgkit holds capabilities only")


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMksquashfs(Squasher):
    """Writes a squashfs with mksquashfs 4.5 or later, which reads a tar."""

    def argv(self, target: SquashTarget) -> list[str]:
        """Return the program and its arguments."""
        created_s = str(target.created_s)
        argv = [str(self.program), "-", str(target.path), "-tar", "-quiet", *self._options(target)]
        if target.offset:
            argv += ["-offset", str(target.offset)]
        # The tar has no entry for the root folder. By default, / would get mode 0777 and the current time.
        argv += ["-root-mode", "0755", "-root-uid", "0", "-root-gid", "0"]
        argv += ["-root-time", created_s, "-mkfs-time", created_s]
        return argv

    def write(self, entries: Iterator[ImageEntry], target: SquashTarget, job: ConversionJob) -> int:
        """Send `entries` to the program as a tar through its standard input.

        The result is the number of names, which the caller compares with the squashfs.
        """
        argv = self.argv(target)
        job.log.write(f"$ ... | {' '.join(argv)}\n")
        with running(argv, job) as sink:
            return write_tar(entries, sink)


def write_tar(entries: Iterator[ImageEntry], sink: IO[bytes]) -> int:
    """Write `entries` to `sink` as a tar for mksquashfs, and return the number of names in it.

    The caller compares this number with the number of names in the squashfs. Hard links are written directly
    after their file, because mksquashfs 4.5.1 loses a hard link that comes before its file.
    """
    name_count = 0
    for entry in entries:
        name_count += len(entry.names)
        # An entry that was not changed still has the header from its source. `ImageEntry.changed` empties it.
        sink.write(entry.header or _make_tar_header(entry))
        if entry.size_bytes:
            for chunk in entry.content:
                sink.write(chunk)
            # A tar consists of blocks of 512 bytes. Zeros fill the last block of a file.
            sink.write(tar_write.padding(entry.size_bytes))
        for name in entry.names[1:]:
            sink.write(tar_write.header(name, HARD_LINK, link=entry.name))
    sink.write(tar_write.END)
    return name_count


def _make_tar_header(entry: ImageEntry) -> bytes:
    """Return the header blocks of a tar that come before the content of `entry`."""
    return tar_write.header(
        entry.name,
        entry.kind,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime_s=entry.mtime_s,
        size_bytes=entry.size_bytes,
        link=entry.link,
        device=entry.device,
        xattrs=entry.xattrs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OldMksquashfs(Squasher):
    """Writes a squashfs with mksquashfs 4.3 or 4.4, from files on disk."""

    disk_share = 1 + PACKED_SHARE

    def argv(self, target: SquashTarget) -> list[str]:
        """Return the command that packs the files in the folder ``tree``, with owners from a pseudo file."""
        tree = target.folder / _TREE_NAME
        squashfs = target.folder / _SQUASHFS_NAME
        # The pseudo file sets owners and modes of the files in `tree`, and adds devices.
        pseudo_file = target.folder / _PSEUDO_FILE_NAME
        return [str(self.program), str(tree), str(squashfs), "-pf", str(pseudo_file), *self._options(target)]

    def write(self, entries: Iterator[ImageEntry], target: SquashTarget, job: ConversionJob) -> int:
        """Write the files to disk, pack them into a squashfs, and copy the squashfs into the target's file.

        An old mksquashfs cannot read a tar or write into the middle of a file. The result is the number of
        names, which the caller compares with the squashfs.
        """
        tree = UnpackedTree(target.folder / _TREE_NAME)
        name_count = 0
        for entry in entries:
            tree.add(entry)
            name_count += len(entry.names)
        # After the last entry, because every new file changes the time of its folder.
        tree.finish(target.created_s)
        # The pseudo file: owners, permissions and devices, which an ordinary user cannot set on disk.
        (target.folder / _PSEUDO_FILE_NAME).write_bytes(b"".join(tree.pseudo_file()))
        for loss in tree.losses():
            job.clock.note(f"{loss} (mksquashfs 4.5 or later loses nothing)")
        # The command reads the tree and the pseudo file, and writes a new file with the squashfs.
        argv = self.argv(target)
        if not tree.stored_attribute_count:
            argv.append("-no-xattrs")
        job.log.write(f"$ {' '.join(argv)}\n")
        # An old mksquashfs prints a table of what it wrote to its standard output, which is ignored.
        with running(argv, job, only_errors=True):
            pass  # it gets no input; the end of the block waits until it has ended
        # The disk may not have space for the files, the squashfs and its copy at the same time.
        remove_tree(tree.root)
        _copy_into_target(target.folder / _SQUASHFS_NAME, target)
        return name_count


def _copy_into_target(squashfs: Path, target: SquashTarget) -> None:
    """Copy the file `squashfs` to byte `target.offset` of the target's file, and remove `squashfs`."""
    # The target's file is not emptied when it is opened, because it may have a header before `target.offset`.
    with (
        files.open_regular(squashfs) as source,
        files.open_own(target.path, os.O_RDWR | os.O_CREAT, "r+b") as stream,
    ):
        stream.seek(target.offset)
        shutil.copyfileobj(source, stream, files.CHUNK_BYTES)
    squashfs.unlink()


class UnpackedTree:
    """The files of an image on disk for an old mksquashfs, and the lines of its pseudo file.

    An ordinary user cannot change the owner of files or create devices. So all files belong to this user. The
    pseudo file tells mksquashfs the true owners and modes of the files, and which devices to add.

    Raises
    ------
    ToolFailed : (from `add`) a file cannot be written.
    CheckFailed : (from `add`) an entry comes twice, or before its folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stored_attribute_count = 0
        """Number of extended attributes on the files that mksquashfs should store."""
        self._lost_attribute_count = 0
        self._folders: dict[str, int] = {"": 0}
        """All folders that were created so far, with their times. The root folder has an empty name."""
        self._pseudo_lines: dict[str, str] = {}
        """The line of each name in the pseudo file, without the name. A folder comes before its files.

        The lines are interned (equal texts share memory), because most files have the same owner and mode.
        """
        root.mkdir(mode=0o700)
        # A file system may set an attribute on every new file, as SELinux does. mksquashfs would store it.
        self._is_labelled = bool(_list_attributes(root))

    def add(self, entry: ImageEntry) -> None:
        """Write the entry to disk under its first name, and create a hard link for each other name.

        Raises
        ------
        CheckFailed : the entry comes twice, or before its folder.
        ToolFailed : the entry cannot be written.
        """
        for name in entry.names:
            self._refuse_name(name)
            try:
                if name != entry.name:
                    self._link(name, entry.name)
                elif entry.kind == HARD_LINK:
                    self._link(name, entry.link)
                else:
                    self._write_entry(entry)
            except OSError as error:
                if error.errno in files.FULL:
                    raise  # `workspace.workspace` turns this error into a message about the full disk
                raise ToolFailed(
                    f"{name!r} of the image cannot be written to disk: {error.strerror}",
                    where=str(self.root),
                    hint="--tmpdir DIR on another file system, or squashfs-tools 4.5 or later",
                ) from error

    def _refuse_name(self, name: str) -> None:
        """Raise an error if `name` cannot be written safely or stored in the pseudo file.

        A hostile archive can contain links. A repeated name, ``..``, or a name in a folder that was not
        created here could lead out of the tree through such a link. A line break would end the name's line
        in the pseudo file.

        Raises
        ------
        CheckFailed : the name is not safe.
        ToolFailed : the name has a line break.
        """
        folder, _, base_name = name.rpartition("/")
        # `_folders` has only the folders that were created here, and no links.
        is_in_new_folder = folder in self._folders and not name.startswith("/")
        is_plain_name = base_name not in ("", ".", "..")
        is_folder_twice = name in self._folders  # for a file that comes twice, writing it will fail
        if not is_in_new_folder or not is_plain_name or is_folder_twice:
            raise CheckFailed(f"{name!r} comes twice, or before its folder", where="the merged layers")
        if "\n" in name:
            raise ToolFailed(
                f"an old mksquashfs cannot store {name!r}, whose name has a line break",
                hint="squashfs-tools 4.5 or later",
            )

    def _write_entry(self, entry: ImageEntry) -> None:
        """Write the file, folder, link or FIFO to disk, and add its line to the pseudo file.

        A device is not written, because an ordinary user cannot create devices. Its line in the pseudo file
        makes mksquashfs add the device.
        """
        # Interned, so that equal lines share one object, which saves memory.
        self._pseudo_lines[entry.name] = sys.intern(_make_pseudo_line(entry))
        if entry.kind in _DEVICES:
            return
        path = self._path(entry.name)
        _write_to_disk(entry, path)
        # A pseudo file cannot contain extended attributes. mksquashfs reads them from the file on disk.
        self._set_attributes(entry, path)
        time_s = min(max(entry.mtime_s, 0), _MAX_TIME_S)
        # The time is set last, because writing content and attributes changes it.
        os.utime(path, (time_s, time_s), follow_symlinks=False)
        if entry.kind == DIRECTORY:
            # Later entries in the folder change its time. `finish` sets it again.
            self._folders[entry.name] = time_s

    def _link(self, name: str, target: str) -> None:
        """Make `name` a hard link to `target`, a file that must have been written before.

        If `target` is a device, `name` gets only a line in the pseudo file.

        Raises
        ------
        CheckFailed : `target` is a folder or has not been written.
        """
        pseudo_line = self._pseudo_lines.get(target)  # every entry that was added has one
        is_folder = target in self._folders
        if pseudo_line is None or is_folder:
            raise CheckFailed(f"{name!r} is a hard link to {target!r}", where="the merged layers")
        if not _adds_device(pseudo_line):
            os.link(self._path(target), self._path(name), follow_symlinks=False)
        # mksquashfs stores each name of a symlink or FIFO as a file of its own, so each name needs a line.
        self._pseudo_lines[name] = pseudo_line

    def _set_attributes(self, entry: ImageEntry, path: Path) -> None:
        """Set the extended attributes that this user may set, and count the others as lost.

        If the file system sets attributes on every file, as SELinux does, mksquashfs must not store any. Then
        all attributes count as lost.
        """
        if self._is_labelled:
            self._lost_attribute_count += len(entry.xattrs)
            return
        for name, value in entry.xattrs.items():
            try:
                os.setxattr(path, name, value, follow_symlinks=False)
            except (OSError, AttributeError):  # not allowed for this user; not Linux
                self._lost_attribute_count += 1
            else:
                self.stored_attribute_count += 1

    def finish(self, created_s: int) -> None:
        """Set the times of the folders at the end, because each new file changes its folder's time.

        `created_s` is the time for the root folder, which has no entry.
        """
        self._folders[""] = created_s
        for name, time_s in self._folders.items():
            os.utime(self._path(name), (time_s, time_s))
        # mksquashfs takes the mode of / from this folder, because the pseudo file has no line for it.
        self.root.chmod(0o755)

    def pseudo_file(self) -> Iterator[bytes]:
        """Yield the lines of the pseudo file."""
        for name, pseudo_line in self._pseudo_lines.items():
            escaped_name = _PSEUDO_SPECIAL.sub(rb"\\\g<0>", _encode_path(name))
            yield escaped_name + f" {pseudo_line}\n".encode()

    def losses(self) -> Iterator[str]:
        """Yield a sentence for the user on each property of the image that the squashfs cannot keep."""
        count = self._lost_attribute_count
        if count:
            yield f"{count} extended attributes are left out, which this user cannot set here"
        device_count = sum(map(_adds_device, self._pseudo_lines.values()))
        if device_count:
            yield f"{device_count} devices get the current time"

    def _path(self, name: str) -> Path:
        return self.root / os.fsdecode(_encode_path(name))


def _make_pseudo_line(entry: ImageEntry) -> str:
    """Return the line of `entry` in the pseudo file, without its name.

    ``m 644 0 0`` sets the mode and the owners of a file in the tree. ``c 666 0 0 1 3`` adds a device.
    """
    mode = entry.mode & 0o7777  # without the bits of the file type
    if entry.kind in _DEVICES:
        major, minor = entry.device
        return f"{_DEVICES[entry.kind]} {mode:o} {entry.uid} {entry.gid} {major} {minor}"
    if entry.kind == SYMLINK:
        mode = 0o777  # Linux gives every symlink this mode
    return f"m {mode:o} {entry.uid} {entry.gid}"


def _write_to_disk(entry: ImageEntry, path: Path) -> None:
    """Create the file, folder, link or FIFO `path` with permissions for this user only.

    mksquashfs gets the final permissions from the pseudo file (`UnpackedTree.pseudo_file`).

    Raises
    ------
    CheckFailed : the entry has another type.
    """
    if entry.kind == REGULAR:
        # O_EXCL and O_NOFOLLOW make the call fail if `path` exists. So nothing is written through a link.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # TID251 forbids `os.open`, because it follows links without these flags.
        with os.fdopen(os.open(path, flags, 0o600), "wb") as stream:  # noqa: TID251 - see `flags`
            stream.writelines(entry.content)
    elif entry.kind == DIRECTORY:
        path.mkdir(mode=0o700)
    elif entry.kind == SYMLINK:
        # The bytes as in the image. Python's encoding of paths may be another one than UTF-8.
        path.symlink_to(os.fsdecode(_encode_path(entry.link)))
    elif entry.kind == FIFO:
        os.mkfifo(path, 0o600)  # noqa: TID251 - a folder of this process
    else:
        raise CheckFailed(f"{entry.name!r} is of the unknown type {entry.kind!r}", where="the merged layers")


def _list_attributes(path: Path) -> list[str]:
    """Return the names of the extended attributes of `path`."""
    try:
        return os.listxattr(path)
    except (OSError, AttributeError):  # the file system has no attributes; not Linux
        return []


def _adds_device(pseudo_line: str) -> bool:
    """Return whether a line of a pseudo file creates a device. Other lines ("m ...") modify a file."""
    return not pseudo_line.startswith("m")


def _encode_path(text: str) -> bytes:
    """Return the bytes of a name or link target, which need not be valid UTF-8."""
    return text.encode("utf-8", "surrogateescape")


@contextlib.contextmanager
def running(argv: Sequence[str], job: ConversionJob, *, only_errors: bool = False) -> Iterator[IO[bytes]]:
    """Run mksquashfs, and yield its standard input, to which the block may write a tar.

    After the block, the function waits until the program ends. If the block raises, the program is killed.
    The program also ends when imgkit is killed, because it would otherwise write gigabytes that nobody uses.

    If mksquashfs leaves out a file, it only prints a line and exits with 0. So every line that it prints
    counts as a failure, unless the line is known to be harmless.

    Parameters
    ----------
    argv : the program and its arguments.
    only_errors : ignore the program's standard output. An old version prints a table of what it wrote there.

    Raises
    ------
    ToolFailed : mksquashfs failed, or printed a line that is not known to be harmless.
    """
    with tempfile.TemporaryFile() as messages:
        process = _start_mksquashfs(argv, messages, only_errors=only_errors)
        assert process.stdin is not None  # noqa: S101 - for the type checker: it is a pipe
        is_input_complete = False
        try:
            # The pipe breaks if the program ends early. Its exit code and its messages say why.
            with contextlib.suppress(BrokenPipeError):
                yield process.stdin
                process.stdin.close()
                is_input_complete = True
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            # `close` writes the rest of the buffer, which fails because the program no longer reads it.
            with contextlib.suppress(OSError):
                process.stdin.close()
            raise
        messages.seek(0)
        output = messages.read().decode("utf-8", "replace").strip()
    job.log.write(output + "\n")
    for line in output.splitlines():
        job.clock.line(line)
    if code != 0 or not is_input_complete:
        raise _mksquashfs_error(f"failed with exit code {code}", code, output, job)
    is_harmless = all(_HARMLESS.match(line) for line in output.splitlines())
    if not is_harmless:
        raise _mksquashfs_error("printed something unexpected", code, output, job)


def _start_mksquashfs(
    argv: Sequence[str], messages: IO[bytes], *, only_errors: bool
) -> subprocess.Popen[bytes]:
    """Start mksquashfs with a pipe as its standard input. It writes its output to the file `messages`.

    If `only_errors` is true, its standard output is dropped, and the file receives only its standard error.
    """
    # mksquashfs refuses the option -mkfs-time if this variable is set.
    env = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    process = subprocess.Popen(
        bound_to_parent(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL if only_errors else messages,
        stderr=messages,
        bufsize=_PIPE_BYTES,
        env=env,
        # With a session of its own, the program does not receive Ctrl-C. imgkit receives it, kills the
        # program and removes its file.
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101 - for the type checker: stdin=PIPE
    # A larger pipe is faster. It may exceed the user's limit, or the system may not be Linux.
    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return process


def _mksquashfs_error(problem: str, code: int, output: str, job: ConversionJob) -> ToolFailed:
    """Return the error for a run of mksquashfs, which quotes the last lines of its output.

    `problem` says what is wrong with the run, such as ``failed with exit code 1``.
    """
    # The kernel sends SIGXFSZ to a program that exceeds the limit of the user for the size of a file.
    if code == -signal.SIGXFSZ:
        problem += ": file too large, see ulimit -f"
    job.log.flush()  # the user reads the log, which the hint names
    tail = "\n".join(last_lines(output))
    return ToolFailed(
        f"mksquashfs {problem}",
        hint=f"its last lines:\n{tail}\nthe full log: {job.log.name}{kill_hint(code)}",
    )


def _count_names(path: Path, offset: int) -> int:
    """Return the number of names in the squashfs at byte `offset` of `path`, without the root folder.

    The names are in its table of folders, which has one list of names per folder.

    Raises
    ------
    CheckFailed : the table is compressed or damaged.
    """
    try:
        with files.open_regular(path) as stream:
            table = b"".join(_read_folder_table(stream, offset))
        return sum(_list_lengths(table))
    except (struct.error, ValueError) as error:
        message = "a squashfs was written whose table of folders cannot be read"
        raise CheckFailed(message, where=str(path)) from error


def _list_lengths(table: bytes) -> Iterator[int]:
    """Yield the number of names in each list of the table of folders.

    A list begins with a header. An entry and a name follow for each file. The format stores counts and
    lengths minus 1.

    Raises
    ------
    struct.error : the table ends within a list.
    """
    position = 0
    while position < len(table):
        (count_less_one,) = _LIST_HEADER.unpack_from(table, position)
        position += _LIST_HEADER.size
        for _ in range(count_less_one + 1):
            (name_length_less_one,) = _LIST_ENTRY.unpack_from(table, position)
            position += _LIST_ENTRY.size + name_length_less_one + 1
        yield count_less_one + 1


def _read_folder_table(stream: BinaryIO, offset: int) -> Iterator[bytes]:
    """Yield the blocks of the table of folders in the squashfs at byte `offset` of the file.

    The table ends where the next table begins, since the format does not store its size.

    Raises
    ------
    ValueError, struct.error : the table is compressed or damaged.
    """
    # All positions in a squashfs count from its first byte, which is at `offset` of the file.
    superblock = Superblock(*_read_struct(stream, image.SUPERBLOCK, offset))
    (end,) = _read_struct(stream, _OFFSET, offset + _find_index_after_folders(superblock))
    position = superblock.directory_table
    while position < end:
        block = _read_metadata_block(stream, offset + position)
        if not block:  # the loop would never end
            raise ValueError("an empty block")
        yield block
        position += _BLOCK_HEADER.size + len(block)


def _find_index_after_folders(superblock: Superblock) -> int:
    """Return the offset of the index that belongs to the table after the table of folders.

    The tables follow in the order fragments, exports, owners. A squashfs may lack the first two. An index
    lists the blocks of its table, so its first number is where the table begins, and the table of folders
    ends. For these three tables, the superblock has the offset of the index. The format is described in
    Documentation/filesystems/squashfs.rst of the kernel.
    """
    if superblock.fragments:
        return superblock.fragment_table
    if superblock.export_table != _NO_TABLE:
        return superblock.export_table
    return superblock.owner_table


def _read_struct(stream: BinaryIO, form: struct.Struct, position: int) -> tuple[Any, ...]:
    """Read the values of the struct `form` at byte `position` of `stream`."""
    stream.seek(position)
    return form.unpack(stream.read(form.size))


def _read_metadata_block(stream: BinaryIO, position: int) -> bytes:
    """Return the content of the metadata block at byte `position`.

    Raises
    ------
    ValueError : the block is compressed or cut short.
    """
    (header,) = _read_struct(stream, _BLOCK_HEADER, position)
    is_compressed = not header & _UNCOMPRESSED_BIT
    size = header & ~_UNCOMPRESSED_BIT
    content = stream.read(size)  # `_read_struct` has left the stream after the header
    if is_compressed or len(content) < size:
        raise ValueError("a compressed block, or cut short")
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inode:
    """An inode in an open squashfs: the description of one file or folder.

    An inode may begin in one metadata block of 8 KiB and end in the next block. Then the header of the next
    block is between its two parts.
    """

    stream: BinaryIO
    first_block: int
    """Position in the file of the block that contains the first byte of the inode."""
    start: int
    """Offset of the inode in the content of this block."""

    def is_folder(self) -> bool:
        """Return whether the inode is uncompressed and describes a folder."""
        (block_header,) = _read_struct(self.stream, _BLOCK_HEADER, self.first_block)
        if not block_header & _UNCOMPRESSED_BIT:
            return False
        self.stream.seek(self._position(0))
        return self.stream.read(1)[0] in _FOLDER_TYPES

    def write(self, field_offset: int, data: bytes) -> None:
        """Replace the bytes of the inode from `field_offset` on by `data`."""
        # The bytes are written one by one, because a block header may be between two bytes of a field.
        for byte_offset, byte in enumerate(data, field_offset):
            self.stream.seek(self._position(byte_offset))
            self.stream.write(bytes([byte]))

    def _position(self, number: int) -> int:
        """Return the position in the file of byte `number` of the inode."""
        block_index, block_offset = divmod(self.start + number, _METADATA_BYTES)
        # In the file, each block of 8 KiB follows its header of two bytes.
        block = self.first_block + block_index * (_BLOCK_HEADER.size + _METADATA_BYTES)
        return block + _BLOCK_HEADER.size + block_offset


def set_root(path: Path, mtime_s: int, *, offset: int) -> None:
    """Make root the owner of a squashfs' root folder, and set the times of the folder and the squashfs.

    Both times are set to `mtime_s`. The squashfs begins at byte `offset` of the file `path`, which is changed
    in place. If the inode of the folder is compressed, the folder is not changed.

    Notes
    -----
    ``mksquashfs -tar`` of 4.5.1 gives the root folder the current time and the calling user, and ignores
    ``-root-time`` and ``-root-uid``. So two users would get two different files. The variable
    SOURCE_DATE_EPOCH does not help, because it would also lower the time of every newer file. The option
    ``-noI`` keeps inodes and owners uncompressed, so that this function can change them.
    """
    raw_time = struct.pack("<I", mtime_s)
    with files.open_own(path, os.O_RDWR, "r+b") as stream:
        superblock = Superblock(*_read_struct(stream, image.SUPERBLOCK, offset))
        # mksquashfs 4.3 has no option -mkfs-time, so the time of the squashfs is set here.
        stream.seek(offset + _MKFS_TIME_OFFSET)
        stream.write(raw_time)
        root = _find_root_inode(stream, superblock, offset)
        # A squashfs of another program may have compressed inodes, in which nothing can be replaced.
        if not root.is_folder():
            return
        root.write(_INODE_TIME, raw_time)
        owner_index = _find_index_of_root(stream, superblock, offset)
        if owner_index is not None:
            root.write(_INODE_OWNERS, struct.pack("<HH", owner_index, owner_index))


def _find_root_inode(stream: BinaryIO, superblock: Superblock, offset: int) -> _Inode:
    """Return the inode of the root folder of the squashfs at byte `offset` of `stream`."""
    # In `root_inode`, the high bits are the offset of a block in the inode table. The low 16 bits are the
    # offset of the inode in the block.
    block_offset, start = divmod(superblock.root_inode, 1 << 16)
    first_block = offset + superblock.inode_table + block_offset
    return _Inode(stream=stream, first_block=first_block, start=start)


def _find_index_of_root(stream: BinaryIO, superblock: Superblock, offset: int) -> int | None:
    """Return the position of uid 0 in the table of owners, since an inode stores positions and not uids.

    The squashfs begins at byte `offset` of `stream`. Return None if no file belongs to root, or if the table
    is compressed.
    """
    try:
        (block,) = _read_struct(stream, _OFFSET, offset + superblock.owner_table)
        data = _read_metadata_block(stream, offset + block)
        owners = [owner for (owner,) in struct.iter_unpack("<I", data)]
        return owners.index(0)
    except (ValueError, struct.error):  # `index` also raises ValueError if no owner is 0
        return None
