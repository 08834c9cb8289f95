"""Code on a remote: one folder per digest, whose equal files of earlier ones are linked and not sent.

The ``ssh`` here is a fake: it runs the script on this machine. rsync is real.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from file_tree import write_files, write_program
from job_records import submitted_job
from notes import Notes

from imgkit_builder.base.progress import Silent
from imgkit_builder.jobs import code
from imgkit_builder.jobs.remote import connection, fetch, store
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.remote.connection import ScriptFailed
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.transport import Ssh
from imgkit_entrypoints.errors import CheckFailed


@pytest.fixture
def folder(tmp_path: Path, ssh: Path) -> Path:
    folder = tmp_path / "my code"
    (folder / "a\nb").mkdir(parents=True)
    (folder / "a\nb/$(touch x) 'y'").write_text("odd\n")
    (folder / "-rf").write_text("odd\n")
    (folder / "away").symlink_to("/nowhere/else")
    (folder / "run").write_text("1\n")
    (folder / "run").chmod(0o755)
    (folder / "table").write_bytes(os.urandom(200_000))
    return folder


def send(folder: Path, home: Path) -> tuple[Path, str]:
    """Return the folder on the remote, which is this machine, and what the user saw."""
    far = connection.connect(Remote(name="far", address="far", folder=str(home), keep_s=0))
    notes = Notes()
    read = code.read_code_folder(JobRequest.of(code=folder), large=False, report=notes)
    transport = Ssh(far)
    transport.store = store.open_store(far, program="sh", code=read.record.sha256)
    transport.put_code(read, home, notes)
    return home / "code" / read.record.sha256, "\n".join(notes.texts)


def leave_part(part: Path, file: Path) -> None:
    """Write what rsync leaves of a read-only file when the connection is lost."""
    part.parent.mkdir(parents=True)
    part.write_bytes(file.read_bytes()[:150_000])
    part.chmod(0o444)


def contents(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()  # noqa: PTH115
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_folder_arrives_with_any_name_in_it(folder, tmp_path):
    target, text = send(folder, tmp_path / "my store")
    assert contents(target / "workspace") == contents(folder)
    assert (target / "workspace/run").stat().st_mode & 0o777 == 0o555
    assert text.startswith("sent: code: 4 files, 200.")
    assert send(folder, tmp_path / "my store") == (
        target,
        f"to send: nothing of the code; far has that of {folder}",
    )


def test_edit_sends_its_file_alone_into_another_folder(folder, tmp_path):
    first, _ = send(folder, tmp_path / "far")
    before = contents(first)
    (folder / "run").write_text("2\n")
    os.utime(folder / "run", (first / "workspace/run").stat()[7:9])  # as long and as old as before
    second, text = send(folder, tmp_path / "far")
    assert text.startswith("sent: code: 1 file, ")
    assert (contents(first), contents(second / "workspace")) == (before, contents(folder))
    inodes = [(path / "workspace/table").stat().st_ino for path in (first, second)]
    assert inodes[0] == inodes[1]


def test_edit_in_a_file_sends_it_once(folder, tmp_path):
    send(folder, tmp_path / "my store")
    with (folder / "table").open("ab") as stream:
        stream.write(b"one more line\n")
    target, text = send(folder, tmp_path / "my store")
    assert text.startswith("sent: code: 1 file, 200.0 kB")  # rsync counts a file again that it sends again
    assert contents(target / "workspace") == contents(folder)


def test_read_only_part_of_a_failed_try_is_used(folder, tmp_path):
    digest = code.read_code_folder(JobRequest.of(code=folder), large=False, report=Silent()).record.sha256
    leave_part(tmp_path / "far/code/.incoming" / digest / "workspace/.imgkit-part/table", folder / "table")
    target, text = send(folder, tmp_path / "far")
    assert " of 200.0 kB were sent before\n" in text
    assert contents(target / "workspace") == contents(folder)


def test_file_that_somebody_edited_there_is_sent_again(folder, tmp_path):
    first, _ = send(folder, tmp_path / "far")
    table = first / "workspace/table"
    status = table.stat()
    table.chmod(0o644)
    table.write_bytes(b"x" * status.st_size)
    table.chmod(0o444)
    os.utime(table, (status.st_atime, status.st_mtime))
    (folder / "run").write_text("2\n")
    second, _ = send(folder, tmp_path / "far")
    assert contents(second / "workspace") == contents(folder)


def test_removed_file_is_gone(folder, tmp_path):
    send(folder, tmp_path / "far")
    (folder / "run").unlink()
    assert contents(send(folder, tmp_path / "far")[0] / "workspace") == contents(folder)
    assert list((tmp_path / "far/code/.incoming").iterdir()) == []


def test_file_that_cannot_be_written_is_no_full_disk(folder, tmp_path):
    digest = code.read_code_folder(JobRequest.of(code=folder), large=False, report=Silent()).record.sha256
    (tmp_path / "far/code/.incoming" / digest / "workspace/table/obstacle").mkdir(parents=True)
    with pytest.raises(ScriptFailed, match=r"a command on far failed with exit code 23\n") as caught:
        send(folder, tmp_path / "far")
    assert "could not make way for new regular file: workspace/table" in caught.value.output


def test_exceeded_quota_is_a_full_disk(folder, tmp_path, ssh):
    """No quota is set on this machine: a program with rsync's message takes its place there."""
    rsync = write_program(tmp_path / "far-bin/rsync", "echo 'Disk quota exceeded (122)' >&2; exit 23")
    ssh.write_text(ssh.read_text().replace("exec ", f"PATH={rsync.parent}:$PATH exec ", 1))
    with pytest.raises(CheckFailed, match="code: the disk of far is full\n"):
        send(folder, tmp_path / "far")


def test_missing_rsync_here_names_what_installs_it(folder, tmp_path, monkeypatch):
    from imgkit_builder.jobs.remote import rsync
    from imgkit_entrypoints.errors import ToolMissing

    far = connection.connect(Remote(name="far", address="far", keep_s=0))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ToolMissing, match="rsync") as caught:
        rsync.run_rsync(far, "/x", (), Notes())
    assert "apt-get install rsync" in str(caught.value.hint)


pytestmark = [pytest.mark.programs("rsync"), pytest.mark.usefixtures("ssh")]


def test_unchanged_code_stays_on_the_remote(tmp_path):
    folder = write_files(
        tmp_path / "here", {"train.py": "1", "a[b] *.py": "2", "lib/same.py": "3", "x.csv": "4"}
    )
    read = code.read_code_folder(JobRequest.of(code=folder), large=False, report=Silent())
    store = tmp_path / "my store"
    read.tree.write(store / "code" / read.record.sha256)
    run_folder = store / "runs/mn5-7"
    run_folder.mkdir(parents=True)
    workspace = run_folder / "workspace"
    read.tree.write_copy(workspace)
    write_files(run_folder, {"code.json": read.record.text, "metrics.jsonl": "{}"})
    write_files(workspace, {"out/model": "weights", "x.csv": "5"})
    far = connection.connect(Remote(name="far", address="far", folder=str(store), keep_s=0))
    record = submitted_job(directory=store, remote="far", code=read.record)
    target = tmp_path / "fetched"
    fetch.fetch_run(far, record, target, checkpoints=False, report=Silent())
    names = {
        str(path.relative_to(target)) for path in target.rglob("*") if path.is_file() or path.name == "lib"
    }
    assert names == {"code.json", "metrics.jsonl", "workspace/out/model", "workspace/x.csv"}
