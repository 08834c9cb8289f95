"""The definition that a build runs, and what its first step notes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from file_tree import write_files

from imgkit_builder.apptainer import definition
from imgkit_builder.apptainer.definition import DefinitionBase
from imgkit_builder.oci import manifest
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_builder.recipe.model import Recipe
from imgkit_builder.sif.entries import Archive

BASE = DefinitionBase(
    source=Archive(path=Path("/base.tar")), image=BaseImage(name="b:1", platform="linux/amd64")
)
MANIFEST = Manifest(
    imgkit="1", recipe="r", recipe_sha256="0", base=BASE.image, platform="linux/amd64", wheel_sha256="1"
)


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for imgkit's folder in the image."""
    monkeypatch.setattr(definition, "INSIDE", str(tmp_path))
    return tmp_path


@pytest.fixture
def text(make_recipe: Callable[..., Recipe]) -> str:
    recipe = make_recipe(run=("echo 1", "echo 2"), lines={("image", "run", 1): 9})
    return definition.render_definition(recipe, BASE, {"a.label": "b  c", "empty": ""})


def test_definition_names_the_line_of_each_step(text):
    lines = text.split("\n")
    assert lines[0] == "Bootstrap: oci"
    assert "    a.label b c" in lines
    assert lines.index("# imgkit: inspect the base") < lines.index("# imgkit: the links of copied folders")
    step = lines.index("(cd -- /workspace && sh -c 'echo 2')")
    assert lines[step - 1].endswith("mine.yaml:9")


def test_post_is_a_shell_script(text):
    post = text.split("%post\n")[1].split("\n%")[0]
    assert subprocess.run(["sh", "-n"], input=post, text=True, check=False).returncode == 0


def test_links_keep_odd_names(inside):
    links = {"it's a $x": "../to; rm", "b": "-f"}
    subprocess.run(["sh"], input=definition.make_links_script(links), text=True, check=True)
    assert {name: str((inside / name).readlink()) for name in links} == links


def complete_manifest(folder: Path, stated: Manifest) -> Manifest:
    """Return the manifest after the first step has looked into this machine as the base."""
    file = folder / "manifest.json"
    file.write_text(manifest.to_json(stated))
    argv = [sys.executable, "-I", "-B", "-c", definition.make_inspection_program()]
    subprocess.run(argv, capture_output=True, check=True)
    return manifest.from_json(file.read_text())


def test_look_completes_the_manifest(inside):
    completed = complete_manifest(inside, MANIFEST)
    base = completed.base
    assert (base.probe.python, base.probe.skipped) == (sys.version.split()[0], "")
    unchanged = dataclasses.replace(base, probe=BASE.image.probe, env={})
    assert dataclasses.replace(completed, base=unchanged) == MANIFEST


def test_look_finds_variables_of_a_base_that_states_none(inside, monkeypatch):
    monkeypatch.setattr(definition, "RUNTIME", str(inside))
    lines = 'export PATH="/base/bin:/usr/bin:/bin"\nexport NCCL_NET_PLUGIN="${NCCL_NET_PLUGIN:-"spcx"}"\n'
    scripts = {"10-docker2singularity.sh": lines, "90-environment.sh": "export LINES='a\nb' X=1\n"}
    write_files(inside / "env", scripts)
    monkeypatch.setenv("NCCL_NET_PLUGIN", "of the host")
    assert complete_manifest(inside, MANIFEST).base.env == {
        "LINES": "a\nb",
        "NCCL_NET_PLUGIN": "spcx",
        "PATH": "/base/bin:/usr/bin:/bin",
        "X": "1",
    }
    # A base whose archive states its variables keeps them.
    stated = dataclasses.replace(MANIFEST, base=dataclasses.replace(BASE.image, env={"PATH": "/"}))
    assert complete_manifest(inside, stated).base.env == {"PATH": "/"}
