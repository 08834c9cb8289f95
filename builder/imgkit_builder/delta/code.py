"""A folder of code, read once: the same files give the same digest, of any owner and time.

What a job mounts holds the folder at `CODE_PLACE`, and a file by which the commands of the image see it.
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
from imgkit_builder.delta import tree
from imgkit_builder.delta.descriptor import CODE_PLACE
from imgkit_builder.delta.tree import Kind, TreeEntry
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import delta_check

SCHEMA = 1
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
    """The content of the folder that a job mounts; making one reads every file.

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
        """Digest of names, kinds, content and what may be executed: it names the folder."""
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


def write_folder(code: CodeTree, folder: Path) -> None:
    """Write the code to `folder`, which does not exist; nobody should edit what a job in the queue will run.

    Raises
    ------
    UsageError : the folder of the code changes while it is read.
    """
    folder.mkdir()
    for path, entry in tree.everything((code,)):
        target = folder / path
        if entry.kind == "dir":
            target.mkdir()
        elif entry.kind == "symlink":
            target.symlink_to(entry.link)
        else:
            with files.create(target) as stream:
                stream.writelines(code.content(entry))
            # rsync links a file to that of an older folder where all of this is equal.
            target.chmod(0o555 if entry.mode & 0o100 else 0o444)
            os.utime(target, (entry.mtime_s, entry.mtime_s))


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
