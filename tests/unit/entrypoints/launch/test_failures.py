"""The end of a failed run: which rank is named, what its user sees, and what goes to the log alone."""

from __future__ import annotations

import ast
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imgkit_entrypoints.launch import failures, user_program
from imgkit_entrypoints.rollcall import messages
from imgkit_entrypoints.rollcall.connection import MAX_LINE_BYTES
from imgkit_entrypoints.rollcall.messages import AttemptEnded, RankFailure
from imgkit_entrypoints.rollcall.session import ReportedFailure

CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44443."
BAD = 'Traceback (most recent call last):\n  File "own.py", line 6, in inner\nValueError: bad value at step 3'
# Recorded from torch 2.13, shortened.
STACK = (
    b"[E1124 16:43:09.160726245 socket.cpp:1028] [c10d] The client socket has timed out after 3000ms while "
    b"trying to connect to (127.0.0.1, 9).\n",
    b"[W1124 16:43:09.161415521 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host\n"
    b"Exception raised from throwTimeoutError at /pytorch/c10d/socket.cpp:1030 (most recent call first):\n"
    b"frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f7ce919cb8d in libc10.so)\n"
    b"<omitting python frames>\nframe #44: _start + 0x21 (0x55d03c667081 in /usr/bin/python3)\n\n",
    b"[vm:1]: [W1124 16:43:10.1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3): Broken pipe\n"
    b"[vm:1]: frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f7ce919cb8d in libc10.so)\n"
    b"[vm:1]: \n",
)


FAILED = RankFailure(rank=0, code=1, age_ms=0, after_peer=False, log="")


def record(folder: Path, rank: int | str, text: str, *, at: float = 0.0) -> None:
    (folder / f"failed-{rank}").write_text(f"{at}\n{text}")


def codes(folder: Path, *, runs_own_program: bool = False, **by_rank: int) -> None:
    exit_codes = {int(name[1:]): code for name, code in by_rank.items()}
    failures.write_exit_codes({"IMGKIT_STOP_DIR": str(folder)}, exit_codes, runs_own_program=runs_own_program)


def first(folder: Path, killed_by: int = 0) -> RankFailure:
    failure = failures.find_node_failure(folder, killed_by)
    assert failure is not None
    return failure


def test_first_exception_counts(tmp_path):
    record(tmp_path, 0, "ValueError: second", at=2.0)
    record(tmp_path, 1, BAD, at=1.0)
    codes(tmp_path, r0=1, r1=1)
    failure = first(tmp_path)
    assert (failure.rank, failure.code, failure.after_peer) == (1, 1, False)
    assert failure.lines == tuple(BAD.split("\n"))


def test_exception_ends_with_one_where_torchrun_was_killed(tmp_path):
    record(tmp_path, 1, CLOSED)
    assert first(tmp_path).code == 1


def test_closed_connection_is_no_cause(tmp_path):
    record(tmp_path, 0, CLOSED, at=1.0)
    record(tmp_path, 1, BAD, at=2.0)
    assert first(tmp_path).rank == 1
    (tmp_path / "failed-1").unlink()
    assert first(tmp_path).after_peer
    codes(tmp_path, r0=1, r2=-9, r3=-1)  # torchrun has ended rank 3
    failure = first(tmp_path)
    assert (failure.rank, failure.code, failure.lines, failure.after_peer) == (2, -9, (), False)


def test_killed_torchrun_is_the_cause(tmp_path):
    record(tmp_path, 0, CLOSED)
    rank_failure = first(tmp_path, killed_by=signal.SIGKILL)
    assert (rank_failure.rank, rank_failure.code) == (None, -9)
    title, *_ = failures.describe_failure(rank_failure, "node 1 of 1")
    assert title.startswith("torchrun on node 1")


def test_error_of_torchrun_has_no_stack_in_cpp(tmp_path):
    cpp = STACK[1].decode().partition("\n")[2]
    text = (
        f'Traceback (most recent call last):\n  File "run.py"\ntorch.distributed.DistNetworkError: no\n{cpp}'
    )
    assert failures.write_torchrun_error({"IMGKIT_STOP_DIR": str(tmp_path)}, text)
    failure = first(tmp_path)
    assert (failure.rank, failure.code, failure.after_peer) == (None, 1, True)
    assert failure.lines[0] == "torch.distributed.DistNetworkError: no"
    assert not any(line.startswith("frame #") for line in failure.lines)


def test_own_program_that_printed_its_reason_has_no_block(tmp_path):
    codes(tmp_path, runs_own_program=True, r0=2)
    assert failures.find_node_failure(tmp_path) is None
    codes(tmp_path, runs_own_program=True, r0=2, r1=-9)
    assert first(tmp_path).rank == 1


@pytest.mark.parametrize("text", ["", "no time\nx", "nan", "\x00"])
def test_record_that_cannot_be_read_is_ignored(tmp_path, text):
    (tmp_path / "failed-x").write_text("1.0\nValueError: not a rank")
    (tmp_path / "failed-0").write_text(text)
    (tmp_path / failures.CODES).write_text(text or "[1]")
    failure = failures.find_node_failure(tmp_path)
    assert failure is None or failure.lines == ("",)


def test_cause_on_any_node_comes_first():
    early, late = (
        ReportedFailure(number, number, dataclasses.replace(FAILED, rank=number, after_peer=number == 0))
        for number in range(2)
    )
    assert failures.first_failure([early, late]) is late
    assert failures.first_failure([early]) is early
    assert failures.first_failure([]) is None
    lines = failures.describe_failure(late.failure, "node 1", ["rank 0"])
    assert lines[0] == "rank 1 on node 1 failed first: exit code 1"
    assert lines[1] == "  then on other nodes: rank 0"


def test_long_text_keeps_both_ends_and_fits_a_message(tmp_path):
    record(tmp_path, 0, "\n".join(f"line {number} \U0001f525" + "é" * 2000 for number in range(1000)))
    failure = first(tmp_path)
    assert failure.lines[0].startswith("line 0 ")
    assert failure.lines[-1].startswith("line 999 ")
    assert sum("more lines in the full log" in line for line in failure.lines) == 1
    line = messages.encode(AttemptEnded(code=1, failure=failure))
    assert len(line) < MAX_LINE_BYTES
    assert messages.decode(line) == AttemptEnded(code=1, failure=failure)


@pytest.mark.parametrize(("is_head", "late_s"), [(True, 5), (False, 30)], ids=["head", "other node"])
def test_late_record_is_reported_once(tmp_path, is_head, late_s):
    """The head prints the traceback of another node at the end, so that node waits longer with it."""
    late = failures.LateRecords(tmp_path, is_head=is_head)
    record(tmp_path, 0, CLOSED, at=time.time() - 10)
    record(tmp_path, 1, BAD, at=time.time() - late_s + 2)
    assert list(late.collect_reports()) == []
    record(tmp_path, 1, BAD, at=time.time() - late_s - 2)
    title = f"rank 1 has failed, and its process has not ended after {late_s} s"
    assert list(late.collect_reports()) == [(title, *BAD.split("\n"))]
    assert list(late.collect_reports()) == []


def test_log_goes_to_a_temporary_folder_where_the_named_one_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = Path(failures.write_log("a\n\x1b[31mb\x07\n", "/proc/nowhere", "as1", 2))
    assert path.name == "errors-as1-attempt2.log"
    assert path.is_relative_to(tmp_path)
    assert path.read_text() == "a\nb\\x07\n"
    assert failures.write_log("a", str(tmp_path / "new"), "as1", 1) == str(tmp_path / "new/errors-as1.log")


def copied(*parts: bytes) -> tuple[str, str]:
    """What of `parts` is printed, and what the log has."""
    code = "import os, sys\n" + "".join(f"os.write(2, {part!r})\n" for part in parts)
    script = (
        "import os, sys\nfrom imgkit_entrypoints.launch.command_process import CommandProcess\n"
        f"child = CommandProcess([sys.executable, '-c', {code!r}], os.environ, print, open_files=99)\n"
        "import select\n"
        "while select.select([child], [], []) and child.read_reports(): pass\n"
        "child.wait()\nprint(repr(child.output_tail()))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    return result.stderr.decode(), ast.literal_eval(result.stdout.decode())


def test_marked_lines_and_stacks_go_to_the_log_alone():
    marked = b"[vm:1]: \x1fTraceback\n[vm:1]: \x1f\n[vm:1]: printed\n\x1f" + b"x" * 100_000 + b"\nbar 50 %\r"
    printed, log = copied(*STACK, marked, b"bar 100 %\n")
    assert printed == STACK[0].decode() + "[vm:1]: printed\nbar 50 %\rbar 100 %\n"
    assert "frame #44" in log
    assert "[vm:1]: Traceback\n" in log
    assert "x" * 100_000 in log


def test_other_output_is_copied_byte_for_byte():
    printed, log = copied(b"frames: 3\n", b"\n\nno line end")
    assert printed == log == "frames: 3\n\n\nno line end"


def program(folder: Path, code: str | None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program below the node agent, but without one. With None, its file is missing."""
    if code is not None:
        (folder / "own.py").write_text(code)
    agent = {"IMGKIT_STOP_DIR": str(folder), "IMGKIT_ATTEMPT": "1", "RANK": "2", **env}
    return subprocess.run(
        [sys.executable, user_program.__file__, str(folder / "own.py")],
        env={name: value for name, value in {**os.environ, **agent}.items() if value},
        capture_output=True,
        text=True,
        check=False,
    )


def test_exception_leaves_the_users_own_frames(tmp_path):
    result = program(tmp_path, "def inner():\n    raise ValueError('bad')\ninner()\n")
    assert result.returncode == 1
    (entry,) = failures.read_records(tmp_path)
    lines = entry.text.split("\n")
    assert (entry.rank, lines[0], lines[-1]) == (2, "Traceback (most recent call last):", "ValueError: bad")
    assert lines[1].endswith('own.py", line 3, in <module>')
    assert "runpy" not in entry.text
    assert result.stderr == "".join(f"\x1f{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit('no data folder')", "no data folder"),
        ("import nosuch_module", "ModuleNotFoundError: No module named 'nosuch_module'"),
    ],
)
def test_other_ends_leave_their_message(tmp_path, code, last):
    assert program(tmp_path, code).returncode == 1
    (entry,) = failures.read_records(tmp_path)
    assert entry.text.split("\n")[-1] == last
    assert "user_program" not in entry.text


def test_missing_script_has_no_frames_of_the_launcher(tmp_path):
    assert program(tmp_path, None).returncode == 1
    (entry,) = failures.read_records(tmp_path)
    assert entry.text.startswith("FileNotFoundError:")


@pytest.mark.parametrize("env", [{"IMGKIT_ATTEMPT": ""}, {"RANK": ""}, {"IMGKIT_STOP_DIR": "/proc/nowhere"}])
def test_without_a_node_agent_python_prints_it(tmp_path, env):
    result = program(tmp_path, "raise ValueError('bad')", **env)
    assert result.returncode == 1
    assert result.stderr.endswith("\nValueError: bad\n")
    assert failures.read_records(tmp_path) == []


def test_programs_own_excepthook_prints_it(tmp_path):
    result = program(tmp_path, "import sys\nsys.excepthook = lambda *_: print('mine')\nraise ValueError")
    assert result.stdout == "mine\n"
    assert failures.read_records(tmp_path) == []


STUB_OF_TORCHS_LOADER = """
import os, sys, types
sys.modules["torch._utils"] = wrappers = types.ModuleType("torch._utils")
class ExceptionWrapper:
    def __init__(self, exc_info=None, where="in background"):
        self.where = where
wrappers.ExceptionWrapper = ExceptionWrapper
scope = {}
fetch = "def fetch(data, wanted):\\n    for idx in wanted:\\n        data(idx)\\n"
exec(compile(fetch, "/x/torch/utils/data/_utils/fetch.py", "exec"), scope)
def data(index):
    if index == 7:
        raise ValueError("cut")
if os.fork() == 0:
    try:
        scope["fetch"](data, range(9))
    except ValueError:
        print(ExceptionWrapper(where="in DataLoader worker process 0").where, flush=True)
    os._exit(0)
os.wait()
scope["fetch"](data, range(9))
"""


def test_bad_sample_names_its_index(tmp_path):
    result = program(tmp_path, STUB_OF_TORCHS_LOADER)
    assert result.stdout == "in DataLoader worker process 0, at sample 7 of the data set\n"
    (entry,) = failures.read_records(tmp_path)
    assert entry.text.startswith("sample 7 of the data set\nTraceback")
