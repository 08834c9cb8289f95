"""``imgkit list``, ``show`` and ``check`` as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from imgkit_recipes import recipe_names

Write = Callable[..., Path]

MAIN = "import sys; from imgkit_builder.cli.app import main; main()"


def imgkit(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Only these verbs, so that a fault in another's module is not told here."""
    return subprocess.run([sys.executable, "-c", MAIN, *argv], capture_output=True, text=True, cwd=cwd)


def test_list_names_every_shipped_recipe() -> None:
    result = imgkit("list")
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(recipe_names())
    content = json.loads(imgkit("list", "--json").stdout)
    assert content["schema"] == 1
    assert [recipe["name"] for recipe in content["recipes"]] == list(recipe_names())


def test_show_tells_where_each_value_stands() -> None:
    rows = {line.split()[0]: line.split() for line in imgkit("show", "mn5-llm").stdout.splitlines()[4:]}
    assert rows["image.base"][1] == "nvcr.io/nvidia/pytorch:24.03-py3"
    assert rows["image.base"][2].startswith("mn5.yaml:")
    assert rows["image.pip[1].packages[0]"][2].startswith("mn5-llm.yaml:")
    assert rows["image.workdir"][2] == "default"
    assert rows["image.constraints"][1:] == ["keep", "default"]


def test_show_json_agrees_with_the_file() -> None:
    content = json.loads(imgkit("show", "olivia-eap", "--json").stdout)
    assert content["schema"] == 1
    assert content["image"]["platforms"] == ["linux/arm64"]
    for value in content["values"]:
        assert value["default"] == (value["line"] is None)
        if not value["default"] and isinstance(value["value"], str):
            line = Path(value["file"]).read_text().splitlines()[value["line"] - 1]
            assert value["value"].removeprefix("linux/") in line[value["column"] - 1 :]


def test_check_of_good_files_exits_zero(write: Write) -> None:
    file = write("image: {base: 'python:3'}\n")
    result = imgkit("check", str(file))
    assert (result.returncode, result.stdout, result.stderr) == (0, f"ok   {file}\n", "")


def test_warning_goes_to_stderr_only(write: Write) -> None:
    result = imgkit("show", str(write("image: {base: 'python:3', env: {MY_TOKEN: abc}}\n")), "--json")
    assert result.returncode == 0
    assert "looks like a secret" in result.stderr
    assert json.loads(result.stdout)["warnings"]


def test_check_without_strict_passes_with_a_warning(write: Write) -> None:
    file = write("image: {base: 'python:3.9'}\nsystem: {runtime: {command: /tmp/evil}}\n")
    result = imgkit("check", str(file))
    assert (result.returncode, result.stdout) == (0, f"ok   {file}\n")
    assert result.stderr.count("warning: ") == result.stderr.count("has Python 3.9") == 1


def test_tagged_name_is_taken_for_an_image() -> None:
    result = imgkit("show", "imgkit-test/absent:none")
    assert result.returncode != 0
    assert "recipe" not in result.stderr.partition("->")[0]


def test_schema_is_one_json_object() -> None:
    assert json.loads(imgkit("check", "--schema").stdout)["title"] == "imgkit recipe"


def test_strict_check_of_shipped_recipes_finds_nothing(write: Write) -> None:
    file = write("extends: mn5\nimage: {copy: [{source: ., target: /workspace/x}]}\n", "mine.yaml")
    result = imgkit("check", "--strict", *recipe_names(), str(file))
    assert (result.returncode, result.stderr) == (0, "")
