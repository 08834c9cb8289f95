"""Launchers as real processes, below a mark that finds everything they ever started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
STUB = str(HERE / "stub_torchrun.py")
MARK = "IMGKIT_TEST_LAUNCH"
READY = "import os, sys, time; print('ready', flush=True);"
SAVE = READY + (
    "stop = os.environ['IMGKIT_STOP_DIR']\n"
    "while not os.path.exists(stop + '/stop'): time.sleep(0.02)\n"
    "open(stop + '/state-saved', 'w').write(os.environ['IMGKIT_JOB_ID'] + ' 7')\n"
)


def stub(code: str, workers: int = 2) -> list[str]:
    """Return the argv of a stub torchrun, whose workers run the Python text `code`."""
    return [sys.executable, STUB, str(workers), code]


def until(condition: Callable[[], Any], *, within_s: float = 20.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


class Nodes:
    """Starts launchers, and knows every process below them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"{MARK}={uuid.uuid4()}"
        self.job = self.mark
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """One node."""
        name, value = self.mark.split("=")
        log = (self.folder / f"node{options.get('rank', 0)}-{len(self.processes)}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, str(HERE / "node.py"), json.dumps({"job": self.job, **options}), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                name: value,
                "TMPDIR": str(self.folder),
                "IMGKIT_RUN_DIR": str(self.folder / "run"),
            },
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def two(self, code: str, *, workers: int = 2, **options: Any) -> tuple[subprocess.Popen[bytes], ...]:
        """Two nodes with a stub torchrun of `workers` each."""
        both = {"nnodes": 2, "hosts": ["host0", "host1"], **options}
        return tuple(self.start(stub(code, workers), rank=rank, **both) for rank in range(2))

    def output(self) -> str:
        """Return the output of all nodes."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("node*.log")))

    def said(self, text: str, count: int = 1, within_s: float = 20.0) -> None:
        """Wait until `text` is in the output."""
        assert until(lambda: self.output().count(text) >= count, within_s=within_s), self.output()

    def live_processes(self) -> dict[int, str]:
        """Every process that carries the mark, but zombies."""
        command_lines = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    command_line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    command_lines[int(folder.name)] = command_line
        return command_lines

    def codes(self, within_s: float = 20.0) -> list[int]:
        """Exit codes of all nodes, in order of their start; nothing of theirs is left."""
        codes = [process.wait(timeout=within_s) for process in self.processes]
        assert until(lambda: not self.live_processes(), within_s=10), self.live_processes()
        return codes


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    for pid in nodes.live_processes():
        with contextlib.suppress(ProcessLookupError):  # it may end by itself meanwhile
            os.kill(pid, signal.SIGKILL)
    for process in nodes.processes:
        process.wait()


@pytest.fixture
def run_dir(nodes: Nodes) -> Path:
    """The folder of the run, empty."""
    folder = nodes.folder / "run"
    folder.mkdir()
    return folder


def file_names(folder: Path) -> list[str]:
    """Return the names of the files in a folder, in order."""
    return sorted(path.name for path in folder.iterdir())
