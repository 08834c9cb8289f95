"""Read files below a folder that replaces ``/``.

Paths are always those of the machine: with the root /tmp/tree, ``/proc/self/status`` is read from
/tmp/tree/proc/self/status.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints.arguments import parse_digits
from imgkit_entrypoints.errors import UsageError

# Bytes of one read.
_PIECE_BYTES = 1 << 16
_MOST_BYTES = 4 << 20
"""Reading stops after about so many bytes. A file of sysfs has at most a page."""


def root_of(env: Mapping[str, str]) -> Path:
    """Return the folder that replaces ``/``: the value of ``IMGKIT_ROOT``, or ``/`` if that is not set.

    With a folder that holds copies of another machine's files, imgkit reads the facts of that machine.

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
    """Reads files, folders and links below `root`. What cannot be read is None or empty, and never an error.

    Many reads fail in ordinary use. For example, an empty GID slot answers EINVAL, and a container hides half
    of /sys.
    """

    root: Path

    @property
    def live(self) -> bool:
        """Return whether `root` is the root of this machine, and not a tree of files."""
        return self.root == Path("/")

    def real_path(self, path: str) -> Path:
        """Return the path below `root` for a path of the machine."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Return the text of a file without white space around it, or None if it cannot be read."""
        content = self.content(path)
        return None if content is None else content.decode("utf-8", "replace").strip()

    def content(self, path: str) -> bytes | None:
        """Return the bytes of a file, or None if it cannot be read.

        A tree of files (``IMGKIT_ROOT``) may come from somebody else. A link that leads out of the tree is
        not followed, because it would show a file of this machine.
        """
        try:
            if not self.live and not self._holds(path):
                return None
            # pathlib is too slow: a machine has thousands of GID slots, and a launch waits for all of them.
            # O_NONBLOCK and the limit are for a tree that holds a FIFO or a link to /dev/zero.
            handle = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # noqa: TID251
            try:
                content = bytearray()
                # Files of /proc arrive page by page, whatever size a read asks for.
                while (piece := os.read(handle, _PIECE_BYTES)) and len(content) < _MOST_BYTES:
                    content += piece
                return bytes(content)
            finally:
                os.close(handle)
        except (OSError, ValueError):
            return None

    def _holds(self, path: str) -> bool:
        """Return True if `path` is a regular file below `root` after all links are followed."""
        real = os.path.realpath(f"{self.root}/{path}")  # pathlib is too slow here, too
        return real.startswith(_resolved(self.root)) and Path(real).is_file()

    def number(self, path: str) -> int | None:
        """Return the content of a file as an integer, or None if it is not one."""
        text = self.text(path) or ""
        number = parse_digits(text.removeprefix("-"))
        if number is not None and text.startswith("-"):
            return -number
        return number

    def names(self, folder: str, like: str = "") -> tuple[str, ...]:
        """Return the names in a folder in natural order, so that mlx5_10 comes after mlx5_2.

        The result is empty if the folder cannot be read.

        Parameters
        ----------
        like : regular expression that must match the whole name. Empty for all names.
        """
        try:
            names = [path.name for path in self.real_path(folder).iterdir()]
        except OSError:
            return ()
        if like:
            names = [name for name in names if re.fullmatch(like, name)]
        return tuple(sorted(names, key=natural))

    def exists(self, path: str) -> bool:
        """Return whether `path` exists. A link that leads nowhere does not count."""
        return self.real_path(path).exists()

    def target(self, path: str) -> str:
        """Return the path of a file with all links followed, or "" if it does not exist.

        In a tree of files (``IMGKIT_ROOT``), the path is that on the machine from which the tree comes.
        """
        if not self.exists(path):
            return ""
        target = os.path.realpath(self.real_path(path))
        root = _resolved(self.root)
        if target.startswith(root):
            return f"/{target.removeprefix(root)}"
        return target


@functools.lru_cache(maxsize=8)
def _resolved(folder: Path) -> str:
    """Return the path of a folder without links, with a slash at its end."""
    return os.path.realpath(folder).rstrip("/") + "/"


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that compares digits as numbers: ``mlx5_2`` comes before ``mlx5_10``."""
    parts = re.split("([0-9]+)", name, flags=re.ASCII)
    return tuple((int(part), "") if number % 2 else (-1, part) for number, part in enumerate(parts))
