"""Verify compares an archive with its checksum and its sidecar."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import subprocess
from pathlib import Path

import pytest
from bit_flips import flip
from sample_image import run_checks, verdicts
from tars import tar_of_files

from imgkit_builder.archive import read, sidecar
from imgkit_builder.archive.sidecar import SavedArchive, SavedImage, Sidecar
from imgkit_builder.base.progress import Silent
from imgkit_builder.examine.verify import verify_file
from imgkit_builder.workflow.convert import source_of
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError

GOOD = {"sha256": "ok", "archive": "ok", "image id": "ok", "layers": "ok", "sidecar": "ok"}
ALONE = GOOD | {"sha256": "warn", "sidecar": "skip"}


def describe(path: Path, **changes: object) -> Sidecar:
    """Write the sidecar of `path`, with `changes` of its image."""
    contents = read.digest_archive(path, compress="none", report=Silent())
    assert contents.image is not None
    facts = {
        "id": contents.image.config.image_id,
        "platform": "linux/amd64",
        "diff_ids": contents.image.config.diff_ids,
    }
    image = SavedImage(tag="small:1", labels={}, **(facts | changes))
    archive = SavedArchive(
        name=path.name, size_bytes=contents.size_bytes, sha256=contents.sha256, compress="none"
    )
    record = Sidecar(image=image, archive=archive, system=None, manifest=None)
    with sidecar.replace_around(record, path):
        pass
    return record


def test_good_archive_passes_everything(archive):
    describe(archive)
    assert verdicts(archive) == GOOD


def test_archive_without_sidecar_warns(archive):
    assert verdicts(archive) == ALONE


def test_checksum_alone_is_enough(archive):
    describe(archive)
    sidecar.json_path(archive).unlink()
    assert verdicts(archive) == GOOD | {"sidecar": "skip"}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("layout", ["modern_members", "oci_members"])
def test_every_layout_passes_with_its_sidecar(sample, tmp_path, layout, pack):
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of_files(getattr(sample, layout)(pack)))
    describe(path)
    assert verdicts(path) == GOOD


def test_sidecar_with_another_id_is_not_ok(sample, tmp_path):
    members = sample.modern_members()
    path = tmp_path / "x.tar"
    path.write_bytes(tar_of_files(members))
    (entry,) = json.loads(members["index.json"])["manifests"]
    describe(path, id=entry["digest"])
    assert verdicts(path) == GOOD | {"sidecar": "fail"}


def test_zstd_archive_needs_the_program(sample, tmp_path, zstd, monkeypatch):
    path = tmp_path / "x.tar.zst"
    path.write_bytes(zstd(tar_of_files(sample.legacy_members())))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ToolMissing, match="zstd"):
        verify_file(path)


def test_flipped_byte_fails_the_checksum(archive):
    describe(archive)
    flip(archive, 8 * 2000)
    checks = run_checks(archive)
    assert checks["sha256"].verdict == "fail"
    assert "rsync" in checks["sha256"].hint


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_truncated_archive_fails(archive, share):
    describe(archive)
    data = archive.read_bytes()
    archive.write_bytes(data[: int(len(data) * share)])
    checks = run_checks(archive)
    assert checks["sha256"].verdict == "fail"
    assert f"of {len(data)} bytes" in checks["sha256"].found
    assert checks["archive"].verdict == "fail"


@pytest.mark.parametrize(
    ("key", "value"),
    [("id", "sha256:" + "0" * 64), ("diff_ids", ("sha256:1",)), ("platform", "linux/arm64")],
)
def test_sidecar_of_another_image_fails(archive, key, value):
    describe(archive, **{key: value})
    assert verdicts(archive) == GOOD | {"sidecar": "fail"}


def test_checksum_of_another_archive_fails(archive):
    sidecar.sha256_path(archive).write_text(f"{'0' * 64}  {archive.name}\n")
    assert verdicts(archive) == ALONE | {"sha256": "fail"}


def test_unreadable_sidecar_fails(archive):
    sidecar.json_path(archive).write_text("{")
    assert verdicts(archive) == ALONE | {"sha256": "fail", "sidecar": "fail"}


@pytest.mark.parametrize("name", ["absent.tar", "."])
def test_absent_file_is_a_usage_error(tmp_path, name):
    with pytest.raises(UsageError, match="cannot be read"):
        verify_file(tmp_path / name)


def test_interrupted_save_is_incomplete_and_mended_by_its_line(archive, tmp_path):
    record = describe(archive)
    checksum = sidecar.sha256_path(archive)
    checksum.unlink()
    check = run_checks(archive)["sha256"]
    assert (check.verdict, check.found) == ("fail", f"incomplete: {checksum.name} is missing")
    subprocess.run(["sh", "-c", check.hint], cwd=tmp_path, check=True)
    assert verdicts(archive) == GOOD
    newer = dataclasses.replace(record, archive=dataclasses.replace(record.archive, sha256="0" * 64))
    with contextlib.suppress(KeyboardInterrupt), sidecar.replace_around(newer, archive):
        raise KeyboardInterrupt
    check = run_checks(archive)["sha256"]
    assert check.verdict == "fail"
    assert (
        check.found
        == f"incomplete: a save has replaced {archive.name}.manifest.json, and not yet {archive.name}"
    )
    assert check.hint == f"imgkit save small:1 -o {archive.name}"


def test_archive_of_an_interrupted_save_is_not_converted(archive):
    describe(archive)
    sidecar.sha256_path(archive).unlink()
    with (
        pytest.raises(CheckFailed, match=r"incomplete: .*sha256 is missing") as caught,
        source_of(str(archive)),
    ):
        pass
    assert str(caught.value.hint).startswith("sha256sum ")
