"""The shell's completion of names: recipes, and the files that a verb takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from imgkit_builder.cli.common import complete_names


def test_recipes_and_files_by_their_beginning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mn6.yaml", "mn5.tar.gz", "mn5.txt", "mn.sif", "x.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt/[a].yaml").touch()
    assert complete_names("mn") == ["mn5", "mn5-llm", "mnt/", "mn.sif", "mn5.tar.gz", "mn6.yaml"]
    assert complete_names("mnt/[") == ["mnt/[a].yaml"]
    assert complete_names(f"{tmp_path}/x") == [f"{tmp_path}/x.yaml"]


@pytest.mark.parametrize("beginning", ["none/x", "zz", "[", "*"])
def test_nothing_begins_like_that(beginning):
    assert complete_names(beginning) == []


@pytest.mark.parametrize("verb", ["build", "sif", "run", "show", "check", "doctor"])
def test_shell_gets_the_names(verb):
    env = {"_IMGKIT_COMPLETE": "complete_bash", "COMP_WORDS": f"imgkit {verb} oli", "COMP_CWORD": "2"}
    imgkit = Path(sys.executable).with_name("imgkit")
    process = subprocess.run([imgkit], env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert process.stdout.split() == ["olivia", "olivia-eap"]
