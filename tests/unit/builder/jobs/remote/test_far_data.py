"""Data on a remote: sent once, shared by the runs, and again when it changed; no run sees it change.

The ``ssh`` here is a fake: it runs the script on this machine. rsync is real.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from file_tree import write_files, write_program
from job_builder import make_job, make_script
from notes import Notes

from imgkit_builder.jobs import data_mounts, systems
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.remote import connection, gc, store
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.remote.connection import Connection, ScriptFailed
from imgkit_builder.jobs.transport import Ssh
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, UsageError

pytestmark = pytest.mark.programs("rsync")
FILES = {"data/x/train": "1" * 100_000, "data/x/sub/test": "2"}


@pytest.fixture
def project(tmp_path: Path, ssh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_files(tmp_path / "my project", FILES)
    monkeypatch.chdir(folder)
    return folder


def far(tmp_path: Path) -> Connection:
    return connection.connect(Remote(name="far", address="far", folder=f"{tmp_path}/store", keep_s=0))


def send(tmp_path: Path, *data: str) -> tuple[Job, list[str]]:
    """Bring the data to the remote, which is this machine. Return the job, and what the user saw."""
    job = make_job(directory=tmp_path / "store", data=data or ("data/x",))
    prepared = PreparedJob(job=job, script=make_script(), data=data_mounts.list_folders(job.request))
    transport, notes = Ssh(far(tmp_path)), Notes()
    transport.store = store.open_store(transport.connection, program="sh")
    return transport.bring_data(prepared, notes), notes.texts


def source(job: Job) -> Path:
    return Path(job.container.data[0].source)


def test_data_is_sent_once_and_mounted_read_only(project, tmp_path):
    job, texts = send(tmp_path)
    assert texts == ["to send: data: data/x, 2 files, 100.0 kB", "sent: data: 2 files, 100.0 kB"]
    assert source(job).parent == tmp_path / "store/data"
    assert (source(job) / "sub/test").read_text() == "2\n"
    assert (source(job) / "train").stat().st_mode & 0o222 == 0
    assert f"{source(job)}:/workspace/data/x:ro" in systems.get_system("slurm").script(job).text
    again, texts = send(tmp_path)
    assert (source(again), texts) == (source(job), [])


def test_changed_data_leaves_that_of_earlier_runs(project, tmp_path):
    first = source(send(tmp_path)[0])
    (project / "data/x/sub/test").write_text("new\n")
    job, texts = send(tmp_path)
    assert texts[1] == "sent: data: 1 file, 4 bytes"
    assert (first / "sub/test").read_text() == "2\n"
    assert (source(job) / "sub/test").read_text() == "new\n"
    assert (first / "train").stat().st_ino == (source(job) / "train").stat().st_ino


def test_data_that_changes_on_its_way_is_refused(project, tmp_path, ssh):
    ssh.write_text(f"{ssh.read_text().partition('exec')[0]}touch 'data/x/train'\nexec sh -c \"$line\"\n")
    with pytest.raises(UsageError) as caught:
        send(tmp_path)
    assert str(caught.value) == (
        f"{project}/data/x: it changed while it was sent\n"
        "  -> run the command again when no program writes there"
    )
    assert [path.name for path in (tmp_path / "store/data").iterdir()] == [".incoming"]


@pytest.mark.parametrize("error", ["No space left on device (28)", "Disk quota exceeded (122)"])
def test_full_disk_names_what_to_remove(project, tmp_path, ssh, error):
    """The disk is not full: a program with rsync's message takes its place on the remote."""
    message = f'rsync: [receiver] mkstemp "/x/.train.a1" failed: {error}'
    rsync = write_program(tmp_path / "far-bin/rsync", f"echo '{message}' >&2; exit 23")
    ssh.write_text(ssh.read_text().replace("exec ", f"PATH={rsync.parent}:$PATH exec ", 1))
    with pytest.raises(CheckFailed, match="data: the disk of far is full\n") as caught:
        send(tmp_path)
    assert message in str(caught.value.hint)
    assert "imgkit remote gc far --delete" in str(caught.value.hint)


def test_full_disk_is_named_if_the_message_of_rsync_is_lost(project, tmp_path, ssh):
    """When the pipe to rsync's receiver breaks first, only its exit code arrives."""
    send(tmp_path)
    (project / "data/x/sub/test").write_text("new\n")
    rsync = write_program(tmp_path / "far-bin/rsync", "exit 11")
    write_program(rsync.with_name("df"), "echo 'tmpfs 9216 9200 16 100% /scratch'")
    ssh.write_text(ssh.read_text().replace("exec ", f"PATH={rsync.parent}:$PATH exec ", 1))
    with pytest.raises(CheckFailed, match=r"data: the disk of far is full: 16\.4 kB free\n") as caught:
        send(tmp_path)
    assert "imgkit remote gc far --delete" in str(caught.value.hint)
    write_program(rsync.with_name("df"), "echo 'tmpfs 9216 9200 9200 1% /scratch'")
    with pytest.raises(ScriptFailed, match="a command on far failed with exit code 11"):
        send(tmp_path)


def test_missing_path_of_the_cluster_is_named(project, tmp_path):
    with pytest.raises(UsageError) as caught:
        send(tmp_path, f"{tmp_path}/away:/data")
    assert str(caught.value) == f"data: far has no {tmp_path}/away\n  -> correct the path in imgkit.toml"


def test_folder_of_a_group_that_is_closed_is_named(project, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    with pytest.raises(ImgkitError) as caught:
        send(tmp_path, f"{closed}:/data")
    assert str(caught.value) == (
        f"data: you may not read {closed} on far\n"
        f"  -> its owner lets your group in: chmod -R g+rX {closed}; see its group: ls -ld {closed}"
    )


def test_unused_version_is_removed_even_if_it_is_write_protected(project, tmp_path):
    (project / "data/x/sub").chmod(0o555)
    first = source(send(tmp_path)[0])
    (project / "data/x/train").write_text("new\n")
    job, _ = send(tmp_path)
    os.utime(first, (5, 5))
    unused = gc.find_unused(far(tmp_path), days=30)
    assert [item.path for item in unused.folders] == [f"data/{first.name}"]
    gc.remove_unused(far(tmp_path), unused)
    assert list((tmp_path / "store/data").glob("[0-9a-f]*")) == [source(job)]
