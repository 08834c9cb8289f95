"""``train_schedules.py SEED COUNT COMMAND...``: runs of three nodes with random faults; runs in the image.

COMMAND starts one launcher where ``--node-rank R`` is added. Each run starts again until it is done, as a
scheduler would requeue it. Every process but this one and its shell is the runs' own.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from train_kills import kind, processes, until

STARTS = 8
LATEST_S = 9.0
"""Latest moment of a fault after a start; an undisturbed run takes a little longer."""


def started(command: list[str], run: str, log: Path) -> list[subprocess.Popen[bytes]]:
    """Three launchers, the head first."""
    nodes = []
    for rank in range(3):
        argv = [*command, "--run-dir", run, "--node-rank", str(rank)]
        with log.open("ab") as file:
            nodes.append(
                subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env={**os.environ, "IMGKIT_RUN_DIR": run},
                    start_new_session=True,
                )
            )
    return nodes


def strike(draw: random.Random, nodes: list[subprocess.Popen[bytes]]) -> str:
    """Do one random action to one random process, and return its description."""
    roles = sorted(processes().items())
    action = draw.choice(("a worker", "torchrun", "the guard", "the launcher", "stop", "freeze"))
    if action in ("stop", "freeze"):
        node = draw.randrange(action == "freeze", len(nodes))  # a frozen head would only end the run
        if nodes[node].poll() is None:
            nodes[node].send_signal(signal.SIGTERM if action == "stop" else signal.SIGSTOP)
        return f"{action} the launcher of node {node}"
    victims = [pid for pid, line in roles if kind(line) == action]
    if victims:
        os.kill(draw.choice(victims), signal.SIGKILL)
    return f"kill {action}"


def play(seed: int, command: list[str], run: str) -> list[str]:
    """One run under random faults, until it is done; return what happened."""
    draw, log, events = random.Random(seed), Path(f"{run}.log"), []  # noqa: S311
    for number in range(STARTS):
        start_s = time.monotonic()
        nodes = started(command, run, log)
        moments = sorted(
            draw.uniform(1, LATEST_S) for _ in range(draw.choice((1, 2, 3)) if number < 3 else 0)
        )
        for moment in moments:
            time.sleep(max(0.0, start_s + moment - time.monotonic()))
            if nodes[0].poll() is None:
                events.append(f"{moment:.1f} s: {strike(draw, nodes)}")
        nodes[0].wait(timeout=300)
        for node in nodes:
            if node.poll() is None:
                node.send_signal(signal.SIGCONT)
        codes = [node.wait(timeout=60) for node in nodes]
        until(lambda: not processes(), 60)
        events.append(f"ended with {codes}")
        if codes[0] == 0:
            break
    return events


def main() -> None:
    seed, count, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    for number in range(seed, seed + count):
        print(f"schedule {number}: {'; '.join(play(number, command, f'schedule{number}'))}", flush=True)


main()
