"""Faults in single calls of libc: ``python faults.py FOLDER HOW ERRNO first|again``, under faults.c.

A child of its own for each function of libc and each number of its calls does the job once, over an older
file or not, so a sweep of many faults starts one interpreter. Prints one line of JSON for each fault.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from imgkit_builder.archive import sidecar, write
from imgkit_builder.archive.sidecar import SavedArchive, SavedImage, Sidecar
from imgkit_builder.archive.write import Saved
from imgkit_builder.examine import verify
from imgkit_entrypoints.errors import ImgkitError

HOW = {"error": 1, "short": 2, "die before": 3, "die after": 4}
FUNCTIONS = (
    *("open64", "write", "pwrite64", "sendfile64", "copy_file_range"),
    *("ftruncate64", "fdatasync", "fsync", "rename", "unlink", "close"),
)
REPORTED, TRACEBACK, NO_FAULT, DIED = 3, 4, 5, 77
SHIM = ctypes.CDLL(None)


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
        found = verify.checksum(target, hashlib.sha256(data).hexdigest(), len(data))
        if found.verdict == "ok":
            listed, about = sidecar.read_sha256(target), sidecar.read(target)
            whole = about and listed == about.archive.sha256 == hashlib.sha256(data).hexdigest()
            return kinds[data] if whole else "mismatched"
        return "incomplete" if found.found.startswith("incomplete: ") and found.hint else "mismatched"

    def _save(self, target: Path, kind: str) -> None:
        write.save(self._pieces(_archive(kind)), target=target, describe=_described)

    @staticmethod
    def _pieces(data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), 20_000):
            yield data[at : at + 20_000]
            time.sleep(0.002)  # the thread that flushes early begins


def _archive(kind: str) -> bytes:
    return kind.encode() * 30_000


def _described(saved: Saved) -> Sidecar:
    image = SavedImage(id="sha256:" + "0" * 64, tag="x:1", platform="linux/amd64", diff_ids=(), labels={})
    about = SavedArchive(
        name=saved.path.name, size_bytes=saved.size_bytes, sha256=saved.sha256, compress=saved.compress
    )
    return Sidecar(image=image, archive=about, system=None, manifest=None)


def outcome(job: Save, folder: Path, function: str, call: int, how: str, code: int) -> str:
    """Do the job in a child with one fault; returns how it ended."""
    pid = os.fork()
    if pid == 0:
        result = TRACEBACK
        try:
            SHIM.faults_arm(str(folder).encode(), function.encode(), call, HOW[how], code)
            job.act(folder)
            result = 0 if SHIM.faults_hit() else NO_FAULT
        except ImgkitError:
            result = REPORTED if SHIM.faults_hit() else TRACEBACK
        finally:
            os._exit(result)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    names = {0: "done", REPORTED: "reported", NO_FAULT: "no fault", DIED: "died"}
    return names.get(ended, "traceback")


def sweep(job: Save, root: Path, how: str, code: int, *, first: bool) -> Iterator[dict[str, object]]:
    for function in FUNCTIONS:
        for call in itertools.count(1):
            folder = root / f"{function}-{call}"
            folder.mkdir()
            job.prepare(folder, first=first)
            ended = outcome(job, folder, function, call, how, code)
            if ended == "no fault":
                break
            found = job.state(folder)
            left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
            job.act(folder)  # the next one mends everything
            yield {
                "name": function,
                "call": call,
                "ended": ended,
                "state": found,
                "left": left,
                "again": job.state(folder),
                "rest": sorted(path.name for path in folder.iterdir() if path.name.startswith(".")),
            }


def main() -> None:
    root, how, code, before = sys.argv[1:]
    write._FLUSH_BYTES = 40_000
    for one in sweep(Save(), Path(root), how, int(code), first=before == "first"):
        print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
