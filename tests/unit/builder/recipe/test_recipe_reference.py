"""docs/reference/recipes.md agrees with the code: it has every key, and its examples are recipes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from file_tree import write_files

from imgkit_builder.recipe.load import APPENDED, load
from imgkit_builder.recipe.model import Document
from imgkit_builder.recipe.problems import key_text
from imgkit_builder.recipe.validation import key_paths

Write = Callable[..., Path]
TEXT = (Path(__file__).parents[4] / "docs/reference/recipes.md").read_text()
LOCKED = Path(__file__).parents[3] / "golden" / "recipes" / "locked"
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


NAMED = ("system", "partitions")
"""The mapping whose keys are the user's names, with keys of imgkit below them."""


def key_paths_in(value: object, *path: str) -> Iterator[tuple[str, ...]]:
    """The place of every key in a recipe's text; items of a list do not count."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield (*path, key)
            yield from key_paths_in(below, *path, key)
    elif isinstance(value, list):
        for below in value:
            yield from key_paths_in(below, *path)


def test_reference_has_every_key():
    free = {("image", "env"), ("image", "labels"), ("system", "env"), ("system", "queue", "limits")}
    free |= {("image", "pip", "env"), ("image", "args"), ("system", "known_issues", "env")}
    paths = {path for path in key_paths_in(yaml.safe_load(BLOCKS[1])) if path[:-1] not in free}
    paths = {(*path[:2], "*", *path[3:]) if path[:2] == NAMED and path[2:] else path for path in paths}
    paths -= {(*NAMED, "*")}
    assert paths == (set(key_paths(Document)) - {("image", "constraints", "policy")}) | {("extends",)}


def test_example_with_every_key_loads(write):
    # Of two keys that only one scheduler each obeys, a recipe can have one.
    file = write(re.sub(r"^ *node_pools: .*\n", "", BLOCKS[1], flags=re.MULTILINE))
    shutil.copytree(LOCKED, file.parent, dirs_exist_ok=True)
    texts = {"src/x": "", "patches/x": "", "requirements.txt": "einops"}
    write_files(file.parent, {**texts, "company.crt": "-----BEGIN CERTIFICATE-----"})
    recipe = load(file)
    assert recipe.system.queue.chunk == ("sales_op=blanca",)
    assert recipe.image.constraints.drop == ("numpy",)


def test_reference_names_every_appended_list():
    row = next(line for line in TEXT.splitlines() if "| append:" in line)
    assert set(re.findall(r"`([\w.]+)`", row.split("|")[1])) == {key_text(path) for path in APPENDED}


def test_example_of_the_reference_loads(write):
    example = BLOCKS[0]
    recipe = load(write(example))
    assert recipe.image.apt == ("git",)
    assert recipe.system.title == "MareNostrum 5 ACC"


def test_table_of_traps_is_what_yaml_does():
    assert yaml.safe_load("[24.10, 3:00:00, yes, 0022]") == [24.1, 10800, True, 18]
