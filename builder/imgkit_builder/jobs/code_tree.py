"""A folder of code, read once: the same files give the same digest, of any owner and time.

What a job mounts holds the folder at `CODE_PLACE`, and a file by which the commands of the image see it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import mounted_code

SCHEMA = 1
CODE_PLACE = "workspace"
"""Folder of an image over which the code of a run lies."""
_TIMES = 1 << 29


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFile:
    """One file, folder or symlink of the code."""

    name: str
    """Its path below the folder."""
    kind: Literal["file", "dir", "symlink"]
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

    def __init__(self, code_files: Iterable[CodeFile], report: Reporter) -> None:
        self.files = {file.name: file for file in code_files}
        """By their names; a folder comes before what is in it."""
        self.size_bytes = sum(file.size_bytes for file in self.files.values())
        self._digests: dict[str, str] = {}
        done_bytes = 0
        digest = hashlib.sha256(b"imgkit code 1\n")
        for name, file in self.files.items():
            if file.kind == "file":
                self._digests[name] = _digest(file)
                done_bytes += file.size_bytes
                report.advance(done_bytes, self.size_bytes)
            fields = (name, file.kind, str(file.executable), file.link, self._digests.get(name, ""))
            digest.update(b"\0".join(os.fsencode(field) for field in fields) + b"\n")
        self.sha256 = digest.hexdigest()
        """Digest of names, kinds, content and what may be executed: it names the folder."""

    def write(self, folder: Path) -> None:
        """Write the code to `folder`, which does not exist; nobody should edit what a queued job will run.

        Raises
        ------
        UsageError : the folder of the code changes while it is read.
        """
        mark = folder / mounted_code.CODE_JSON.lstrip("/")
        mark.parent.mkdir(parents=True)
        text = json.dumps({"schema": SCHEMA, "sha256": self.sha256}, indent=1) + "\n"
        _put(mark, [text.encode()], mtime_s=files.MTIME_S)
        (folder / CODE_PLACE).mkdir()
        for name, file in self.files.items():
            target = folder / CODE_PLACE / name
            if file.kind == "dir":
                target.mkdir()
            elif file.kind == "symlink":
                target.symlink_to(file.link)
            else:
                # Python takes bytecode for current if time and size of the source are those that it knows. So
                # the time follows from the content: the image may hold bytecode of another version of it.
                mtime_s = files.MTIME_S + int(self._digests[name][:8], 16) % _TIMES
                _put(target, self._unchanged(file), mtime_s=mtime_s, executable=file.executable)

    def _unchanged(self, file: CodeFile) -> Iterator[bytes]:
        """Yield the bytes of a file, which must be those that were read first."""
        digest, left_bytes = hashlib.sha256(), file.size_bytes
        with _readable(file.source), files.open_regular(file.source, buffering=0) as stream:
            # One byte more than expected detects a file that grew.
            while chunk := stream.read(min(files.CHUNK_BYTES, left_bytes + 1)):
                digest.update(chunk)
                left_bytes -= len(chunk)
                if left_bytes < 0 or (not left_bytes and digest.hexdigest() != self._digests[file.name]):
                    raise _changed(file.source)
                yield chunk
        if left_bytes:
            raise _changed(file.source)


def _put(path: Path, content: Iterable[bytes], *, mtime_s: int, executable: bool = False) -> None:
    with files.create(path) as stream:
        stream.writelines(content)
    # rsync links a file to that of an older folder where all of this is equal.
    path.chmod(0o555 if executable else 0o444)
    os.utime(path, (mtime_s, mtime_s))


def _digest(file: CodeFile) -> str:
    with _readable(file.source), files.open_regular(file.source, buffering=0) as stream:
        if os.fstat(stream.fileno()).st_size != file.size_bytes:
            raise _changed(file.source)
        return files.sha256(stream, 0, file.size_bytes)


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
