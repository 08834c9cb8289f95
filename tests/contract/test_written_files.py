"""Files that versions from 0.3.0 on wrote (`tests/written`) are read, with all that they hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from job_records import full_record

from imgkit_builder.archive import sidecar
from imgkit_builder.examine.verify import verify_file
from imgkit_builder.jobs import measured, records
from imgkit_builder.sif import image
from imgkit_builder.workflow import baked

WRITTEN = Path(__file__).parents[1] / "written"
VERSIONS = sorted(path.parent.name for path in WRITTEN.glob("*/small.sif"))


@pytest.fixture(params=VERSIONS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the files of a version: no reader needs to write next to them, and none may change them."""
    return Path(shutil.copytree(WRITTEN / request.param, tmp_path / request.param))


def test_files_begin_with_this_version():
    assert VERSIONS[0] == "0.3.0"


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        ("small.tar.gz", ["sha256", "archive", "image id", "layers", "sidecar"]),
        ("small.sif", ["header", "root partition", "manifest"]),
        ("small.sqsh", ["sha256", "squashfs", "content", "manifest"]),
    ],
)
def test_every_check_of_an_image_passes(written, name, checks):
    verdicts = {check.name: check.verdict for check in verify_file(written / name)}
    assert verdicts == dict.fromkeys(checks, "ok")


def test_one_image_is_known_by_one_id(written):
    described = sidecar.read_sidecar(written / "small.tar.gz")
    assert described is not None
    assert described.manifest is not None
    record = image.read(written / "small.sif").record
    assert record is not None
    assert (described.image.id, described.image.diff_ids) == (record.image_id, record.diff_ids)
    assert record.imgkit == written.name


@pytest.mark.programs("mksquashfs")
def test_converted_archive_is_up_to_date(written, call):
    code, out, err = call("sif", str(written / "small.tar.gz"), "-o", str(written / "small.sif"), "--no-test")
    assert (code, "up to date" in out) == (0, True), err


def test_system_in_a_sif_is_read(written):
    target = baked.read_target(written / "small.sif")
    assert (target.name, target.system.scheduler, target.system.fabric.kind) == ("cpu", "standalone", "tcp")


def test_record_of_a_job_has_every_field(written, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(written / "state"))
    assert records.find_record("4711@far") == full_record()


def test_run_folder_is_read(written):
    measurement = measured.last_numbers(written / "dist-train")
    assert measurement.step == 6
    assert measurement.loss is not None
