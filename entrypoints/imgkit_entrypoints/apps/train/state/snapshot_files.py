"""Snapshots as folders: complete or absent, however the writer ends. No torch.

A snapshot is written under a temporary name, each file and the folder are synced, and then it is renamed. Its
manifest holds the sha256 of every file, so that later disk errors are detected too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from imgkit_entrypoints import json_text

SCHEMA = 1
MANIFEST = "manifest.json"
WRITING, LEAVING = ".writing-", ".leaving-"
CHUNK = 4 << 20


class Sink(Protocol):
    """The file of a snapshot, written in sequence."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write all of `data`."""

    def flush(self) -> None:
        """Do nothing, because nothing is buffered; torch.save calls it."""


WriteFile = Callable[[Sink], object]
"""Writes the content of one file into a sink."""


class _File:
    """A new file that is hashed while it is written, and synced at the end."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._sum = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        self._sum.update(view)
        done = 0
        while done < len(view):
            done += os.write(self._descriptor, view[done : done + CHUNK])
        self.size_bytes += done
        return done

    def flush(self) -> None:
        pass

    def finish(self) -> dict[str, int | str]:
        os.fsync(self._descriptor)
        return {"size_bytes": self.size_bytes, "sha256": self._sum.hexdigest()}

    def close(self) -> None:
        os.close(self._descriptor)


def name(step: int) -> str:
    """Folder name of a step's snapshot; names sort like steps."""
    return f"step-{step:010d}"


def write(folder: Path, step: int, parts: Mapping[str, WriteFile], *, keep: int) -> Path:
    """Write a snapshot into `folder`, and remove all but the `keep` newest.

    Snapshots of later steps are removed too: the run was resumed from before them.

    Raises
    ------
    OSError : the snapshot could not be written; older ones are unchanged.
    """
    target = folder / name(step)
    _clear(folder)
    temporary = folder / f"{WRITING}{target.name}"
    try:
        os.mkdir(temporary)  # noqa: PTH102 - tests interrupt each os call of this module
        _fill(temporary, step, parts)
        if os.path.lexists(target):
            os.rename(target, folder / f"{LEAVING}{target.name}")  # noqa: PTH104
        os.rename(temporary, target)  # noqa: PTH104
        _sync(folder)
    except Exception:  # torch.save turns an OSError of its file into a RuntimeError
        with contextlib.suppress(OSError):
            _clear(folder)
        raise
    # The new snapshot is safe, so a failure to remove old ones is not reported.
    with contextlib.suppress(OSError):
        found = newest_first(folder)
        here = found.index(target)
        for path in (*found[:here], *found[here + keep :]):
            os.rename(path, folder / f"{LEAVING}{path.name}")  # noqa: PTH104
        _clear(folder)
    return target


def _fill(temporary: Path, step: int, parts: Mapping[str, WriteFile]) -> None:
    files: dict[str, dict[str, int | str]] = {}

    def manifest(sink: Sink) -> None:
        sink.write(json.dumps({"schema": SCHEMA, "step": step, "files": files}).encode())

    for part_name, part in (*parts.items(), (MANIFEST, manifest)):
        file = _File(temporary / part_name)
        try:
            part(file)
            files[part_name] = file.finish()
        finally:
            file.close()
    _sync(temporary)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    """Remove what an interrupted writer left, and snapshots that are being removed."""
    for entry in os.listdir(folder):  # noqa: PTH208
        if entry.startswith((WRITING, LEAVING)):
            path = folder / entry
            for file in os.listdir(path):  # noqa: PTH208
                os.unlink(path / file)  # noqa: PTH108
            os.rmdir(path)  # noqa: PTH106


def newest_first(folder: Path) -> list[Path]:
    """The snapshots in `folder`, valid or not, newest first."""
    try:
        found = [path for path in folder.iterdir() if path.name.startswith("step-")]
    except OSError:
        return []
    return sorted(found, key=lambda path: path.name, reverse=True)


def problem(snapshot: Path) -> str | None:
    """The reason why `snapshot` cannot be used; None if every file is as it was written."""
    try:
        manifest = json_text.parse((snapshot / MANIFEST).read_bytes())
        if manifest["schema"] != SCHEMA:
            return f"{snapshot / MANIFEST} has schema {manifest['schema']}; this imgkit reads {SCHEMA}"
        for part_name, said in manifest["files"].items():
            if (size := (snapshot / part_name).stat().st_size) != said["size_bytes"]:
                return f"{snapshot / part_name} has {size} bytes, not {said['size_bytes']}"
            if _sha256(snapshot / part_name) != said["sha256"]:
                return f"{snapshot / part_name} is damaged: its sha256 differs from the manifest"
    except OSError as error:
        return f"{error.filename or snapshot}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{snapshot / MANIFEST} is not a manifest"
    return None


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            found.update(data)
    return found.hexdigest()


def step_of(snapshot: Path) -> int:
    """The step after which a valid snapshot was taken."""
    return int(json_text.parse((snapshot / MANIFEST).read_bytes())["step"])


def valid_ones(place: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yield valid snapshots, newest first. `place` is a snapshot, a folder of snapshots, or a run folder.

    Reports every snapshot that is skipped, with the reason.
    """
    if (place / MANIFEST).exists():
        found = [place]
    else:
        found = newest_first(place) or newest_first(place / "snapshots")
    for path in found:
        why = problem(path)
        if why is None:
            yield path
        else:
            say(f"snapshot skipped: {why}")
