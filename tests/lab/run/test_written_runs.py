"""Runs of versions from 0.3.0 on (`tests/written`) go on, with the state that is in their checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from labkit import ROOT, in_image

from .test_sharded_export_real import EXPORT

pytestmark = pytest.mark.docker
WRITTEN = ROOT / "tests/written"
LAB = ROOT / "tests/lab"
VERSIONS = sorted(path.parent.name for path in WRITTEN.glob("*/small.sif"))
RUNS = ("library", "sharded", "dist-train")
LIBRARY = """
before = weights("library")
assert set(before) >= {"model.pt", "optimizer.pt", "seen.ranks.pt"}, sorted(before)
total = sum(value.double().sum().item() for value in before["model.pt"].values())
assert start(2, "/written/library_run.py", "library", words=["8"]) == [0, 0]
own = [one["total"] for one in before["seen.ranks.pt"]]
assert own[0] != own[1]
for rank in range(2):
    print(f"expected: rank {rank} begins after step 6 with {total:.4f}, {own[rank]:.4f};")
"""
SHARDED = (
    EXPORT
    + """
before = weights("sharded")
assert exported("sharded", "file")[0] == 0
values = [bytearray(values) for _, _, values in content("file")[1].values()]
total = sum(torch.frombuffer(one, dtype=torch.float32).double().sum().item() for one in values)
assert start(2, "/written/library_run.py", "sharded", words=["8", "sharded"]) == [0, 0]
own = [one["total"] for one in before["seen.ranks.pt"]]
for rank in range(2):
    print(f"expected: rank {rank} begins after step 6 with {total:.4f}, {own[rank]:.4f};")
"""
)
TRAINED = """
assert train(2, "--steps 8 --log-every 1 --run-dir dist-train") == 0
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_runs_of_earlier_versions_go_on(standin: str, tmp_path: Path, version: str) -> None:
    for name in RUNS:
        shutil.copytree(WRITTEN / version / name, tmp_path / name)
    for script in (LIBRARY, SHARDED):
        told = _run(standin, tmp_path, "run/run_many.py", script)
        expected = re.findall("expected: (.*);", told)
        assert [line in told.splitlines() for line in expected] == [True, True], told
    told = _run(standin, tmp_path, "apps/train_many.py", TRAINED)
    assert "step 7/8" in told, told
    assert "step 6/8" not in told, told
    for name in RUNS:
        assert (
            sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir())[-1] == "step-0000000008"
        )


def _run(standin: str, folder: Path, program: str, script: str) -> str:
    mounted = (f"{LAB}:/lab:ro", f"{WRITTEN}:/written:ro", f"{folder}:/runs")
    options = [word for one in mounted for word in ("--volume", one)]
    done = in_image(
        standin, "python3", f"/lab/{program}", options=(*options, "--workdir", "/runs"), given=script
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    return told
