"""Attempts of real launchers over a stub torchrun: who takes part, what is lost, and how the run ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

STUB = str(Path(__file__).resolve().parent / "stub_torchrun.py")
MARKERS = ("<number of nodes of this attempt>", "<node rank of this attempt>", "<port from the roll call>")
WORK = """
import os, sys, time
nnodes, rank, port, attempt = *sys.argv[1:4], os.environ["IMGKIT_ATTEMPT"]
run = os.environ["IMGKIT_RUN_DIR"]
print("attempt", attempt, "rank", rank, "of", nnodes, "works;", flush=True)
"""
HANG_ONCE = WORK + "time.sleep(0 if attempt == '2' else 100)"


def start(nodes: Any, code: str, size: str = "2+1", **options: Any) -> list[subprocess.Popen[bytes]]:
    """Three nodes, with one worker each where they train."""
    words = [sys.executable, "-c", code, *MARKERS]
    both = {"nnodes": 3, "size": size, "max_failures": 3, "hosts": ["host0", "host1", "host2"], **options}
    return [nodes.start(words, rank=rank, **both) for rank in range(3)]


def read(nodes: Any, name: str) -> str:
    text: str = (nodes.folder / "run" / name).read_text()
    return text


def test_spare_takes_the_rank_of_a_killed_node(nodes: Any) -> None:
    three = start(nodes, HANG_ONCE)
    nodes.said("works;", 2)
    assert "attempt 1 rank 0 of 2" in nodes.output()
    three[1].kill()
    assert nodes.codes() == [0, -9, 0]
    said = nodes.output()
    assert "lost node 1 of 3 (host1): it closed the connection" in said
    assert "attempt 2 starts with 2 nodes; node 2 of 3 (host2) takes rank 1" in said
    assert "attempt 2 rank 1 of 2" in (nodes.folder / "node2-2.log").read_text()
    assert read(nodes, "attempt") == f"{nodes.job} 2\n"
    assert read(nodes, "result") == f"{nodes.job} 0\n"
