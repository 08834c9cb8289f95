"""A lock that uv 0.13.9 wrote: how imgkit reads it, what it refuses, and what it adds to a base.

`my-project/uv.lock` is as written, but for the names of the hosts, the times of upload, and wheels of other
systems and Pythons, which were removed.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from imgkit_builder.image import install, uv_inside
from imgkit_builder.recipe import uv_lock
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.problems import RecipeErrors

RECORDED = Path(__file__).parent / "my-project"
BUILT = {"antlr4-python3-runtime": "4.9.3"}
TORCH = "2.14.1a0+1234567890.nv26.06"
SAME_TORCH = {"torch": TORCH, "numpy": "2.2.6", **BUILT}
UV = "image:\n  base: python:3\n  uv: {project: my-project%s}\n"

Edit = Callable[..., Path]


@pytest.fixture
def edited(tmp_path: Path) -> Edit:
    """``edited("uv.lock", old, new)``: a recipe for the recorded project, whose file has the new text."""

    def make(name: str = "uv.lock", old: str = "", new: str = "", more: str = "") -> Path:
        shutil.copytree(RECORDED, tmp_path / "my-project")
        file = tmp_path / "my-project" / name
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new, 1))
        (tmp_path / "mine.yaml").write_text(UV % more)
        return tmp_path / "mine.yaml"

    return make


def refusal(file: Path) -> str:
    with pytest.raises(RecipeErrors) as caught:
        load(file)
    return re.sub(r"\S*mine.yaml", "mine.yaml", str(caught.value))


def chosen(base: dict[str, str], *, recipe: Path, constrained: str = "") -> uv_inside.UvChoice:
    """What the recipe's lock adds to a base, with wheels for this Python."""
    content = install.as_json(load(recipe), uv_lock.read(recipe.parent / "my-project"))
    limits = {"numpy": (constrained, "/etc/pip/constraint.txt")} if constrained else {}
    choice = uv_inside.UvChoice(json.loads(content), base, limits)
    choice.walk()
    return choice


def test_lock_is_read_whole() -> None:
    lock = uv_lock.read(RECORDED)
    own = lock.packages[lock.project]
    assert [(lock.packages[one.package].name, one.extras) for one in own.needs] == [
        ("antlr4-python3-runtime", ()),
        ("einops", ()),
        ("requests", ("socks",)),
        ("tomli", ()),
        ("torchmetrics", ()),
    ]
    assert [one.name for one in lock.packages].count("numpy") == 1
    assert lock.groups.keys() == {"dev"}
    assert own.extras.keys() == {"plots"}
    assert not any("win" in wheel.file for one in lock.packages for wheel in one.wheels)


def test_base_keeps_its_torch_and_what_it_needs(edited: Edit) -> None:
    choice = chosen(SAME_TORCH, recipe=edited())
    names = {one["name"] for one in choice.wheels}
    assert not choice.problems
    assert {"einops", "requests", "pysocks", "torchmetrics", "lightning-utilities"} <= names
    assert names.isdisjoint({"torch", "triton", "sympy", "cycler", "iniconfig", "numpy"})
    assert ("tomli" in names) == (sys.version_info < (3, 11))
    assert not [name for name in names if name.startswith("nvidia")]
    assert choice.notes == [f"torch: the base's {TORCH} stays in place of 2.14.1"]
    assert choice.versions["numpy"] == "2.2.6"


def test_extras_and_groups_are_added(edited: Edit) -> None:
    choice = chosen(SAME_TORCH, recipe=edited(more=", extras: [plots], groups: [dev]"))
    assert {"cycler", "iniconfig"} <= {one["name"] for one in choice.wheels}


def test_conflict_names_versions_and_who_wants_it(edited: Edit) -> None:
    choice = chosen({**SAME_TORCH, "torch": "2.3.0a0+nv24.03"}, recipe=edited())
    assert choice.problems == [
        (
            "torch: uv.lock has 2.14.1, but the base has 2.3.0a0+nv24.03, which imgkit never replaces"
            " (wanted by my-project -> torchmetrics)",
            "lock the base's release: uv lock --upgrade-package 'torch==2.3.0'",
        )
    ]


def test_constraint_of_the_base_binds_the_lock(edited: Edit) -> None:
    base = {**SAME_TORCH, "numpy": "1.26.4"}
    file = edited()
    ((what, hint),) = chosen(base, constrained="numpy==1.26.4", recipe=file).problems
    assert what.startswith(
        "numpy: uv.lock has 2.2.6, but /etc/pip/constraint.txt of the base has numpy==1.26.4"
    )
    assert "--upgrade-package 'numpy==1.26.4'; or let it differ" in hint
    # Without a constraint the locked version replaces the base's.
    assert "numpy" in {one["name"] for one in chosen(base, recipe=file).wheels}


def test_package_without_wheel_is_named(edited: Edit) -> None:
    file = edited()
    base = {"torch": TORCH, "numpy": "2.2.6"}
    ((what, hint),) = chosen(base, recipe=file).problems
    assert what.startswith("antlr4-python3-runtime 4.9.3 has no wheel for Python 3.")
    assert what.endswith("(wanted by my-project)")
    assert "pip: [{packages: [antlr4-python3-runtime]}]" in hint
    file.write_text(file.read_text() + "  pip: [{packages: [antlr4_python3.runtime]}]\n")
    choice = chosen(base, recipe=file)
    assert not choice.problems
    assert "antlr4-python3-runtime 4.9.3: left to the pip step that names it" in choice.notes
    assert choice.versions["antlr4-python3-runtime"] == "4.9.3"


def test_git_source_is_named(edited: Edit) -> None:
    old = 'name = "einops"\nversion = "0.8.0"\nsource = { registry = "https://index.example.org/simple" }'
    git = 'name = "einops"\nversion = "0.8.0"\nsource = { git = "https://me:x@example.org/e?rev=main#01" }'
    file = edited(old=old, new=git)
    lock = file.parent / "my-project" / "uv.lock"
    lock.write_text(
        re.sub(r'(name = "einops"\n(?:.*\n){2}(?:sdist.*\n)?)wheels = \[\n.*\n\]\n', r"\1", lock.read_text())
    )
    ((what, _),) = chosen(SAME_TORCH, recipe=file).problems
    assert what == "einops 0.8.0 comes from git https://example.org/e?rev=main (wanted by my-project)"


def test_odd_version_of_the_base_is_replaced(edited: Edit) -> None:
    choice = chosen({**SAME_TORCH, "einops": "0.8.0-unknown"}, recipe=edited())
    assert "einops" in {one["name"] for one in choice.wheels}


def test_python_that_the_lock_excludes(edited: Edit) -> None:
    choice = chosen(
        SAME_TORCH, recipe=edited(old='requires-python = ">=3.10"', new='requires-python = ">=3.99"')
    )
    assert re.match(r"Python: uv.lock requires >=3.99, the base has 3\.", choice.problems[0][0])


def test_files_for_pip(edited: Edit, tmp_path: Path) -> None:
    choice = chosen(SAME_TORCH, recipe=edited())
    (tmp_path / "constraint.txt").write_text(f"torch=={TORCH}\n")
    uv_inside.write(tmp_path, choice)
    digest = "9572fb63046264a862693b0a87088af3bdc8c068fde03de63453cbbde245465f"
    assert f"einops==0.8.0 --hash=sha256:{digest}\n" in (tmp_path / "uv.txt").read_text()
    page = (tmp_path / "uv.html").read_text()
    assert re.search(rf'<a href="https://files\.example\.org/\S+#sha256={digest}">einops-0.8.0-py3', page)
    pinned = (tmp_path / "constraint.txt").read_text().splitlines()
    assert pinned[0] == f"torch=={TORCH}"
    assert {"einops==0.8.0", "numpy==2.2.6"} <= set(pinned)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("version = 1\n", "version = 2\n", "uv.lock has version 2; this imgkit reads version 1"),
        ("revision = 5\n", 'conflicts = [[{ package = "x" }]]\n', "has conflicting extras or groups"),
        (
            "//files.example.org/packages/54",
            "//me:secret@files.example.org/packages/54",
            "holds a user or a password, which would be in the image",
        ),
        ('whl", hash = "sha256:', 'whl", hash = "md5:', "has a wheel without a sha256"),
        ('name = "my-project"', 'name = "other"', "does not know the project my-project"),
        ("[[package]]", "[[package", "uv.lock:16: it is not TOML"),
        ('{ name = "einops" }', '{ name = "absent" }', "has 0 packages that fit absent"),
    ],
)
def test_unusable_lock_is_refused_at_its_line(edited: Edit, old: str, new: str, what: str) -> None:
    problem = refusal(edited(old=old, new=new))
    assert problem.startswith("mine.yaml:3:17: image.uv.project: its uv.lock cannot be used: ")
    assert what in problem
    assert "secret" not in problem


@pytest.mark.parametrize(
    ("old", "new", "line", "name"),
    [
        ("einops==0.8.0", "einops>=0.8.0", 6, "einops"),
        ("requests[socks]", "requests", 8, "requests"),
        ("< '3.11'", "< '3.12'", 7, "tomli"),
        ('    "torchmetrics",\n', "", 0, "torchmetrics"),
        ('    "torchmetrics",\n', '    "torchmetrics",\n    "mine_too",\n', 10, "mine-too"),
    ],
)
def test_stale_lock_names_the_line(edited: Edit, old: str, new: str, line: int, name: str) -> None:
    problem = refusal(edited("pyproject.toml", old, new))
    place = f"pyproject.toml:{line}" if line else "pyproject.toml"
    assert f"image.uv.project: uv.lock is not up to date: {place} and the lock differ about {name}" in problem


@pytest.mark.parametrize("marker", ["python_full_version < '3.11'", "python_version <= '3.10'"])
def test_marker_in_other_words_is_not_stale(edited: Edit, marker: str) -> None:
    load(edited("pyproject.toml", "python_version < '3.11'", marker))


def test_unknown_extra_and_missing_lock(edited: Edit) -> None:
    file = edited(more=", extras: [plot]")
    assert "pyproject.toml has no extra 'plot'; it has plots" in refusal(file)
    (file.parent / "my-project" / "uv.lock").unlink()
    assert "my-project has no uv.lock; write it: uv lock" in refusal(file)


def test_changed_lock_changes_the_recipe(edited: Edit) -> None:
    file = edited()
    first = load(file)
    lock = file.parent / "my-project" / "uv.lock"
    lock.write_text(lock.read_text() + "\n")
    assert load(file).sha256 != first.sha256
    assert {path.name for path in first.sources} >= {"uv.lock", "pyproject.toml"}


def test_step_is_one_instruction(edited: Edit) -> None:
    made = install.uv_command(load(edited()))
    assert made is not None
    assert made.origin == "mine.yaml:3"
    assert "--require-hashes --no-deps --only-binary=:all: --no-index" in made.command
    assert install.PIP in made.command
