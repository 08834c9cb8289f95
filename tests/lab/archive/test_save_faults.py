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

HERE = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.programs("cc"),
    pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD"),
]


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shim") / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, HERE / "faults.c", "-ldl"], check=True)
    return made


def sweep(shim: Path, verb: str, folder: Path, how: str, code: int, before: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, HERE / "faults.py", verb, folder, how, str(code), before],
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


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
def test_fault_in_any_call_tears_nothing(
    shim: Path, tmp_path: Path, how: str, code: int, before: str
) -> None:
    found = sweep(shim, "save", tmp_path, how, code, before)
    assert len(found) > 25, "the sweep has not gone through the save"
    assert_whole(found, how, "incomplete")
    assert any(one["state"] == "incomplete" for one in found)
    if how == "error":
        assert [one for one in found if one["ended"] != "reported" or one["left"]] == []


@pytest.mark.programs("mksquashfs")
@pytest.mark.parametrize("before", [pytest.param("first", marks=SOAK), "again"])
@pytest.mark.parametrize("verb", ["sif", *(pytest.param(one, marks=SOAK) for one in ("delta", "apply"))])
@pytest.mark.parametrize(
    ("how", "code"), [HOW[0], *(pytest.param(*one.values, id=one.id, marks=SOAK) for one in HOW[1:])]
)
def test_fault_while_a_sif_or_a_delta_is_written(
    shim: Path, tmp_path: Path, verb: str, how: str, code: int, before: str
) -> None:
    found = sweep(shim, verb, tmp_path, how, code, before)
    assert len(found) > (5 if how == "short" else 20)
    assert_whole(found, how)
    if how == "error":  # where a removal itself fails, the next run removes what is left
        assert {one["name"] for one in found if one["left"]} <= {"unlink", "close"}
    assert [one for one in found if one["rest"]] == []


def assert_whole(found: list[dict[str, object]], how: str, *more: str) -> None:
    assert [one for one in found if one["state"] not in ("old", "new", "absent", *more)] == []
    assert {one["ended"] for one in found} <= {"done", "reported", "died"}
    assert [one for one in found if one["ended"] == "done" and one["state"] != "new"] == []
    assert {one["again"] for one in found} == {"new"}
    if how == "error":
        assert {"open64", "write", "fsync", "rename", "close"} <= {one["name"] for one in found}
