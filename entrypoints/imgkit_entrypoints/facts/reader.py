"""Reads below a root folder that replaces ``/``, and a machine saved as a folder to replay its decisions.

Paths are those of the machine. A saved tree holds the files that `gather` reads.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from imgkit_entrypoints import files, json_text
from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.errors import UsageError

NOT_FILES = "facts.json"
"""JSON file of a saved tree with the facts that come from calls instead of files (arch, shm_bytes, ...)."""

_NOT_FILES = {
    **{"hostname": str, "arch": str, "python": str, "cpus": int, "shm_bytes": int, "closed": list},
    **{"host_libraries": dict, "cuda_compat": dict},
}
_PIECE_BYTES = 1 << 16
_MOST_BYTES = 4 << 20
"""A file is read no further; those of sysfs have a page."""


def root_of(env: Mapping[str, str]) -> Path:
    """The folder that replaces ``/``.

    Raises
    ------
    UsageError : ``IMGKIT_ROOT`` is not a folder.
    """
    root = Path(env.get("IMGKIT_ROOT") or "/")
    if not root.is_dir():
        raise UsageError(
            f"{str(root)!r} is not a folder",
            where="IMGKIT_ROOT",
            hint="to use this machine: unset IMGKIT_ROOT",
        )
    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads files, folders and links under `root`; an unreadable one is None or empty, never an error.

    Many reads fail in ordinary use: an empty GID slot answers EINVAL, and a container hides half of /sys.
    """

    root: Path

    @property
    def live(self) -> bool:
        """True if the root is that of this machine."""
        return self.root == Path("/")

    def place(self, path: str) -> Path:
        """Real place of `path`."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Content of the file without surrounding white space; None if it cannot be read.

        A saved tree comes from somebody else: a link out of it would show a file of this machine.
        """
        try:
            if not self.live and not self._holds(path):
                return None
            # pathlib is too slow: a machine has thousands of GID slots, and a launch waits for all of them.
            # Not blocking, and not to the end: a saved tree may hold a FIFO, or a link to /dev/zero.
            handle = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                content = b""
                # Files of /proc arrive page by page, whatever size a read asks for.
                while (piece := os.read(handle, _PIECE_BYTES)) and len(content) < _MOST_BYTES:
                    content += piece
                return content.decode("utf-8", "replace").strip()
            finally:
                os.close(handle)
        except (OSError, ValueError):
            return None

    def _holds(self, path: str) -> bool:
        real = os.path.realpath(f"{self.root}/{path}")  # pathlib is too slow here, too
        return real.startswith(_real(self.root)) and Path(real).is_file()

    def number(self, path: str) -> int | None:
        """Content of the file as an integer; None if it is not one."""
        text = self.text(path) or ""
        value = digits(text.removeprefix("-"))
        return -value if value is not None and text.startswith("-") else value

    def names(self, folder: str, like: str = "") -> tuple[str, ...]:
        """Names in `folder` that match `like` completely, in natural order: ``mlx5_10`` after ``mlx5_2``."""
        try:
            found = [path.name for path in self.place(folder).iterdir()]
        except OSError:
            return ()
        return tuple(sorted((name for name in found if not like or re.fullmatch(like, name)), key=natural))

    def exists(self, path: str) -> bool:
        """True if `path` exists (a dangling link does not)."""
        return self.place(path).exists()

    def target(self, path: str) -> str:
        """`path` of the machine with all links followed; empty if it does not exist."""
        place = self.place(path)
        if not place.exists():
            return ""
        real, root = os.path.realpath(place), os.path.realpath(self.root)
        return "/" + os.path.relpath(real, root) if real.startswith(root.rstrip("/") + "/") else real

    def not_files(self) -> Mapping[str, Any]:
        """Content of a saved tree's facts.json; empty on a live machine, or if there is none."""
        text = None if self.live else self.text(NOT_FILES)
        if text is None:
            return {}
        try:
            data = json_text.parse(text)
        except ValueError as error:
            raise UsageError(f"not JSON: {error}", where=str(self.place(NOT_FILES))) from error
        if not isinstance(data, dict):
            raise UsageError("not a JSON object", where=str(self.place(NOT_FILES)))
        for name, kind in _NOT_FILES.items():
            if data.get(name) is not None and type(data[name]) is not kind:
                raise UsageError(f"{name} is not {kind.__name__}", where=str(self.place(NOT_FILES)))
        return data


@functools.lru_cache(maxsize=8)
def _real(folder: Path) -> str:
    """The real path of a folder, with a slash at its end."""
    return os.path.realpath(folder).rstrip("/") + "/"


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that compares runs of digits as numbers."""
    parts, digits = [], ""
    for character in name + "\0":
        if character.isdigit() and character.isascii():
            digits += character
            continue
        if digits:
            parts.append((int(digits), ""))
            digits = ""
        parts.append((-1, character))
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder(Reader):
    """A reader that records the paths that it reads."""

    texts: dict[str, str] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)

    def text(self, path: str) -> str | None:
        """`Reader.text`, recorded; a file that exists but cannot be read becomes a folder."""
        found = Reader.text(self, path)
        if found is not None:
            self.texts[path] = found
        elif self.exists(path):
            self.paths.add(path)
        return found

    def names(self, folder: str, like: str = "") -> tuple[str, ...]:
        """`Reader.names`, recorded."""
        found = Reader.names(self, folder, like)
        self.paths.update(f"{folder}/{name}" for name in found)
        return found

    def exists(self, path: str) -> bool:
        """`Reader.exists`, recorded if true."""
        found = Reader.exists(self, path)
        if found:
            self.paths.add(path)
        return found

    def target(self, path: str) -> str:
        """`Reader.target`, recorded if there is one."""
        found = Reader.target(self, path)
        if found:
            self.paths.add(path)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One member of a saved tree; `path` is relative, and the `content` of a link is its target."""

    path: str
    kind: str
    """``file``, ``folder`` or ``link``."""
    content: str = ""


def entries(recorder: Recorder, not_files: Mapping[str, object]) -> tuple[Entry, ...]:
    """Turn the recorded reads into members of a tree; links stay links, and stay inside the tree.

    `not_files` becomes the tree's facts.json.
    """
    made: dict[str, Entry] = {}
    for path in sorted({*recorder.paths, *recorder.texts}):
        real = _links(recorder, path, made)
        place = recorder.place(real)
        if path in recorder.texts:
            made[real] = Entry(path=real, kind="file", content=recorder.texts[path] + "\n")
        elif place.is_dir() or (place.is_file() and not _readable(place)):
            # For example a slot that answers EINVAL: reading a folder fails as well.
            made.setdefault(real, Entry(path=real, kind="folder"))
        else:
            made.setdefault(real, Entry(path=real, kind="file"))
    made[NOT_FILES] = Entry(
        path=NOT_FILES, kind="file", content=json.dumps(not_files, indent=2, sort_keys=True) + "\n"
    )
    return tuple(made[path] for path in sorted(made))


def _readable(place: Path) -> bool:
    try:
        with files.open_regular(place) as file:
            file.read(1)
    except OSError:
        return False
    return True


def _links(recorder: Recorder, path: str, made: dict[str, Entry]) -> str:
    """Enter every link on the way to `path`; returns its real place, relative to the root."""
    done = PurePosixPath()
    for part in PurePosixPath(path.lstrip("/")).parts:
        step = done / part
        place = recorder.place(str(step))
        if not place.is_symlink():
            done = step
            continue
        target = PurePosixPath(Reader.target(recorder, str(step)).lstrip("/"))
        made[str(step)] = Entry(path=str(step), kind="link", content=os.path.relpath(target, done))
        done = target
    return str(done)


def write(members: tuple[Entry, ...], target: Path) -> None:
    """Create the folder `target` and write the tree into it."""
    target.mkdir(parents=True, exist_ok=True)
    for item in members:
        place = target / item.path
        place.parent.mkdir(parents=True, exist_ok=True)
        if item.kind == "folder":
            place.mkdir(exist_ok=True)
        elif item.kind == "link":
            place.symlink_to(item.content)
        else:
            place.write_text(item.content, encoding="utf-8")
