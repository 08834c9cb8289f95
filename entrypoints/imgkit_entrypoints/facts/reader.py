"""Reads below one root: paths are written as on the machine, whatever folder stands in for ``/``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_entrypoints.errors import UsageError

NOT_FILES = "facts.json"
"""In a saved tree: what a machine shows by a call and not by a file, as JSON (arch, shm_bytes, ...)."""

_PIECE_BYTES = 1 << 16


def root_of(env: Mapping[str, str]) -> Path:
    """The folder that stands in for ``/``.

    Raises
    ------
    UsageError : ``IMGKIT_ROOT`` names no folder.
    """
    root = Path(env.get("IMGKIT_ROOT") or "/")
    if not root.is_dir():
        raise UsageError(
            f"{str(root)!r} is no folder", where="IMGKIT_ROOT", hint="unset it to look at this machine"
        )
    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads files, folders and links under `root`; what cannot be read is None or empty, never an error.

    Many files fail in ordinary use: an empty GID slot answers EINVAL, a container hides half of /sys.
    """

    root: Path

    @property
    def live(self) -> bool:
        """True where the root is this very machine's."""
        return self.root == Path("/")

    def place(self, path: str) -> Path:
        """Where `path` really lies."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """The file's content without white space around it; None if it cannot be read."""
        try:
            # Not pathlib: a machine has thousands of GID slots, and a launch waits for all of them.
            handle = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Files of /proc come in pieces of a page, whatever is asked for.
                content = b"".join(iter(lambda: os.read(handle, _PIECE_BYTES), b""))
                return content.decode("utf-8", "replace").strip()
            finally:
                os.close(handle)
        except (OSError, ValueError):
            return None

    def number(self, path: str) -> int | None:
        """The file's content as an integer; None if it is none."""
        try:
            return int(self.text(path) or "")
        except ValueError:
            return None

    def names(self, folder: str, like: str = "") -> tuple[str, ...]:
        """Names in `folder` that match `like` whole, with numbers in order: ``mlx5_10`` after ``mlx5_2``."""
        try:
            found = [path.name for path in self.place(folder).iterdir()]
        except OSError:
            return ()
        return tuple(sorted((name for name in found if not like or re.fullmatch(like, name)), key=natural))

    def exists(self, path: str) -> bool:
        """True if something is there (a dangling link is not)."""
        return self.place(path).exists()

    def target(self, path: str) -> str:
        """`path` with all links followed, as the machine would name it; empty if there is nothing."""
        place = self.place(path)
        if not place.exists():
            return ""
        real, root = os.path.realpath(place), os.path.realpath(self.root)
        return "/" + os.path.relpath(real, root) if real.startswith(root.rstrip("/") + "/") else real

    def not_files(self) -> Mapping[str, Any]:
        """The content of a saved tree's facts.json; empty on a live machine or without one."""
        text = None if self.live else self.text(NOT_FILES)
        if text is None:
            return {}
        try:
            data = json.loads(text)
        except ValueError as error:
            raise UsageError(f"not JSON: {error}", where=str(self.place(NOT_FILES))) from error
        if not isinstance(data, dict):
            raise UsageError("not a JSON object", where=str(self.place(NOT_FILES)))
        return data


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that takes runs of digits as numbers."""
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
