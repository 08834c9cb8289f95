"""Errors under ``--json``: one object on stdout, whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BROKEN = "description: x\nimage:\n  base: 3\n  runn: [a]\n"


def test_error_is_one_object(call: Any) -> None:
    code, out, err = call("build", "no-such-recipe", "--json")
    error = json.loads(out)["error"]
    assert (code, error["exit_code"], error["where"]) == (2, 2, None)
    assert "no recipe 'no-such-recipe'" in error["what"]
    assert "mn5" in error["hint"]
    assert json.loads(err)["event"] == "error"


@pytest.mark.parametrize(
    "words",
    [
        ("build", "--json"),
        ("build", "mn5", "--tagg", "x", "--json"),
        ("build", "mn5", "--builder", "no-such", "--json"),
        ("no-such-verb", "--json"),
        ("schema", "--json"),
        ("--json",),
    ],
)
def test_wrong_command_line_is_one_object(call: Any, words: tuple[str, ...]) -> None:
    code, out, _ = call(*words)
    error = json.loads(out)["error"]
    assert (code, error["exit_code"]) == (2, 2)
    assert "--help" in error["hint"]


def test_words_of_the_users_program_do_not_count(call: Any) -> None:
    code, out, err = call("run", "--dry-run", "no-such-recipe", "--", "dist-env", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("imgkit: ")


def test_text_stays_without_json(call: Any) -> None:
    code, out, err = call("build", "mn5", "--tagg", "x")
    assert (code, out) == (2, "")
    assert "No such option: --tagg" in err


def test_unreadable_folder_is_an_object(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/closed")

    monkeypatch.setattr("imgkit_builder.recipe.load.load", refuse)
    code, out, _ = call("build", "mn5", "--json")
    error = json.loads(out)["error"]
    assert (code, error["what"], error["where"]) == (4, "Permission denied", "/closed")


def test_interrupt_is_an_object(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("imgkit_builder.recipe.load.load", interrupt)
    code, out, _ = call("build", "mn5", "--json")
    assert (code, json.loads(out)["error"]["exit_code"]) == (130, 130)


def test_recipe_error_lists_all_problems(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(BROKEN)
    code, out, _ = call("build", str(file), "--json")
    problems = json.loads(out)["error"]["problems"]
    assert code == 2
    assert {problem["key"] for problem in problems} >= {"image.base", "image.runn"}
    assert all("broken.yaml:" in problem["where"] for problem in problems)


def test_check_answers_for_every_recipe(call: Any, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(BROKEN)
    code, out, err = call("check", "mn5", str(file), "/no-such-file.yaml", "--json")
    answer = json.loads(out)
    assert (code, answer["passed"], err) == (2, False, "")
    assert [row["passed"] for row in answer["recipes"]] == [True, False, False]
    assert answer["recipes"][1]["problems"][0]["where"].startswith(str(file))


def test_check_of_good_recipes_passes(call: Any) -> None:
    code, out, _ = call("check", "mn5", "cpu", "--json")
    assert (code, json.loads(out)["passed"]) == (0, True)
