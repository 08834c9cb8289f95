"""``imgkit list``, ``show`` and ``check`` as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from imgkit_recipes import recipe_names

Write = Callable[..., Path]

MAIN = "import sys; from imgkit_builder.cli.app import main; main()"


def imgkit(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Only these verbs, so that a fault in another's module is not told here."""
    return subprocess.run([sys.executable, "-c", MAIN, *argv], capture_output=True, text=True, cwd=cwd)


def test_list_names_every_shipped_recipe() -> None:
    done = imgkit("list")
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(recipe_names())
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


def test_check_goes_through_every_file(write: Write) -> None:
    good = write("image: {base: 'python:3'}\n", "good.yaml")
    write("image: {base: Python}\n", "bad.yaml")
    write("image: {base: 'python:3', apt: [Git]}\n", "worse.yaml")
    done = imgkit("check", "bad.yaml", "good.yaml", "worse.yaml", "absent.yaml", "mn5", cwd=good.parent)
    assert done.returncode == 2
    said = done.stdout.split()
    assert said == [
        "bad",
        "bad.yaml",
        "ok",
        "good.yaml",
        "bad",
        "worse.yaml",
        "bad",
        "absent.yaml",
        "ok",
        "mn5",
    ]
    assert "imgkit: bad.yaml:1:15: image.base: " in done.stderr
    assert "\nimgkit: worse.yaml:1:33: image.apt[0]: " in done.stderr
    assert "there is no file absent.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_of_good_files_exits_zero(write: Write) -> None:
    file = write("image: {base: 'python:3'}\n")
    done = imgkit("check", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"ok   {file}\n", "")


def test_warning_goes_to_stderr_only(write: Write) -> None:
    done = imgkit("show", str(write("image: {base: 'python:3', env: {MY_TOKEN: abc}}\n")), "--json")
    assert done.returncode == 0
    assert "looks like a secret" in done.stderr
    assert json.loads(done.stdout)["warnings"]


@pytest.mark.parametrize("name", ["nm5", "./nothing.yaml", ""])
def test_unknown_recipe_exits_two(name: str) -> None:
    done = imgkit("show", name)
    assert done.returncode == 2
    assert done.stderr.startswith("imgkit: ")
    assert done.stdout == ""


def test_tagged_name_is_taken_for_an_image() -> None:
    done = imgkit("show", "imgkit-test/absent:none")
    assert done.returncode != 0
    assert "recipe" not in done.stderr.partition("->")[0]


def test_schema_is_one_json_object() -> None:
    assert json.loads(imgkit("check", "--schema").stdout)["title"] == "imgkit recipe"


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--schema", "mn5"), "--schema takes no FILE"), ((), "no recipe given")],
)
def test_check_refuses_what_it_cannot_mean(words: tuple[str, ...], message: str) -> None:
    done = imgkit("check", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


STRANGERS = """
extends: {parent}
image:
  secrets:
    - {{id: key, file: ~/.ssh/id_rsa}}
    - {{id: token, env: HF_TOKEN}}
  run:
    - {{command: make, secrets: [key, token]}}
system:
  runtime:
    command: /tmp/evil
    options: [--nv, --writable]
    modules: [/tmp/evil-module]
    binds: [/root]
    host_libs: [/tmp/lib]
  fabric: {{host_libs: auto}}
  env: {{LD_PRELOAD: /tmp/evil.so, NCCL_DEBUG: WARN}}
  queue: {{options: [--launch-agent, /tmp/evil]}}
"""


def test_strict_check_lists_what_a_recipe_does_on_this_machine(write: Write) -> None:
    file = write(STRANGERS.format(parent="lambda"), "strange.yaml")
    relaxed = imgkit("check", "strange.yaml", cwd=file.parent)
    assert (relaxed.returncode, "evil" in relaxed.stderr) == (0, False), relaxed.stderr
    done = imgkit("check", "strange.yaml", "--strict", cwd=file.parent)
    assert (done.returncode, done.stdout) == (1, "warn strange.yaml\n"), done.stderr
    for what in (
        "system.runtime.command: runs the program /tmp/evil",
        "the option --writable",
        "the option --launch-agent",
        "the module file /tmp/evil-module",
        "see /root",
        "load libraries from /tmp/lib",
        "system.fabric.host_libs: programs of the image see /usr and /opt",
        "sets LD_PRELOAD",
        f"the file {Path.home()}/.ssh/id_rsa",
        "the variable HF_TOKEN",
    ):
        assert done.stderr.count(what) == 1, (what, done.stderr)
    assert "--nv" not in done.stderr.replace("options: [--nv", "")
    found = json.loads(imgkit("check", "strange.yaml", "--strict", "--json", cwd=file.parent).stdout)
    assert found["passed"] is False
    assert len(found["recipes"][0]["warnings"]) >= 10


def test_strict_check_of_shipped_recipes_finds_nothing(write: Write) -> None:
    mine = write("extends: mn5\nimage: {copy: [{source: ., target: /workspace/x}]}\n", "mine.yaml")
    done = imgkit("check", "--strict", *recipe_names(), str(mine))
    assert (done.returncode, done.stderr) == (0, "")
