"""What a recipe asks of its lock; cli/refusals has stale locks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


def test_request_has_lines_of_requirements_files(write: Write) -> None:
    write(NEEDED, "needed.txt")
    first, second, _ = lock_file.make_request(load(write(RECIPE))).pip[-3:]
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
    request = lock_file.make_request(load(write(text)))
    assert "word-9" not in repr(request)
    assert request.pip[0].options == ("--index-url", "https://index.example.org/simple")


def test_same_recipe_has_no_difference(write: Write) -> None:
    write(NEEDED, "needed.txt")
    first = lock_file.make_request(load(write(RECIPE)))
    write(f"# a new comment{NEEDED}", "needed.txt")
    second = lock_file.make_request(load(write(f"description: new{RECIPE}")))
    assert lock_file.first_difference(second, first) is None
