"""NCCL's RAS in the report of a hang, and torch's flight recorder after a failure. There is no GPU here.

`FakeRas` listens in place of NCCL's thread. Its answers have the lines and spaces that
src/ras/client_support.cc of NCCL prints, with made-up values. Workers that are fakes leave a file as torch
does when a collective has timed out.
"""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from imgkit_entrypoints.launch import nccl

from .conftest import stub
from .test_watchdog import SOON, WAITS, worker

HEAD = """NCCL version 2.27.3+cuda12.9 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
BEHIND = """    0         1         2         4         8         8   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  5 ranks have launched up to operation 6650
  3 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 4831 on node 10.0.0.1
  Rank 2 -- GPU 2 (NVML 6) managed by process 4833 on node 10.0.0.1
  Rank 5 -- GPU 1 managed by process 993 on node 10.0.0.2

"""
MISSING = """    0         1         2       3-4         8         8   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 4833 on node 10.0.0.1 managing GPU 2

#0-0 (27a079b828ff1a75) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 2

#1-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 1 -- [process information not found]

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

"""
CALM = """    0         1         2         4         8         8   RUNNING      OK

Errors
======

Warnings
========

"""


class FakeRas(threading.Thread):
    """A socket that answers as NCCL's RAS thread does, or worse."""

    def __init__(
        self, answer: bytes, *, greets: bytes = b"SERVER PROTOCOL 2\n", mute: int = 0, ends: bool = True
    ) -> None:
        """The first `mute` connections are never answered, as by a stopped process."""
        super().__init__(daemon=True)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.answer, self.greets, self.mute, self.ends = answer, greets, mute, ends
        self.heard = b""
        self.links: list[socket.socket] = []

    def run(self) -> None:
        while True:
            try:
                link, _ = self.listening.accept()
            except OSError:
                return
            self.links.append(link)
            if len(self.links) <= self.mute:
                continue
            try:
                self.heard += link.recv(100)
                link.sendall(self.greets)
                self.heard += link.recv(100)
                link.sendall(b"OK\n" + self.answer)
            except OSError:
                continue
            if self.ends:
                link.close()

    def env(self) -> dict[str, str]:
        return {"IMGKIT_DEVICE": "cuda", "NCCL_RAS_ADDR": f"127.0.0.1:{self.port}"}


@contextmanager
def fake_ras(answer: str | bytes, **how: Any) -> Iterator[FakeRas]:
    ras = FakeRas(answer.encode() if isinstance(answer, str) else answer, **how)
    ras.start()
    try:
        yield ras
    finally:
        ras.listening.shutdown(socket.SHUT_RDWR)  # or the thread would accept one more
        ras.listening.close()
        for link in ras.links:
            link.close()


def report(env: dict[str, str]) -> str:
    """What the report says."""
    question = nccl.ask_about_hang(env)
    if question is None:
        return "not asked"
    end = time.monotonic() + 60
    while question.is_open and time.monotonic() < end:
        time.sleep(0.01)
    return "\n".join(question.lines)


def test_ranks_with_fewer_collectives_are_told():
    with fake_ras(HEAD + BEHIND) as ras:
        assert report(ras.env()) == (
            f"  NCCL's RAS (127.0.0.1:{ras.port}):\n"
            "    #0-0 (27a079b828ff1a75) MISMATCH\n"
            "      Communicator ranks have different AllReduce operation counts\n"
            "      5 ranks have launched up to operation 6650\n"
            "      3 ranks have launched up to operation 6649\n"
            "      Ranks 0,2 on node 10.0.0.1\n"
            "      Rank 5 -- GPU 1 managed by process 993 on node 10.0.0.2"
        )
    assert ras.heard == b"CLIENT PROTOCOL 2\nTIMEOUT 2\nVERBOSE STATUS\n"


@pytest.mark.parametrize(
    ("answer", "report_lines"),
    [
        (
            MISSING,
            (
                "INCOMPLETE\n      Missing communicator data from 1 job process",
                "#0-0 (27a079b828ff1a75) INCOMPLETE",
                "  The missing rank: 2",
                "#1-0 (cf264af53edbe986) INCOMPLETE",
                "  Rank 1 -- [process information not found]",
                "TIMEOUT\n      Encountered 2 communication timeouts while gathering communicator data",
            ),
        ),
        (CALM, ("all ranks of all communicators answer, and have launched the same number of collectives",)),
    ],
    ids=["missing ranks", "all agree"],
)
def test_ranks_of_all_communicators_are_told(answer, report_lines):
    with fake_ras(HEAD + answer) as ras:
        text = report(ras.env()) + "\n"
    assert [line for line in report_lines if f"    {line}\n" not in text] == []
    assert text.endswith(f"    {report_lines[-1]}\n")


def test_stopped_process_that_shares_the_port_is_passed_over(monkeypatch):
    monkeypatch.setattr(nccl, "_GREETING_S", 0.2)
    with fake_ras(HEAD + BEHIND, mute=2) as ras:
        assert "MISMATCH" in report(ras.env())
    with fake_ras(HEAD + BEHIND, mute=9) as ras:
        assert report(ras.env()) == f"  NCCL's RAS (127.0.0.1:{ras.port}) does not answer"


def test_answer_that_never_ends_is_left(monkeypatch):
    monkeypatch.setattr(nccl, "LIMIT_S", 0.5)
    with fake_ras(HEAD, ends=False) as ras:
        assert report(ras.env()) in ("", f"  NCCL's RAS (127.0.0.1:{ras.port}) does not answer")


@pytest.mark.parametrize("answer", [b"", b"\xff\x00\x1b[2J" * 50, b"x" * (10 << 20), HEAD.encode()])
def test_other_answers_are_one_clause(answer):
    with fake_ras(answer) as ras:
        text = report(ras.env())
    assert text == (
        f"  NCCL's RAS (127.0.0.1:{ras.port}) sent an unreadable answer: it contains no list of errors"
    )


def test_another_program_is_asked_nothing():
    with fake_ras("", greets=b"SSH-2.0-x\r\n") as ras:
        assert report(ras.env()).endswith("unreadable answer: another program listens there")
    assert ras.heard == b"CLIENT PROTOCOL 2\n"


def test_characters_that_move_the_cursor_are_not_told():
    with fake_ras(HEAD + CALM + "\x1b[2Jx\r\n" + "y" * 5000 + "\n" + "z\n" * 100) as ras:
        text = report(ras.env())
    assert text.replace("\n", "").isprintable()
    assert max(map(len, text.splitlines())) < 200
    assert len(text.splitlines()) == nccl.MAX_LINES + 2
    assert text.endswith("and 78 more lines")


def test_nothing_listens_says_nothing():
    with fake_ras("") as ras:
        pass
    assert report(ras.env()) == ""  # as with a NCCL before 2.24


@pytest.mark.parametrize(
    ("changed", "address"),
    [
        ({}, ("localhost", 28028)),
        ({"NCCL_RAS_ENABLE": "1"}, ("localhost", 28028)),
        ({"NCCL_RAS_ENABLE": "0"}, None),
        ({"IMGKIT_DEVICE": "cpu"}, None),
        ({"NCCL_RAS_ADDR": "10.0.0.1:5000"}, ("10.0.0.1", 5000)),
        ({"NCCL_RAS_ADDR": "[::1]:5000"}, ("::1", 5000)),
        ({"NCCL_RAS_ADDR": "localhost"}, None),
        ({"NCCL_RAS_ADDR": "localhost:70000"}, None),
        ({"NCCL_RAS_ADDR": ""}, None),
    ],
)
def test_address_is_the_one_of_nccl(changed, address):
    assert nccl.ras_address({"IMGKIT_DEVICE": "cuda", **changed}) == address


def test_answer_stands_below_the_stacks(nodes):
    hang = worker("if step == 8 and rank == 1: time.sleep(1000)", WAITS)
    with fake_ras(HEAD + BEHIND) as ras:
        nodes.start(stub(hang), **SOON, env=ras.env())
        nodes.said("process 993 on node 10.0.0.2>")
    text = nodes.output()
    assert text.index("stack, innermost first") < text.index("NCCL's RAS (")


def test_one_node_asks_where_all_ranks_wait(nodes):
    with fake_ras(HEAD + BEHIND) as ras:
        nodes.two(worker(within="if step == 8: time.sleep(1000)"), **SOON, env=ras.env())
        nodes.said("no rank has moved", count=2)
        nodes.said("NCCL's RAS (")
    assert nodes.output().count("NCCL's RAS (") == 1
    assert len(ras.links) == 1


def test_mute_answer_does_not_stop_the_heartbeat(nodes, tmp_path):
    with fake_ras("", mute=9) as ras:
        launchers = nodes.two(
            worker(within="if step == 8: time.sleep(1000)"), **{**SOON, "lost_s": 2.0}, env=ras.env()
        )
        nodes.said(") does not answer>")
    assert "lost" not in nodes.output()
    assert [launcher.poll() for launcher in launchers] == [None, None]


FAKE = """
import os, sys
place = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
if place and "leaves":
    with open(place + os.environ["LOCAL_RANK"], "w") as file:
        file.write("a fake of what torch writes")
sys.exit(1)
"""


def test_dumps_are_named_after_a_failure(nodes, monkeypatch):
    monkeypatch.setenv("IMGKIT_DEVICE", "cuda")
    (nodes.folder / "run").mkdir()
    nodes.start(stub(FAKE), job="4711.head/x")
    assert nodes.codes() == [1]
    prefix = nodes.folder / "run/nccl-4711.head_x-rank-"
    assert f"NCCL's flight recorder has written {prefix}N for rank 0, 1, with" in nodes.output()
    assert f"torchfrtrace --prefix {prefix.name} {prefix.parent}" in nodes.output()


@pytest.mark.parametrize(("device", "fake"), [("cpu", FAKE), ("cuda", FAKE.replace('"leaves"', "False"))])
def test_failure_without_dumps_names_none(nodes, monkeypatch, device, fake):
    monkeypatch.setenv("IMGKIT_DEVICE", device)
    (nodes.folder / "run").mkdir()
    (nodes.folder / "run/nccl-local-rank-0").write_text("of an earlier run")
    nodes.start(stub(fake), job="")
    assert nodes.codes() == [1]
    assert "flight recorder" not in nodes.output()


def test_older_torch_has_the_older_names():
    cuda = {"IMGKIT_DEVICE": "cuda", "IMGKIT_RUN_DIR": "/runs/one"}
    new, old = (
        nccl.recorder_variables(cuda, torch, "7") for torch in ("2.13.0+cu130", "2.3.0a0+40ec155e58.nv24.03")
    )
    assert new["TORCH_FR_DUMP_TEMP_FILE"] == "/runs/one/nccl-7-rank-"
    assert old["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/runs/one/nccl-7-rank-"
    assert old["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert not [name for name in new if "TRACE" in name or "DEBUG" in name]  # new versions warn of these


def test_what_the_user_has_set_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = {
        "IMGKIT_DEVICE": "cuda",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert nccl.recorder_variables(env, "2.13", "7") == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert list(tmp_path.iterdir()) == []  # no folder is made for files that go elsewhere
