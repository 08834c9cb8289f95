"""``train_kills.py N COMMAND...``: kill random processes of COMMAND at random times, then let it end.


Runs in the image, where every process but this one and its shell is the command's.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

LATEST_S = 0.6
"""Latest time of a kill after the first step of a start, when the run saves many times a second."""


def processes() -> dict[int, str]:
    """The live processes of the command, each with its role."""
    roles = {}
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit() or int(folder.name) in (1, os.getpid(), os.getppid()):
                continue
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                line = (folder / "cmdline").read_bytes()
                forked = line == Path(f"/proc/{parent}/cmdline").read_bytes()
                roles[int(folder.name)] = "fork" if forked else line.replace(b"\0", b" ").decode()
        except OSError:
            continue
    return roles


def kind(line: str) -> str:
    """The role of a process: one of the four of a run."""
    if "guard.py" in line:
        return "the guard"
    if " -m imgkit_entrypoints dist-train" in line:
        return "the launcher"
    return "torchrun" if "apps.torchrun" in line else "a worker"


def until(condition: object, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > end:
            sys.exit(f"not within {seconds:g} s; there are: {processes()}")
        time.sleep(0.02)


def start(command: list[str], number: int) -> tuple[subprocess.Popen[bytes], Path]:
    log = Path(f"shot-{number}.log")
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL), log


def main() -> None:
    count, command = int(sys.argv[1]), sys.argv[2:]
    seed = time.time_ns() % 10**6
    draw = random.Random(seed)  # noqa: S311
    print(f"drawn by {seed}", flush=True)
    for number in range(count):
        run, log = start(command, number)
        # The first start saves once, so that there is something to resume from.
        progress = r"step +\d.*loss" if number else r"step +\d\d.*loss"
        until(lambda log=log, progress=progress: re.search(progress, log.read_text()), 300)
        time.sleep(draw.uniform(0, LATEST_S))
        victim, line = draw.choice(sorted(processes().items()))
        os.kill(victim, signal.SIGKILL)
        step = re.findall(r"step +(\d+)/", log.read_text())[-1]
        print(f"killed {kind(line)} after step {step}", flush=True)
        until(lambda: not processes(), 300)
        print(log.read_text(), "exit code", run.wait(), flush=True)
    run, log = start(command, count)
    code = run.wait()
    print(log.read_text())
    sys.exit(code)


if __name__ == "__main__":
    main()
