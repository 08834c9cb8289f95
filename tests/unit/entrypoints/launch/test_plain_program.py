"""Programs of dist-run that note nothing, below real launchers: hangs and stalled starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from imgkit_entrypoints.launch import user_program

from .conftest import until

LAUNCH = """
import os, subprocess, sys
base = 2 * int(sys.argv[1])
workers = [
    subprocess.Popen([*sys.argv[2:]], env=os.environ | {"RANK": str(base + n), "LOCAL_RANK": str(n)})
    for n in range(2)
]
sys.exit(max(worker.wait() for worker in workers))
"""
STOP = "import os, sys, time\nstop = os.environ['IMGKIT_STOP_DIR'] + '/stop'\nrank = os.environ['RANK']\n"
SOON = {"tick_s": 0.1, "beat_s": 0.1, "lost_s": 20.0, "nproc": 2}


def launch(tmp_path: Path, code: str, node: int = 0) -> list[str]:
    """Two workers that run the text `code` as dist-run does."""
    program = tmp_path / "program.py"
    program.write_text(STOP + code)
    worker = [sys.executable, user_program.__file__, str(program)]
    return [sys.executable, "-c", LAUNCH, str(node), *worker]


def test_stacks_of_all_ranks_come_without_py_spy(nodes: Any, tmp_path: Path) -> None:
    hang = (
        "def reads_data():\n    while True: time.sleep(0.02)\n"
        "def blocks():\n    os.read(os.pipe()[0], 1)\n"
        "blocks() if rank == '0' else reads_data()\n"
    )
    nodes.start(launch(tmp_path, hang), **SOON, hang_after_s=1.0)
    nodes.said(" on host0 without a sign of life for ", within_s=60)
    nodes.said(" reads_data\n", within_s=60)
    text = nodes.output()
    assert "program.py:" in text
    assert " blocks\n" in text
    assert "user_program.py" not in text
    assert "runpy" not in text
    nodes.processes[0].kill()
    nodes.codes()


def test_program_that_works_is_not_reported(nodes: Any, tmp_path: Path) -> None:
    busy = "for _ in range(60):\n    time.sleep(0.05)\nprint('done')\n"
    nodes.start(launch(tmp_path, busy), **SOON, hang_after_s=0.5)
    assert nodes.codes() == [0]
    assert "sign of life" not in nodes.output()


def test_ranks_that_never_connect_end_with_the_nodes_named(nodes: Any, tmp_path: Path) -> None:
    """A stranger has deleted the keys of all ranks, so that each waits for the others."""
    waits = "def init_process_group():\n    os.read(os.pipe()[0], 1)\ninit_process_group()\n"
    both = {"nnodes": 2, "hosts": ["host0", "host1"], "timeout_s": 3.0, **SOON, "hang_after_s": 1.0}
    for node in range(2):
        nodes.start(launch(tmp_path, note("workers") + waits, node), rank=node, **both)
    assert nodes.codes(within_s=90) == [4, 4]
    text = (
        "the ranks did not connect within 3 s (--rollcall-timeout); all of them are in init_process_group: "
    )
    assert f"<{text}node 1 of 2 (host0), node 2 of 2 (host1). " in nodes.output()


def note(phase: str) -> str:
    return f"from imgkit_entrypoints.launch import start_up\nstart_up.write_phase(os.environ, {phase!r})\n"


def test_head_leaves_after_the_other_nodes(nodes: Any, tmp_path: Path) -> None:
    """Torchrun of the head serves the store, and ends when the node agent has heard of all nodes."""
    head = "while not os.path.exists(os.path.dirname(stop) + '/others-have-ended'): time.sleep(0.02)\n"
    member_code = "while not os.path.exists(os.environ['IMGKIT_RUN_DIR'] + '/go'): time.sleep(0.02)\n"
    both = {"nnodes": 2, "hosts": ["host0", "host1"], **SOON}
    launchers = []
    for node, code in enumerate((head, member_code)):
        folder = tmp_path / f"program{node}"
        folder.mkdir()
        launchers.append(nodes.start(launch(folder, code, node), rank=node, **both))
    assert not until(lambda: any(launcher.poll() is not None for launcher in launchers), within_s=2.0)
    (nodes.folder / "run").mkdir(exist_ok=True)
    (nodes.folder / "run/go").touch()
    assert nodes.codes() == [0, 0]
