from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job_builder import make_script, write_recipe

IMGKIT = (sys.executable, "-m", "imgkit_builder", "run", "cpu")
OPTIONS = "extends: cpu\nsystem:\n  runtime:\n    options: [{}]\n"


def argv(recipe: str | Path = "cpu", **options: Any) -> tuple[str, ...]:
    return make_script(recipe, **options).submit


def test_interactive_program_has_a_terminal():
    assert argv(interactive=True)[2:4] == ("--interactive", "--tty")


def test_options_go_to_the_runtime():
    inside = argv(options=("--cleanenv",), runtime="singularity")
    assert inside[:4] == ("singularity", "--quiet", "exec", "--cleanenv")


def test_limit_of_open_files_can_be_chosen(tmp_path):
    assert "--ulimit=nofile=16384" in argv()
    recipe = write_recipe(tmp_path, OPTIONS.format("--ulimit, nofile=4096"))
    for chosen in (argv(options=("--ulimit=nofile=1048576",)), argv(recipe), argv(runtime="singularity")):
        assert "--ulimit=nofile=16384" not in chosen


def test_recipe_with_gpus_gets_them(tmp_path):
    recipe = write_recipe(tmp_path, OPTIONS.format("--gpus=all"))
    assert {"--gpus=all", "IMGKIT_NPROC=1"} <= {*argv(recipe, gpus=1)}


@pytest.mark.parametrize(("program", "code"), [("exit 3", 3), ("kill -TERM $$", -15)])
def test_exit_code_is_the_program_s(program, code, tmp_path):
    shell = ("sh", "-c", f'pwd; echo "$1"; {program}', "sh", "a  'b' $c")
    result = subprocess.run(
        [*IMGKIT, "--runtime", "host", "--directory", str(tmp_path), "--", *shell],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
        timeout=60,
    )
    assert result.returncode == code
    assert result.stdout == f"{tmp_path}\na  'b' $c\n"


def test_missing_runtime_is_named(tmp_path):
    argv = [*IMGKIT, "--directory", str(tmp_path), "--", "dist-hello"]
    result = subprocess.run(argv, capture_output=True, text=True, env={"PATH": str(tmp_path)}, timeout=60)
    assert result.returncode == 3
    assert "'docker' is not on PATH" in result.stderr
