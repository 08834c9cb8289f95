"""A fake ssh, which runs the script on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from file_tree import FakeProgram

UNPRIVILEGED = "" if os.geteuid() else "setpriv --bounding-set=-dac_override,-dac_read_search"
"""What starts a program for which read-only files are read-only, as they are for an ordinary user."""
RUNS = f'for line; do :; done\nexec {UNPRIVILEGED} sh -c "$line"'


@pytest.fixture
def ssh(fake_program: FakeProgram) -> Path:
    """The program, in a folder of its own on PATH; a test may write another one."""
    return fake_program("ssh", RUNS)
