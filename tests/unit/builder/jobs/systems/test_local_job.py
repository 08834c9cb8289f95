from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve_job
from imgkit_builder.jobs.systems.local import SYSTEM as local
from imgkit_builder.recipe.targets import load_target

IMGKIT = (sys.executable, "-m", "imgkit_builder", "run", "cpu")
TRAIN = JobRequest.of(command=("dist-train",), directory=Path("/home/me"))


def command(request: JobRequest, recipe: str | Path = "cpu") -> tuple[str, ...]:
    return local.script(resolve_job(load_target(recipe), request)).submit


def test_terminal_only_where_asked_for() -> None:
    assert "--tty" not in command(TRAIN)
    assert command(TRAIN.changed(interactive=True))[2:4] == ("--interactive", "--tty")
    assert command(TRAIN.changed(command=(), interactive=True))[-2:] == ("cpu:latest", "bash")


def test_options_go_to_the_runtime() -> None:
    assert command(TRAIN.changed(options=("--memory=4g",)))[:3] == ("docker", "run", "--memory=4g")
    inside = command(TRAIN.changed(options=("--cleanenv",), runtime="singularity"))
    assert inside[:4] == ("singularity", "--quiet", "exec", "--cleanenv")


def test_limit_of_open_files_can_be_chosen(tmp_path: Path) -> None:
    assert "--ulimit=nofile=16384" in command(TRAIN)
    typed = command(TRAIN.changed(options=("--ulimit=nofile=1048576",)))
    file = tmp_path / "mine.yaml"
    file.write_text("extends: cpu\nsystem:\n  runtime:\n    options: [--ulimit, nofile=4096]\n")
    for argv in (typed, command(TRAIN, file), command(TRAIN.changed(runtime="singularity"))):
        assert "--ulimit=nofile=16384" not in argv


def test_recipe_with_gpus_gets_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: cpu\nsystem:\n  runtime:\n    options: [--gpus=all]\n")
    argv = command(TRAIN.changed(gpus=1), file)
    assert "--gpus=all" in argv
    assert "IMGKIT_NPROC=1" in argv


@pytest.mark.parametrize(("program", "code"), [("exit 3", 3), ("kill -TERM $$", -15)])
def test_exit_code_is_the_program_s(program: str, code: int, tmp_path: Path) -> None:
    argv = [*IMGKIT, "--runtime", "host", "--directory", str(tmp_path)]
    result = subprocess.run(
        [*argv, "--", "sh", "-c", f'pwd; echo "$1"; {program}', "sh", "a  'b' $c"],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
        timeout=60,
    )
    assert result.returncode == code
    assert result.stdout == f"{tmp_path}\na  'b' $c\n"


def test_missing_runtime_is_named(tmp_path: Path) -> None:
    argv = [*IMGKIT, "--directory", str(tmp_path), "--", "dist-hello"]
    result = subprocess.run(argv, capture_output=True, text=True, env={"PATH": str(tmp_path)}, timeout=60)
    assert result.returncode == 3
    assert "'docker' is not on PATH" in result.stderr
