"""Free space is compared with what the way needs, before anything is written."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.base.sizes import size_text
from imgkit_builder.sif import conversion, convert, workspace
from imgkit_builder.sif.convert import ConversionPlan
from imgkit_builder.sif.entries import Archive, Piped, Source
from imgkit_builder.sif.squash import OldMksquashfs, Squasher, TarMksquashfs
from imgkit_entrypoints.errors import CheckFailed

IMAGE_BYTES = 1_000_000
SQUASHERS: dict[str, Squasher | None] = {
    "new": TarMksquashfs(program=Path("mksquashfs")),
    "old": OldMksquashfs(program=Path("mksquashfs"), note=""),
    "runtime": None,
}


def check(source: Source, folder: Path, way: str = "new") -> None:
    plan = ConversionPlan(
        method="layers" if way == "runtime" else "stream",
        compression=conversion.GZIP,
        squasher=SQUASHERS[way],
        tool=None,
        notes=(),
    )
    convert._check_space(source, folder / "x.sif", folder, plan)


def free(monkeypatch: pytest.MonkeyPatch, free_bytes: float) -> None:
    usage: Any = type("usage", (), {"free": int(free_bytes)})
    monkeypatch.setattr(workspace, "disk_usage", lambda _: usage)


@pytest.mark.parametrize(("way", "share"), [("new", 0.5), ("old", 2), ("runtime", 3.8)])
def test_each_way_needs_its_share(tmp_path, monkeypatch, way, share):
    (tmp_path / "x.tar").write_bytes(bytes(IMAGE_BYTES))
    source = Archive(path=tmp_path / "x.tar")
    free(monkeypatch, share * IMAGE_BYTES)
    check(source, tmp_path, way)
    free(monkeypatch, share * IMAGE_BYTES - 1)
    with pytest.raises(CheckFailed, match=r"are free, an image of 1\.0 MB needs"):
        check(source, tmp_path, way)


def test_compressed_archive_needs_room_for_its_plain_form(tmp_path, monkeypatch):
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(b"x") + bytes(IMAGE_BYTES))
    free(monkeypatch, 4 * IMAGE_BYTES)
    with pytest.raises(CheckFailed, match=r"4\.0 MB are free, an image of 3\.0 MB needs 4\.5 MB"):
        check(Archive(path=tmp_path / "x.tar.gz"), tmp_path)


def test_full_disk_names_both_options_at_once(tmp_path, monkeypatch):
    free(monkeypatch, 0)
    with pytest.raises(CheckFailed) as caught:
        workspace.check_space(IMAGE_BYTES, IMAGE_BYTES, tmp_path / "x.sif", tmp_path)
    assert caught.value.hint == "--tmpdir DIR and -o FILE.sif on a larger disk"
    ram_disk = Path("/dev/shm")  # another file system
    with pytest.raises(
        CheckFailed, match=f"needs 1.0 MB; .* in {ram_disk}, where 0 bytes are free"
    ) as caught:
        workspace.check_space(IMAGE_BYTES, IMAGE_BYTES, ram_disk / "x.sif", tmp_path)
    assert caught.value.hint == "--tmpdir DIR and -o FILE.sif on a larger disk"


def test_standard_input_that_is_a_file_is_measured(tmp_path, monkeypatch):
    (tmp_path / "x.tar").write_bytes(bytes(IMAGE_BYTES))
    free(monkeypatch, IMAGE_BYTES)
    with (tmp_path / "x.tar").open("rb") as stream, pytest.raises(CheckFailed, match=r"needs 1\.5 MB"):
        check(Piped(stream=stream), tmp_path)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (52_300_000, "52.3 MB"),
        (3_400_000_000, "3.4 GB"),
        (5 * 10**13, "50000.0 GB"),
    ],
)
def test_sizes_have_a_fitting_unit(size, text):
    assert size_text(size) == text
