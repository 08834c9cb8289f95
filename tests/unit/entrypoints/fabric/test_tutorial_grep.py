"""The public tutorial's one-line grep for NCCL_IB_GID_INDEX, run on the same machines.

Source: "Distributed PyTorch with RunAI" (EPFL), "Using RDMA", step 3.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imgkit_entrypoints import fabric, facts

ONE_LINER = (
    "grep 'RoCE v2' $(grep '0000:0000:0000:0000:0000:ffff' /sys/class/infiniband/mlx5_bond_0/ports/1/gids/* "
    r"| cut -d ':' -f 1 | sed 's/gids/gid_attrs\/types/') |  sed -e 's/.*\/\([0-9]*\):.*/\1/'"
)
HANGS = "<hangs>"


def run(root: Path, patience_s: float = 20) -> str:
    """Run the line on the machine under `root`; its input is a terminal without any typing."""
    line = ONE_LINER.replace("/sys/", f"{root}/sys/")
    with subprocess.Popen(
        ["sh", "-c", line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return HANGS
        return process.stdout.read().rstrip("\n")


def test_one_liner_gives_what_it_gives(planted: Callable[[str], Path], tree: str, row: Any):
    patience_s = 0.5 if row.one_liner == HANGS else 20
    assert run(planted(tree), patience_s) == row.one_liner


def test_end_of_input_gives_nothing(planted: Callable[[str], Path]):
    line = ONE_LINER.replace("/sys/", f"{planted('ib4_ndr200')}/sys/")
    done = subprocess.run(["sh", "-c", line], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.stdout == ""


def test_two_types_at_two_slots_are_two_lines(planted: Callable[[str], Path]):
    assert run(planted("roce_idx10")).split() == ["10", "2"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("roce_single_v2", "is not a number, and NCCL silently reads 0"),
        ("roce_idx10", "is not a number, and NCCL silently reads 10"),
        ("half_pod", "finds the GID itself"),
    ],
)
def test_lint_names_what_it_yields(planted: Callable[[str], Path], name: str, words: str):
    root = planted(name)
    value = run(root)
    found = facts.gather(root, {"IMGKIT_NCCL_VERSION": "2.27.3"})
    plan = fabric.choose(found, None, {"NCCL_IB_GID_INDEX": value}, nnodes=2)
    assert "NCCL_IB_GID_INDEX" not in plan.env
    assert any(words in str(text) for text in plan.warnings), plan.warnings
