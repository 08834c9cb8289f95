"""The guard beside a program that builds: real processes, closed pipes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from imgkit_builder.engine import build_guard

SOURCE = Path(build_guard.__file__).read_text(encoding="utf-8")


class Guarded:
    """A guard with a shell script as its program; `life` is the pipe that imgkit holds."""

    def __init__(self, script: str, containers: str = "") -> None:
        ended, self.life = os.pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-c",
                SOURCE,
                str(ended),
                "token",
                containers,
                "--",
                "sh",
                "-c",
                script,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(ended,),
            start_new_session=True,
        )
        os.close(ended)

    def say(self, text: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.close()

    def read(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture
def begun() -> Iterator[list[Guarded]]:
    """Guards that a test began; they are ended."""
    found: list[Guarded] = []
    yield found
    for one in found:
        one.process.kill()
        one.process.wait()
        for stream in (one.process.stdin, one.process.stdout):
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


def test_input_output_and_code_go_through(begun: list[Guarded]) -> None:
    begun.append(Guarded("cat; echo wrong >&2; exit 3"))
    begun[0].say(b"tar\n")
    assert begun[0].read() + begun[0].read() == b"tar\nwrong\n"
    assert begun[0].process.wait(60) == 3


def test_closed_pipe_ends_the_program(begun: list[Guarded]) -> None:
    begun.append(Guarded("echo $$; exec sleep 1000"))
    pid = int(begun[0].read())
    os.close(begun[0].life)
    assert begun[0].process.wait(60) == 128 + 15
    assert gone(pid)


def test_program_that_ends_early_is_no_trap(begun: list[Guarded]) -> None:
    begun.append(Guarded("exit 5"))
    assert begun[0].process.wait(60) == 5
    with pytest.raises(BrokenPipeError):
        begun[0].say(b"x" * (1 << 20))


def test_reader_that_went_ends_the_program(begun: list[Guarded]) -> None:
    begun.append(Guarded("echo $$; while echo more; do :; done; exec sleep 1000"))
    pid = int(begun[0].read())
    assert begun[0].process.stdout is not None
    begun[0].process.stdout.close()
    begun[0].process.wait(60)
    assert gone(pid)


def test_foreign_working_container_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a folder that holds the token is removed; the program here is a fake that records its words."""
    for name, text in (("ours", '{"Args": {"BUILD_OF_IMGKIT": "token"}}'), ("theirs", "{}")):
        (tmp_path / "all" / name / "userdata").mkdir(parents=True)
        (tmp_path / "all" / name / "userdata/buildah.json").write_text(text)
    podman = tmp_path / "podman"
    podman.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/asked"\n')
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    build_guard.remove(str(tmp_path / "all"), "token")
    assert (tmp_path / "asked").read_text() == "--remote=false rm --force ours\n"
