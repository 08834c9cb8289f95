"""What a container shows at the paths that some layers change, as `engine.show_changed` writes it.

The first line is ``imgkit-changed 1 BYTES``. So many bytes of names follow: for each folder its path, ``old``
or ``new``, and all names in it with ``/`` between them, all with a zero byte between them. The rest is a tar.
Everything comes from a program of the image, so nothing in it is believed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files
from imgkit_entrypoints.errors import CheckFailed

_START = re.compile(rb"imgkit-changed 1 ([0-9]{1,10})")
_MAX_START_BYTES = 100
_MAX_NAMES_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFolder:
    """A folder that shows and that some layer has."""

    names: frozenset[str]
    """Everything in it, changed or not."""
    in_old: bool
    """A layer of the older image has it: that layer may hide what lower layers hold there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFiles:
    """What shows at changed paths."""

    tar: Path
    """Every path that a layer has and that shows."""
    folders: Mapping[str, ShownFolder]
    """Every folder of `tar`, and the root, the empty text; what these lack is deleted."""


def read(chunks: Iterator[bytes], tar: Path, *, most_bytes: int) -> ChangedFiles:
    """Read all `chunks`; the tar goes to the new file `tar`.

    Raises
    ------
    CheckFailed : another format, cut short, or larger than `most_bytes`.
    """
    start = bytearray()
    while (end := start.find(b"\n")) < 0 and len(start) < _MAX_START_BYTES:
        start += _next(chunks)
    match = _START.fullmatch(start[:end]) if end >= 0 else None
    if match is None or int(match[1]) > _MAX_NAMES_BYTES:
        raise CheckFailed(f"a program of the image wrote {bytes(start[:60])!r} instead of its files")
    names, size = start[end + 1 :], int(match[1])
    while len(names) < size:
        names += _next(chunks)
    left = most_bytes
    with files.create(tar) as stream:
        for chunk in itertools.chain([bytes(names[size:])], chunks):
            left -= stream.write(chunk)
            if left < 0:
                raise CheckFailed(f"its changed files have more than {most_bytes / 1e9:.1f} GB")
    return ChangedFiles(tar=tar, folders=_folders(bytes(names[:size])))


def _next(chunks: Iterator[bytes]) -> bytes:
    for chunk in chunks:
        if chunk:
            return chunk
    raise CheckFailed("the list of changed files is cut short")


def _folders(data: bytes) -> dict[str, ShownFolder]:
    fields = data.decode("utf-8", "surrogateescape").split("\0")
    if len(fields) % 3:
        raise CheckFailed("the list of changed files is damaged")
    return {
        path: ShownFolder(names=frozenset(filter(None, names.split("/"))), in_old=kind == "old")
        for path, kind, names in zip(fields[::3], fields[1::3], fields[2::3], strict=True)
    }
