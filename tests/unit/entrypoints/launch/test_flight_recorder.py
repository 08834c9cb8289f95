"""NCCL's flight recorder: asked to record, told where to, and its files named after a failure.

The workers are fakes that leave a file as torch does when a collective has timed out: there is no GPU here.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from imgkit_entrypoints.launch import nccl

STUB = str(Path(__file__).with_name("stub_torchrun.py"))
FAKE = """
import os, sys
place = os.environ.get("TORCH_FR_DUMP_TEMP_FILE")
if place and "leaves":
    with open(place + os.environ["LOCAL_RANK"], "w") as file:
        file.write("a fake of what torch writes")
sys.exit(1)
"""


def test_dumps_are_named_after_a_failure(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMGKIT_DEVICE", "cuda")
    (nodes.folder / "run").mkdir()
    nodes.start([sys.executable, STUB, "2", FAKE], job="4711.head/x")
    assert nodes.codes() == [1]
    prefix = nodes.folder / "run/nccl-4711.head_x-rank-"
    assert f"NCCL's flight recorder has written {prefix}N for rank 0, 1, with" in nodes.output()
    assert f"torchfrtrace --prefix {prefix.name} {prefix.parent}" in nodes.output()


@pytest.mark.parametrize(("device", "fake"), [("cpu", FAKE), ("cuda", FAKE.replace('"leaves"', "False"))])
def test_failure_without_dumps_names_none(
    nodes: Any, monkeypatch: pytest.MonkeyPatch, device: str, fake: str
) -> None:
    monkeypatch.setenv("IMGKIT_DEVICE", device)
    (nodes.folder / "run").mkdir()
    (nodes.folder / "run/nccl-local-rank-0").write_text("of an earlier run")
    nodes.start([sys.executable, STUB, "2", fake], job="")
    assert nodes.codes() == [1]
    assert "flight recorder" not in nodes.output()


def test_older_torch_has_the_older_names() -> None:
    cuda = {"IMGKIT_DEVICE": "cuda", "IMGKIT_RUN_DIR": "/runs/one"}
    new, old = (
        nccl.recorder_variables(cuda, torch, "7") for torch in ("2.13.0+cu130", "2.3.0a0+40ec155e58.nv24.03")
    )
    assert new["TORCH_FR_DUMP_TEMP_FILE"] == "/runs/one/nccl-7-rank-"
    assert old["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/runs/one/nccl-7-rank-"
    assert old["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert not [name for name in new if "TRACE" in name or "DEBUG" in name]  # new versions warn of these


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = {
        "IMGKIT_DEVICE": "cuda",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert nccl.recorder_variables(env, "2.13", "7") == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert list(tmp_path.iterdir()) == []  # no folder is made for files that go elsewhere
