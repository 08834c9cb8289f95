"""A lock: its text, where it lies, what it keeps of a recipe, and which one a build follows.

cli/refusals has damaged, edited and stale ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_lock import locked_deb, locked_platform, locked_wheel

from imgkit_builder.image import install, render
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Lock, LockedBase, LockedStep, LockRequest, Recipe
from imgkit_entrypoints.errors import UsageError

Write = Callable[..., Path]
GOLDEN = Path(__file__).resolve().parents[3] / "golden/recipes"
PLATFORM = "linux/amd64"
FILE = Path("mine.lock")
DIGEST = "sha256:" + "5" * 64
NOT_UTF_8 = "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"
DEB = locked_deb("tree", "2.1.0-1", size_bytes=52000)
PACKAGES = locked_platform(
    request=LockRequest(
        base="base.example.org/torch:24.03",
        apt=("tree", "jq"),
        pip=(LockedStep(requirements=('rich; python_version > "3"',), env=('A=b\t"',)), LockedStep()),
    ),
    base=LockedBase(name="base.example.org/torch:24.03", digest=DIGEST, id=DIGEST),
    apt=(DEB,),
    pip=(locked_wheel("rich", "13.9.4"), locked_wheel("own", "1", step=1, kept=True)),
)
LOCK = Lock(recipe="mine", imgkit="0.3.0", platforms=(PACKAGES,))
TEXT = lock_file.render_lock(LOCK)


def test_text_gives_same_lock_again():
    assert lock_file.parse_lock(TEXT, FILE) == LOCK
    assert lock_file.render_lock(lock_file.parse_lock(TEXT, FILE)) == TEXT
    assert lock_file.parse_lock(TEXT.replace("\n", "\r\n"), FILE) == LOCK


def test_platforms_are_sorted_and_replaced():
    arm = dataclasses.replace(PACKAGES, platform="linux/arm64")
    both = Lock(recipe="mine", imgkit="0.3.0", platforms=()).with_platform(arm).with_platform(PACKAGES)
    assert [locked.platform for locked in both.platforms] == ["linux/amd64", "linux/arm64"]
    assert both.with_platform(dataclasses.replace(arm, apt=())).for_platform("linux/arm64") != arm
    assert both.for_platform("linux/amd64") == PACKAGES
    assert both.for_platform("linux/riscv64") is None


def test_upgrade_changes_lines_of_its_package_only():
    newer = dataclasses.replace(DEB, version="2.2.0-1", sha256="c" * 64)
    after = lock_file.render_lock(LOCK.with_platform(dataclasses.replace(PACKAGES, apt=(newer,))))
    lines = difflib.ndiff(TEXT.splitlines(), after.splitlines())
    assert [line for line in lines if line[0] == "+"] == [
        '+ version = "2.2.0-1"',
        f'+ sha256 = "{"c" * 64}"',
    ]


def test_digest_in_name_of_base_stays():
    named = LockedBase(name=f"base.example.org/torch@sha256:{'7' * 64}", digest=DIGEST)
    assert named.exact == named.name
    assert dataclasses.replace(named, name="host:5000/torch:1").exact == f"host:5000/torch@{DIGEST}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", f"the lock cannot be read: {NOT_UTF_8}"),
        (b"a = " + b"[" * 5000 + b"]" * 5000, "it is not TOML: its brackets are nested too deeply"),
    ],
    ids=["no text", "deep"],
)
def test_unreadable_lock_is_refused(tmp_path, content, message):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        lock_file.read_lock(tmp_path / FILE)
    assert caught.value.what == message


def test_lock_lies_beside_its_recipe(write, tmp_path, monkeypatch):
    file = write("extends: cpu\n", "sub/mine.yaml")
    monkeypatch.chdir(tmp_path)
    assert lock_file.lock_path(load(file)) == file.with_name("mine.lock")
    assert lock_file.lock_path(load("cpu")) == tmp_path / "cpu.lock"


# ---- what a lock keeps of its recipe

NEEDED = """
# what the group needs
--extra-index-url https://index.example.org/simple  # ours
numpy==1.26.4 \\
    --hash=sha256:00
"""
RECIPE = """
image:
  base: base.example.org/torch:24.03
  platform: [amd64, arm64]
  apt: [tree]
  pip:
    - packages: [rich]
      options: [--no-build-isolation]
      env: {MAX_JOBS: "4"}
    - requirements: needed.txt
"""


@pytest.fixture
def recipe(write: Write) -> Recipe:
    write(NEEDED, "needed.txt")
    return load(write(RECIPE))


def test_request_has_lines_of_requirements_files(recipe):
    first, second = lock_file.make_request(recipe).pip
    assert first == LockedStep(requirements=("rich",), options=("--no-build-isolation",), env=("MAX_JOBS=4",))
    assert second.requirements == ("numpy==1.26.4     --hash=sha256:00",)
    assert second.options == ("--extra-index-url", "https://index.example.org/simple")


def test_credentials_are_not_in_a_request(write):
    write("--extra-index-url https://me:word-9@index.example.org/simple\neinops\n", "needed.txt")
    text = """
image:
  base: registry.invalid/base:1
  pip:
    - packages: [rich]
      options: [--index-url, "https://word-9@index.example.org/simple"]
      env: {PIP_FIND_LINKS: "https://me:word-9@files.example.org/", BUILD_PASSWORD: word-9}
    - requirements: needed.txt
"""
    request = lock_file.make_request(load(write(text)))
    assert "word-9" not in repr(request)
    assert request.pip[0].options == ("--index-url", "https://index.example.org/simple")


def test_same_recipe_has_no_difference(recipe, write):
    first = lock_file.make_request(recipe)
    write(f"# a new comment{NEEDED}", "needed.txt")
    second = lock_file.make_request(load(write(f"description: new{RECIPE}")))
    assert lock_file.first_difference(second, first) is None


# ---- which lock a build follows


def locked(recipe: Recipe, **changes: object) -> Path:
    """Write a lock of `recipe` beside it."""
    values = {
        "request": lock_file.make_request(recipe),
        "base": LockedBase(name=recipe.image.base, digest=f"sha256:{'b' * 64}"),
        "apt": (locked_deb("tree", "2.1.0-1"),),
        "pip": (locked_wheel("rich", "15.0"),),
    }
    platform = locked_platform(**{**values, **changes})
    file = lock_file.lock_path(recipe)
    file.write_text(lock_file.render_lock(Lock(recipe=recipe.name, imgkit="0.3.0", platforms=(platform,))))
    return file


def test_lock_beside_recipe_is_attached(recipe):
    file = locked(recipe)
    with_lock = lock_file.attach_lock(recipe, platform=PLATFORM)
    assert with_lock.lock is not None
    assert with_lock.lock.base.exact == f"base.example.org/torch@sha256:{'b' * 64}"
    assert lock_file.parse_lock(with_lock.lock_text, file).platforms == (with_lock.lock,)
    assert len(with_lock.sources[file]) == 64
    assert (with_lock.kept, with_lock.sha256) == ({}, recipe.sha256)


def test_recipe_without_lock_stays_as_it_is(recipe):
    without_lock = lock_file.attach_lock(recipe, platform=PLATFORM)
    assert without_lock.lock is None
    assert without_lock.sources[lock_file.lock_path(recipe)] == ""


def test_requirements_file_that_has_gone_is_an_error(recipe):
    locked(recipe)
    file = recipe.file.with_name("needed.txt")
    file.unlink()
    with pytest.raises(UsageError) as caught:
        lock_file.attach_lock(recipe, platform=PLATFORM)
    reason = f"[Errno 2] No such file or directory: '{file}'"
    assert caught.value.what == f"a file of the recipe cannot be read: {reason}"


def test_wheel_that_only_this_machine_had_is_used(recipe):
    built = locked_wheel("own", "1", step=1, kept=True)
    file = locked(recipe, pip=(built,))
    folder = file.with_name("mine.lock.files")
    folder.mkdir()
    (folder / built.file).write_bytes(b"")
    assert lock_file.attach_lock(recipe, platform=PLATFORM).kept == {built.file: folder / built.file}


ODD_TEXTS = ("\nRUN id\n", "\r", '"', "'", "$(id)", "${HOME}", "`id`", "\\\n", " # ", "../", "@evil/", ";id")
ODD_ENDS = ("\x1b[2J", "\x9b", "\u202e", "\u2028", "\0", "\n")
"""What a shell, a Dockerfile, pip or a terminal could act on."""


def changed_texts(text: str) -> list[str]:
    """Return what somebody might put in place of a text of a lock."""
    changed = [f"{text[:3]}{odd}{text[3:]}" for odd in ODD_TEXTS]
    changed += [text + odd for odd in ODD_ENDS]
    return [*changed, f"-{text}", f"../{text}", "", "evil.example/other:1"]


def first_texts(lock: str) -> dict[tuple[str, str], re.Match[str]]:
    """Return the place of one text for each key of each kind of table."""
    places: dict[tuple[str, str], re.Match[str]] = {}
    heading = ""
    for match in re.finditer(r'^\[.*|^(\w+) = \[?\s*("[^"\n]*")', lock, re.MULTILINE):
        if match[1]:
            places.setdefault((heading, match[1]), match)
        else:
            heading = match[0]
    return places


def rendered(recipe: Recipe) -> tuple[list[str], list[int]]:
    """The instructions of a locked build, and how many lines the files have that its steps read."""
    text = render.render_dockerfile(recipe, base=recipe.lock.base.exact if recipe.lock else None)
    instructions = [
        line for line in text.replace("\\\n", "").split("\n") if line and not line.startswith("#")
    ]
    steps = range(len(recipe.image.pip))
    files = (install.render_apt_list(recipe), *(install.render_requirements(recipe, step) for step in steps))
    return [line.split(" ")[0] for line in instructions], [file.count("\n") for file in files]


def test_changed_text_of_lock_is_refused_or_changes_no_instruction(tmp_path):
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    recipe = load(tmp_path / "locked.yaml")
    file = lock_file.lock_path(recipe)
    text = file.read_text()
    usual = rendered(lock_file.attach_lock(recipe, platform=PLATFORM))
    assert usual[0].count("RUN") > 5
    accepted_keys = set()
    refused_at = set()
    places = first_texts(text)
    assert len(places) > 20
    for (_, key), match in places.items():
        for changed in changed_texts(json.loads(match[2])):
            file.write_text(text[: match.start(2)] + json.dumps(changed) + text[match.end(2) :])
            try:
                with_lock = lock_file.attach_lock(recipe, platform=PLATFORM)
            except UsageError as error:
                refused_at.add(str(error.where))
                continue
            assert with_lock.lock is not None
            assert re.match(r"nvcr\.io/nvidia/pytorch(:24\.03-py3$|@)", with_lock.lock.base.exact)
            assert rendered(with_lock) == usual
            accepted_keys.add(key)
    assert all(re.search(r"locked\.(lock|yaml)(:\d+|$)|locked\.lock\.files$", where) for where in refused_at)
    assert accepted_keys <= {"imgkit", "digest", "id", "version", "file", "url", "name"}
