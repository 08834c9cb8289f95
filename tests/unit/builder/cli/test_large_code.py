"""Code of more than 1 GB: asked about on a terminal, refused elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = (sys.executable, "-m", "imgkit_builder", "build", "./big.yaml", "--dry-run")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "big.yaml").write_text("image: {base: 'a:1', copy: [{source: code}]}\n")
    (tmp_path / "code").mkdir()
    with (tmp_path / "code" / "weights.bin").open("wb") as stream:
        stream.truncate(1_100_000_000)  # takes no room on the disk
    return tmp_path


def test_script_is_refused_with_the_flag(folder):
    process = subprocess.run(PLAN, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert process.returncode == 2
    assert "big.yaml:1: the code for the image is 1.1 GB: weights.bin 1.1 GB\n" in process.stderr
    assert "to pack all of it: --large" in process.stderr


def test_person_is_asked_and_may_refuse(folder):
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as terminal:
        process = subprocess.Popen(PLAN, cwd=folder, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE)
        os.close(theirs)
        prompt = b""
        while b"Pack all of it? [y/N]" not in prompt:
            prompt += terminal.read(1000)
        terminal.write(b"n\n")
        output, _ = process.communicate(timeout=120)
    assert (process.returncode, output.strip()) == (2, b"")
