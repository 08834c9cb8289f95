from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from notes import Notes
from refusals import refused
from tars import chunks

from imgkit_builder.archive import write
from imgkit_builder.base import files, process
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError

DATA = os.urandom(300_000) + bytes(3_000_000)

needs_zstd = pytest.mark.programs("zstd")


def never() -> Iterator[bytes]:
    raise AssertionError("the engine was asked")
    yield b""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_plain_archive_is_the_stream(tmp_path):
    saved = write.save_archive(chunks(DATA), target=tmp_path / "x.tar")
    assert saved.path.read_bytes() == DATA
    assert saved.sha256 == hashlib.sha256(DATA).hexdigest()
    assert saved.size_bytes == len(DATA)
    assert names(tmp_path) == ["x.tar"]


def test_gzip_archive_unpacks_to_the_stream(tmp_path):
    saved = write.save_archive(chunks(DATA), target=tmp_path / "x.tar.gz", compress="gzip")
    packed = saved.path.read_bytes()
    assert gzip.decompress(packed) == DATA
    assert saved.sha256 == hashlib.sha256(packed).hexdigest()
    assert subprocess.run(["gzip", "-t", saved.path], check=False).returncode == 0


def test_gzip_bytes_ignore_how_chunks_are_cut(tmp_path):
    from_small_chunks = write.save_archive(chunks(DATA, 1_000), target=tmp_path / "1", compress="gzip")
    from_large_chunks = write.save_archive(chunks(DATA, 2_500_000), target=tmp_path / "2", compress="gzip")
    assert from_small_chunks.sha256 == from_large_chunks.sha256


@needs_zstd
def test_zstd_archive_unpacks_to_the_stream(tmp_path):
    saved = write.save_archive(chunks(DATA), target=tmp_path / "x.tar.zst", compress="zstd")
    assert subprocess.run(["zstd", "-dc", saved.path], capture_output=True, check=True).stdout == DATA
    assert saved.sha256 == hashlib.sha256(saved.path.read_bytes()).hexdigest()


def test_absent_zstd_is_refused_before_saving(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused(ToolMissing, "zstd", hint="--compression gzip"):
        write.save_archive(never(), target=tmp_path / "x.tar.zst", compress="zstd")


def test_too_small_disk_is_refused_before_saving(tmp_path):
    with refused(UsageError, "GB needed", hint="zstd"):
        write.save_archive(never(), target=tmp_path / "x.tar", expected_bytes=10**18)


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent/x.tar", "folder does not exist"), ("folder", "is a folder"), ("two\nlines.tar", "newline")],
)
def test_impossible_targets_are_refused(tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=message):
        write.save_archive(never(), target=tmp_path / name)


def test_failing_stream_keeps_the_old_archive(tmp_path):
    def broken() -> Iterator[bytes]:
        yield DATA
        raise ToolFailed("the engine went away")

    target = tmp_path / "x.tar"
    target.write_bytes(b"old")
    for compress in ("none", "gzip", "zstd") if shutil.which("zstd") else ("none", "gzip"):
        with pytest.raises(ToolFailed, match="went away"):
            write.save_archive(broken(), target=target, compress=compress)
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["x.tar"]


@contextlib.contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_space_midway_leaves_nothing(tmp_path):
    with file_size_limit(1 << 20), pytest.raises(ToolFailed, match="no space left after 1 MB"):
        write.save_archive(chunks(DATA), target=tmp_path / "x.tar")
    assert names(tmp_path) == []


def test_failed_flush_in_the_background_fails_the_save(tmp_path, monkeypatch):
    flushed = threading.Event()

    def fails_once(_: int) -> None:  # as Linux does: the last fsync then succeeds
        flushed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def slow_stream() -> Iterator[bytes]:
        yield DATA
        assert flushed.wait(20)
        yield DATA

    monkeypatch.setattr(os, "fdatasync", fails_once)
    monkeypatch.setattr(write, "_FLUSH_BYTES", 1)
    (tmp_path / "x.tar").write_bytes(b"old")
    with pytest.raises(ToolFailed, match="cannot write: Input/output error"):
        write.save_archive(slow_stream(), target=tmp_path / "x.tar")
    assert names(tmp_path) == ["x.tar"]
    assert (tmp_path / "x.tar").read_bytes() == b"old"


SLOW = """
import sys, time
from pathlib import Path
from imgkit_builder.archive import write as archive
from imgkit_builder.base import files
def chunks():
    while True:
        yield bytes(100_000)
        time.sleep(0.01)
archive.save_archive(chunks(), target=Path(sys.argv[1]))
"""


@contextlib.contextmanager
def slow_save(target: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SLOW, target], stderr=subprocess.DEVNULL) as running:
        try:
            until = time.monotonic() + 20
            while not any(path.stat().st_size for path in target.parent.glob(".imgkit-*.part")):
                assert time.monotonic() < until
                time.sleep(0.01)
            yield running
        finally:
            running.kill()


def test_interrupt_leaves_nothing(tmp_path):
    with slow_save(tmp_path / "x.tar") as running:
        running.send_signal(signal.SIGINT)
        running.wait(20)
    assert names(tmp_path) == []


def test_killed_save_is_cleaned_by_the_next(tmp_path):
    target = tmp_path / "x.tar"
    with slow_save(target) as running:
        running.kill()
        running.wait(20)
    (leftover,) = names(tmp_path)
    assert leftover.startswith(".imgkit-")
    assert leftover.endswith(".x.tar.part")
    write.save_archive(chunks(DATA), target=target)
    assert names(tmp_path) == ["x.tar"]


def test_running_save_keeps_its_file(tmp_path):
    target = tmp_path / "x.tar"
    with slow_save(target):
        write.save_archive(chunks(DATA), target=target)
        assert len(names(tmp_path)) == 2


def test_other_names_leftovers_are_not_touched(tmp_path):
    of_others = (
        ".imgkit-01234567.x.tar.gz.part",
        ".imgkit-01234567.x[1]tar.part",
        ".imgkit-01234567.y.tar.part",
    )
    names_before = [*of_others, ".imgkit-mine.x.tar.part"]
    for name in names_before:
        (tmp_path / name).touch()
    write.remove_leftovers(tmp_path / "x.tar")
    assert names(tmp_path) == sorted(names_before)
    write.remove_leftovers(tmp_path / "x[1]tar")
    assert names(tmp_path) == sorted(set(names_before) - {".imgkit-01234567.x[1]tar.part"})


def test_locked_leftover_stays(tmp_path):
    leftover = files.temporary_name(tmp_path / "x.tar")
    with leftover.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        write.remove_leftovers(tmp_path / "x.tar")
        assert leftover.exists()
    write.remove_leftovers(tmp_path / "x.tar")
    assert not leftover.exists()


@pytest.mark.parametrize("is_held", [False, True], ids=["free", "held"])
def test_leftover_is_locked_by_a_writable_descriptor(tmp_path, monkeypatch, is_held):
    flock = fcntl.flock

    def as_on_nfs(stream: Any, operation: int) -> None:  # flock there is a lock of fcntl
        if fcntl.fcntl(stream, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(stream, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    leftover = files.temporary_name(tmp_path / "x.tar")
    with leftover.open("wb") as stream:
        if is_held:
            flock(stream, fcntl.LOCK_EX)
        write.remove_leftovers(tmp_path / "x.tar")
        assert leftover.exists() == is_held


def test_progress_never_exceeds_its_total(tmp_path):
    notes = Notes()
    # A tar has headers that the image's size does not count.
    write.save_archive(chunks(DATA), target=tmp_path / "x", expected_bytes=len(DATA) - 50_000, report=notes)
    assert notes.progress[-1] == (len(DATA), len(DATA))
    assert all(total is not None and advanced <= total for advanced, total in notes.progress)


def test_memory_does_not_grow_with_the_image(tmp_path):
    # Not ru_maxrss: a child starts with its parent's, and a whole pytest run is large.
    source = f"""
from pathlib import Path
from imgkit_builder.archive import write as archive
from imgkit_builder.base import files
for compress in ("none", "gzip"):
    chunks = (bytes(32768) for _ in range(4_000))
    archive.save_archive(chunks, target=Path({str(tmp_path / "x")!r}), compress=compress)
status = Path("/proc/self/status").read_text()
print(status.split("VmHWM:")[1].split()[0])
"""
    child = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert int(child.stdout) < 64 * 1024


def test_failing_filter_is_quoted():
    output = process.filter_through(["sh", "-c", "echo the reason >&2; exit 3"], chunks(DATA))
    with pytest.raises(ToolFailed, match="exit code 3: the reason"):
        list(output)


def test_filter_is_ended_when_the_reader_stops():
    output = process.filter_through(["cat"], iter(lambda: bytes(65_536), None))
    assert next(output)
    output.close()  # type: ignore[attr-defined]  # hangs or leaves a process where it is not ended
