"""The launcher over real torchrun: two nodes on loopback, real signals and kills, and what is left of them.

Runs in the stand-in image, or with the Python named in IMGKIT_TEST_TORCH_PYTHON, which must have torch.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from labkit import PACKAGE, PLACE, ROOT, soak

NODE = ROOT / "tests/unit/entrypoints/launch/node.py"
SCENARIO = ROOT / "tests/lab/launch/launch_scenario.py"

PYTHON = os.environ.get("IMGKIT_TEST_TORCH_PYTHON", "")

Play = Callable[[str], "dict[str, Any]"]


def _has_torch(python):
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


@pytest.fixture
def play(request):
    """``play(scenario)``: what came of it."""
    if PYTHON:
        if not _has_torch(PYTHON):
            pytest.fail(f"IMGKIT_TEST_TORCH_PYTHON={PYTHON} has no torch", pytrace=False)
        argv = [PYTHON, str(SCENARIO), str(NODE)]
        env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    else:
        image = request.getfixturevalue("standin")
        mounts = (f"{PACKAGE}:{PLACE}:ro", f"{NODE}:/node.py:ro", f"{SCENARIO}:/scenario.py:ro")
        argv = ["docker", "run", "--rm", "--network", "none"]
        argv += [option for mount in mounts for option in ("--volume", mount)]
        argv += [image, "python3", "/scenario.py", "/node.py"]
        env = dict(os.environ)

    def run(scenario):
        completed = subprocess.run(
            [*argv, scenario], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, env=env
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
        result: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
        assert result["left"] == []
        return result

    return run


pytestmark = [] if PYTHON else [pytest.mark.docker]


def test_two_nodes_make_one_run(play):
    result = play("finish")
    assert result["codes"] == [0, 0]
    for rank in range(4):
        assert f"[host{rank // 2}:{rank}]: rank {rank} of 4 works, past the rendezvous" in result["output"]
    assert result["output"].count("hostname of the client socket cannot be retrieved") <= 1


@pytest.mark.parametrize(
    "scenario",
    [
        "terminate one launcher",
        # Slurm's own USR1 is in tests/lab/job/test_submit_slurm_real.py.
        *soak("SIGUSR1 to every process", "SIGTERM to every process"),
    ],
)
def test_stop_request_saves_on_all_nodes(play, scenario):
    result = play(scenario)
    assert result["codes"] == [85, 85]
    assert result["output"].count("state saved at step") == 2


def test_deaf_program_is_ended_on_all_nodes(play):
    result = play("deaf")
    assert result["codes"] == [143, 143]
    assert result["output"].count("ending the program: the grace time is over") == 2
    assert "Traceback" not in result["output"]
    assert "Sending process" not in result["output"]


def test_failed_worker_ends_all_nodes(play):
    result = play("worker fails")
    assert result["codes"] == [1, 1]
    assert result["output"].count("\nRuntimeError: this rank is broken") == 1


def test_hanging_worker_ends_with_its_node(play):
    result = play("worker fails, others hang")
    assert result["codes"] == [1, 1]
    assert "Signal 1 (SIGHUP)" in result["logs"]  # not KILL, half a minute later
    assert "SIGHUP" not in result["output"]
    assert "memory ran out" not in result["output"]


def test_killed_launcher_leaves_no_process(play):
    result = play("kill the head's launcher")
    assert result["codes"] == [-9, 4]
    assert result["output"].count("ending the program: lost node") == 1
    assert "Traceback" not in result["output"]
