"""``tests/conftest.py``: a missing capability skips with the command that helps; where required, it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from file_tree import write_files

CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"
TEST = """
import pytest

@pytest.mark.docker
def test_needs_docker():
    pass

@pytest.mark.programs("sh", "absent-program", "second-absent-program")
def test_needs_programs():
    pass

def test_needs_nothing():
    pass
"""


@pytest.mark.parametrize(
    ("require", "code", "messages"),
    [
        (
            "",
            0,
            (
                "1 passed, 2 skipped",
                "ci/lab/engine start",
                "no absent-program, second-absent-program; as root: apt-get install absent-program",
            ),
        ),
        ("docker,cluster", 1, ("docker is required by IMGKIT_REQUIRE",)),
        ("programs", 1, ("programs is required by IMGKIT_REQUIRE: no absent-program",)),
        ("dokcer", 4, ("IMGKIT_REQUIRE: unknown ['dokcer']",)),
    ],
    ids=["none is required", "docker", "programs", "unknown"],
)
def test_missing_capability_skips_or_fails(tmp_path, require, code, messages):
    write_files(
        tmp_path,
        {
            "tests/conftest.py": CONFTEST.read_text(),
            "tests/test_it.py": TEST,
            "pytest.ini": "[pytest]\nmarkers =\n    docker\n    programs\naddopts = -ra",
        },
    )
    env = {**os.environ, "IMGKIT_REQUIRE": require, "DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"]
    result = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == code
    assert [message for message in messages if message not in result.stdout + result.stderr] == []
