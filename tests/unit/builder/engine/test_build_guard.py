"""The guard beside a program that builds: real processes, closed pipes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from file_tree import write_files, write_program

from imgkit_builder.engine import build_guard

SOURCE = Path(build_guard.__file__).read_text(encoding="utf-8")


class Guarded:
    """A guard with a shell script as its program; `life` is the pipe that imgkit holds."""

    def __init__(self, script: str, containers: str = "") -> None:
        pipe_end, self.life = os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                SOURCE,
                str(pipe_end),
                "token",
                containers,
                "--",
                "sh",
                "-c",
                script,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(pipe_end,),
            start_new_session=True,
        )
        os.close(pipe_end)

    def say(self, text: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.close()

    def read(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


StartGuard = Callable[[str], Guarded]


@pytest.fixture
def start_guard() -> Iterator[StartGuard]:
    """``start_guard(script)``: a guard that is ended after the test."""
    guards: list[Guarded] = []

    def start(script: str) -> Guarded:
        guards.append(Guarded(script))
        return guards[-1]

    yield start
    for guard in guards:
        guard.process.kill()
        guard.process.wait()
        for stream in (guard.process.stdin, guard.process.stdout):
            if stream is not None:
                stream.close()


def gone(pid: int) -> bool:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_input_output_and_code_go_through(start_guard):
    guard = start_guard("cat; echo wrong >&2; exit 3")
    guard.say(b"tar\n")
    assert guard.read() + guard.read() == b"tar\nwrong\n"
    assert guard.process.wait(60) == 3


def test_closed_pipe_ends_the_program(start_guard):
    guard = start_guard("echo $$; exec sleep 1000")
    pid = int(guard.read())
    os.close(guard.life)
    assert guard.process.wait(60) == 128 + 15
    assert gone(pid)


def test_program_that_ends_early_is_no_trap(start_guard):
    guard = start_guard("exit 5")
    assert guard.process.wait(60) == 5
    with pytest.raises(BrokenPipeError):
        guard.say(b"x" * (1 << 20))


def test_reader_that_went_ends_the_program(start_guard):
    guard = start_guard("echo $$; while echo more; do :; done; exec sleep 1000")
    pid = int(guard.read())
    assert guard.process.stdout is not None
    guard.process.stdout.close()
    guard.process.wait(60)
    assert gone(pid)


def test_foreign_working_container_stays(tmp_path, monkeypatch):
    """Only a folder that holds the token is removed; the program here is a fake that records its words."""
    containers = {"ours": '{"Args": {"BUILD_OF_IMGKIT": "token"}}', "theirs": "{}"}
    write_files(
        tmp_path / "all", {f"{name}/userdata/buildah.json": text for name, text in containers.items()}
    )
    write_program(tmp_path / "podman", f'echo "$@" >> "{tmp_path}/asked"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    build_guard.remove_containers(str(tmp_path / "all"), "token")
    assert (tmp_path / "asked").read_text() == "--remote=false rm --force ours\n"
