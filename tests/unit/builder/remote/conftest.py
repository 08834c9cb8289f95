"""A fake ssh, which runs the script on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

RUNS = '#!/bin/sh\n# A fake ssh.\nfor line; do :; done\nexec sh -c "$line"\n'


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program, in a folder of its own on PATH; a test may write another one."""
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    program.write_text(RUNS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program
