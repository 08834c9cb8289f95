"""One fault in each call of a save: the archive and what is beside it are old, new, or called incomplete."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install build-essential"),
    pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD"),
]


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shim") / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, HERE / "faults.c", "-ldl"], check=True)
    return made


def sweep(shim: Path, folder: Path, how: str, code: int, before: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, HERE / "faults.py", folder, how, str(code), before],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("before", ["first", "again"])
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("error", errno.EIO),
        pytest.param("error", errno.ENOSPC, marks=pytest.mark.soak),
        pytest.param("short", errno.EIO, marks=pytest.mark.soak),
        pytest.param("die before", 0, marks=pytest.mark.soak),
        ("die after", 0),
    ],
    ids=["EIO", "ENOSPC", "short write", "killed before", "killed after"],
)
def test_fault_in_any_call_tears_nothing(
    shim: Path, tmp_path: Path, how: str, code: int, before: str
) -> None:
    found = sweep(shim, tmp_path, how, code, before)
    assert len(found) > 25, "the sweep has not gone through the save"
    wrong = [one for one in found if one["state"] not in ("old", "new", "absent", "incomplete")]
    assert wrong == []
    assert {one["ended"] for one in found} <= {"done", "reported", "died"}
    assert [one for one in found if one["ended"] == "done" and one["state"] != "new"] == []
    assert {one["again"] for one in found} == {"new"}
    assert any(one["state"] == "incomplete" for one in found)
    if how == "error":
        assert {"open64", "write", "fsync", "rename", "close"} <= {one["name"] for one in found}
        assert {one["ended"] for one in found} == {"reported"}
        assert [one for one in found if one["left"]] == []
