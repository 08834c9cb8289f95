"""Reads below a root folder that replaces ``/``; paths are those of the machine."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_entrypoints import json_text
from imgkit_entrypoints.arguments import digits
from imgkit_entrypoints.errors import UsageError

NOT_FILES = "facts.json"
"""JSON file of a saved tree with the facts that come from calls instead of files (arch, shm_bytes, ...)."""

_NOT_FILES = {"hostname": str, "arch": str, "python": str, "cpus": int, "shm_bytes": int, "closed": list}
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
            hint="to look at this machine: unset IMGKIT_ROOT",
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
