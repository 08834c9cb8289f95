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

_NOT_FILES: Mapping[str, type] = {
    **dict.fromkeys(("hostname", "arch", "python"), str),
    **dict.fromkeys(("cpus", "shm_bytes"), int),
    **dict.fromkeys(("host_libraries", "cuda_compat"), dict),
    "closed": list,
}
_PIECE_BYTES = 1 << 16
_MOST_BYTES = 4 << 20
"""A file is read no further; those of sysfs have a page."""


def root_of(env: Mapping[str, str]) -> Path:
    """Return the folder that replaces ``/``.

    Raises
    ------
    UsageError : ``IMGKIT_ROOT`` is not a folder.
    """
    root = Path(env.get("IMGKIT_ROOT") or "/")
    if not root.is_dir():
        hint = "to use this machine: unset IMGKIT_ROOT"
        raise UsageError(f"{str(root)!r} is not a folder", where="IMGKIT_ROOT", hint=hint)
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

    def real_path(self, path: str) -> Path:
        """Return where `path` of the machine is."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Return the content of the file without surrounding white space; None if it cannot be read.

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
        return real.startswith(_resolved(self.root)) and Path(real).is_file()

    def number(self, path: str) -> int | None:
        """Return the content of the file as an integer; None if it is not one."""
        text = self.text(path) or ""
        value = digits(text.removeprefix("-"))
        return -value if value is not None and text.startswith("-") else value

    def names(self, folder: str, like: str = "") -> tuple[str, ...]:
        """Return the names in `folder` that match `like`, in natural order: mlx5_10 after mlx5_2."""
        try:
            names = [path.name for path in self.real_path(folder).iterdir()]
        except OSError:
            return ()
        return tuple(sorted((name for name in names if not like or re.fullmatch(like, name)), key=natural))

    def exists(self, path: str) -> bool:
        """Return True if `path` exists (a dangling link does not)."""
        return self.real_path(path).exists()

    def target(self, path: str) -> str:
        """Return `path` of the machine with all links followed; empty if it does not exist."""
        if not self.exists(path):
            return ""
        target, root = os.path.realpath(self.real_path(path)), os.path.realpath(self.root)
        return "/" + os.path.relpath(target, root) if target.startswith(root.rstrip("/") + "/") else target

    def not_files(self) -> Mapping[str, Any]:
        """Return the content of a saved tree's facts.json; empty on a live machine, or if there is none."""
        text = None if self.live else self.text(NOT_FILES)
        if text is None:
            return {}
        where = str(self.real_path(NOT_FILES))
        try:
            data = json_text.parse(text)
        except ValueError as error:
            raise UsageError(f"not JSON: {error}", where=where) from error
        if not isinstance(data, dict):
            raise UsageError("not a JSON object", where=where)
        for name, kind in _NOT_FILES.items():
            if data.get(name) is not None and type(data[name]) is not kind:
                raise UsageError(f"{name} is not {kind.__name__}", where=where)
        return data


@functools.lru_cache(maxsize=8)
def _resolved(folder: Path) -> str:
    """Return the path of a folder without links, with a slash at its end."""
    return os.path.realpath(folder).rstrip("/") + "/"


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that compares runs of digits as numbers."""
    parts = re.split("([0-9]+)", name, flags=re.ASCII)
    return tuple((int(part), "") if number % 2 else (-1, part) for number, part in enumerate(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder(Reader):
    """A reader that records the paths that it reads."""

    texts: dict[str, str] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)

    def text(self, path: str) -> str | None:
        """Record the text; a file that exists but cannot be read becomes a folder."""
        text = Reader.text(self, path)
        if text is not None:
            self.texts[path] = text
        else:
            self.exists(path)
        return text

    def names(self, folder: str, like: str = "") -> tuple[str, ...]:
        """Record every name."""
        names = Reader.names(self, folder, like)
        self.paths.update(f"{folder}/{name}" for name in names)
        return names

    def exists(self, path: str) -> bool:
        """Record a path that exists; `target` asks here, too."""
        exists = Reader.exists(self, path)
        if exists:
            self.paths.add(path)
        return exists


@dataclass(frozen=True, slots=True)
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
    members: dict[str, Entry] = {}
    for path in sorted({*recorder.paths, *recorder.texts}):
        target = _follow_links(recorder, path, members)
        if path in recorder.texts:
            members[target] = Entry(target, "file", recorder.texts[path] + "\n")
        else:
            members.setdefault(target, Entry(target, _saved_kind(recorder.real_path(target))))
    content = json.dumps(not_files, indent=2, sort_keys=True) + "\n"
    members[NOT_FILES] = Entry(NOT_FILES, "file", content)
    return tuple(members[path] for path in sorted(members))


def _saved_kind(path: Path) -> str:
    """Return the kind of an entry whose text is not read.

    A file that cannot be read, such as a slot that answers EINVAL, becomes a folder: reading that fails, too.
    """
    if path.is_file():
        try:
            with files.open_regular(path) as file:
                file.read(1)
        except OSError:
            return "folder"
    return "folder" if path.is_dir() else "file"


def _follow_links(recorder: Recorder, path: str, members: dict[str, Entry]) -> str:
    """Enter every link on the way to `path`; return its target, relative to the root."""
    resolved = PurePosixPath()
    for part in PurePosixPath(path.lstrip("/")).parts:
        step = resolved / part
        if not recorder.real_path(str(step)).is_symlink():
            resolved = step
            continue
        target = PurePosixPath(Reader(root=recorder.root).target(str(step)).lstrip("/"))
        members[str(step)] = Entry(str(step), "link", os.path.relpath(target, resolved))
        resolved = target
    return str(resolved)
