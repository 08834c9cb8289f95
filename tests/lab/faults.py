"""Faults in single calls of libc: ``python faults.py JOB FOLDER HOW ERRNO first|again``, under faults.c.

JOB is save or sif.

A child of its own for each function of libc and each number of its calls does the job once, over an older
file or not, so a sweep of many faults starts one interpreter. Prints one line of JSON for each fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import itertools
import json
import os
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import stored_images
from tars import tar_entry

from imgkit_builder.archive import sidecar, write
from imgkit_builder.archive.sidecar import SavedArchive, SavedImage, Sidecar
from imgkit_builder.archive.write import SavedFile
from imgkit_builder.base.progress import Silent
from imgkit_builder.examine import verify
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.sif import convert
from imgkit_builder.sif.conversion import Options
from imgkit_builder.sif.entries import Archive, peek_config
from imgkit_entrypoints.errors import ImgkitError

HOW = {"error": 1, "short": 2, "die before": 3, "die after": 4}
FUNCTIONS = (
    *("open64", "write", "pwrite64", "sendfile64", "copy_file_range"),
    *("ftruncate64", "fdatasync", "fsync", "rename", "unlink", "close"),
)
REPORTED, TRACEBACK, NO_FAULT, DIED = 3, 4, 5, 77
SHIM = ctypes.CDLL(None)


class Job(Protocol):
    """Something that writes one file, an older one or none before."""

    def prepare(self, folder: Path, *, first: bool) -> None: ...
    def act(self, folder: Path) -> None: ...
    def state(self, folder: Path) -> str:
        """``old``, ``new``, ``absent``, or a word for damage."""


class Save:
    """A save of an archive."""

    def prepare(self, folder: Path, *, first: bool) -> None:
        if not first:
            self._save(folder / "x.tar", "old")

    def act(self, folder: Path) -> None:
        self._save(folder / "x.tar", "new")

    def state(self, folder: Path) -> str:
        target = folder / "x.tar"
        data = target.read_bytes() if target.exists() else b""
        kinds = {_archive("old"): "old", _archive("new"): "new", b"": "absent"}
        if data not in kinds:
            return "torn"
        if not data:
            return "absent"
        check = verify.check_checksum(target, hashlib.sha256(data).hexdigest(), len(data))
        if check.verdict == "ok":
            listed, record = sidecar.read_sha256(target), sidecar.read_sidecar(target)
            matches = record and listed == record.archive.sha256 == hashlib.sha256(data).hexdigest()
            return kinds[data] if matches else "mismatched"
        return "incomplete" if check.found.startswith("incomplete: ") and check.hint else "mismatched"

    def _save(self, target: Path, kind: str) -> None:
        write.save_archive(self._pieces(_archive(kind)), target=target, describe=_described)

    @staticmethod
    def _pieces(data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), 20_000):
            yield data[at : at + 20_000]
            time.sleep(0.002)  # the thread that flushes early begins


class StoredImage:
    """An image archive, whose layers have no file in common, in the place of an engine."""

    def __init__(self, path: Path) -> None:
        config = peek_config(Archive(path=path))
        assert config is not None
        self.path, self.name = path, path.stem
        self.config: ImageConfig = config
        self.size_bytes = path.stat().st_size

    @contextlib.contextmanager
    def save(self) -> Iterator[Iterator[bytes]]:
        yield iter([self.path.read_bytes()])

    @contextlib.contextmanager
    def export(self) -> Iterator[Iterator[bytes]]:
        exported = io.BytesIO()
        with tarfile.open(self.path) as archive, tarfile.open(fileobj=exported, mode="w") as target:
            for name in json.load(archive.extractfile("manifest.json") or io.BytesIO())[0]["Layers"]:
                with tarfile.open(fileobj=archive.extractfile(name)) as layer:
                    for member in layer:
                        target.addfile(member, layer.extractfile(member))
        yield iter([exported.getvalue()])


class WriteSif:
    """The verb that writes a .sif; the same input gives the same bytes."""

    target = "x.sif"

    def __init__(self, inputs: Path) -> None:
        self.inputs = inputs
        drawn = random.Random(1)  # noqa: S311 - no secret
        layers = [
            [tar_entry(f"{kind}/{count}", drawn.randbytes(20_000)) for count in range(3)] for kind in "abc"
        ]
        for count, name in enumerate(("one", "two", "three"), 1):
            (self.inputs / f"{name}.tar").write_bytes(stored_images.archive(layers[:count]))
        self._convert("one", self.inputs / "one.sif")
        self.old = (self.inputs / "one.sif").read_bytes()
        (self.inputs / "new").mkdir()
        self.act(self.inputs / "new")
        self.new = (self.inputs / "new" / self.target).read_bytes()

    def prepare(self, folder: Path, *, first: bool) -> None:
        if not first:
            (folder / self.target).write_bytes(self.old)

    def act(self, folder: Path) -> None:
        self._convert("three", folder / self.target)

    def state(self, folder: Path) -> str:
        target = folder / self.target
        if not target.exists():
            return "absent"
        return {self.old: "old", self.new: "new"}.get(target.read_bytes(), "torn")

    def _convert(self, name: str, target: Path) -> None:
        source = Archive(path=self.inputs / f"{name}.tar")
        convert.convert(source, target, Options(test=False), Silent())


def _archive(kind: str) -> bytes:
    return kind.encode() * 30_000


def _described(saved: SavedFile) -> Sidecar:
    image = SavedImage(id="sha256:" + "0" * 64, tag="x:1", platform="linux/amd64", diff_ids=(), labels={})
    archive = SavedArchive(
        name=saved.path.name, size_bytes=saved.size_bytes, sha256=saved.sha256, compress=saved.compress
    )
    return Sidecar(image=image, archive=archive, system=None, manifest=None)


def outcome(job: Job, folder: Path, function: str, call: int, how: str, code: int) -> str:
    """Do the job in a child with one fault; returns how it ended."""
    pid = os.fork()
    if pid == 0:
        result = TRACEBACK
        try:
            SHIM.faults_arm(str(folder).encode(), function.encode(), call, HOW[how], code)
            job.act(folder)
            result = 0 if SHIM.faults_hit() else NO_FAULT
        except (ImgkitError, OSError):  # the command says an OSError in a line, too
            result = REPORTED if SHIM.faults_hit() else TRACEBACK
        finally:
            os._exit(result)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    names = {0: "done", REPORTED: "reported", NO_FAULT: "no fault", DIED: "died"}
    return names.get(exit_code, "traceback")


def sweep(job: Job, root: Path, how: str, code: int, *, first: bool) -> Iterator[dict[str, object]]:
    for function in FUNCTIONS:
        for call in itertools.count(1):
            folder = root / f"{function}-{call}"
            folder.mkdir()
            job.prepare(folder, first=first)
            ending = outcome(job, folder, function, call, how, code)
            if ending == "no fault":
                break
            state = job.state(folder)
            leftovers = [path.name for path in folder.iterdir() if path.name.startswith(".")]
            job.act(folder)  # the next one mends everything
            yield {
                "name": function,
                "call": call,
                "ended": ending,
                "state": state,
                "left": leftovers,
                "again": job.state(folder),
                "rest": sorted(path.name for path in folder.iterdir() if path.name.startswith(".")),
            }


def main() -> None:
    name, root, how, code, before = sys.argv[1:]
    write._FLUSH_BYTES = 40_000
    with tempfile.TemporaryDirectory() as inputs:
        job = Save() if name == "save" else WriteSif(Path(inputs))
        for row in sweep(job, Path(root), how, int(code), first=before == "first"):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
