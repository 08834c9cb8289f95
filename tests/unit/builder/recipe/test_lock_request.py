"""What a recipe asks of its lock, and which of its lines a stale lock does not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import LockedStep

Write = Callable[..., Path]

RECIPE = """
extends: cpu
image:
  apt: [tree, jq]
  constraints: {drop: [numpy]}
  pip:
    - packages: [rich]
      options: [--no-build-isolation]
      env: {MAX_JOBS: "4"}
    - requirements: needed.txt
    - packages: [einops]
"""
NEEDED = """
# what the group needs
--extra-index-url https://index.example.org/simple  # ours
numpy==1.26.4 \\
    --hash=sha256:00
"""


def changed(write: Write, old: str, new: str, *, needed: str = NEEDED) -> tuple[str, str]:
    """The place and the text of the difference that replacing `old` by `new` in the recipe makes."""
    write(NEEDED, "needed.txt")
    before = lock_file.request_of(load(write(RECIPE)))
    write(needed, "needed.txt")
    assert old in RECIPE
    recipe = load(write(RECIPE.replace(old, new, 1)))
    found = lock_file.difference(lock_file.request_of(recipe), before)
    assert found is not None
    return recipe.where(*found[0]), found[1]


def test_request_has_lines_of_requirements_files(write: Write) -> None:
    write(NEEDED, "needed.txt")
    first, second, _ = lock_file.request_of(load(write(RECIPE))).pip[-3:]
    assert first == LockedStep(requirements=("rich",), options=("--no-build-isolation",), env=("MAX_JOBS=4",))
    assert second.requirements == ("numpy==1.26.4     --hash=sha256:00",)
    assert second.options == ("--extra-index-url", "https://index.example.org/simple")


def test_credentials_of_an_index_are_not_in_a_request(write: Write) -> None:
    write("--extra-index-url https://me:word-9@index.example.org/simple\neinops\n", "needed.txt")
    text = """
image:
  base: registry.invalid/base:1
  pip:
    - packages: [rich]
      options: [--index-url, "https://word-9@index.example.org/simple"]
      env: {PIP_FIND_LINKS: "https://me:word-9@files.example.org/"}
    - requirements: needed.txt
"""
    request = lock_file.request_of(load(write(text)))
    assert "word-9" not in repr(request)
    assert request.pip[0].options == ("--index-url", "https://index.example.org/simple")


def test_same_recipe_has_no_difference(write: Write) -> None:
    write(NEEDED, "needed.txt")
    first = lock_file.request_of(load(write(RECIPE)))
    write(f"# a new comment{NEEDED}", "needed.txt")
    second = lock_file.request_of(load(write(f"description: new{RECIPE}")))
    assert lock_file.difference(second, first) is None


@pytest.mark.parametrize(
    ("old", "new", "place", "said"),
    [
        ("[tree, jq]", "\n  - tree\n  - jq\n  - htop", "mine.yaml:7", "'htop', which the lock does not know"),
        ("[tree, jq]", "[jq]", "mine.yaml:4", "no longer have 'tree'"),
        ("[tree, jq]", "[jq, tree]", "mine.yaml:4", "another order"),
        ("{drop: [numpy]}", "keep", "mine.yaml:5", "constraints: keep, and was drop numpy"),
        ("[rich]", "[rich>=13]", "mine.yaml:7", "'rich>=13'"),
        ("[einops]", "[wget, einops]", "mine.yaml:11", "'wget'"),
        ("[--no-build-isolation]", "[--pre]", "mine.yaml:8", "'--pre'"),
        ('"4"', '"8"', "mine.yaml:9", "'MAX_JOBS=8'"),
        ("    - packages: [einops]", "", "mine.yaml:7", "there are 3 pip steps, and were 4"),
        ("[einops]", "[einops]\n    - packages: [wget]", "mine.yaml:12", "there are 5 pip steps"),
        (
            "image:",
            "image:\n  base: other.example.org/torch:1",
            "mine.yaml:4",
            "the base is other.example.org",
        ),
    ],
)
def test_difference_names_line_of_recipe(write: Write, old: str, new: str, place: str, said: str) -> None:
    where, what = changed(write, old, new)
    assert where == place
    assert said in what


def test_changed_requirements_file_is_difference(write: Write) -> None:
    where, what = changed(write, "tree", "tree", needed="numpy==1.26.5\n")
    assert (where, "'numpy==1.26.5'" in what) == ("mine.yaml:10", True)


def test_other_base_of_command_line_is_difference(write: Write) -> None:
    write(NEEDED, "needed.txt")
    recipe = load(write(RECIPE))
    found = lock_file.difference(lock_file.request_of(recipe, base="mine:1"), lock_file.request_of(recipe))
    assert found is not None
    assert "the base is mine:1" in found[1]
