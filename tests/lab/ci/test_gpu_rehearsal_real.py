"""``ci/gpu`` with tiny sizes on a CPU. No GPU is here: what it measures is not what it says elsewhere."""

from __future__ import annotations

import json

import pytest
from labkit import ROOT, docker


@pytest.mark.docker
@pytest.mark.soak
def test_every_part_runs_on_a_cpu(standin, tmp_path):
    file = tmp_path / "gpu.json"
    mounts = [f"--volume={folder}:{folder}" for folder in (ROOT, tmp_path)]
    text = docker("run", "--rm", "--network=none", *mounts, standin, ROOT / "ci/gpu", "--rehearse", file)
    parts = json.loads(file.read_text())["parts"]
    assert [name for name, results in parts.items() if "failed" in results] == []
    assert parts["resume"]["bitwise"]
    assert "GPT 110M, bf16, eager" in text
