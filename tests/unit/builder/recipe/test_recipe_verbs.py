"""``imgkit list``, ``show`` and ``check``, and values as JSON, which may be of unknown origin."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.recipe import targets
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints import system
from imgkit_entrypoints.errors import UsageError
from imgkit_recipes import recipe_names

Write = Callable[..., Path]


def test_list_names_every_shipped_recipe(call):
    _, out, _ = call("list")
    assert [line.split()[0] for line in out.splitlines()] == list(recipe_names())
    content = json.loads(call("list", "--json")[1])
    assert content["schema"] == 1
    assert [recipe["name"] for recipe in content["recipes"]] == list(recipe_names())


def test_show_tells_where_each_value_stands(call):
    _, out, _ = call("show", "mn5-llm")
    for row in (
        r"image\.base +nvcr\.io/nvidia/pytorch:24\.03-py3 +mn5\.yaml:\d+",
        r"image\.pip\[1\]\.packages\[0\] +\S+ +mn5-llm\.yaml:\d+",
        r"image\.workdir +/workspace +default",
        r"image\.constraints +keep +default",
    ):
        assert re.search(f"^{row}$", out, re.MULTILINE)


def test_show_json_agrees_with_the_file(call):
    content = json.loads(call("show", "olivia-eap", "--json")[1])
    assert content["schema"] == 1
    assert content["image"]["platforms"] == ["linux/arm64"]
    for value in content["values"]:
        assert value["default"] == (value["line"] is None)
        if not value["default"] and isinstance(value["value"], str):
            line = Path(value["file"]).read_text().splitlines()[value["line"] - 1]
            assert value["value"].removeprefix("linux/") in line[value["column"] - 1 :]


def test_check_of_good_files_exits_zero(write, call):
    file = write("image: {base: 'python:3'}\n")
    assert call("check", str(file)) == (0, f"ok   {file}\n", "")


def test_warning_goes_to_stderr_only(write, call):
    code, out, err = call("show", str(write("image: {base: 'python:3', env: {MY_TOKEN: abc}}\n")), "--json")
    assert code == 0
    assert "looks like a secret" in err
    assert json.loads(out)["warnings"]


def test_check_without_strict_passes_with_a_warning(write, call):
    file = write("image: {base: 'python:3.9'}\nsystem: {runtime: {command: /tmp/evil}}\n")
    code, out, err = call("check", str(file))
    assert (code, out) == (0, f"ok   {file}\n")
    assert err.count("warning: ") == err.count("has Python 3.9") == 1


def test_tagged_name_is_taken_for_an_image(call):
    code, _, err = call("show", "imgkit-test/absent:none")
    assert code != 0
    assert "recipe" not in err.partition("->")[0]


def test_schema_is_one_json_object(call):
    assert json.loads(call("check", "--schema")[1])["title"] == "imgkit recipe"


def test_strict_check_of_shipped_recipes_finds_nothing(write, call):
    file = write("extends: mn5\nimage: {copy: [{source: ., target: /workspace/x}]}\n", "mine.yaml")
    code, _, err = call("check", "--strict", *recipe_names(), str(file))
    assert (code, err) == (0, "")


# ---- values as JSON


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
def test_json_says_what_the_recipe_says(name):
    recipe, target = load(name), read(described(name))
    assert (target.name, target.system) == (recipe.name, recipe.system)
    assert target.platforms == recipe.image.platforms


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("queue", "name", "a\n#SBATCH --x", "system.queue.name: contains a line break"),
        ("runtime", "command", "a; b", "system.runtime.command: 'a; b' is not one word"),
    ],
)
def test_value_that_no_recipe_has_is_refused(part, key, value, message):
    content = described("mn5")
    content["system"][part][key] = value
    # The reader of an image's system refuses numbers, and its caller names the image.
    with pytest.raises((UsageError, ValueError), match=message):
        read(content)


def test_every_broken_rule_is_named():
    content = described("mn5")
    content["name"], content["image"]["platforms"] = "../x", ["linux/riscv64"]
    with pytest.raises(UsageError) as caught:
        read(content)
    for fault in ("name: the name '../x'", "image.platform[0]: 'linux/riscv64'"):
        assert fault in str(caught.value)


def test_rules_of_the_scheduler_apply_to_json():
    content = described("mn5")
    content["system"]["scheduler"] = "slrum"
    with pytest.raises(UsageError, match="did you mean slurm"):
        read(content)
