"""The programs that write a squashfs from a tar: mksquashfs from 4.5 on, and 4.3 and 4.4.

Both receive one tar with every name once, folders first. What they write is compared with it
afterwards (`squash`).

mksquashfs 4.3 and 4.4 cannot read a tar, so the files are unpacked once. An ordinary user cannot give files
away or make devices: the files are unpacked under the user's uid, and a pseudo-file definition states owners,
modes and devices. The tree is private, and no entry is written through a link: a folder counts only if it was
made here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from imgkit_builder.archive.tar_read import (
    BLOCK,
    CHARACTER,
    DIRECTORY,
    FIFO,
    HARD_LINK,
    REGULAR,
    SYMLINK,
    Member,
    TarLimits,
    TarStream,
)
from imgkit_builder.base import files
from imgkit_builder.sif import mksquashfs
from imgkit_builder.sif.conversion import PACKED_SHARE, Squasher, SquashOrder
from imgkit_builder.sif.workspace import remove_tree
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing

INSTALL = "apt install squashfs-tools, dnf install squashfs-tools, or brew install squashfs"

_READ_BYTES = 1 << 20
_MOST_TIME_S = (1 << 32) - 1
_SPECIAL = re.compile(rb'[\s\\"#]')
_UNBOUNDED = TarLimits(entries=1 << 40, hole_bytes=1 << 62)
"""The layers that the tar is made from were within the user's limits."""
_DEVICES = {CHARACTER: b"c", BLOCK: b"b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMksquashfs:
    """mksquashfs from 4.5 on, which reads a tar and writes into the .sif itself."""

    program: Path
    note: str = ""
    disk_share: float = 0.0

    def __str__(self) -> str:
        return f"mksquashfs {mksquashfs.version(self.program)} at {self.program}"

    @property
    def lacks_zstd(self) -> str:
        """Whether this build of it has zstd."""
        return mksquashfs.lacks_zstd(self.program)

    def words(self, order: SquashOrder) -> list[str]:
        """The program and its arguments."""
        return [
            *(str(self.program), "-", str(order.target), "-tar", "-noappend", "-quiet", "-no-progress"),
            *order.compression.options,
            *mksquashfs.gather_limits().mksquashfs_options(),
            *(("-offset", str(order.offset)) if order.offset else ()),
            *_root_options(order),
        ]

    def shown(self, order: SquashOrder) -> str:
        """One program."""
        return shlex.join(self.words(order))

    @contextlib.contextmanager
    def feed(self, order: SquashOrder) -> Iterator[IO[bytes]]:
        """Feed it directly."""
        words = self.words(order)
        order.log.write(f"$ ... | {' '.join(words)}\n")
        with mksquashfs.squashing(words, log=order.log, on_line=order.on_line) as sink:
            yield sink


def _root_options(order: SquashOrder) -> tuple[str, ...]:
    created_s = str(order.created_s)
    return (
        # A tar has no entry for the root itself; by default / would get mode 0777 and the current time.
        *("-root-mode", "0755", "-root-uid", "0", "-root-gid", "0"),
        *("-root-time", created_s, "-mkfs-time", created_s),
        # Uncompressed inodes, for root_inode.set_root; costs 0.3 % of size.
        "-noI",
    )


def choose() -> Squasher:
    """Return the first program that works on this machine.

    Raises
    ------
    ToolMissing : none does.
    """
    if program := mksquashfs.tar_reader():
        return TarMksquashfs(program=program)
    why = mksquashfs.obstacle()
    for old in mksquashfs.candidates():
        if mksquashfs.knows(old, r"-pf\b"):
            note = f"the files are written to disk once, and squashed from there (slower): {why}"
            return OldMksquashfs(program=old, note=note)
    raise ToolMissing(why, hint=INSTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldMksquashfs:
    """mksquashfs before 4.5."""

    program: Path
    note: str
    disk_share: float = 1 + PACKED_SHARE

    def __str__(self) -> str:
        return f"mksquashfs {mksquashfs.version(self.program)} at {self.program}"

    @property
    def lacks_zstd(self) -> str:
        """Whether this build of it has zstd; 4.3 has not."""
        return mksquashfs.lacks_zstd(self.program)

    def words(self, order: SquashOrder, output: Path, *options: str) -> list[str]:
        """The program and its arguments."""
        return [
            *(str(self.program), str(order.folder / "tree"), str(output)),
            *("-pf", str(order.folder / "owners"), "-noappend", "-no-progress"),
            *order.compression.options,
            *mksquashfs.gather_limits().mksquashfs_options(),
            # Uncompressed inodes, for root_inode.set_root.
            *("-noI", *options),
        ]

    def shown(self, order: SquashOrder) -> str:
        """The three steps."""
        output = order.folder / "root.sqfs"
        squashed = (
            f"{shlex.join(self.words(order, output))}; cat {shlex.quote(str(output))} >> {order.target}"
        )
        return f"tar -x -C {order.folder / 'tree'}   # as files of yours\n{squashed}"

    @contextlib.contextmanager
    def feed(self, order: SquashOrder) -> Iterator[IO[bytes]]:
        """Write the files, then squash them, then copy the squashfs."""
        root, owners, output = (order.folder / name for name in ("tree", "owners", "root.sqfs"))
        tree = PlainTree(root=root)
        with tree.written() as sink:
            yield sink
        tree.finish(order.created_s)
        with owners.open("wb") as out:
            out.writelines(tree.pseudo_file())
        for one in tree.losses():
            order.note(f"{one} (mksquashfs 4.5 or later loses nothing)")
        words = self.words(order, output, *(() if tree.attributes else ("-no-xattrs",)))
        order.log.write(f"$ {' '.join(words)}\n")
        with mksquashfs.squashing(words, log=order.log, on_line=order.on_line, only_errors=True):
            pass
        remove_tree(root)
        _append(output, order.target, order.offset)
        output.unlink()


@dataclass(slots=True, kw_only=True)
class PlainTree:
    """Files of a tar on disk, and what a pseudo file says about them."""

    root: Path
    attributes: int = 0
    """Number of files that have an extended attribute of theirs."""
    _folders: dict[str, int] = field(default_factory=dict)
    """Folders made here, with their times."""
    _said: dict[str, bytes] = field(default_factory=dict)
    """What the pseudo file says of each name; a folder comes before what is in it."""
    _texts: dict[bytes, bytes] = field(default_factory=dict)
    """Each of these texts once: most files have the same owner and mode."""
    _labelled: bool = False
    _bare: int = 0
    """Number of files that lost an extended attribute."""

    @contextlib.contextmanager
    def written(self) -> Iterator[IO[bytes]]:
        """Yield a stream for a tar; on leaving, its files are on disk.

        Raises
        ------
        ToolFailed : a file cannot be written.
        CheckFailed : the tar has an entry twice, or before its folder.
        """
        self.root.mkdir(mode=0o700)
        self._folders[""] = 0
        # A file system may label every file, as SELinux does. mksquashfs would store that.
        self._labelled = bool(_attributes(self.root))
        reading, writing = os.pipe()
        failed: list[Exception] = []
        reader = threading.Thread(target=self._read, args=(reading, failed.append))
        reader.start()
        sink = os.fdopen(writing, "wb", buffering=_READ_BYTES)
        try:
            try:
                yield sink
            finally:
                with contextlib.suppress(BrokenPipeError):
                    sink.close()
                reader.join()
        except BrokenPipeError:
            if not failed:
                raise
        if failed:
            raise failed[0]

    def _read(self, descriptor: int, fail: Callable[[Exception], None]) -> None:
        with os.fdopen(descriptor, "rb", buffering=0) as source:
            try:
                chunks = iter(lambda: source.read(_READ_BYTES), b"")
                stream = TarStream(chunks, name="the merged layers", limits=_UNBOUNDED)
                for member in stream:
                    self._put(member, stream)
                stream.drain()
            except Exception as error:  # it belongs to the thread that writes
                fail(error)

    def _put(self, member: Member, stream: TarStream) -> None:
        path = member.name
        above, _, name = path.rpartition("/")
        if above not in self._folders or name in ("", ".", "..") or path in self._folders:
            raise CheckFailed(f"{path!r} comes twice, or before its folder", where="the merged layers")
        if b"\n" in _raw_name(path):
            raise ToolFailed(
                f"an old mksquashfs cannot store {path!r}, whose name has a line break",
                hint="squashfs-tools 4.5 or later",
            )
        try:
            self._make(member, stream)
        except OSError as error:
            if error.errno in files.FULL:
                raise
            raise ToolFailed(
                f"{path!r} of the image cannot be written to disk: {error.strerror}",
                where=str(self.root),
                hint="--tmpdir DIR on another file system, or squashfs-tools 4.5 or later",
            ) from error

    def _make(self, member: Member, stream: TarStream) -> None:
        path, kind = member.name, member.kind
        place = self._at(path)
        if kind == HARD_LINK:
            self._link(path, member.link, place)
            return
        mode = member.mode & 0o7777
        time_s = min(max(int(member.mtime_s), 0), _MOST_TIME_S)
        if kind == REGULAR:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(place, flags, 0o600), "wb") as out:
                for piece in stream.content():
                    out.write(piece)
        elif kind == DIRECTORY:
            place.mkdir(mode=0o700)
            self._folders[path] = time_s
        elif kind == SYMLINK:
            place.symlink_to(os.fsdecode(_raw_name(member.link)))
            mode = 0o777
        elif kind == FIFO:
            os.mkfifo(place, 0o600)
        elif kind in _DEVICES:
            device = (_DEVICES[kind], mode, member.uid, member.gid, *member.device)
            self._say(path, b"%s %o %d %d %d %d" % device)
            return
        else:
            raise CheckFailed(f"{path!r} is of the unknown type {kind!r}", where="the merged layers")
        self._keep(member, place)
        os.utime(place, (time_s, time_s), follow_symlinks=False)
        self._say(path, b"m %o %d %d" % (mode, member.uid, member.gid))

    def _link(self, path: str, target: str, place: Path) -> None:
        said = self._said.get(target)
        if said is None or target in self._folders:
            raise CheckFailed(f"{path!r} is a hard link to {target!r}", where="the merged layers")
        if not _is_device(said):
            os.link(self._at(target), place, follow_symlinks=False)
        # mksquashfs stores every name of a link or FIFO as a file of its own.
        self._said[path] = said

    def _say(self, path: str, text: bytes) -> None:
        self._said[path] = self._texts.setdefault(text, text)

    def pseudo_file(self) -> Iterator[bytes]:
        """The lines of the pseudo file."""
        for path, text in self._said.items():
            yield b"%s %s\n" % (_quoted_name(path), text)

    def _keep(self, member: Member, place: Path) -> None:
        """Set the extended attributes that this user may set."""
        kept = False
        for name, value in member.xattrs.items():
            try:
                os.setxattr(place, name, value, follow_symlinks=False)
                kept = True
            except (OSError, AttributeError):
                self._bare += 1
        self.attributes += kept and not self._labelled
        self._bare += kept and self._labelled

    def finish(self, created_s: int) -> None:
        """Set the times of the folders, which every file in them has changed."""
        self._folders[""] = created_s
        for path, time_s in self._folders.items():
            os.utime(self._at(path), (time_s, time_s))
        self.root.chmod(0o755)

    def losses(self) -> Iterator[str]:
        """Say what the squashfs will lack."""
        if self._bare:
            yield f"{self._bare} extended attributes are left out, which this user cannot set here"
        if devices := sum(map(_is_device, self._said.values())):
            yield f"{devices} devices get the current time"

    def _at(self, path: str) -> Path:
        return self.root / os.fsdecode(_raw_name(path))


def _attributes(path: Path) -> list[str]:
    try:
        return os.listxattr(path)
    except (OSError, AttributeError):  # a file system without them; not Linux
        return []


def _is_device(said: bytes) -> bool:
    return not said.startswith(b"m")


def _raw_name(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _quoted_name(path: str) -> bytes:
    """A name as a pseudo file has it."""
    return _SPECIAL.sub(rb"\\\g<0>", _raw_name(path))


def _append(source: Path, target: Path, offset: int) -> None:
    """Copy the file `source` to byte `offset` of `target`, by the kernel where it can."""
    with (
        files.open_regular(source, buffering=0) as data,
        files.open_own(target, os.O_RDWR | os.O_CREAT, "r+b") as out,
    ):
        size = os.fstat(data.fileno()).st_size
        done = _copied_by_kernel(data.fileno(), out.fileno(), size, offset)
        data.seek(done)
        out.seek(offset + done)
        shutil.copyfileobj(data, out, 1 << 20)


def _copied_by_kernel(source: int, target: int, size: int, offset: int) -> int:
    """Number of bytes that were copied; fewer than `size` where the kernel or the file systems cannot."""
    done = 0
    try:
        while done < size:
            step = os.copy_file_range(source, target, size - done, done, offset + done)
            if not step:
                break
            done += step
    except AttributeError:  # not Linux
        return 0
    except OSError:  # two file systems, or one without it; a full disk fails again
        return done
    return done
