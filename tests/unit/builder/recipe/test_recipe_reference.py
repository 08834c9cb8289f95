"""docs/recipes.md is true: every key is in it, and its example is a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import yaml

from imgkit_builder.recipe.extends import APPENDED
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.problems import key_text
from imgkit_builder.recipe.typecheck import places

Write = Callable[..., Path]
TEXT = (Path(__file__).parents[4] / "docs" / "recipes.md").read_text()
ROWS = re.findall(r"^\| `([\w.]+)` \|", TEXT.partition("## How `extends`")[0], re.MULTILINE)


def test_reference_has_every_key() -> None:
    wanted = {"extends"}
    for place in places():
        if place[:2] == ("image", "constraints") and len(place) == 3:
            continue
        name = key_text(place)
        wanted.add(name.removeprefix("system.") if name.startswith("system.") else place[-1])
    sections = {"runtime", "node", "fabric", "queue", "transfer", "platforms"}
    assert set(ROWS) == (wanted - sections) | {"platform"}


def test_reference_names_every_appended_list() -> None:
    row = next(line for line in TEXT.splitlines() if "| append:" in line)
    assert set(re.findall(r"`([\w.]+)`", row.split("|")[1])) == {key_text(path) for path in APPENDED}


def test_example_of_the_reference_loads(write: Write) -> None:
    example = TEXT.split("```yaml\n")[1].split("```")[0]
    recipe = load(write(example))
    assert recipe.image.apt == ("git",)
    assert recipe.system.title == "MareNostrum 5 ACC"


def test_table_of_traps_is_what_yaml_does() -> None:
    assert yaml.safe_load("[24.10, 3:00:00, yes, 0022]") == [24.1, 10800, True, 18]
