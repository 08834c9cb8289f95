"""The Singularity definition file as text, and what it refuses."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from imgkit_builder.image import render
from imgkit_builder.recipe.model import CopyStep, PipStep, Recipe
from imgkit_entrypoints.errors import UsageError

MakeRecipe = Callable[..., Recipe]


def section(text: str, name: str) -> list[str]:
    body = text.split(f"\n%{name}\n", 1)[1].split("\n%", 1)[0]
    return [line.strip() for line in body.splitlines() if line.strip() and not line.strip().startswith("#")]


def test_sections_from_the_same_model(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(apt=("git",), env={"A": "1"}, labels={"team": "x"})
    text = render.render_definition(recipe)
    assert "\nBootstrap: docker\n# mine.yaml:3\nFrom: example.org/base:1\n" in text
    assert section(text, "environment") == ["export PYTHONNOUSERSITE=1", "export A=1"]
    assert "team x" in section(text, "labels")
    assert section(text, "post")[0] == "set -e"


def test_nasty_variables_survive_the_shell(make_recipe: MakeRecipe) -> None:
    value = 'it\'s $HOME "q" \\ `id` # x'
    lines = section(render.render_definition(make_recipe(env={"A": value})), "environment")
    assert shlex.split(lines[-1]) == ["export", f"A={value}"]


def test_files_are_context_members(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(
        pip=(PipStep(requirements=Path("/r.txt")),), copy=(CopyStep(source=Path("/x"), target="/a b/"),)
    )
    text = render.render_definition(recipe)
    assert "imgkit/requirements-0.txt /opt/imgkit/requirements-0.txt" in section(text, "files")
    assert "copy/0 /opt/imgkit/copy/0" in section(text, "files")
    assert "cp -RP -- /opt/imgkit/copy/0/. '/a b'" in section(text, "post")


def test_run_steps_keep_to_themselves(make_recipe: MakeRecipe) -> None:
    post = section(render.render_definition(make_recipe(run=("cd / && exit 0",), workdir="/w")), "post")
    assert "(cd -- /w && sh -c 'cd / && exit 0')" in post


def test_braces_of_a_build_argument_stay_in_a_dockerfile(make_recipe: MakeRecipe) -> None:
    assert "echo {{ name }}" in render.render_dockerfile(make_recipe(run=("echo {{ name }}",)))


def test_label_with_a_space_in_its_name_is_refused(make_recipe: MakeRecipe) -> None:
    with pytest.raises(UsageError) as caught:
        render.render_definition(make_recipe(labels={"two words": "x"}))
    reason = "white space in its name or around its value cannot appear in a definition file"
    assert caught.value.what == f"label 'two words': {reason}"
