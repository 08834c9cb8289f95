"""Answers of a remote that imgkit's scripts did not print: errors that name it, in little memory.

The ``ssh`` here is a fake. It prints the token that imgkit's script begins with, and then the file
``answer``; or it runs the script on this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from file_tree import write_program
from job_builder import make_job, make_script
from job_records import submitted_job

from imgkit_builder.base.process import MOST_BYTES, TooLong
from imgkit_builder.base.progress import SILENT, Silent
from imgkit_builder.jobs import submit
from imgkit_builder.jobs.handle import JobHandle
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.remote import check, connection, gc, jobs, rsync, store, transfer
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.remote.connection import Connection
from imgkit_builder.jobs.transport import Ssh
from imgkit_builder.recipe import targets
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError

HANDSHAKE = 'read -r echo token\necho "$token"\n'
ANSWERS = HANDSHAKE + "cat answer"
SSH = Path("bin/ssh")
DIGITS = "7" * 5000
SOURCE = transfer.Source(path=Path("x"), label="image", size_bytes=5, options=())
FAR = Remote(name="far", address="me@far", folder="/x", keep_s=0)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ssh: Path) -> Connection:
    """A remote that is this machine."""
    monkeypatch.chdir(tmp_path)
    return connection.connect(FAR)


@pytest.fixture
def far(local: Connection) -> Connection:
    """A remote whose answer is the file ``answer``."""
    write_program(SSH, ANSWERS)
    return local


READERS: dict[str, tuple[Callable[[Connection], object], tuple[str, ...]]] = {
    "look": (
        lambda far: store.open_store(far, program="sbatch"),
        (
            "",
            "end\n",
            "home /x\n",
            "home /x\nimage x y\nend\n",
            "home /x\nimage -5 y\nend\n",
            f"home /x\nimage {DIGITS} y\nend\n",
            f"home /x\nimage 999999999999999 y\n{'x' * 65536}end\n",
            "home /x\nimage 500 y\nend\n",
            "home \nend\n",
        ),
    ),
    "prepare": (
        lambda far: transfer._prepare_incoming(far, {}, SOURCE, is_retry=False),
        ("", "arrived 5\n", "disk x\narrived x\n", "disk x\narrived -5\n", f"disk x\narrived {DIGITS}\n"),
    ),
    "gc": (
        lambda far: gc.find_unused(far, 30),
        ("", "clock 5\n", f"clock {DIGITS}\nend\n", "Welcome\nend\n"),
    ),
    "check": (lambda far: check.check_remote(far, None), ("", "clock 5\nhome /x\n")),
    "scheduler": (lambda far: jobs.run_scheduler_command(far, ("squeue",)), ()),  # any answer is its output
}


@pytest.mark.parametrize("name", sorted(READERS.keys() - {"scheduler"}))
def test_answer_that_is_cut_short_or_strange_is_named(far, name):
    read, answers = READERS[name]
    for answer in (*answers, "\n", "\xff\xfe", "x" * 1_000_000):
        Path("answer").write_bytes(answer.encode("latin-1"))
        with pytest.raises(ToolFailed, match="cannot be read, or is cut short") as caught:
            read(far)
        assert caught.value.where == "far"
        first = (answer.strip() or "(nothing)").split("\n", 1)[0][:100].strip()
        assert first in caught.value.what or "\xff" in first
        assert len(caught.value.what) < 400


@pytest.mark.parametrize("home", ["relative", "/a'b", "/a\nhome ", "/x\xff"])
def test_home_that_no_job_can_have_is_refused(far, home):
    Path("answer").write_bytes(f"home {home}\nend\n".encode("latin-1"))
    with pytest.raises((UsageError, ToolFailed)):
        READERS["look"][0](far)


def test_odd_values_of_a_check_are_verdicts(far):
    rows = (f"disk x 1 2 {DIGITS} 4% /", "quota 1 2 3", "sbatch", "python", "modules", "owner")
    Path("answer").write_bytes("\n".join((*rows, "\xff", "end", "")).encode("latin-1"))
    verdicts = {row.name: row.verdict for row in check.check_remote(far, targets.load_target("mn5"))}
    assert (verdicts["runtime"], verdicts["folder"]) == ("fail", "fail")


@pytest.mark.parametrize("name", READERS)
def test_answer_without_end_is_refused(far, name):
    write_program(SSH, ANSWERS.replace("cat answer", "yes"))
    with pytest.raises(TooLong, match=r"a command on far printed more than 8 MB.*first line: y$"):
        READERS[name][0](far)


@pytest.mark.parametrize("floods", ["before", "behind"])
@pytest.mark.parametrize("name", READERS)
def test_errors_without_end_are_refused(far, name, floods):
    endless = "yes 'no space left' >&2"
    write_program(SSH, endless if floods == "before" else HANDSHAKE + endless)
    message = "a command on me@far printed more than 8 MB of error messages; their first line: no space left"
    with pytest.raises(ToolFailed) as caught:
        READERS[name][0](far)
    assert (caught.value.what, caught.value.where) == (message, "far")
    assert "ssh me@far echo works" in (caught.value.hint or "")


ENDLESS = {
    "banner": "yes Welcome",
    "banner on stderr": "yes Welcome >&2",
    "stdout": f"{HANDSHAKE}yes",
    "stderr": f"{HANDSHAKE}yes >&2",
}


@pytest.mark.programs("rsync")
def test_missing_rsync_there_names_what_installs_it(far, tmp_path):
    write_program(SSH, f"{HANDSHAKE}exit 127")
    Path("image").touch()
    with pytest.raises(ToolMissing, match="there is no rsync on me@far") as caught:
        rsync.run_rsync(far, "/x", ("-t", f"{tmp_path}/image", "remote:./"), SILENT)
    assert "dnf install rsync" in str(caught.value.hint)


@pytest.mark.programs("rsync")
@pytest.mark.parametrize("kind", ENDLESS)
def test_rsync_ends_where_the_remote_prints_without_end(far, tmp_path, kind):
    write_program(SSH, f"echo $$ > pid\n{ENDLESS[kind]}")
    Path("image").write_bytes(b"x" * 1000)
    start_s = time.monotonic()
    with pytest.raises(ToolFailed):
        rsync.run_rsync(far, "/x", ("-t", f"{tmp_path}/image", "remote:./"), SILENT)
    assert time.monotonic() - start_s < 50
    cmdline = Path("/proc", Path("pid").read_text().strip(), "cmdline")
    # An empty file is that of an ended process whose parent has not asked for its exit code.
    while cmdline.exists() and cmdline.read_bytes():
        assert time.monotonic() - start_s < 60
        time.sleep(0.05)


def test_many_warnings_do_not_end_a_transfer_that_gets_on(far):
    # tar prints a line for each file with a time in the future.
    warns = "head -c 5000000 /dev/zero >&2; echo got on"
    write_program(SSH, ANSWERS.replace("cat answer", f"{warns}; {warns}; {warns}"))
    assert far.run("") == b"got on\n" * 3


FLOOD = """
from imgkit_builder.jobs.remote import connection, gc
from imgkit_builder.jobs.remote.config import Remote
from imgkit_entrypoints.errors import ToolFailed
from imgkit_builder.base import process
from pathlib import Path
try:
    gc.find_unused(connection.connect(Remote(name="far", address="far", keep_s=0)), 30)
except ToolFailed as error:
    print(str(error)[:100])
print(len(process.run(["head", "-c", "100000000", "/dev/zero"]).output))
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.parametrize(
    ("flood", "message"),
    [
        ("head -c 100000000 /dev/zero", "printed more than 8 MB"),
        ("head -c 100000000 /dev/zero >&2; exit 3", "printed more than 8 MB"),
    ],
    ids=["output", "errors"],
)
def test_memory_does_not_grow_with_what_programs_print(far, flood, message):
    write_program(SSH, ANSWERS.replace("cat answer", flood))
    result = subprocess.run([sys.executable, "-c", FLOOD], capture_output=True, text=True, check=True)
    error, kept_bytes, most_kib = result.stdout.rsplit("\n", 3)[:3]
    assert message in error
    assert int(kept_bytes) <= MOST_BYTES
    assert int(most_kib) < 120 * 1024


def test_final_message_is_quoted_though_a_child_runs_on(far):
    # As a shared connection of ssh does, the child holds standard error open.
    write_program(SSH, "sleep 60 > /dev/null &\necho $! > child\nexec >&-\necho late words >&2\nexit 3")
    try:
        with pytest.raises(ToolFailed, match="exit code 3") as caught:
            far.run(":")
        assert "late words" in (caught.value.hint or "")
    finally:
        os.kill(int(Path("child").read_text()), 9)


@pytest.mark.parametrize(
    ("answer", "job_id", "cluster", "note"),
    [
        ("4711", "4711", "", "slurm"),
        ("Welcome\n\n4711;two", "4711", "two", "slurm;two"),
        ("4711\nThank you", "", "", None),
        ("../../x", "", "", None),
        ("-x", "", "", None),
        ("", "", "", None),
    ],
)
def test_submission_there_notes_what_the_job_uses(
    local,
    fake_program,
    tmp_path,
    answer,
    job_id,
    cluster,
    note,
):
    Path("answer").write_text(f"{answer}\n")
    fake_program("sbatch", "cat > /dev/null\ncat answer")
    for folder in ("jobs", "images"):
        Path(folder).mkdir()
    Path("images/x.sif").touch()
    values = {"directory": tmp_path, "image": f"{tmp_path}/images/x.sif"}
    prepared = PreparedJob(job=make_job(**values), script=make_script(**values))
    record = submit.start_job(prepared, Ssh(local), Silent())
    assert (record.answer is None, record.job.cluster, record.job.remote) == (bool(job_id), cluster, "far")
    if note is None:
        assert list(Path("jobs").iterdir()) == []
        return
    assert record.job.id == job_id
    text = Path("jobs", job_id).read_text()
    assert text == f"{note}\nmn5\nimages/x.sif\n"
    rows = "".join(f"note jobs/{job_id}:{line}\n" for line in text.splitlines())
    (job_note,) = gc.parse_listing(f"clock 5\njob 1 {job_id}\n{rows}end\n".encode(), "far").notes
    assert (job_note.id, job_note.system, job_note.folders) == (job_id, note, ("images/x.sif",))


def test_output_beyond_the_limit_is_cut_visibly(local, tmp_path, monkeypatch):
    monkeypatch.setattr("imgkit_builder.jobs.job_status.connection_to", lambda *_, **__: local)
    handle = JobHandle(record=submitted_job(id="4711", directory=tmp_path, remote="far"))
    (tmp_path / "mn5-4711.out").write_text("step\n" * (MOST_BYTES // 5) + "last step\n")
    first_line, *_, last_line = handle.logs().splitlines()
    assert first_line == "imgkit: the output has 8388615 bytes, of which these are the last 8387584"
    assert last_line == "last step"
    (tmp_path / "mn5-4711.out").write_text("step\n")
    assert handle.logs() == "step\n"


def test_note_of_a_file_that_is_no_id_is_left_out():
    rows = "".join(f"job 1 {name}\n" for name in ("../x", "-x", "a b", "7"))
    assert [note.id for note in gc.parse_listing(f"clock 5\n{rows}end\n".encode(), "far").notes] == ["7"]


def test_waiting_jobs_of_a_cluster_are_asked_for_there(local, fake_program):
    fake_program("squeue", 'echo "$*" > arguments; echo 4711')
    assert gc.unfinished_jobs(local, "slurm;two").ids == {"4711"}
    assert Path("arguments").read_text() == "--noheader --format=%A --clusters=two\n"
