"""A folder of code as a delta over any image: the same files give the same bytes, of any owner and time.

Such a delta has no base and no whiteouts. It holds the folder at `CODE_PLACE`, and a file by which the
commands of the image see that it is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.delta import tree, write_squashfs
from imgkit_builder.delta.descriptor import CODE_PLACE
from imgkit_builder.delta.read_squashfs import SquashfsLayer
from imgkit_builder.delta.tree import Kind, TreeEntry
from imgkit_builder.sif import conversion
from imgkit_builder.sif.conversion import Clock, ConversionJob, Options
from imgkit_builder.sif.runtime import log_file
from imgkit_builder.sif.workspace import tmp_base, workspace
from imgkit_entrypoints.errors import CheckFailed, UsageError
from imgkit_entrypoints.launch import delta_check

SCHEMA = 1
SUFFIX = ".imgdelta"
_INSIDE = delta_check.CODE_JSON.lstrip("/")
_TIMES = 1 << 29


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFile:
    """One file, folder or symlink of the code."""

    name: str
    """Its path below the folder."""
    kind: Kind
    source: Path
    size_bytes: int = 0
    executable: bool = False
    link: str = ""
    """Target of a symlink, which nobody follows."""


class CodeTree:
    """The layer of a code delta; making one reads every file.

    Raises
    ------
    UsageError : a file cannot be read.
    """

    def __init__(self, found: Iterable[CodeFile], report: Reporter) -> None:
        self._files = {tree.join(CODE_PLACE, one.name): one for one in found}
        self._digests: dict[str, str] = {}
        done_bytes, all_bytes = 0, self.size_bytes
        for path, one in self._files.items():
            if one.kind == "file":
                self._digests[path] = _digest(one)
                done_bytes += one.size_bytes
                report.advance(done_bytes, all_bytes)
        whole = hashlib.sha256(b"imgkit code 1\n")
        for path, one in self._files.items():
            words = (one.name, one.kind, str(one.executable), one.link, self._digests.get(path, ""))
            whole.update(b"\0".join(os.fsencode(word) for word in words) + b"\n")
        self.sha256 = whole.hexdigest()
        """Digest of names, kinds, content and what may be executed: it names the delta."""
        self._mark = json.dumps({"schema": SCHEMA, "sha256": self.sha256}, indent=1).encode() + b"\n"
        self._tree: dict[str, dict[str, TreeEntry]] = {}
        folders = ("opt", "opt/imgkit", CODE_PLACE)
        for path in (*folders, _INSIDE, *self._files):
            folder, _, name = path.rpartition("/")
            self._tree.setdefault(folder, {})[name] = self._entry(path)

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(one.size_bytes for one in self._files.values())

    def children(self, path: str) -> Mapping[str, TreeEntry]:
        """Entries of the folder `path`; empty if it is not in this layer."""
        return self._tree.get(path, {})

    def content(self, entry: TreeEntry) -> Iterator[bytes]:
        """The bytes of a file, which must be those that were read first."""
        path = str(entry.place)
        if path == _INSIDE:
            yield self._mark
            return
        one = self._files[path]
        digest, left = hashlib.sha256(), one.size_bytes
        with _readable(one.source), files.open_regular(one.source, buffering=0) as stream:
            # One byte more than expected detects a file that grew.
            while chunk := stream.read(min(files.CHUNK_BYTES, left + 1)):
                digest.update(chunk)
                left -= len(chunk)
                if left < 0 or (not left and digest.hexdigest() != self._digests[path]):
                    raise _changed(one.source)
                yield chunk
        if left:
            raise _changed(one.source)

    def names(self, group: int) -> tuple[str, ...]:
        """Empty: no file has two names."""
        return ()

    def _entry(self, path: str) -> TreeEntry:
        one = self._files.get(path)
        if one is None:
            is_mark = path == _INSIDE
            return TreeEntry(
                layer=self,
                kind="file" if is_mark else "dir",
                mode=0o644 if is_mark else 0o755,
                mtime_s=files.MTIME_S,
                size_bytes=len(self._mark) if is_mark else 0,
                place=path,
            )
        # Python takes compiled code for current if time and size of the source are those that it knows. So
        # the time follows from the content: the image may hold compiled code of another version of the file.
        later_s = int(self._digests[path][:8], 16) % _TIMES if one.kind == "file" else 0
        return TreeEntry(
            layer=self,
            kind=one.kind,
            mode=0o777 if one.kind == "symlink" else 0o755 if one.kind == "dir" or one.executable else 0o644,
            mtime_s=files.MTIME_S + later_s,
            size_bytes=one.size_bytes,
            link=one.link,
            place=path,
        )


def name_of(sha256: str) -> str:
    """The file name of the code with that digest; without the suffix, that of its folder."""
    return f"code-{sha256}{SUFFIX}"


def name_over(sha256: str, base: str) -> str:
    """The file name of the changes that make this code of that with the digest `base`."""
    return f"code-{sha256}-{base[:12]}.imgdelta"


def write(code: CodeTree, target: Path, options: Options, report: Reporter) -> None:
    """Write the delta `target`, which is whole or absent.

    Raises
    ------
    UsageError : the folder changes while it is read.
    ToolMissing, ToolFailed : nothing here squashes, or it failed.
    """
    _write(code, tree.everything((code,)), target.absolute(), options, report)


def write_folder(code: CodeTree, folder: Path) -> None:
    """Write what is in the delta to `folder`, which does not exist. Raises UsageError as `write` does."""
    folder.mkdir()
    for path, entry in tree.everything((code,)):
        if entry.kind == "dir":
            (folder / path).mkdir()
        elif entry.kind == "symlink":
            (folder / path).symlink_to(entry.link)
        else:
            with files.create(folder / path, mode=0o777 if entry.mode & 0o100 else 0o666) as stream:
                stream.writelines(code.content(entry))


def write_over(code: CodeTree, base: Path, target: Path, options: Options, report: Reporter) -> bool:
    """Write to `target` what `code` adds and replaces over the delta `base`.

    False, and no file, where `base` has a name that must show the image's file again. Raises as `write` does.
    """
    below = (SquashfsLayer(base),)
    changes = tree.changes(below, (code,))
    added = [(path, entry) for path, entry in changes.items() if entry is not None]
    if len(added) < len(changes) or any(_hides(tree.find(below, path), entry) for path, entry in added):
        return False
    _write(code, added, target.absolute(), options, report)
    return True


def _hides(before: tree.Node | None, entry: TreeEntry) -> bool:
    """Whether a folder and what is none have one name: the image may have a folder of it, too."""
    return before is not None and (before.entry.kind == "dir") != (entry.kind == "dir")


def _write(
    code: CodeTree,
    entries: Iterable[tuple[str, TreeEntry]],
    target: Path,
    options: Options,
    report: Reporter,
) -> None:
    with workspace(target, tmp_base(target, options.tmpdir)) as work, log_file(target.stem) as log:
        clock = Clock(report)
        # Every runtime mounts gzip, and the delta is for images of either compression.
        packing = conversion.choose_compression(None, "gzip", zstd_error="")
        job = ConversionJob(tool=None, options=options, compression=packing, work=work, clock=clock, log=log)
        clock.stage("squash the code")
        write_squashfs.make(job, work.part, entries)
        if tree.content((SquashfsLayer(work.part),), _INSIDE) != tree.content((code,), _INSIDE):
            raise CheckFailed(
                "the new file does not contain the code",
                where=str(work.part),
                hint="mksquashfs did not store the data that it received: try another version",
            )
        files.publish(work.part, target)
        clock.finish()


def _digest(one: CodeFile) -> str:
    with _readable(one.source), files.open_regular(one.source, buffering=0) as stream:
        if os.fstat(stream.fileno()).st_size != one.size_bytes:
            raise _changed(one.source)
        return files.sha256(stream, 0, one.size_bytes)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into an error that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise _changed(path) from None
    except OSError as error:
        raise UsageError(
            f"it cannot be read: {error.strerror}",
            where=str(path),
            hint="chmod u+r it, or list it in .gitignore",
        ) from error


def _changed(path: Path) -> UsageError:
    return UsageError(
        "it changed while imgkit read it",
        where=str(path),
        hint="run the command again when no program writes there; or list it in .gitignore or .dockerignore",
    )
