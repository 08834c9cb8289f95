from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.resolve import resolve
from imgkit_builder.jobs.systems.local import SYSTEM as local
from imgkit_builder.recipe.targets import find
from imgkit_entrypoints.errors import UsageError

IMGKIT = (sys.executable, "-m", "imgkit_builder", "run", "cpu")
TRAIN = JobRequest.of(command=("dist-train",), directory=Path("/home/me"))


def words(request: JobRequest, recipe: str | Path = "cpu") -> tuple[str, ...]:
    return local.script(resolve(find(recipe), request)).submit


def test_terminal_only_where_asked_for() -> None:
    assert "--tty" not in words(TRAIN)
    assert words(TRAIN.changed(interactive=True))[2:4] == ("--interactive", "--tty")
    assert words(TRAIN.changed(command=(), interactive=True))[-2:] == ("cpu:latest", "bash")


def test_options_go_to_the_runtime() -> None:
    assert words(TRAIN.changed(options=("--memory=4g",)))[:3] == ("docker", "run", "--memory=4g")
    inside = words(TRAIN.changed(options=("--cleanenv",), runtime="singularity"))
    assert inside[:4] == ("singularity", "--quiet", "exec", "--cleanenv")


def test_stated_limit_of_open_files_stays(tmp_path: Path) -> None:
    assert "--ulimit=nofile=16384" in words(TRAIN)
    typed = words(TRAIN.changed(options=("--ulimit=nofile=1048576",)))
    file = tmp_path / "mine.yaml"
    file.write_text("extends: cpu\nsystem:\n  runtime:\n    options: [--ulimit, nofile=4096]\n")
    for made in (typed, words(TRAIN, file), words(TRAIN.changed(runtime="singularity"))):
        assert "--ulimit=nofile=16384" not in made


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"nodes": "2"}, "2 nodes, but this is one machine"),
        ({"gpus": 1}, "starts its container without GPUs"),
        ({"options": ("--x",), "runtime": "host"}, "an option for a container"),
        ({"options": ("a b",)}, "cannot be used in a directive"),
    ],
)
def test_what_one_machine_cannot_do_is_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        words(TRAIN.changed(**change))  # type: ignore[arg-type]


def test_recipe_with_gpus_gets_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: cpu\nsystem:\n  runtime:\n    options: [--gpus=all]\n")
    made = words(TRAIN.changed(gpus=1), file)
    assert "--gpus=all" in made
    assert "IMGKIT_NPROC=1" in made


@pytest.mark.parametrize(("program", "code"), [("exit 3", 3), ("kill -TERM $$", -15)])
def test_exit_code_is_the_program_s(program: str, code: int, tmp_path: Path) -> None:
    argv = [*IMGKIT, "--runtime", "host", "--directory", str(tmp_path)]
    done = subprocess.run(
        [*argv, "--", "sh", "-c", f'pwd; echo "$1"; {program}', "sh", "a  'b' $c"],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
        timeout=60,
    )
    assert done.returncode == code
    assert done.stdout == f"{tmp_path}\na  'b' $c\n"


def test_missing_runtime_is_named(tmp_path: Path) -> None:
    argv = [*IMGKIT, "--directory", str(tmp_path), "--", "dist-hello"]
    done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": str(tmp_path)}, timeout=60)
    assert done.returncode == 3
    assert "'docker' is not on PATH" in done.stderr
