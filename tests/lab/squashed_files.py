"""Every file that a runtime would show of a .sif or .sqsh, as unsquashfs lists and unpacks it."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.sif import unsquash


@dataclass(frozen=True, slots=True, kw_only=True)
class SquashedFile:
    """One file; links have their target."""

    mode: str
    uid: int
    gid: int
    content: str
    """sha256 of a file, target of a symlink, numbers of a device."""


def squashed_files(path: Path) -> dict[str, SquashedFile]:
    """The files by their names; needs root where an image has files that nobody else may read."""
    files: dict[str, SquashedFile] = {}
    for squashfs in reversed(unsquash.open_squashfs(path)):
        with tempfile.TemporaryDirectory(prefix="imgkit-") as name:
            folder = Path(name, "files")
            squashfs.unpack(folder)
            for file in squashfs.list_files():
                link, _, target = file.path.partition(" -> ") if file.mode[0] == "l" else (file.path, "", "")
                content = target if file.mode[0] == "l" else file.size if file.mode[0] in "cb" else ""
                if file.mode[0] == "-":
                    content = hashlib.sha256((folder / link).read_bytes()).hexdigest()
                for below in [path for path in files if file.mode[0] != "d" and path.startswith(f"{link}/")]:
                    del files[below]
                files[link] = SquashedFile(mode=file.mode, uid=file.uid, gid=file.gid, content=content)
    return {name: file for name, file in files.items() if (file.mode[0], file.content) != ("c", "0,0")}
