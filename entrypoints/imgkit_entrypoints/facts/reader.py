"""Reads below a root folder that replaces ``/``; paths are those of the machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError

NOT_FILES = "facts.json"
"""JSON file of a saved tree with the facts that come from calls instead of files (arch, shm_bytes, ...)."""

_PIECE_BYTES = 1 << 16


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
        """Content of the file without surrounding white space; None if it cannot be read."""
        try:
            # pathlib is too slow: a machine has thousands of GID slots, and a launch waits for all of them.
            handle = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Files of /proc arrive page by page, whatever size a read asks for.
                content = b"".join(iter(lambda: os.read(handle, _PIECE_BYTES), b""))
                return content.decode("utf-8", "replace").strip()
            finally:
                os.close(handle)
        except (OSError, ValueError):
            return None

    def number(self, path: str) -> int | None:
        """Content of the file as an integer; None if it is not one."""
        try:
            return int(self.text(path) or "")
        except ValueError:
            return None

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
        return data


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
