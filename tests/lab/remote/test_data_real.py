"""Folders of data go to a remote over a real sshd: twice at once, and onto a disk that is full."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from file_tree import write_files
from labkit import output
from notes import Notes
from remotekit import far_host, far_marks, run_at_once, sshd

from imgkit_builder.data import folder, spec
from imgkit_builder.jobs.remote import connection, transfer
from imgkit_builder.jobs.remote.config import Remote
from imgkit_entrypoints.errors import CheckFailed

pytestmark = [*far_marks, pytest.mark.xdist_group("far-data")]
MB = 1 << 20


@pytest.fixture(scope="module")
def served():
    with far_host(Path(f"/tmp/imgkit-data-{os.getpid()}")) as host, sshd(host):
        yield host


@pytest.fixture
def data(tmp_path):
    files = {f"data/x/part {number}": os.urandom(MB) for number in range(6)}
    return folder.find_folder(spec.parse_spec("data/x"), write_files(tmp_path / "project", files))


def send(home, data, *earlier):
    (home / "data").mkdir(parents=True, exist_ok=True)
    remote = Remote(name="far", address="far", folder=str(home))
    transfer.send_data(connection.connect(remote), data, home=str(home), earlier=earlier, report=Notes())
    return home / "data" / data.name


@pytest.mark.usefixtures("far")
def test_two_runs_that_send_at_once_share_one_folder(tmp_path, data):
    home, targets = tmp_path / "my store", []
    run_at_once(lambda: targets.append(send(home, data)))
    assert targets == [home / "data" / data.name] * 3
    assert output("diff", "-r", data.path, targets[0]) == ""
    assert [path for path in (home / "data").rglob("*") if ".incoming/" in str(path)] == []


@pytest.mark.usefixtures("far")
def test_next_version_needs_room_for_what_changed_alone(tmp_path, data):
    """Linked files take no room, so their size is no reason to refuse; a disk that fills up is one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    output("mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", disk)
    try:
        first = send(disk / "store", data)
        (data.path / "part 0").write_bytes(os.urandom(MB))
        second = send(disk / "store", folder.list_folder(data.spec, data.path), first.name)
        assert (first / "part 1").stat().st_ino == (second / "part 1").stat().st_ino
        (data.path / "part 9").write_bytes(os.urandom(4 * MB))
        with pytest.raises(CheckFailed, match="the disk of far is full") as caught:
            send(disk / "store", folder.list_folder(data.spec, data.path), second.name)
        assert "imgkit remote gc far --delete" in str(caught.value.hint)
        with pytest.raises(CheckFailed, match=r"10\.5 MB to send to far, but .* free"):
            send(disk / "store", folder.list_folder(data.spec, data.path))
    finally:
        output("umount", "--lazy", disk)  # after a failure, rsync may still have a file open there
