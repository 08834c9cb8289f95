"""The rendered definition file under a real runtime: files, variables and labels come out as they went in.

Without ``%post`` and its base: running that needs privileges that not every machine gives, and its text is
checked by shellcheck and, as RUN lines, by real Docker builds.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from imgkit_builder.image import context, render
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.recipe.model import CopyStep, Image, Recipe
from imgkit_entrypoints.system import SystemFacts

pytestmark = pytest.mark.singularity

ENV = {
    "SPACES": "two  spaces",
    "QUOTES": 'it\'s "$HOME" `id` \\n',
    "HASH": "# no comment",
    "BRACES": "{{ a.b }} {{.ID}}",
}
LABELS = {"nasty.label": 'it\'s "$HOME" \\ # `id`', "percent": "%post"}


def test_values_files_and_labels_are_exact(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a b.py").write_text("x = 1\n")
    recipe = Recipe(
        name="nasty",
        image=Image(base="b:1", env=ENV, labels=LABELS, copy=(CopyStep(source=tmp_path / "code"),)),
        system=SystemFacts(),
        file=Path("/nasty.yaml"),
        sha256="0" * 64,
        positions={},
    )
    packed = context.pack_context(recipe, base=BaseImage(name="b:1"), platform="linux/amd64", revision="")
    with packed.open() as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extractall(tmp_path / "context")  # noqa: S202 - made one line above; Python 3.11.2 has no filter
    (tmp_path / "root" / "bin").mkdir(parents=True)
    text = render.render_definition(recipe).replace("\nBootstrap: docker\n", "\nBootstrap: localimage\n")
    text = text.replace("\nFrom: b:1\n", f"\nFrom: {tmp_path}/root\n")
    (tmp_path / "nasty.def").write_text(
        re.sub(r"\n%post\n.*?\n%environment\n", "\n%environment\n", text, flags=re.S)
    )
    command = shutil.which("singularity") or shutil.which("apptainer") or ""
    result = subprocess.run(
        [command, "build", "--force", "--sandbox", tmp_path / "out", tmp_path / "nasty.def"],
        cwd=tmp_path / "context",
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    built = tmp_path / "out"
    assert (built / "opt/imgkit/copy/0/a b.py").read_text() == "x = 1\n"
    assert json.loads((built / "opt/imgkit/manifest.json").read_text())["recipe"] == "nasty"
    labels = json.loads((built / ".singularity.d/labels.json").read_text())
    assert {key: labels[key] for key in LABELS} == LABELS
    sourced = subprocess.run(
        ["/bin/sh", "-c", f". {built}/.singularity.d/env/90-environment.sh; env -0"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    env = dict(line.split("=", 1) for line in sourced.stdout.split("\0") if line)
    assert {key: env[key] for key in ENV} == ENV
