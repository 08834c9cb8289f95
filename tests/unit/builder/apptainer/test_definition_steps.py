"""The definition that a build runs, and what its output becomes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from imgkit_builder.apptainer import definition
from imgkit_builder.apptainer.definition import MARK, Follower, Start
from imgkit_builder.base.progress import Silent
from imgkit_builder.image.instructions import Definition, Step
from imgkit_builder.oci import manifest
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_builder.recipe.model import Recipe
from imgkit_builder.sif.entries import Archive
from imgkit_entrypoints.errors import ToolFailed

BASE = Start(source=Archive(path=Path("/base.tar")), image=BaseImage(name="b:1", platform="linux/amd64"))


@pytest.fixture
def made(make_recipe: Callable[..., Recipe]) -> Definition:
    recipe = make_recipe(run=("echo 1", "echo 2"), lines={("image", "run", 1): 9})
    return definition.definition(recipe, BASE, {"a.label": "b  c", "empty": ""})


def test_every_step_says_that_it_begins(made: Definition) -> None:
    lines = made.text.split("\n")
    count = len(made.steps)
    marks = [line for line in lines if MARK in line]
    assert marks == [f"echo '{MARK} {number}/{count}'" for number in range(1, count + 1)]
    assert lines[0] == "Bootstrap: oci"
    assert "    a.label b c" in lines
    assert [step.text for step in made.steps][:2] == ["inspect the base", "the links of copied folders"]
    assert "(cd -- /workspace && sh -c 'echo 2')" in [step.text for step in made.steps]


def test_post_is_a_shell_script(made: Definition, tmp_path: Path) -> None:
    post = made.text.split("%post\n")[1].split("\n%")[0]
    assert subprocess.run(["sh", "-n"], input=post, text=True, check=False).returncode == 0


def test_links_keep_odd_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "INSIDE", str(tmp_path))
    script = definition.links_script({"it's a $x": "../to; rm", "b": "-f"})
    subprocess.run(["sh"], input=script, text=True, check=True)
    assert [str((tmp_path / name).readlink()) for name in ("it's a $x", "b")] == ["../to; rm", "-f"]


def test_look_completes_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "INSIDE", str(tmp_path))
    about = Manifest(
        imgkit="1", recipe="r", recipe_sha256="0", base=BASE.image, platform="linux/amd64", wheel_sha256="1"
    )
    (tmp_path / "manifest.json").write_text(manifest.to_json(about))
    words = [sys.executable, "-I", "-B", "-c", definition.look_program()]
    output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    follower = Follower(
        Definition(text="", steps=(Step(origin="", command=""),)), base_line="", report=Silent()
    )
    follower.line(f"{MARK} 1/1")
    for line in output.splitlines():
        follower.line(line)
    base = dataclasses.replace(about.base, probe=follower.probe)
    expected = manifest.to_json(dataclasses.replace(about, base=base))
    assert (tmp_path / "manifest.json").read_text() == expected
    assert json.loads(expected)["base"]["probe"]["python"]


def test_look_finds_variables_of_a_base_that_states_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definition, "INSIDE", str(tmp_path))
    monkeypatch.setattr(definition, "RUNTIME", str(tmp_path))
    (tmp_path / "env").mkdir()
    lines = 'export PATH="/base/bin:/usr/bin:/bin"\nexport NCCL_NET_PLUGIN="${NCCL_NET_PLUGIN:-"spcx"}"\n'
    (tmp_path / "env/10-docker2singularity.sh").write_text(lines)
    (tmp_path / "env/90-environment.sh").write_text("export LINES='a\nb' X=1\n")
    monkeypatch.setenv("NCCL_NET_PLUGIN", "of the host")
    about = Manifest(
        imgkit="1", recipe="r", recipe_sha256="0", base=BASE.image, platform="linux/amd64", wheel_sha256="1"
    )
    (tmp_path / "manifest.json").write_text(manifest.to_json(about))
    words = [sys.executable, "-I", "-B", "-c", definition.look_program()]
    output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    expected = {"LINES": "a\nb", "NCCL_NET_PLUGIN": "spcx", "PATH": "/base/bin:/usr/bin:/bin", "X": "1"}
    baked = manifest.from_json((tmp_path / "manifest.json").read_text())
    assert baked.base.env == expected
    follower = Follower(
        Definition(text="", steps=(Step(origin="", command=""),)), base_line="", report=Silent()
    )
    follower.line(f"{MARK} 1/1")
    for line in output.splitlines():
        follower.line(line)
    assert follower.env == expected
    # A base whose archive states its variables keeps them.
    stated = dataclasses.replace(about, base=dataclasses.replace(about.base, env={"PATH": "/"}))
    (tmp_path / "manifest.json").write_text(manifest.to_json(stated))
    subprocess.run(words, capture_output=True, check=True)
    assert manifest.from_json((tmp_path / "manifest.json").read_text()).base.env == {"PATH": "/"}


def failed(made: Definition, *lines: str) -> ToolFailed:
    follower = Follower(made, base_line="mine.yaml:3", report=Silent())
    for line in lines:
        follower.line(line)
    return follower.failed(ToolFailed("apptainer failed", hint="its last lines:\nx\nthe full log: /x.log"))


def test_failure_names_the_step_that_ran(made: Definition) -> None:
    count = len(made.steps)
    begun = [f"{MARK} {number}/{count}" for number in range(1, count + 1)]
    at = next(number for number, step in enumerate(made.steps, 1) if "echo 2" in step.text)
    said = [
        "out of it",
        "+ echo traced",
        "\x1b[91mFATAL:   while running %post section: exit status 7\x1b[0m",
    ]
    error = failed(made, *begun[:at], *said)
    assert error.where == "mine.yaml:9"
    assert error.what.endswith("failed with exit code 7")
    assert "out of it\nFATAL" in (error.hint or "")
    assert "/x.log" in (error.hint or "")
    # A program that prints a mark of another step changes nothing.
    assert failed(made, *begun[:at], begun[0], f"{MARK} 99/99", *said).where == "mine.yaml:9"


def test_failure_before_the_steps_is_the_bases(made: Definition) -> None:
    error = failed(made, "INFO:    Starting build...", "FATAL:   no such image")
    assert (error.where, error.what) == ("mine.yaml:3", "the base cannot be fetched: apptainer failed")
