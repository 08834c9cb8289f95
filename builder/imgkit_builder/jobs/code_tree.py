"""Read a folder of code once, and write its content to the store of code or to the run folder of a job.

The content has a digest. Equal files give an equal digest, whatever their owners and times are. The store has
one read-only folder for each version of the code. The folder is named by the digest, and contains the code in
its subfolder `WORKSPACE`. Each run works in a copy of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import WORKSPACE

# The modification times of code are spread over 2^29 seconds, which is 17 years. See `CodeTree._mtime_s`.
_MTIME_RANGE_S = 1 << 29


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFile:
    """A file, folder or symlink of the code."""

    name: str
    """The path below the folder of the code, such as ``src/train.py``."""
    kind: Literal["file", "dir", "symlink"]
    source: Path
    size_bytes: int = 0
    executable: bool = False
    link: str = ""
    """Target of a symlink. The link is copied as a link, even if its target is not in the code."""


class CodeTree:
    """The content of a folder of code.

    The constructor reads every file.

    Raises
    ------
    UsageError : a file cannot be read, or has changed since it was listed.
    """

    def __init__(self, code_files: Iterable[CodeFile], report: Reporter) -> None:
        self.files = {file.name: file for file in code_files}
        """The entries of the code, by their names. A folder comes before its content."""
        self.size_bytes = sum(file.size_bytes for file in self.files.values())
        self._digests = {}
        read_bytes = 0
        # Version 1 of the format that is hashed: one line of fields for each entry, as written below.
        tree_digest = hashlib.sha256(b"imgkit code 1\n")
        for name, file in self.files.items():
            if file.kind == "file":
                self._digests[name] = _sha256_of_file(file)
                read_bytes += file.size_bytes
                report.advance(read_bytes, self.size_bytes)
            fields = (name, file.kind, str(file.executable), file.link, self._digests.get(name, ""))
            tree_digest.update(b"\0".join(os.fsencode(field) for field in fields) + b"\n")
        self.sha256 = tree_digest.hexdigest()
        """Digest of the names, kinds, contents, executable bits and links. The folder on the nodes has it as
        its name.
        """

    def write(self, folder: Path) -> None:
        """Write the code as read-only files to ``folder/WORKSPACE``, the form in which the store has it.

        `folder` must not exist.

        Raises
        ------
        UsageError : a file has changed since the constructor read it.
        """
        folder.mkdir(parents=True)
        self._write_files(folder / WORKSPACE, writable=False)

    def write_copy(self, folder: Path) -> None:
        """Write the code to `folder`, as the copy in which a run works. The owner can change the files.

        `folder` must not exist.

        Raises
        ------
        UsageError : a file has changed since the constructor read it.
        """
        self._write_files(folder, writable=True)

    def _write_files(self, folder: Path, *, writable: bool) -> None:
        """Write all files, folders and links of the code to `folder`, which must not exist.

        Parameters
        ----------
        writable : whether the owner can change the files.
        """
        folder.mkdir()
        for name, file in self.files.items():  # each folder comes before its content
            target = folder / name
            if file.kind == "dir":
                target.mkdir()
            elif file.kind == "symlink":
                target.symlink_to(file.link)
            else:
                self._write_file(file, target, writable=writable)

    def _write_file(self, file: CodeFile, target: Path, *, writable: bool) -> None:
        """Write the content of `file` to `target`, with a mode and a time that depend only on the file.

        An unchanged file therefore has the same mode and time in each version of the code. ``rsync
        --link-dest`` needs this: it then makes a hard link to the file of an older version, instead of
        sending the file again.
        """
        with files.create_file(target) as stream:
            stream.writelines(self._read_unchanged(file))
        mode = 0o444
        if file.executable:
            mode |= 0o111
        if writable:  # the owner may write to a run's copy, but nobody to a file of the store
            mode |= 0o200
        target.chmod(mode)
        mtime_s = self._mtime_s(file.name)
        # Last, because writing the content sets the time, too.
        os.utime(target, (mtime_s, mtime_s))

    def _mtime_s(self, name: str) -> int:
        """Return the modification time of a file, a number that depends only on the file's content.

        All files cannot have the same fixed time. Python runs the bytecode in ``__pycache__`` if the bytecode
        records the time and the size of the source file. If all versions of a file had the same time, Python
        would run the bytecode of an older version with the same size.
        """
        # 8 hexadecimal digits are 32 bits of the digest, which is more than the range needs.
        return files.MTIME_S + int(self._digests[name][:8], 16) % _MTIME_RANGE_S

    def _read_unchanged(self, file: CodeFile) -> Iterator[bytes]:
        """Yield the content of a file in chunks, and check that it is the content that the constructor read.

        The last chunk is checked before it is yielded. So a file that has changed is never written
        completely.

        Raises
        ------
        UsageError : the file has grown, shrunk or changed.
        """
        digest = hashlib.sha256()
        remaining_bytes = file.size_bytes
        with _translate_read_errors(file.source), files.open_regular(file.source, buffering=0) as stream:
            while True:
                # Reading one byte more than expected detects a file that has grown.
                chunk = stream.read(min(files.CHUNK_BYTES, remaining_bytes + 1))
                if not chunk:
                    break
                digest.update(chunk)
                remaining_bytes -= len(chunk)
                if remaining_bytes < 0:
                    raise _changed_error(file.source)
                if remaining_bytes == 0 and digest.hexdigest() != self._digests[file.name]:
                    raise _changed_error(file.source)
                yield chunk
        if remaining_bytes:
            raise _changed_error(file.source)


def _sha256_of_file(file: CodeFile) -> str:
    """Return the SHA-256 of the content of a file.

    Raises
    ------
    UsageError : the file cannot be read, or its size has changed since it was listed.
    """
    with _translate_read_errors(file.source), files.open_regular(file.source, buffering=0) as stream:
        if os.fstat(stream.fileno()).st_size != file.size_bytes:
            raise _changed_error(file.source)
        return files.sha256(stream, 0, file.size_bytes)


@contextlib.contextmanager
def _translate_read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError raised in the ``with`` block into a UsageError that names the file.

    A file that no longer exists counts as changed, because imgkit has listed it before.
    """
    try:
        yield
    except FileNotFoundError:
        raise _changed_error(path) from None
    except OSError as error:
        raise UsageError(
            f"it cannot be read: {error.strerror}",
            where=str(path),
            hint="chmod u+r it, or list it in .gitignore",
        ) from error


def _changed_error(path: Path) -> UsageError:
    """Return the error for a file that has changed while imgkit read it, because a program writes to it."""
    return UsageError(
        "it changed while imgkit read it",
        where=str(path),
        hint="run the command again when no program writes there; or list it in .gitignore or .dockerignore",
    )
