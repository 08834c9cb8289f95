"""What pip and apt said becomes an error at the line of the recipe that asked for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from imgkit_builder.lock.answers import Unresolved, explain, read_failure
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import UV_STEP, Recipe
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

RECIPE = """\
image:
  base: registry.invalid/base:1
  apt:
    - jq
    - no-such-thing
  pip:
    - packages:
        - einops
        - torch==2.1.0
        - Flash_Attn==2.5.5
    - requirements: needed.txt
"""
CONFLICT = """\
Collecting einops
WARNING: something
ERROR: Cannot install torch==2.1.0 because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested torch==2.1.0
    The user requested (constraint) torch==2.13.0+cpu
"""
NO_MATCH = "ERROR: No matching distribution found for deepspeed==0.13.1\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "needed.txt").write_text("# ours\nnumpy\ndeepspeed==0.13.1\n")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return load(str(tmp_path / "mine.yaml"))


def error_of(recipe: Recipe, step: int | str, output: str) -> ImgkitError:
    return explain(recipe, Unresolved(step, output=output), log="build.log")


def test_package_without_wheel_names_its_line_and_the_remedy(recipe: Recipe) -> None:
    error = explain(recipe, Unresolved(0, "no wheel", "x==1, flash-attn==2.5.5"), log="")
    assert isinstance(error, UsageError)
    assert (error.where or "").endswith("mine.yaml:10")
    assert (error.hint or "").endswith("mine.yaml --keep-files")


def test_line_of_a_requirements_file_is_named(recipe: Recipe) -> None:
    error = error_of(recipe, 1, NO_MATCH)
    assert (error.where or "").endswith("mine.yaml:11 (needed.txt:3)")
    assert NO_MATCH.strip() in (error.hint or "")


def test_other_torch_is_refused_at_its_line(recipe: Recipe) -> None:
    error = error_of(recipe, 0, CONFLICT)
    assert (error.where or "").endswith("mine.yaml:9")
    assert "another torch than the base's 2.13.0+cpu" in error.what
    assert "Collecting" not in (error.hint or "")


def test_unknown_apt_package_is_named(recipe: Recipe) -> None:
    error = error_of(recipe, "apt", "Reading...\nE: Unable to locate package no-such-thing\n")
    assert (error.where or "").endswith("mine.yaml:5")
    assert "E: Unable to locate package no-such-thing" in (error.hint or "")


def test_package_without_match_names_the_remedy(recipe: Recipe) -> None:
    error = error_of(recipe, 1, NO_MATCH)
    assert isinstance(error, UsageError)
    assert "no index has a wheel of deepspeed==0.13.1" in error.what
    assert "mine.yaml --keep-files" in (error.hint or "")


def test_old_pip_is_named(recipe: Recipe) -> None:
    error = error_of(recipe, 0, "Usage: pip install\n\nno such option: --report\n")
    assert isinstance(error, UsageError)
    assert "the base's pip is older than 22.2" in error.what
    assert "{command: python3 -m pip install 'pip>=23', after: base}" in (error.hint or "")


def test_uv_step_is_named(recipe: Recipe) -> None:
    position = dataclasses.replace(recipe.positions["image", "apt"], line=99)
    recipe = dataclasses.replace(recipe, positions={**recipe.positions, ("image", "uv"): position})
    assert (error_of(recipe, UV_STEP, NO_MATCH).where or "").endswith("mine.yaml:99")


@pytest.mark.parametrize("text", ["", "pip\nx", "-2\nx", "99999\nx", "٣\nx"])
def test_failure_of_no_step_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the failure names no step of a recipe"):
        read_failure(text)


def test_step_is_named_where_no_line_asks_for_the_package(recipe: Recipe) -> None:
    assert (error_of(recipe, 0, NO_MATCH).where or "").endswith("mine.yaml:7")


@pytest.mark.parametrize(
    "output",
    [
        "WARNING: Retrying after connection broken by 'NewConnectionError(...)'\n" + NO_MATCH,
        "E: Failed to fetch http://a.example/x  Temporary failure resolving 'a.example'\n",
    ],
)
def test_network_fault_is_no_fault_of_the_recipe(recipe: Recipe, output: str) -> None:
    error = error_of(recipe, 0, output)
    assert isinstance(error, ToolFailed)
    assert "network" in error.what


def test_words_of_a_setup_py_are_quoted(recipe: Recipe) -> None:
    output = (
        "Collecting flash-attn==2.5.5\n  error: subprocess-exited-with-error\n  x egg_info did not run\n"
        "      FileNotFoundError: [Errno 2] No such file or directory: 'git'\n      [end of output]\n"
        "error: metadata-generation-failed\nhint: See above for details.\n"
    )
    error = error_of(recipe, 0, output)
    assert "the source of flash-attn==2.5.5 cannot be prepared" in error.what
    assert "No such file or directory: 'git'" in (error.hint or "")
    assert "See above" not in (error.hint or "")
    assert (error.where or "").endswith("mine.yaml:10")


def test_failed_build_of_a_wheel_quotes_its_end(recipe: Recipe) -> None:
    output = (
        "building\nnvcc was not found\n      [end of output]\n  ERROR: Failed building wheel for flash-attn\n"
    )
    error = error_of(recipe, 0, output)
    assert isinstance(error, ToolFailed)
    assert "the wheel of flash-attn cannot be built" in error.what
    assert (error.where or "").endswith("mine.yaml:10")
    assert "nvcc was not found" in (error.hint or "")
    assert "build.log" in (error.hint or "")
