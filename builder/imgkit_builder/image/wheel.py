"""The entry-point wheel, made of the running imgkit, so that host and image always have the same version.

Notes
-----
The same sources give the same bytes with the same zlib. Another zlib (zlib-ng, as in some newer Pythons)
gives other bytes: then the last layers, less than a megabyte, are built again. Uncompressed members would
avoid that, but cost every image their full size twice, in the wheel and installed.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import io
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import imgkit_entrypoints
from imgkit_entrypoints import __version__

if TYPE_CHECKING:
    from importlib.abc import Traversable

PACKAGE = imgkit_entrypoints.__name__

_LEFT_OUT: frozenset[str] = frozenset({"__pycache__", "tests"})

_METADATA = f"""\
Metadata-Version: 2.1
Name: {PACKAGE.replace("_", "-")}
Version: {__version__}
Summary: The image half of imgkit: dist-run, dist-train and the other commands inside a container
License: Apache-2.0
Requires-Python: >=3.10
"""

_WHEEL = """\
Wheel-Version: 1.0
Generator: imgkit
Root-Is-Purelib: true
Tag: py3-none-any
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel in memory."""

    name: str
    """File name."""
    data: bytes
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _WheelFile:
    name: str
    data: bytes
    executable: bool = False


def file_name() -> str:
    """Name of the wheel's file, known before the wheel is made."""
    return f"{PACKAGE}-{__version__}-py3-none-any.whl"


def entrypoints_wheel() -> Wheel:
    """The wheel of imgkit_entrypoints with its ``dist-*`` commands; the same sources give the same bytes.

    It works in an editable install, in site-packages and inside a zip file.
    """
    members = [*_modules(importlib.resources.files(PACKAGE), PACKAGE), *_shims(), *_dist_info()]
    members.sort(key=lambda member: member.name)
    members.append(_record(members))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in members:
            info = zipfile.ZipInfo(member.name)  # its time stays 1980-01-01, the earliest in a zip file
            info.create_system = 3  # Unix, on every host: only then is the mode below read
            info.external_attr = (stat.S_IFREG | (0o755 if member.executable else 0o644)) << 16
            archive.writestr(info, member.data, zipfile.ZIP_DEFLATED, 9)
    data = buffer.getvalue()
    return Wheel(name=file_name(), data=data, sha256=hashlib.sha256(data).hexdigest())


def entrypoints_files() -> tuple[tuple[str, bytes], ...]:
    """The files of imgkit_entrypoints, sorted by their names, which begin with `PACKAGE`."""
    found = ((one.name, one.data) for one in _modules(importlib.resources.files(PACKAGE), PACKAGE))
    return tuple(sorted(found))


def _modules(folder: Traversable, prefix: str) -> Iterator[_WheelFile]:
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name not in _LEFT_OUT:
                yield from _modules(entry, f"{prefix}/{entry.name}")
        else:
            yield _WheelFile(name=f"{prefix}/{entry.name}", data=entry.read_bytes())


def _shims() -> Iterator[_WheelFile]:
    from imgkit_entrypoints.cli.commands import COMMANDS, shim

    for command in COMMANDS:
        yield _WheelFile(
            name=f"{PACKAGE}-{__version__}.data/scripts/{command.name}",
            data=shim(command).encode(),
            executable=True,
        )


def _dist_info() -> Iterator[_WheelFile]:
    for name, text in (("METADATA", _METADATA), ("WHEEL", _WHEEL)):
        yield _WheelFile(name=f"{PACKAGE}-{__version__}.dist-info/{name}", data=text.encode())


def _record(members: list[_WheelFile]) -> _WheelFile:
    """The list of members with their hashes, without a hash of its own, as PEP 427 requires."""
    name = f"{PACKAGE}-{__version__}.dist-info/RECORD"
    lines = []
    for member in members:
        digest = base64.urlsafe_b64encode(hashlib.sha256(member.data).digest()).rstrip(b"=").decode()
        lines.append(f"{member.name},sha256={digest},{len(member.data)}\n")
    return _WheelFile(name=name, data=("".join(lines) + f"{name},,\n").encode())
