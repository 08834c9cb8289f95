"""What two builds of one lock differ in does not get into the .sif; what the image needs stays."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from imgkit_builder.archive.tar_read import CHARACTER, DIRECTORY, HARD_LINK, REGULAR, SYMLINK
from imgkit_builder.sif import locked
from imgkit_builder.sif.entries import ImageEntry

EPOCH_S = 1_750_000_000
DAY = EPOCH_S // 86400
LATER_S = EPOCH_S + 400 * 86400


def entry(
    name: str, data: bytes = b"", *, kind: bytes = REGULAR, mtime_s: int = LATER_S, link: str = ""
) -> ImageEntry:
    found = ImageEntry(names=(name,), kind=kind, mode=0o644, mtime_s=mtime_s, link=link)
    return found.with_content(data) if data else found


def passed(*entries: ImageEntry) -> dict[str, ImageEntry]:
    found = {one.name: one for one in locked.normalising(EPOCH_S)(iter(entries))}
    return {name: one.with_content(content(one)) for name, one in found.items()}


def content(one: ImageEntry) -> bytes:
    return b"".join(map(bytes, one.content))


@pytest.mark.parametrize(
    "name",
    [
        ".dockerenv",
        "run/.containerenv",
        "dev/console",
        "dev/pts/0",
        "etc/hostname",
        "etc/mtab",
        "etc/passwd-",
        "var/log/dpkg.log",
        "var/log/alternatives.log",
        "var/log/apt/term.log",
        "var/lib/apt/lists/host_dists_Release",
        "var/lib/dpkg/status-old",
        "var/cache/apt/pkgcache.bin",
        "var/cache/apt/archives/less.deb",
        "var/cache/ldconfig/aux-cache",
        "var/cache/debconf/config.dat-old",
        "usr/lib/python3/dist-packages/x-1.dist-info/direct_url.json",
    ],
)
def test_what_differs_is_left_out(name: str) -> None:
    assert passed(entry(name, b"some text")) == {}


@pytest.mark.parametrize(
    "name",
    [
        "etc/passwd",
        "etc/host.conf",
        "etc/opt/a-",
        "var/log/dpkg.log.keep",
        "var/lib/dpkg/status",
        "var/cache/debconf/config.dat",
        "home/me/.dockerenv",
        "opt/etc/hosts",
        "opt/x/direct_url.json",
    ],
)
def test_what_looks_like_it_stays(name: str) -> None:
    assert content(passed(entry(name, b"some text"))[name]) == b"some text"


def test_folders_that_apt_needs_stay() -> None:
    names = ("var/lib/apt/lists/partial", "var/cache/apt/archives", "var/log/apt")
    assert set(passed(*(entry(name, kind=DIRECTORY) for name in names))) == set(names)


def test_hosts_files_are_empty_whatever_the_engine_sent() -> None:
    found = passed(entry("etc", kind=DIRECTORY), entry("etc/hosts", b"10.0.0.1 build-host\n"))
    assert {name: found[name].size_bytes for name in ("etc/hosts", "etc/resolv.conf")} == {
        "etc/hosts": 0,
        "etc/resolv.conf": 0,
    }
    assert set(passed(entry("etc", kind=SYMLINK, link="/home"))) == {"etc"}


def test_no_time_is_later_and_no_folder_has_its_own() -> None:
    early = entry("bin/early", mtime_s=EPOCH_S - 5)
    found = passed(
        early, entry("bin/late"), entry("bin", kind=DIRECTORY, mtime_s=7), entry("l", kind=SYMLINK)
    )
    assert {name: one.mtime_s for name, one in found.items()} == {
        "bin/early": EPOCH_S - 5,
        "bin/late": EPOCH_S,
        "bin": EPOCH_S,
        "l": EPOCH_S,
    }


def test_an_early_file_keeps_the_bytes_of_its_header() -> None:
    early = ImageEntry(names=("x",), kind=REGULAR, mtime_s=5, header=b"as it came")
    assert next(locked.normalising(EPOCH_S)(iter([early]))).header == b"as it came"


def test_passwords_were_not_changed_later() -> None:
    text = f"root:*:{DAY - 400}:0:99999:7:::\nnew:!:{DAY + 9}:0:99999:7:::\nnever:!::0:::::\nodd\n".encode()
    found = content(passed(entry("etc/shadow", text))["etc/shadow"])
    assert found == text.replace(b"%d" % (DAY + 9), b"%d" % DAY)


def test_record_does_not_list_what_is_left_out() -> None:
    lines = (
        b"x/__init__.py,sha256=abc,4\nx-1.dist-info/direct_url.json,sha256=zzz,40\nx-1.dist-info/RECORD,,\n"
    )
    name = "lib/x-1.dist-info/RECORD"
    kept = b"x/__init__.py,sha256=abc,4\nx-1.dist-info/RECORD,,\n"
    assert content(passed(entry(name, lines))[name]) == kept
    assert content(passed(entry(name, lines, mtime_s=EPOCH_S))[name]) == lines  # the base's own


def test_mounted_folders_are_the_same_from_every_engine() -> None:
    found = passed(
        entry("proc", kind=DIRECTORY).changed(mode=0o555, uid=3), entry("dev/null", kind=CHARACTER)
    )
    assert {name: (one.mode, one.uid) for name, one in found.items()} == {"proc": (0o755, 0)}


def compiled(folder: Path, *, mtime_s: int, mode: py_compile.PycInvalidationMode) -> bytes:
    source = folder / "mod.py"
    source.write_text("VALUE = 1\n")
    os.utime(source, (mtime_s, mtime_s))
    target = py_compile.compile(str(source), cfile=str(folder / "mod.pyc"), invalidation_mode=mode)
    return Path(target).read_bytes()


STAMPED = py_compile.PycInvalidationMode.TIMESTAMP
HASHED = py_compile.PycInvalidationMode.CHECKED_HASH


def test_python_takes_the_byte_code_with_the_clamped_time(tmp_path: Path) -> None:
    data = compiled(tmp_path, mtime_s=LATER_S, mode=STAMPED)
    found = passed(entry("lib/__pycache__/mod.cpython-311.pyc", data), entry("lib/mod.py", b"VALUE = 1\n"))
    package = tmp_path / "lib"
    place = Path(importlib.util.cache_from_source(str(package / "mod.py")))
    place.parent.mkdir(parents=True)
    for one, path in zip(found.values(), (package / "mod.py", place), strict=True):
        path.write_bytes(content(one))
        os.utime(path, (one.mtime_s, one.mtime_s))
    words = (sys.executable, "-Bvc", "import mod")
    said = subprocess.run(words, cwd=package, capture_output=True, text=True, check=True).stderr
    assert f"matches {package}/mod.py" in said


def test_byte_code_comes_behind_its_source_with_the_links_to_it(tmp_path: Path) -> None:
    data = compiled(tmp_path, mtime_s=LATER_S, mode=STAMPED)
    link = entry("a/__pycache__/m.opt-1.pyc", kind=HARD_LINK, link="a/__pycache__/m.pyc")
    found = passed(entry("a/__pycache__/m.pyc", data), link, entry("a/m.py", b"x"), entry("b"))
    assert list(found) == ["a/m.py", "a/__pycache__/m.pyc", "a/__pycache__/m.opt-1.pyc", "b"]
    assert struct.unpack_from("<I", content(found["a/__pycache__/m.pyc"]), 8) == (EPOCH_S,)


def test_stale_byte_code_does_not_become_fresh(tmp_path: Path) -> None:
    """A step changed the source after the compilation: with both times clamped, it would look fresh."""
    data = compiled(tmp_path, mtime_s=LATER_S, mode=STAMPED)
    link = entry("a/__pycache__/m.opt-1.pyc", kind=HARD_LINK, link="a/__pycache__/m.pyc")
    found = passed(entry("a/__pycache__/m.pyc", data), link, entry("a/m.py", b"x", mtime_s=LATER_S + 1))
    assert list(found) == ["a/m.py"]


@pytest.mark.parametrize("mtime_s", [EPOCH_S - 9, LATER_S])
def test_byte_code_with_a_hash_stays_as_it_is(tmp_path: Path, mtime_s: int) -> None:
    data = compiled(tmp_path, mtime_s=mtime_s, mode=HASHED)
    name = "a/__pycache__/m.pyc"
    assert content(passed(entry(name, data))[name]) == data


def test_byte_code_of_the_base_stays_as_it_is(tmp_path: Path) -> None:
    data = compiled(tmp_path, mtime_s=EPOCH_S - 9, mode=STAMPED)
    assert content(passed(entry("m.pyc", data, mtime_s=EPOCH_S - 8))["m.pyc"]) == data


@pytest.mark.parametrize("data", [b"", b"short", bytes(4) + b"\1\0\0\0" + b"x" * 40])
def test_what_is_no_byte_code_stays_as_it_is(data: bytes) -> None:
    assert content(passed(entry("a/odd.pyc", data))["a/odd.pyc"]) == data
