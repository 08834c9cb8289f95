"""Lock files: the text of a lock, and what a damaged or edited one says."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path

import pytest

from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import (
    Lock,
    LockedBase,
    LockedDeb,
    LockedPlatform,
    LockedStep,
    LockedWheel,
    LockRequest,
)
from imgkit_entrypoints.errors import UsageError

FILE = Path("mine.lock")
DIGEST = "sha256:" + "5" * 64
DEB = LockedDeb(
    name="tree",
    version="2.1.0-1",
    architecture="amd64",
    file="tree_2.1.0-1_amd64.deb",
    url="http://deb.example.org/debian/pool/main/t/tree/tree_2.1.0-1_amd64.deb",
    sha256="a" * 64,
    size_bytes=52000,
)
WHEEL = LockedWheel(
    step=0,
    name="rich",
    version="13.9.4",
    file="rich-13.9.4-py3-none-any.whl",
    url="https://files.example.org/rich-13.9.4-py3-none-any.whl",
    sha256="b" * 64,
)
PART = LockedPlatform(
    platform="linux/amd64",
    source_date_epoch=1700000000,
    request=LockRequest(
        base="base.example.org/torch:24.03",
        apt=("tree", "jq"),
        pip=(LockedStep(requirements=('rich; python_version > "3"',), env=('A=b\t"',)), LockedStep()),
    ),
    base=LockedBase(name="base.example.org/torch:24.03", digest=DIGEST, id=DIGEST),
    apt=(DEB,),
    pip=(WHEEL, dataclasses.replace(WHEEL, step=1, name="own", url="", kept=True)),
)
LOCK = Lock(recipe="mine", imgkit="0.3.0", platforms=(PART,))
TEXT = lock_file.text(LOCK)


def refused(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        lock_file.parse(text, FILE)
    return str(caught.value)


def test_text_gives_same_lock_again() -> None:
    assert lock_file.parse(TEXT, FILE) == LOCK
    assert lock_file.text(lock_file.parse(TEXT, FILE)) == TEXT
    assert lock_file.parse(TEXT.replace("\n", "\r\n"), FILE) == LOCK


def test_parts_are_sorted_and_replaced_by_platform() -> None:
    arm = dataclasses.replace(PART, platform="linux/arm64")
    both = Lock(recipe="mine", imgkit="0.3.0", platforms=()).replaced(arm).replaced(PART)
    assert [one.platform for one in both.platforms] == ["linux/amd64", "linux/arm64"]
    assert both.replaced(dataclasses.replace(arm, apt=())).of("linux/arm64") != arm
    assert both.of("linux/amd64") == PART
    assert both.of("linux/riscv64") is None


def test_upgrade_changes_lines_of_its_package_only() -> None:
    newer = dataclasses.replace(DEB, version="2.2.0-1", sha256="c" * 64)
    after = lock_file.text(LOCK.replaced(dataclasses.replace(PART, apt=(newer,))))
    lines = [*difflib.unified_diff(TEXT.splitlines(), after.splitlines(), n=0, lineterm="")]
    assert [line for line in lines if line[0] == "+"][1:] == [
        '+version = "2.2.0-1"',
        f'+sha256 = "{"c" * 64}"',
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('sha256 = "aaa', 'sha265 = "aaa', "unknown key (package tree); allowed: sha256"),
        ("size_bytes = 52000\n", "", "mine.lock: platforms[0].apt[0].size_bytes: is missing (package tree)"),
        ("size_bytes = 52000", 'size_bytes = "big"', "size_bytes: must be an integer"),
        ("size_bytes = 52000", "size_bytes = 2020-01-01", "size_bytes: must be an integer"),
        ('apt = [\n    "tree"', "apt = [\n    2020-01-01", "mine.lock"),
        ('sha256 = "aa', 'sha256 = "xx', "must be 64 hex digits"),
        ('file = "tree', 'file = "../tree', "must be the name of a .deb"),
        ('"http://deb.', '"http://me:token@deb.', "without credentials"),
        ('"http://deb.', '"file:///deb.', "must be a URL of http or https"),
        ('version = "2.1.0-1"', 'version = "2.1 $(id)"', "must be a version"),
        ('"https://files.', '"https://${TOKEN}.', "must be a URL of http or https"),  # pip would fill it in
        ('name = "base.example.org/torch:24.03"', 'name = "evil.example/torch"', "must be 'base.example.org"),
        (
            'name = "base.example.org/',
            r'name = "a\nRUN id\nb/',
            "mine.lock: platforms[0].base.name: contains",
        ),
        ('"rich; python', r'"\u202erich; python', "contains the invisible character U+202E"),
        ("step = 0", "step = 7", "there is no pip step 7"),
        ('platform = "linux/amd64"', 'platform = "linux/arm46"', "'linux/arm46' is not supported"),
        ("source_date_epoch = 1700000000", "source_date_epoch = -1", "must be seconds since 1970"),
        ("schema = 1", "schema = 2", "mine.lock: schema: schema 2 is that of a later imgkit"),
        ("schema = 1", 'schema = "x"', "'x' is not a schema of a lock"),
        ("kept = true", "kept = false", "is missing, and the wheel is not a kept one"),
        ("[[platforms.apt]]", "[platforms.apt]", "platforms[0].apt"),
        ("[platforms.base]", "[[platforms.base]]", "platforms[0].base: must be a table"),
        (DIGEST, "sha256:12", "must be sha256: and 64 hex digits"),
        ("step = 0", "step = = 0", "mine.lock:38:8: it is not TOML"),
        ("schema = 1", "schema = 1\nschema = 1", "it is not TOML"),
    ],
)
def test_edited_lock_is_refused_with_line(old: str, new: str, said: str) -> None:
    assert old in TEXT
    assert said in refused(TEXT.replace(old, new, 1))


def test_digest_in_name_of_base_stays() -> None:
    named = LockedBase(name=f"base.example.org/torch@sha256:{'7' * 64}", digest=DIGEST)
    assert named.exact == named.name
    assert dataclasses.replace(named, name="host:5000/torch:1").exact == f"host:5000/torch@{DIGEST}"


def test_faulty_package_is_named() -> None:
    second = dataclasses.replace(DEB, name="zsh", sha256="d" * 64)
    text = lock_file.text(LOCK.replaced(dataclasses.replace(PART, apt=(DEB, second))))
    message = refused(text.replace("ddd", "DDD", 1))
    assert "mine.lock: platforms[0].apt[1].sha256: " in message
    assert "must be 64 hex digits (package zsh)" in message


def test_platform_twice_is_refused() -> None:
    assert "linux/amd64 occurs twice" in refused(
        lock_file.text(dataclasses.replace(LOCK, platforms=(PART, PART)))
    )


def test_cut_or_binary_lock_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.lock"
    for content in (TEXT[: len(TEXT) // 2].encode(), b"\xff\xfe", b"", b"\0"):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=r"mine\.lock"):
            lock_file.read(file)
    with pytest.raises(UsageError, match="cannot be read"):
        lock_file.read(tmp_path)


def test_deep_lock_is_refused() -> None:
    deep = f"a = {'[' * 5000}{']' * 5000}"
    assert "mine.lock" in refused(deep)


def test_lock_lies_beside_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sub" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("extends: cpu\n")
    monkeypatch.chdir(tmp_path)
    assert lock_file.beside(load(file)) == file.with_name("mine.lock")
    assert lock_file.beside(load("cpu")) == tmp_path / "cpu.lock"


def test_nothing_of_a_lock_outside_is_shown(tmp_path: Path) -> None:
    for text in ("hunter2 = x\n", 'schema = "hunter2"\n', "schema = 1\nhunter2 = 5\n"):
        (tmp_path / "secret").write_text(text)
        (folder := tmp_path / "own").mkdir(exist_ok=True)
        (folder / "mine.lock").unlink(missing_ok=True)
        (folder / "mine.lock").symlink_to(tmp_path / "secret")
        with pytest.raises(UsageError, match="it cannot be used; nothing of a file outside") as refused:
            lock_file.read(folder / "mine.lock")
        assert "hunter2" not in str(refused.value)
