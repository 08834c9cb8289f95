"""The folder of compiled code and its packed copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import compile_cache
from imgkit_entrypoints.launch.compile_cache import FOLDERS, HEADER, CompileCache

KEY = compile_cache.make_key("an image")


def cache_of(folder: Path, file: Path | None = None) -> CompileCache:
    cache = CompileCache(folder=folder, key=KEY, packed_file=file)
    cache.make_folders()
    return cache


def compile_into(cache: CompileCache, *names: str) -> None:
    for name in names:
        (cache.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (cache.folder / name).write_text(f"code of {name}")


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_folder_is_on_the_node_s_own_disk_and_named_by_image_and_user(tmp_path):
    env = {"TMPDIR": str(tmp_path)}
    local = compile_cache.find_folder(env, KEY, is_shared=lambda _: False)
    assert local == tmp_path / f"imgkit-cache-{os.geteuid()}-{KEY}"
    elsewhere = compile_cache.find_folder(env, KEY, is_shared=lambda path: path == str(tmp_path))
    assert elsewhere == Path("/tmp") / local.name
    assert compile_cache.find_folder(env, KEY, is_shared=lambda _: True) is None
    local.symlink_to(tmp_path / "planted")
    assert compile_cache.find_folder(env, KEY, is_shared=lambda _: False) == Path("/tmp") / local.name
    assert compile_cache.make_key("another image") != KEY


def test_variables_of_the_user_stay(tmp_path):
    variables = compile_cache.cache_variables(tmp_path, {"TRITON_CACHE_DIR": "/mine"})
    assert set(variables) == set(FOLDERS) - {"TRITON_CACHE_DIR"}


def test_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "cache").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="the folder for compiled code cannot be used"):
        cache_of(tmp_path / "cache")


def test_next_start_has_what_the_last_one_compiled(tmp_path):
    file = tmp_path / "new" / "cache.zip"
    first = cache_of(tmp_path / "first", file)
    assert first.unpack() == ""
    compile_into(first, "triton/AB/kernel.so", "inductor/xy/c.so")
    (first.folder / "triton/link").symlink_to("/etc/passwd")
    compile_into(first, "torch_extensions/fused_adam/lock")  # of a build that goes on
    assert "packed 2 files" in first.pack()
    assert file.stat().st_mode & 0o777 == 0o600
    second = cache_of(tmp_path / "second", file)
    compile_into(second, "inductor/xy/c.so")
    assert second.unpack() == ""
    assert contents(second.folder) == {
        name: f"code of {name}" for name in ("triton/AB/kernel.so", "inductor/xy/c.so")
    }
    assert second.pack() == "", "nothing was compiled"
    compile_into(second, "cuda/1")
    assert "packed 3 files" in second.pack()


START = """
import pathlib, sys, time
from imgkit_entrypoints.launch.compile_cache import CompileCache
CompileCache(folder=pathlib.Path(sys.argv[1]), key="key").make_folders()
print("made", flush=True)
time.sleep(600)
"""


def test_lock_of_a_killed_build_stays_while_another_start_may_build(tmp_path):
    folder = tmp_path / "cache"
    lock = folder / "torch_extensions/fused_adam/lock"
    argv = (sys.executable, "-c", START, str(folder))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "made\n"
        lock.parent.mkdir()
        lock.touch()
        second_start = (*argv[:2], START.replace("600", "0"), str(folder))
        subprocess.run(second_start, check=True, capture_output=True)
        assert lock.exists(), "the other start may be building"
        other.kill()
    subprocess.run(second_start, check=True, capture_output=True)
    assert not lock.exists()


def test_cache_of_another_image_is_replaced(tmp_path):
    file = tmp_path / "cache.zip"
    packed(file, "triton/a", key="other")
    cache = cache_of(tmp_path / "cache", file)
    assert cache.unpack() == f"{file} is not used: it is for another image, and is replaced at the end"
    compile_into(cache, "triton/a")
    assert "packed 1 files" in cache.pack()
    assert cache_of(tmp_path / "next", file).unpack() == ""


def packed(file: Path, *names: str, key: str = KEY) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(HEADER, key)
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), "code")


@pytest.mark.parametrize(
    "name",
    ["../escaped", "triton/../../escaped", "/tmp/imgkit-escaped", "elsewhere/escaped", "triton/escaped/"],
)
def test_packed_file_that_leads_elsewhere_is_not_used(tmp_path, name):
    packed(tmp_path / "cache.zip", "triton/good", name)
    cache = cache_of(tmp_path / "cache", tmp_path / "cache.zip")
    problem = cache.unpack()
    assert "is not used: it holds" in problem
    assert "\n" not in problem
    assert contents(cache.folder) == {}
    assert not list(tmp_path.rglob("*escaped"))


@pytest.mark.parametrize("part", [0.5, 0.9])
def test_damaged_file_is_not_used(tmp_path, part):
    file = tmp_path / "cache.zip"
    first = cache_of(tmp_path / "first", file)
    (first.folder / "triton/a").write_bytes(os.urandom(100_000))
    first.pack()
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * part)])
    second = cache_of(tmp_path / "second", file)
    assert "is not used" in second.unpack()
    assert contents(second.folder) == {}


def test_larger_file_than_a_disk_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 15)
    packed(tmp_path / "c.zip", "triton/a")
    assert "more than 15 bytes" in cache_of(tmp_path / "cache", tmp_path / "c.zip").unpack()


@pytest.mark.parametrize("is_zip", [False, True])
def test_file_of_another_kind_is_never_replaced(tmp_path, is_zip):
    file = tmp_path / "model.pt"
    file.write_bytes(b"weights")
    if is_zip:
        shutil.make_archive(str(tmp_path / "model"), "zip", tmp_path, file.name)
        (tmp_path / "model.zip").replace(file)
    before = file.read_bytes()
    with pytest.raises(UsageError, match="is no packed cache"):
        cache_of(tmp_path / "cache", file).unpack()
    assert file.read_bytes() == before


def test_link_in_place_of_the_file_is_not_followed(tmp_path):
    packed(tmp_path / "theirs.zip", "triton/a")
    (tmp_path / "cache.zip").symlink_to("theirs.zip")
    assert "symbolic link" in cache_of(tmp_path / "cache", tmp_path / "cache.zip").unpack()
