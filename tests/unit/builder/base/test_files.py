"""Files of imgkit's own: a HOME that cannot be written costs time, no more."""

from __future__ import annotations

import stat
from pathlib import Path
from unittest import mock

import pytest

from imgkit_builder.base import files
from imgkit_builder.engine import building
from imgkit_builder.image import smoke


@pytest.fixture(params=["read-only", "none"])
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home in which even root creates nothing, or none at all."""
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc")
    if request.param == "none":
        error = RuntimeError("Could not determine home directory.")
        monkeypatch.setattr(Path, "home", mock.Mock(side_effect=error))


@pytest.mark.usefixtures("home")
def test_goes_on_without_a_cache():
    files.write_cache(files.cache_dir() / "probe/x.json", "{}")
    assert not smoke.has_passed("sha256:1")
    smoke.record_pass("sha256:1")
    assert not smoke.has_passed("sha256:1")


@pytest.mark.usefixtures("home")
def test_log_of_a_build_goes_to_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert building._make_log_folder("mn5").parent == tmp_path


def test_cache_that_others_can_write_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    smoke.record_pass("sha256:1")
    assert smoke.has_passed("sha256:1")
    assert stat.S_IMODE((tmp_path / "imgkit").stat().st_mode) == 0o700
    (record,) = (path for path in tmp_path.rglob("*") if path.is_file())
    record.unlink()
    record.symlink_to("/etc/hostname")
    assert not smoke.has_passed("sha256:1")
