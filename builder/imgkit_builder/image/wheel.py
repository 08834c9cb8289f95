"""Make the wheel of the entry points from the running imgkit.

So host and image always have the same version. Equal sources give equal bytes if zlib is the same. Another
zlib, such as zlib-ng in some newer Pythons, gives other bytes. The last layers, which are smaller than a
megabyte, are then built again. Uncompressed members would avoid that, but every image would contain the full
size twice: in the wheel and installed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path

import imgkit_entrypoints
from imgkit_entrypoints import __version__
from imgkit_entrypoints.cli.commands import COMMANDS, shim_text

PACKAGE = imgkit_entrypoints.__name__

_DIST_INFO = f"{PACKAGE}-{__version__}.dist-info"
_SCRIPTS = f"{PACKAGE}-{__version__}.data/scripts"
_EXCLUDED_FOLDERS = frozenset({"__pycache__", "tests"})

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


def wheel_name() -> str:
    """Return the file name of the wheel. The wheel need not exist yet."""
    return f"{PACKAGE}-{__version__}-py3-none-any.whl"


def make_wheel() -> bytes:
    """Return the content of the wheel of imgkit_entrypoints, with its ``dist-*`` commands.

    Equal sources give equal bytes.
    """
    contents = dict(entrypoints_files())
    for command in COMMANDS:
        contents[f"{_SCRIPTS}/{command.name}"] = shim_text(command).encode()
    contents[f"{_DIST_INFO}/METADATA"] = _METADATA.encode()
    contents[f"{_DIST_INFO}/WHEEL"] = _WHEEL.encode()
    # RECORD lists the digests of all other files, so it is made last.
    contents = dict(sorted(contents.items()))
    contents[f"{_DIST_INFO}/RECORD"] = _render_record_file(contents)
    return _make_zip(contents)


def _make_zip(contents: Mapping[str, bytes]) -> bytes:
    """Return a zip file with the files `contents`, of which only the scripts are executable.

    Equal contents give equal bytes, on every host and at every time.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:  # noqa: TID251 - a stream
        for name, data in contents.items():
            mode = 0o755 if name.startswith(f"{_SCRIPTS}/") else 0o644
            member = zipfile.ZipInfo(name)  # its time stays 1980-01-01, the earliest in a zip file
            member.create_system = 3  # Unix, on every host: only then is the mode below read
            member.external_attr = (stat.S_IFREG | mode) << 16  # the upper 16 bits have the mode
            archive.writestr(member, data, zipfile.ZIP_DEFLATED, compresslevel=9)
    return buffer.getvalue()


def entrypoints_files() -> tuple[tuple[str, bytes], ...]:
    """Return the names and contents of the files of imgkit_entrypoints, sorted by name.

    The names begin with `PACKAGE`.
    """
    # The installed package itself is the source, so the image gets the same version of it.
    root = Path(imgkit_entrypoints.__file__).parent
    contents = []
    for path in root.rglob("*"):
        name = path.relative_to(root.parent)
        if path.is_file() and not _EXCLUDED_FOLDERS.intersection(name.parts):
            contents.append((name.as_posix(), path.read_bytes()))
    return tuple(sorted(contents))


def _render_record_file(contents: Mapping[str, bytes]) -> bytes:
    """Return the content of the file RECORD: ``NAME,sha256=DIGEST,SIZE`` for each member of the wheel.

    The line of RECORD itself has no digest, as PEP 427 requires.
    """
    lines = []
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    return "".join([*lines, f"{_DIST_INFO}/RECORD,,\n"]).encode()
