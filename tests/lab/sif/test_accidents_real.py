"""Whatever happens while imgkit writes a .sif, its name holds the old file, the new one or none."""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import shutil
import signal
import subprocess
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

import bit_flips
import pytest
from file_tree import write_program
from labkit import IMGKIT, imgkit, imgkit_json, small_disk, until
from stored_images import archive, busybox_layer, convert_as, only
from tars import tar_entry
from tiny_image import BUSYBOX

from imgkit_builder.base import files
from imgkit_builder.base.progress import Silent
from imgkit_builder.recipe import sources as recipe_sources
from imgkit_builder.sif import convert, image
from imgkit_builder.sif.conversion import Options
from imgkit_builder.sif.entries import Archive

pytestmark = [
    pytest.mark.xdist_group("accidents"),
    pytest.mark.programs("mksquashfs"),
]
STAGES = 5
"""Stages of a conversion from a compressed archive, before the file has its name."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """An image as a plain and as a gzip archive, its .sif, and the .sif of an older image."""

    plain: Path
    packed: Path
    new: bytes
    old: bytes


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder, drawn = tmp_path_factory.mktemp("accidents"), random.Random(1)  # noqa: S311 - no secret
    layers = [
        [tar_entry(f"{layer}/{number}", drawn.randbytes(100_000)) for number in range(4)]
        for layer in range(3)
    ]
    plain, packed = folder / "x.tar", folder / "x.tar.gz"
    plain.write_bytes(archive(layers))
    packed.write_bytes(gzip.compress(plain.read_bytes(), 1))
    (folder / "old.tar").write_bytes(archive([[tar_entry("old", b"x")]]))
    for name in ("x", "old"):
        assert convert_as(0, folder / f"{name}.tar", folder / f"{name}.sif") == ""
    return Sources(
        plain=plain,
        packed=packed,
        new=(folder / "x.sif").read_bytes(),
        old=(folder / "old.sif").read_bytes(),
    )


class Killed(Silent):
    """A reporter that ends its process at one stage, as ``kill -9`` does."""

    def __init__(self, stage):
        self.stages_to_go = stage

    def stage(self, text):
        self.stages_to_go -= 1
        if self.stages_to_go < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def kill(source, target, *, stage=1000, after_s=None):
    """Convert in a child that dies at a stage, or after a while; returns its exit code."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            convert.convert(Archive(path=source), target, Options(test=False), Killed(stage))
            os._exit(0)
        os._exit(1)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def assert_next_run_mends(source, target, expected):
    assert convert_as(0, source, target) == ""
    assert target.read_bytes() == expected
    assert sorted(path.name for path in target.parent.iterdir()) == [target.name]


@pytest.mark.parametrize("stage", range(STAGES))
def test_kill_at_any_stage_leaves_the_old_file_or_none(sources, tmp_path, stage):
    target = tmp_path / "x.sif"
    if old := stage % 2:
        target.write_bytes(sources.old)
    assert kill(sources.packed, target, stage=stage) == -signal.SIGKILL
    assert target.read_bytes() == sources.old if old else not target.exists()
    # A recipe that copies the folder takes nothing of it.
    assert recipe_sources.list_source(tmp_path).entries == ()
    assert_next_run_mends(sources.packed, target, sources.new)


def test_kill_after_the_file_has_its_name_is_tidied(sources, tmp_path, monkeypatch):
    """The next run finds the right file, and removes the rest all the same."""

    def publish(part, target):
        part.replace(target)
        os.kill(os.getpid(), signal.SIGKILL)

    target = tmp_path / "x.sif"
    with monkeypatch.context() as patched:
        patched.setattr(files, "publish_file", publish)
        assert kill(sources.plain, target) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 3
    assert_next_run_mends(sources.plain, target, sources.new)


@pytest.mark.soak
def test_kill_at_any_moment_leaves_the_old_file_the_new_or_none(sources, tmp_path):
    target, drawn = tmp_path / "x.sif", random.Random()  # noqa: S311 - no secret
    for turn in range(100):
        target.unlink(missing_ok=True)
        if old := turn % 2:
            target.write_bytes(sources.old)
        source = sources.packed if turn % 4 < 2 else sources.plain
        kill(source, target, after_s=drawn.random() * 0.4)
        states = (sources.new, sources.old if old else None)
        assert (target.read_bytes() if target.exists() else None) in states
        assert_next_run_mends(source, target, sources.new)


@pytest.mark.parametrize("way", ["new", "old"])
def test_killed_conversion_leaves_no_mksquashfs(sources, tmp_path, way):
    """A program that hangs stands in for the mksquashfs that squashes."""
    started_file = tmp_path / "be gan"
    env = {**os.environ, **only(way, tmp_path)}
    program = tmp_path / f"only-{way}/mksquashfs"
    if way == "new":
        program.write_text(f'#!/bin/sh\nexec {shutil.which("mksquashfs")} "$@"\n')
    hangs = f'case "$*" in *-noappend*) echo $$ >"{started_file}"; exec sleep 600;; esac'
    program.write_text(program.read_text().replace("\n", f"\n{hangs}\n", 1))
    argv = [*IMGKIT, "sif", sources.plain, "-o", tmp_path / "x.sif", "--no-test"]
    with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as process:
        until(lambda: started_file.exists() and started_file.read_text().strip(), within_s=60)
        assert not has_ended(int(started_file.read_text()))
        process.kill()
    until(lambda: has_ended(int(started_file.read_text())), within_s=60)


def has_ended(pid):
    """Return True if the process is gone, or a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize("kib", [100, 700, 900, 1170])
def test_full_disk_leaves_the_old_file(sources, tmp_path, kib):
    with small_disk(tmp_path / "disk", kib) as disk:
        target = disk / "x.sif"
        target.write_bytes(sources.old)
        message = convert_as(0, sources.plain, target)
        assert ("the disk of" if kib > 100 else "are free") in message
        assert str(disk) in message
        assert target.read_bytes() == sources.old
        assert list(disk.iterdir()) == [target]


def test_full_temporary_disk_is_named(tmp_path):
    """The archive unpacks to more than it promises: zeros."""
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(archive([[tar_entry("zeros", bytes(3_000_000))]])))
    (tmp_path / "out").mkdir()
    with small_disk(tmp_path / "disk", 1000) as disk:
        message = convert_as(0, tmp_path / "x.tar.gz", tmp_path / "out/x.sif", tmpdir=disk)
        assert f"the disk of {disk} is full" in message
        assert not list(disk.iterdir())
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("kib", [8, 1000])
def test_layers_without_room_give_the_same_file(tmp_path, kib):
    """They promise less than 8 KiB, unpack to more than 1000, and are then unpacked twice."""
    layers = [[tar_entry(f"zeros {number}", bytes(2_000_000))] for number in range(2)]
    for name, packed in (("plain", bytes), ("packed", gzip.compress)):
        (tmp_path / f"{name}.tar").write_bytes(archive(layers, packed=packed))
    assert convert_as(0, tmp_path / "plain.tar", tmp_path / "plain.sif") == ""
    with small_disk(tmp_path / "disk", kib) as disk:
        assert convert_as(0, tmp_path / "packed.tar", tmp_path / "packed.sif", tmpdir=disk) == ""
        assert not list(disk.iterdir())
    assert image.root_sha256(tmp_path / "packed.sif") == image.root_sha256(tmp_path / "plain.sif")


@pytest.mark.parametrize("stage", ["standard input", "mksquashfs"])
def test_interrupt_leaves_the_old_file(sources, tmp_path, stage):
    target, started_file = tmp_path / "x.sif", tmp_path / "began"
    target.write_bytes(sources.old)
    hangs = f'case "$*" in *-noappend*) touch {started_file}; exec sleep 600;; esac'
    script = f'{hangs}\nexec {shutil.which("mksquashfs")} "$@"'
    program = write_program(tmp_path / "bin/mksquashfs", script)
    piped = stage == "standard input"
    source = "-" if piped else sources.plain
    with subprocess.Popen(
        [*IMGKIT, "sif", source, "-o", target, "--no-test"],
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        if piped:
            process.stdin.write(sources.plain.read_bytes())  # and no end
            process.stdin.flush()
        until(
            lambda: list(tmp_path.glob(".imgkit-sif*/spool.tar")) if piped else started_file.exists(),
            within_s=60,
        )
        process.send_signal(signal.SIGINT)
        stderr = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert target.read_bytes() == sources.old
    assert {path.name for path in tmp_path.iterdir()} <= {"x.sif", "began", "bin"}


@pytest.mark.parametrize("flips", [8, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_flipped_bit_is_named_or_means_nothing(tmp_path, flips, packed):
    """An error that names the archive, or the same files."""
    path, target = tmp_path / "x.tar", tmp_path / "x.sif"
    data = archive(
        [
            [tar_entry(f"{layer}", b"text " * 300), tar_entry("l", kind=tarfile.SYMTYPE, linkname="0")]
            for layer in range(3)
        ]
    )
    path.write_bytes(gzip.compress(data) if packed else data)
    assert convert_as(0, path, target) == ""
    root_sha256 = image.root_sha256(target)

    def noticed():
        target.unlink(missing_ok=True)
        message = convert_as(0, path, target)
        if message:
            assert message.startswith("CheckFailed: ")
            assert str(path) in message
            assert not target.exists()
        else:
            assert image.root_sha256(target) == root_sha256
        assert {path.name for path in tmp_path.iterdir()} <= {"x.tar", "x.sif"}
        return bool(message)

    assert len(bit_flips.survivors(path, noticed, flips, seed=flips)) < flips


@pytest.mark.singularity
def test_image_without_a_shell_converts(tmp_path):
    """It has one program, and no ``true``, which imgkit would run to test it."""
    config = {"Entrypoint": ["/busybox", "echo", "ran"]}
    (tmp_path / "x.tar").write_bytes(archive([[tar_entry("busybox", BUSYBOX.read_bytes())]], config=config))
    result = imgkit("sif", "x.tar", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "nothing run: the image has no program 'true'" in result.stderr


def test_image_of_zeros_is_whole(tmp_path):
    (tmp_path / "x.tar").write_bytes(archive([[tar_entry("zeros", bytes(8_000_000))]]))
    assert convert_as(0, tmp_path / "x.tar", tmp_path / "x.sif") == ""


def built_by_runtime(folder, layers):
    """A .sif that the runtime built with gzip; imgkit's own way would take zstd."""
    (folder / "old.tar").write_bytes(archive(layers, config={"Env": ["PATH=/bin"]}))
    answer = imgkit_json("sif", "old.tar", "--no-test", folder=folder, env=only("runtime", folder))
    assert answer["record"]["compression"] == "gzip 6"
    return folder / "old.sif"


@pytest.mark.singularity
def test_sif_that_a_runtime_built_is_not_converted_again(tmp_path):
    path = built_by_runtime(tmp_path, [busybox_layer("sh", "cat", "true")])
    before = path.read_bytes()
    assert convert_as(0, tmp_path / "old.tar", path) == ""
    assert path.read_bytes() == before
    assert convert_as(0, tmp_path / "old.tar", path, compression="zstd") == ""
    assert path.read_bytes() != before
