"""The speed of writing: measured on this machine, and nothing of it stays."""

from __future__ import annotations

import pytest

from imgkit_entrypoints.facts import storage


def test_written_files_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FILE_BYTES", 1 << 20)
    assert storage.measure_write_MBps(tmp_path) > 0
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        storage.measure_write_MBps(tmp_path / "absent")
