from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.recipe import targets
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints import system
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import recipe_names


def described(recipe: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(targets.describe_as_json(load(recipe)))
    return content


def read(content: dict[str, Any]) -> Target:
    """Check the values as those of an image's own system are checked."""
    target = Target(
        name=content["name"],
        system=system.from_json(json.dumps(content["system"])),
        platforms=tuple(content["image"]["platforms"]),
        file=Path("mine.json"),
    )
    return targets.validate_target(target)


@pytest.mark.parametrize("name", recipe_names())
def test_json_says_what_the_recipe_says(name: str) -> None:
    recipe, target = load(name), read(described(name))
    assert (target.name, target.system, target.platforms) == (
        recipe.name,
        recipe.system,
        recipe.image.platforms,
    )


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("queue", "name", "a\n#SBATCH --x", "system.queue.name: contains a line break"),
        ("runtime", "command", "a; b", "system.runtime.command: 'a; b' is not one word"),
    ],
)
def test_value_that_no_recipe_has_is_refused(part: str, key: str, value: object, message: str) -> None:
    content = described("mn5")
    content["system"][part][key] = value
    # The reader of an image's system refuses numbers, and its caller names the image.
    with pytest.raises((UsageError, ValueError), match=message):
        read(content)


def test_every_broken_rule_is_named() -> None:
    content = described("mn5")
    content["name"], content["image"]["platforms"] = "../x", ["linux/riscv64"]
    with pytest.raises(UsageError) as caught:
        read(content)
    for fault in ("name: the name '../x'", "image.platform[0]: 'linux/riscv64'"):
        assert fault in str(caught.value)


def test_rules_of_the_scheduler_apply_to_json() -> None:
    content = described("mn5")
    content["system"]["scheduler"] = "slrum"
    with pytest.raises(UsageError, match="did you mean slurm"):
        read(content)
