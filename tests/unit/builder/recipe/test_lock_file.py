"""Lock files: the text of a lock, and where it lies; cli/refusals has damaged and edited ones."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path

import pytest
from sample_lock import locked_deb, locked_platform, locked_wheel

from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Lock, LockedBase, LockedStep, LockRequest
from imgkit_entrypoints.errors import UsageError

FILE = Path("mine.lock")
DIGEST = "sha256:" + "5" * 64
DEB = locked_deb("tree", "2.1.0-1", size_bytes=52000)
PART = locked_platform(
    request=LockRequest(
        base="base.example.org/torch:24.03",
        apt=("tree", "jq"),
        pip=(LockedStep(requirements=('rich; python_version > "3"',), env=('A=b\t"',)), LockedStep()),
    ),
    base=LockedBase(name="base.example.org/torch:24.03", digest=DIGEST, id=DIGEST),
    apt=(DEB,),
    pip=(locked_wheel("rich", "13.9.4"), locked_wheel("own", "1", step=1, kept=True)),
)
LOCK = Lock(recipe="mine", imgkit="0.3.0", platforms=(PART,))
TEXT = lock_file.render_lock(LOCK)


def test_text_gives_same_lock_again() -> None:
    assert lock_file.parse_lock(TEXT, FILE) == LOCK
    assert lock_file.render_lock(lock_file.parse_lock(TEXT, FILE)) == TEXT
    assert lock_file.parse_lock(TEXT.replace("\n", "\r\n"), FILE) == LOCK


def test_parts_are_sorted_and_replaced_by_platform() -> None:
    arm = dataclasses.replace(PART, platform="linux/arm64")
    both = Lock(recipe="mine", imgkit="0.3.0", platforms=()).with_platform(arm).with_platform(PART)
    assert [part.platform for part in both.platforms] == ["linux/amd64", "linux/arm64"]
    assert both.with_platform(dataclasses.replace(arm, apt=())).for_platform("linux/arm64") != arm
    assert both.for_platform("linux/amd64") == PART
    assert both.for_platform("linux/riscv64") is None


def test_upgrade_changes_lines_of_its_package_only() -> None:
    newer = dataclasses.replace(DEB, version="2.2.0-1", sha256="c" * 64)
    after = lock_file.render_lock(LOCK.with_platform(dataclasses.replace(PART, apt=(newer,))))
    lines = [*difflib.unified_diff(TEXT.splitlines(), after.splitlines(), n=0, lineterm="")]
    assert [line for line in lines if line[0] == "+"][1:] == [
        '+version = "2.2.0-1"',
        f'+sha256 = "{"c" * 64}"',
    ]


def test_digest_in_name_of_base_stays() -> None:
    named = LockedBase(name=f"base.example.org/torch@sha256:{'7' * 64}", digest=DIGEST)
    assert named.exact == named.name
    assert dataclasses.replace(named, name="host:5000/torch:1").exact == f"host:5000/torch@{DIGEST}"


def test_lock_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.lock"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError) as caught:
        lock_file.read_lock(file)
    assert caught.value.what.startswith("the lock cannot be read: 'utf-8' codec can't decode byte 0xff")


def test_deep_lock_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        lock_file.parse_lock(f"a = {'[' * 5000}{']' * 5000}", FILE)
    assert caught.value.what == "it is not TOML: its brackets are nested too deeply"


def test_lock_lies_beside_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sub" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("extends: cpu\n")
    monkeypatch.chdir(tmp_path)
    assert lock_file.lock_path(load(file)) == file.with_name("mine.lock")
    assert lock_file.lock_path(load("cpu")) == tmp_path / "cpu.lock"
