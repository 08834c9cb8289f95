"""What public Dockerfiles and definition files do, as recipes; those that are refused are in ``malformed``.

Each file in ``public`` is a case in our own words. ``# renders TEXT`` is in its Dockerfile.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from imgkit_builder.image import render
from imgkit_builder.recipe.load import load

FOLDER = Path(__file__).parent / "public"
CASES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_recipe_is_expressible(case):
    recipe = load(case)
    text = render.render_dockerfile(recipe)
    parts = re.findall(r"^# renders (.+)$", case.read_text(), re.MULTILINE)
    assert parts
    assert [part for part in parts if part not in text] == []
    assert render.render_definition(recipe).startswith(f"# {case.stem} for ")


def test_no_line_of_a_definition_begins_a_section():
    """Text of a command stays one line there: ``%files`` in a heredoc would end ``%post``."""
    text = render.render_definition(load(FOLDER / "large-model-lts.yaml"))
    assert "[global]\\nno-cache-dir" in text


def test_build_argument_replaces_the_value(tmp_path):
    case = FOLDER / "video-model-with-a-number.yaml"
    recipe = load(case, build_args=["MAX_JOBS=2"])
    assert 'ARG MAX_JOBS="2"' in render.render_dockerfile(recipe)
    assert recipe.sha256 != load(case).sha256


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("/x:$PATH", '"/x${PATH:+:$PATH}"'),
        ("${PATH}:/x", '"${PATH:+$PATH:}/x"'),
        ("/a:$PATH:/b", '"/a${PATH:+:$PATH}:/b"'),
        ("/a b$c:$PATH", '"/a b\\$c${PATH:+:$PATH}"'),
        ("/x:$PATHS", '"/x:\\$PATHS"'),
    ],
)
def test_variable_adds_to_the_base_s_value(tmp_path, value, quoted):
    file = tmp_path / "one.yaml"
    file.write_text(f"extends: mn5\nimage:\n  env: {{PATH: '{value}'}}\n")
    assert f"PATH={quoted}" in render.render_dockerfile(load(file))


def test_user_of_the_base_comes_back():
    text = render.render_dockerfile(load("mn5"), base_user="jo")
    users = [line for line in text.splitlines() if line.startswith("USER")]
    assert users == ['USER "root"', 'USER "jo"']
    assert "\nUSER" not in render.render_dockerfile(load("mn5"), base_user="0:0")
