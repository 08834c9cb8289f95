"""A folder of code that is read once: the same files give the same digest, whatever their owners and times.

The store has it as a read-only folder that is named by the digest, with the code in its folder `WORKSPACE`.
Each run works in a copy of its own.
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

_MTIME_RANGE_S = 1 << 29
"""Modification times of the code are spread over 17 years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFile:
    """A file, folder or symlink of the code."""

    name: str
    """Its path below the folder of the code."""
    kind: Literal["file", "dir", "symlink"]
    source: Path
    size_bytes: int = 0
    executable: bool = False
    link: str = ""
    """Target of a symlink, which is copied as it is."""


class CodeTree:
    """The content of a folder of code.

    The constructor reads every file.

    Raises
    ------
    UsageError : a file cannot be read, or has changed since it was listed.
    """

    def __init__(self, code_files: Iterable[CodeFile], report: Reporter) -> None:
        self.files = {file.name: file for file in code_files}
        """By their names; a folder comes before its content."""
        self.size_bytes = sum(file.size_bytes for file in self.files.values())
        self._digests: dict[str, str] = {}
        read_bytes = 0
        tree_digest = hashlib.sha256(b"imgkit code 1\n")
        for name, file in self.files.items():
            if file.kind == "file":
                self._digests[name] = _sha256_of_file(file)
                read_bytes += file.size_bytes
                report.advance(read_bytes, self.size_bytes)
            fields = (name, file.kind, str(file.executable), file.link, self._digests.get(name, ""))
            tree_digest.update(b"\0".join(os.fsencode(field) for field in fields) + b"\n")
        self.sha256 = tree_digest.hexdigest()
        """Digest of the names, kinds, contents and executable bits; it names the folder on the nodes."""

    def write(self, folder: Path) -> None:
        """Write the code to `folder`, which must not exist, as the store has it: nobody can change a file.

        Raises
        ------
        UsageError : a file has changed since the constructor read it.
        """
        folder.mkdir(parents=True)
        self._write_files(folder / WORKSPACE, writable=False)

    def write_copy(self, folder: Path) -> None:
        """Write the code to `folder`, which must not exist, as the copy of a run: its files can be changed.

        Raises
        ------
        UsageError : a file has changed since the constructor read it.
        """
        self._write_files(folder, writable=True)

    def _write_files(self, folder: Path, *, writable: bool) -> None:
        folder.mkdir()
        for name, file in self.files.items():
            target = folder / name
            if file.kind == "dir":
                target.mkdir()
            elif file.kind == "symlink":
                target.symlink_to(file.link)
            else:
                mode = 0o555 if file.executable else 0o444
                if writable:
                    mode |= 0o200
                with files.create_file(target) as stream:
                    stream.writelines(self._unchanged_content(file))
                # rsync --link-dest links a file to that of an older folder only if mode and time are equal.
                target.chmod(mode)
                mtime_s = self._mtime_s(name)
                os.utime(target, (mtime_s, mtime_s))

    def _mtime_s(self, name: str) -> int:
        """Return the modification time of a file, which depends on its content alone.

        Python uses the bytecode in ``__pycache__`` if the time and size of the source are those that the
        bytecode records. A run may have written bytecode of another version of the file, of the same size:
        with one time for all files, Python would run that.
        """
        return files.MTIME_S + int(self._digests[name][:8], 16) % _MTIME_RANGE_S

    def _unchanged_content(self, file: CodeFile) -> Iterator[bytes]:
        """Yield the bytes of a file; raise UsageError if they are not those that the constructor read."""
        digest = hashlib.sha256()
        left_bytes = file.size_bytes
        with _translate_read_errors(file.source), files.open_regular(file.source, buffering=0) as stream:
            # One byte more than expected detects a file that grew.
            while chunk := stream.read(min(files.CHUNK_BYTES, left_bytes + 1)):
                digest.update(chunk)
                left_bytes -= len(chunk)
                has_grown = left_bytes < 0
                if has_grown or (left_bytes == 0 and digest.hexdigest() != self._digests[file.name]):
                    raise _changed_error(file.source)
                yield chunk
        if left_bytes:
            raise _changed_error(file.source)


def _sha256_of_file(file: CodeFile) -> str:
    """Return the SHA-256 of a file; raise UsageError if its size is not the one that was listed."""
    with _translate_read_errors(file.source), files.open_regular(file.source, buffering=0) as stream:
        if os.fstat(stream.fileno()).st_size != file.size_bytes:
            raise _changed_error(file.source)
        return files.sha256(stream, 0, file.size_bytes)


@contextlib.contextmanager
def _translate_read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UsageError that names the file."""
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
    """Return the error for a file that a program writes while imgkit reads it."""
    return UsageError(
        "it changed while imgkit read it",
        where=str(path),
        hint="run the command again when no program writes there; or list it in .gitignore or .dockerignore",
    )
