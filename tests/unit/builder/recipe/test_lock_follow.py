"""A recipe and the lock beside it: which one a build follows, and what it refuses."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sample_lock import locked_deb, locked_platform, locked_wheel

from imgkit_builder.image import install, render
from imgkit_builder.recipe import lock_file, problems
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Lock, LockedBase, Recipe
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError

GOLDEN = Path(__file__).resolve().parents[3] / "golden/recipes"
Write = Callable[..., Path]
PLATFORM = "linux/amd64"
RECIPE = """
image:
  base: base.example.org/torch:24.03
  platform: [amd64, arm64]
  apt: [tree]
  pip:
    - packages: [rich]
    - requirements: needed.txt
"""


@pytest.fixture
def recipe(write: Write) -> Recipe:
    write("--extra-index-url https://index.example.org/simple\nnumpy==1.26.4\n", "needed.txt")
    return load(write(RECIPE))


def locked(recipe: Recipe, **changes: object) -> Path:
    """Write a lock of `recipe` beside it."""
    values = {
        "request": lock_file.make_request(recipe),
        "base": LockedBase(name=recipe.image.base, digest=f"sha256:{'b' * 64}"),
        "apt": (locked_deb("tree", "2.1.0-1"),),
        "pip": (locked_wheel("rich", "15.0"),),
    }
    part = locked_platform(**{**values, **changes})
    file = lock_file.lock_path(recipe)
    file.write_text(lock_file.render_lock(Lock(recipe=recipe.name, imgkit="0.3.0", platforms=(part,))))
    return file


def test_lock_beside_recipe_is_attached(recipe: Recipe) -> None:
    file = locked(recipe)
    with_lock = lock_file.attach_lock(recipe, platform=PLATFORM)
    assert with_lock.lock is not None
    assert with_lock.lock.base.exact == f"base.example.org/torch@sha256:{'b' * 64}"
    assert lock_file.parse_lock(with_lock.lock_text, file).platforms == (with_lock.lock,)
    assert len(with_lock.sources[file]) == 64
    assert (with_lock.kept, with_lock.sha256) == ({}, recipe.sha256)


def test_recipe_without_lock_stays_as_it_is(recipe: Recipe) -> None:
    without_lock = lock_file.attach_lock(recipe, platform=PLATFORM)
    assert without_lock.lock is None
    assert without_lock.sources[lock_file.lock_path(recipe)] == ""


def test_requirements_file_that_has_gone_is_an_error(recipe: Recipe) -> None:
    locked(recipe)
    file = recipe.file.with_name("needed.txt")
    file.unlink()
    with pytest.raises(UsageError) as caught:
        lock_file.attach_lock(recipe, platform=PLATFORM)
    reason = f"[Errno 2] No such file or directory: '{file}'"
    assert caught.value.what == f"a file of the recipe cannot be read: {reason}"


def test_wheel_that_only_this_machine_had_is_used(recipe: Recipe) -> None:
    built = locked_wheel("own", "1", step=1, kept=True)
    file = locked(recipe, pip=(built,))
    folder = file.with_name("mine.lock.files")
    folder.mkdir()
    (folder / built.file).write_bytes(b"")
    assert lock_file.attach_lock(recipe, platform=PLATFORM).kept == {built.file: folder / built.file}


def test_lock_holds_no_password_of_the_recipe(write: Write) -> None:
    steps = (
        "  pip:\n"
        "    - packages: [rich]\n"
        "      options: [--index-url, 'https://ann:seCret-77@example.org/simple']\n"
        "      env: {BUILD_PASSWORD: seCret-78}\n"
    )
    recipe = load(write(f"image:\n  base: example.org/base:1\n{steps}", "mine.yaml"))
    text = str(lock_file.make_request(recipe))
    assert "seCret" not in text
    assert "example.org/simple" in text


SHIFTS: tuple[Callable[[str], str], ...] = (
    *(
        lambda text, odd=odd: f"{text[:3]}{odd}{text[3:]}"  # type: ignore[misc]
        for odd in (
            "\nRUN id\n",
            "\r",
            '"',
            "'",
            "$(id)",
            "${HOME}",
            "`id`",
            "\\\n",
            " # ",
            "../",
            "@evil/",
            ";id",
        )
    ),
    *(lambda text, odd=odd: f"{text}{odd}" for odd in ("\x1b[2J", "\x9b", "\u202e", "\u2028", "\0", "\n")),  # type: ignore[misc]
    lambda text: f"-{text}",
    lambda text: f"../{text}",
    lambda text: "",
    lambda text: "evil.example/other:1",
)
"""Changes of a text that a shell, a Dockerfile, pip or a terminal could act on."""


def texts(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all texts in the content of a lock."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from texts(item, (*path, key))


def with_text(value: Any, path: Sequence[Any], change: Callable[[str], str]) -> Any:
    """Return the lock, or a part of it, with the text at `path` changed: no rule is applied."""
    if not path:
        return change(value)
    key, *rest = path
    if isinstance(key, int):
        return (*value[:key], with_text(value[key], rest, change), *value[key + 1 :])
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{key: with_text(getattr(value, key), rest, change)})
    return {**value, key: with_text(value[key], rest, change)}


def rendered(recipe: Recipe) -> tuple[list[str], list[int]]:
    """The instructions of a locked build, and how many lines the files have that its steps read."""
    text = render.render_dockerfile(recipe, base=recipe.lock.base.exact if recipe.lock else None)
    instructions = [
        line for line in text.replace("\\\n", "").split("\n") if line and not line.startswith("#")
    ]
    steps = range(len(recipe.image.pip))
    files = (install.render_packages(recipe), *(install.render_requirements(recipe, step) for step in steps))
    return [line.split(" ")[0] for line in instructions], [file.count("\n") for file in files]


def test_changed_text_of_lock_is_refused_or_changes_no_instruction(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    recipe = load(tmp_path / "locked.yaml")
    file = lock_file.lock_path(recipe)
    content = problems.parse_toml(file.read_text())
    lock: Lock = json_text.build_value(Lock, content, "lock")
    usual = rendered(lock_file.attach_lock(recipe, platform=PLATFORM))
    assert usual[0].count("RUN") > 5
    accepted_keys = set()
    # One text of each key.
    paths = {tuple(key for key in path if isinstance(key, str)): path for path in texts(content)}
    assert len(paths) > 20
    for path in paths.values():
        for shift in SHIFTS:
            file.write_text(lock_file.render_lock(with_text(lock, path, shift)), newline="")
            where = ""
            try:
                with_lock = lock_file.attach_lock(recipe, platform=PLATFORM)
            except UsageError as error:
                where = str(error.where)
            if where:
                assert re.search(r"locked\.(lock|yaml)(:\d+|$)|locked\.lock\.files$", where)
            else:
                assert with_lock.lock is not None
                assert re.match(r"nvcr\.io/nvidia/pytorch(:24\.03-py3$|@)", with_lock.lock.base.exact)
                assert rendered(with_lock) == usual
                accepted_keys.add(path[-1])
    assert accepted_keys <= {"imgkit", "digest", "id", "version", "file", "url", "name"}
