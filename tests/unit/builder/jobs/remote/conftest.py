"""A fake ssh, which runs the script on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

UNPRIVILEGED = "" if os.geteuid() else "setpriv --bounding-set=-dac_override,-dac_read_search"
"""Words that start a program for which read-only files are read-only, as they are for an ordinary user."""
RUNS = f'#!/bin/sh\n# A fake ssh.\nfor line; do :; done\nexec {UNPRIVILEGED} sh -c "$line"\n'


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program, in a folder of its own on PATH; a test may write another one."""
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    program.write_text(RUNS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program
