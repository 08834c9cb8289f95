"""Read files of this machine, or of another machine whose files were copied to a folder.

Callers always use the original paths. If the root is /tmp/tree, ``/proc/self/status`` is read from
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

# Number of bytes to request in one read.
_PIECE_BYTES = 1 << 16
_MAX_BYTES = 4 << 20
"""Approximate limit for the size of a file, after which reading stops. Files of sysfs are at most a page."""


def root_of(env: Mapping[str, str]) -> Path:
    """Return the folder that replaces ``/``: the value of ``IMGKIT_ROOT``, or ``/`` if it is not set.

    If the folder contains copies of another machine's files, imgkit reads the facts of that machine.

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
    """Reads files, folders and links below `root`.

    If something cannot be read, the result is None or empty, and no error is raised. Many reads fail in
    ordinary use: the attributes of an empty GID slot return EINVAL, and a container hides large parts of
    /sys.
    """

    root: Path

    @property
    def live(self) -> bool:
        """Return whether `root` is the root of this machine, and not a saved tree of files."""
        return self.root == Path("/")

    def real_path(self, path: str) -> Path:
        """Return the path below `root` at which the file `path` of the machine is found."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Return the text of a file without white space around it, or None if it cannot be read."""
        content = self.content(path)
        return None if content is None else content.decode("utf-8", "replace").strip()

    def content(self, path: str) -> bytes | None:
        """Return the bytes of a file, or None if it cannot be read. Files over 4 MiB are cut.

        A saved tree of files (``IMGKIT_ROOT``) may come from another person. A link that leads out of the
        tree is not followed, because it would reveal a file of this machine.
        """
        try:
            if not self.live and not self._is_file_below_root(path):
                return None
            # os.open instead of pathlib, which is too slow: a launch reads thousands of small files.
            # O_NONBLOCK and the limit of the size guard against a tree with a FIFO or a link to /dev/zero.
            descriptor = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # noqa: TID251
            try:
                return _read_descriptor(descriptor)
            finally:
                os.close(descriptor)
        except (OSError, ValueError):  # ValueError: the path contains a zero byte
            return None

    def _is_file_below_root(self, path: str) -> bool:
        """Return whether `path` leads to a regular file below `root` after all links are resolved."""
        real = os.path.realpath(f"{self.root}/{path}")  # pathlib would be too slow, as in `content`
        return real.startswith(_resolve_folder(self.root)) and Path(real).is_file()

    def number(self, path: str) -> int | None:
        """Return the content of a file as an integer, or None if the content is not an integer."""
        text = self.text(path) or ""
        value = parse_digits(text.removeprefix("-"))
        if value is not None and text.startswith("-"):
            return -value
        return value

    def names(self, folder: str, like: str = "") -> tuple[str, ...]:
        """Return the names in a folder in natural order, so that mlx5_10 comes after mlx5_2.

        The result is empty if the folder cannot be read.

        Parameters
        ----------
        like : regular expression that must match the whole name. An empty text selects all names.
        """
        try:
            names = [path.name for path in self.real_path(folder).iterdir()]
        except OSError:
            return ()
        if like:
            names = [name for name in names if re.fullmatch(like, name)]
        return tuple(sorted(names, key=natural))

    def exists(self, path: str) -> bool:
        """Return whether `path` exists. A broken symbolic link does not exist in this sense."""
        return self.real_path(path).exists()

    def target(self, path: str) -> str:
        """Resolve all links in `path`, and return the result, or "" if the file does not exist.

        In a saved tree of files (``IMGKIT_ROOT``), the result is a path on the machine from which the tree
        comes.
        """
        if not self.exists(path):
            return ""
        target = os.path.realpath(self.real_path(path))
        root_prefix = _resolve_folder(self.root)  # "/tmp/tree/", or "/" for this machine
        if target.startswith(root_prefix):
            return f"/{target.removeprefix(root_prefix)}"
        return target


def _read_descriptor(descriptor: int) -> bytes:
    """Return the content of an open file, but not much more than `_MAX_BYTES` of it."""
    content = bytearray()
    # A read of a file in /proc returns at most a page, even if it requests more.
    while (chunk := os.read(descriptor, _PIECE_BYTES)) and len(content) < _MAX_BYTES:
        content += chunk
    return bytes(content)


@functools.lru_cache(maxsize=8)
def _resolve_folder(folder: Path) -> str:
    """Return the path of a folder with all links resolved, and with a slash at its end."""
    return os.path.realpath(folder).rstrip("/") + "/"


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that compares numbers in names by value: ``mlx5_2`` comes before ``mlx5_10``."""
    # "mlx5_10" -> "mlx", "5", "_", "10", "": every second part is a number.
    parts = re.split("([0-9]+)", name, flags=re.ASCII)
    return tuple((int(part), "") if index % 2 else (-1, part) for index, part in enumerate(parts))
