"""A machine saved as a folder: the files that `gather` reads, to replay its decisions elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from imgkit_entrypoints import files
from imgkit_entrypoints.facts.reader import NOT_FILES, Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder(Reader):
    """A reader that records the paths that it reads."""

    texts: dict[str, str] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)

    def text(self, path: str) -> str | None:
        """`Reader.text`, recorded; a file that exists but cannot be read becomes a folder."""
        found = Reader.text(self, path)
        if found is not None:
            self.texts[path] = found
        elif self.exists(path):
            self.paths.add(path)
        return found

    def names(self, folder: str, like: str = "") -> tuple[str, ...]:
        """`Reader.names`, recorded."""
        found = Reader.names(self, folder, like)
        self.paths.update(f"{folder}/{name}" for name in found)
        return found

    def exists(self, path: str) -> bool:
        """`Reader.exists`, recorded if true."""
        found = Reader.exists(self, path)
        if found:
            self.paths.add(path)
        return found

    def target(self, path: str) -> str:
        """`Reader.target`, recorded if there is one."""
        found = Reader.target(self, path)
        if found:
            self.paths.add(path)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
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
    made: dict[str, Entry] = {}
    for path in sorted({*recorder.paths, *recorder.texts}):
        real = _links(recorder, path, made)
        place = recorder.place(real)
        if path in recorder.texts:
            made[real] = Entry(path=real, kind="file", content=recorder.texts[path] + "\n")
        elif place.is_dir() or (place.is_file() and not _readable(place)):
            # For example a slot that answers EINVAL: reading a folder fails as well.
            made.setdefault(real, Entry(path=real, kind="folder"))
        else:
            made.setdefault(real, Entry(path=real, kind="file"))
    made[NOT_FILES] = Entry(
        path=NOT_FILES, kind="file", content=json.dumps(not_files, indent=2, sort_keys=True) + "\n"
    )
    return tuple(made[path] for path in sorted(made))


def _readable(place: Path) -> bool:
    try:
        with files.open_regular(place) as file:
            file.read(1)
    except OSError:
        return False
    return True


def _links(recorder: Recorder, path: str, made: dict[str, Entry]) -> str:
    """Enter every link on the way to `path`; returns its real place, relative to the root."""
    done = PurePosixPath()
    for part in PurePosixPath(path.lstrip("/")).parts:
        step = done / part
        place = recorder.place(str(step))
        if not place.is_symlink():
            done = step
            continue
        target = PurePosixPath(Reader.target(recorder, str(step)).lstrip("/"))
        made[str(step)] = Entry(path=str(step), kind="link", content=os.path.relpath(target, done))
        done = target
    return str(done)


def write(members: tuple[Entry, ...], target: Path) -> None:
    """Create the folder `target` and write the tree into it."""
    target.mkdir(parents=True, exist_ok=True)
    for item in members:
        place = target / item.path
        place.parent.mkdir(parents=True, exist_ok=True)
        if item.kind == "folder":
            place.mkdir(exist_ok=True)
        elif item.kind == "link":
            place.symlink_to(item.content)
        else:
            place.write_text(item.content, encoding="utf-8")
