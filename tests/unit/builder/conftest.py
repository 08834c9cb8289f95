"""Recipes made by hand, so that these tests need no YAML; a home of the test's own, and fake programs."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from file_tree import FakeProgram, write_program

from imgkit_builder.recipe.model import Image, Recipe, RunCommand
from imgkit_builder.recipe.problems import Position
from imgkit_entrypoints.system import SystemFacts

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def make_recipe() -> MakeRecipe:
    """``make_recipe(apt=("git",), lines={("image", "apt", 0): 7})``: image fields, and where they stand."""

    def make(*, lines: dict[tuple[str | int, ...], int] | None = None, **image: Any) -> Recipe:
        file = Path("/recipes/mine.yaml")
        commands = image.pop("run", ())
        image["run"] = tuple(
            RunCommand(command=command) if isinstance(command, str) else command for command in commands
        )
        return Recipe(
            name="mine",
            image=Image(**{"base": "example.org/base:1", **image}),
            system=SystemFacts(),
            file=file,
            sha256="0" * 64,
            positions={
                path: Position(file=file, line=line, column=3)
                for path, line in {("image",): 2, ("image", "base"): 3, **(lines or {})}.items()
            },
        )

    return make


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the user's remotes in ``config``, the records of jobs in ``state``."""
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.split("_")[1].lower()))
    monkeypatch.chdir(tmp_path)
    # tmp_path is too long for a socket of ssh, which would then be in a folder of /tmp that stays.
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield tmp_path


@pytest.fixture
def fake_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProgram:
    """``fake_program("squeue", "echo 7")``: put a shell script in the folder ``bin``, the first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return lambda name, script: write_program(tmp_path / "bin" / name, script)


FakeRunAI = Callable[[Mapping[str, str]], Path]
FIRST_RUNAI = {
    "submit": "--name --image --gpu --pvc -e",
    "submit-dist pytorch": "--name --image --workers --gpu --pvc -e",
}
"""Commands of a fake first client, with options in their help."""


@pytest.fixture
def fake_runai(tmp_path: Path, fake_program: FakeProgram) -> FakeRunAI:
    """``fake_runai(commands)``: a fake ``runai`` on PATH; returns the file that keeps its last arguments.

    It has help for these commands alone, which lists the options of each, and takes every other line.
    """

    def make(commands: Mapping[str, str]) -> Path:
        called = tmp_path / "runai-called"
        lines = ["# A fake client of RunAI.", 'case "$*" in']
        for command, options in commands.items():
            listed = "".join(
                f"  {option}, --word-of{option} stringArray\\n"
                if len(option) == 2
                else f"      {option} string\\n"
                for option in options.split()
            )
            lines.append(f"{shlex.quote(f'{command} --help')}) printf {shlex.quote(listed)};;")
        lines += ["*--help) echo unknown command >&2; exit 1;;"]
        lines += [f'*) for word in "$@"; do echo "$word"; done | tee {shlex.quote(str(called))};;', "esac"]
        fake_program("runai", "\n".join(lines))
        return called

    return make


@pytest.fixture
def first_runai(fake_runai: FakeRunAI) -> Path:
    """A fake of RunAI's first client on PATH."""
    return fake_runai(FIRST_RUNAI)
