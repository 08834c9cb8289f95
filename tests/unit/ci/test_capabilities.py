"""``tests/conftest.py``: a missing capability skips with the command that helps; where required, it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def pytest_without_docker(folder: Path, require: str) -> subprocess.CompletedProcess[str]:
    (folder / "tests").mkdir()
    (folder / "tests/conftest.py").write_text(CONFTEST.read_text())
    (folder / "tests/test_it.py").write_text(TEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    docker\n    programs\naddopts = -ra\n")
    env = {**os.environ, "IMGKIT_REQUIRE": require, "DOCKER_HOST": f"unix://{folder}/none.sock"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_missing_docker_skips_with_the_remedy(tmp_path):
    result = pytest_without_docker(tmp_path, "")
    assert result.returncode == 0
    assert "1 passed, 2 skipped" in result.stdout
    assert "ci/lab/engine start" in result.stdout
    assert (
        "no absent-program, second-absent-program; as root: apt-get install absent-program" in result.stdout
    )


def test_missing_docker_fails_where_required(tmp_path):
    result = pytest_without_docker(tmp_path, "docker,cluster")
    assert result.returncode == 1
    assert "docker is required by IMGKIT_REQUIRE" in result.stdout


def test_missing_program_fails_where_required(tmp_path):
    result = pytest_without_docker(tmp_path, "programs")
    assert result.returncode == 1
    assert "programs is required by IMGKIT_REQUIRE: no absent-program" in result.stdout


def test_unknown_requirement_is_refused(tmp_path):
    result = pytest_without_docker(tmp_path, "dokcer")
    assert result.returncode == 4
    assert "dokcer" in result.stderr
