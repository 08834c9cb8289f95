"""One fault in each call of what writes a file: it is old, new or absent, and the next run mends the rest.

An archive has files beside it: a fault may leave it without them, which `imgkit verify` calls incomplete.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.programs("cc"),
    pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD"),
]


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    library = tmp_path_factory.mktemp("shim") / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, LAB / "faults.c", "-ldl"], check=True)
    return library


def sweep(shim, verb, folder, how, code, before):
    result = subprocess.run(
        [sys.executable, LAB / "faults.py", verb, folder, how, str(code), before],
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": f"{LAB}:{LAB.parent / 'kit'}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


SOAK = pytest.mark.soak
HOW = [
    pytest.param("error", errno.EIO, id="EIO"),
    pytest.param("error", errno.ENOSPC, id="ENOSPC", marks=SOAK),
    pytest.param("short", errno.EIO, id="short write", marks=SOAK),
    pytest.param("die before", 0, id="killed before", marks=SOAK),
    pytest.param("die after", 0, id="killed after"),
]


@pytest.mark.parametrize("before", ["first", "again"])
@pytest.mark.parametrize(("how", "code"), HOW)
def test_fault_in_any_call_tears_nothing(shim, tmp_path, how, code, before):
    rows = sweep(shim, "save", tmp_path, how, code, before)
    assert len(rows) > 25, "the sweep has not gone through the save"
    assert_nothing_torn(rows, how, "incomplete")
    assert any(row["state"] == "incomplete" for row in rows)
    if how == "error":
        assert [row for row in rows if row["ended"] != "reported" or row["left"]] == []


@pytest.mark.programs("mksquashfs")
@pytest.mark.parametrize("before", [pytest.param("first", marks=SOAK), "again"])
@pytest.mark.parametrize(
    ("how", "code"), [HOW[0], *(pytest.param(*fault.values, id=fault.id, marks=SOAK) for fault in HOW[1:])]
)
def test_fault_while_a_sif_is_written(shim, tmp_path, how, code, before):
    rows = sweep(shim, "sif", tmp_path, how, code, before)
    assert len(rows) > (5 if how == "short" else 20)
    assert_nothing_torn(rows, how)
    if how == "error":  # where a removal itself fails, the next run removes what is left
        assert {row["name"] for row in rows if row["left"]} <= {"unlink", "close"}
    assert [row for row in rows if row["rest"]] == []


def assert_nothing_torn(rows, how, *states):
    assert [row for row in rows if row["state"] not in ("old", "new", "absent", *states)] == []
    assert {row["ended"] for row in rows} <= {"done", "reported", "died"}
    assert [row for row in rows if row["ended"] == "done" and row["state"] != "new"] == []
    assert {row["again"] for row in rows} == {"new"}
    if how == "error":
        assert {"open64", "write", "fsync", "rename", "close"} <= {row["name"] for row in rows}
