"""Following a job on a remote: output and the scheduler's answers share one connection.

The ``ssh`` here is a fake: it runs the script on this machine, which has a fake ``squeue``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_schedulers import SLURM_FORGOT
from hypothesis import given
from hypothesis import strategies as st
from job_records import submitted_job

from imgkit_builder.jobs.remote import connection, jobs
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.submitted import JobState, WaitInfo

MARK = b"\x1e0123"
SQUEUE = f"""
echo >> calls
case $(wc -l < calls) in
1) echo '7  gpu PENDING, 1 nodes, elapsed 0:00, start N/A  (Priority)' ;;
2) cat output >> mn5-7.out; echo '7  gpu RUNNING, 1 nodes' ;;
3) echo 'slurm_load_jobs error: Unable to contact slurm controller'; exit 1 ;;
4) cat output >> mn5-7.out; yes 7_1 long row | head -n 9000 | tr '\\n' ' ' ;;
*) {SLURM_FORGOT} ;;
esac
"""


@pytest.mark.usefixtures("ssh")
def test_answers_come_between_unchanged_output(tmp_path, monkeypatch, fake_program):
    monkeypatch.chdir(tmp_path)
    output = b"step 1\r\x1e\x1e0 no mark \xff\n" * 3000 + b"end\x1e"
    Path("output").write_bytes(output)
    fake_program("squeue", SQUEUE)
    written = bytearray()
    states: list[tuple[JobState, WaitInfo]] = []
    jobs.follow_output(
        connection.connect(Remote(name="far", address="me@far", folder="/x", keep_s=0)),
        submitted_job(directory=tmp_path, remote="far"),
        written.extend,
        on_status=lambda *status: states.append(status),
        log=pytest.fail,
    )
    assert bytes(written) == output * 2
    assert states == [
        ("waiting", WaitInfo(reason="Priority")),
        ("running", WaitInfo()),
        ("", WaitInfo()),
    ]


ROWS = st.lists(st.binary(min_size=1, max_size=5).filter(lambda row: b"\x1e" not in row and b"\n" not in row))


@given(st.lists(st.tuples(st.binary(max_size=9), ROWS)), st.lists(st.integers(1, 9), min_size=1), st.binary())
def test_output_and_answers_are_told_apart_in_any_chunks(parts, sizes, end):
    stream = bytearray()
    answers = []
    output = b""
    for text, rows in parts:
        text = text.replace(b"3", b"")  # so that no random text has the mark
        output += text
        stream += text + b"".join(MARK + row + MARK for row in rows) + MARK + MARK
        answers.append(b"\n".join(rows).decode(errors="replace"))
    end = end.replace(b"3", b"")
    stream += end
    chunks = []
    while stream:
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(bytes(stream[:size]))
        del stream[:size]
    split = list(jobs.split_stream(chunks, MARK))
    assert b"".join(part for part in split if isinstance(part, bytes)) == output + end
    assert [part for part in split if isinstance(part, str)] == answers


def test_answer_that_is_cut_off_is_left_out():
    split = list(jobs.split_stream([b"a" + MARK + b"row" + MARK, MARK[:3]], MARK))
    assert [part for part in split if part] == [b"a", MARK[:3]]
