from __future__ import annotations

import dataclasses
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from imgkit_builder.delta import source
from imgkit_builder.delta.layers import Tar
from imgkit_builder.delta.source import OpenedImage
from imgkit_builder.examine import differences
from imgkit_builder.examine.differences import ComparedSide, Differences, compare
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import (
    LockedBase,
    LockedDeb,
    LockedPlatform,
    LockedWheel,
    LockRequest,
)

STATUS = b"Package: curl\nVersion: 7.88\nArchitecture: amd64\n"
SITE = "usr/lib/python3/dist-packages"


def layer(path: Path, files: Mapping[str, bytes], *, mtime: int = 1, mode: int = 0o644) -> Tar:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(data), mtime, mode
            tar.addfile(info, io.BytesIO(data))
    return Tar(path)


def image(*layers: Tar, env: Mapping[str, str] | None = None, keeps: bool = True) -> ComparedSide:
    return differences.of_image(
        OpenedImage(
            name="an image",
            arch="amd64",
            created_s=0,
            env=tuple((env or {}).items()),
            layers=tuple((f"sha256:{one.path.name}", one) for one in layers) if keeps else (),
            stack=tuple(reversed(layers)),
            added=frozenset() if keeps else source.OWN,
        )
    )


def lock(**versions: str) -> ComparedSide:
    debs = tuple(
        LockedDeb(name=name, version=one, architecture="amd64", file=name, url="", sha256="", size_bytes=0)
        for name, one in versions.items()
    )
    wheels = (LockedWheel(step=0, name="A_b", version="2.1", file="a", sha256=""),)
    return differences.of_lock(
        "mine.lock",
        LockedPlatform(
            platform="linux/amd64",
            source_date_epoch=0,
            request=LockRequest(base="base.example.org/a:1"),
            base=LockedBase(name="base.example.org/a:1"),
            apt=debs,
            pip=wheels,
        ),
    )


def recipe(path: Path, image: str = "") -> ComparedSide:
    path.write_text("extends: lambda\nimage:\n  base: base.example.org/a:1\n" + image)
    return differences.of_recipe("mine", load(str(path)))


def values(found: Differences) -> list[tuple[str, str, str]]:
    return [(one.name, one.before, one.after) for one in (*found.packages, *(found.env or ()))]


def test_packages_and_variables_of_two_images(tmp_path: Path) -> None:
    one = layer(tmp_path / "1", {"var/lib/dpkg/status": STATUS, f"{SITE}/a-1.egg-info": b""})
    other = layer(tmp_path / "2", {"var/lib/dpkg/status": STATUS.replace(b"88", b"89")})
    found = compare(image(one, env={"A": "1", "B": "1"}), image(other, env={"A": "2", "C": "1"}))
    assert values(found) == [
        ("deb curl", "7.88", "7.89"),
        ("pypi a", "1", ""),
        ("A", "1", "2"),
        ("B", "1", ""),
        ("C", "", "1"),
    ]
    assert not found.equal


def test_equal_images_have_no_difference(tmp_path: Path) -> None:
    one = layer(tmp_path / "1", {"a/b": b"1"})
    found = compare(image(one), image(one))
    assert found.equal
    assert found.to_dict()["files"] == ()


def test_each_kind_of_change_of_a_file(tmp_path: Path) -> None:
    one = layer(tmp_path / "1", {"a": b"1", "b": b"22", "gone/x": b"333", "gone/y": b"", "same": b"1"})
    more = {"a": b"9", "b": b"22", "gone": b"now a file", "new/z": b"4444", "same": b"1"}
    other = layer(tmp_path / "2", {**more})
    touched = layer(tmp_path / "3", {"b": b"22"}, mtime=5)
    found = compare(image(one), image(other, touched)).files
    assert found is not None
    assert {(one.path, one.how, one.before_bytes, one.after_bytes) for one in found} == {
        ("a", "changed", 1, 1),
        ("b", "attributes", 2, 2),
        ("gone", "removed", 0, 0),
        ("gone/x", "removed", 3, 0),
        ("gone/y", "removed", 0, 0),
        ("gone", "added", 0, 10),
        ("new", "added", 0, 0),
        ("new/z", "added", 0, 4),
    }


def test_layers_that_one_side_lacks(tmp_path: Path) -> None:
    one, other, third = (layer(tmp_path / name, {name: name.encode() * 10}) for name in ("1", "2", "3"))
    found = compare(image(one, other), image(one, third, third)).layers
    assert found is not None
    assert [(one.number, one.before_bytes, one.after_bytes) for one in found] == [(2, 10, 10), (3, 0, 10)]


def test_runtime_files_count_only_where_both_have_them(tmp_path: Path) -> None:
    one = layer(tmp_path / "1", {"a": b"1"})
    made = {".singularity.d/runscript": b"1", "opt/imgkit/sbom.spdx.json": b"{}", "etc/hosts": b""}
    meta = layer(tmp_path / "2", made)
    sif = image(one, meta, keeps=False)
    mixed = compare(image(one), sif)
    assert mixed.files == compare(sif, image(one)).files == ()
    assert mixed.layers is None
    assert "a .sif or .sqsh keeps no layers" in mixed.not_compared
    more = image(one, layer(tmp_path / "3", {"home/me/x": b"1"}))
    assert {one.path for one in compare(more, sif).files or ()} == {"home/me", "home/me/x"}
    both = compare(image(one, keeps=False), sif)
    assert ".singularity.d/runscript" in {one.path for one in both.files or ()}


def test_lock_is_compared_by_what_it_names(tmp_path: Path) -> None:
    files = {
        "var/lib/dpkg/status": STATUS + b"\nPackage: base\nVersion: 1\n",
        f"{SITE}/a.b-2.1.egg-info": b"",
    }
    made = image(layer(tmp_path / "1", files))
    assert compare(lock(curl="7.88"), made).equal
    found = compare(made, lock(curl="7.89", wget="1"))
    assert values(found) == [("deb curl", "7.88", "7.89"), ("deb wget", "", "1")]
    assert found.files is found.env is None


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("[a.b]", []),
        ("['A_B>=2,<3']", []),
        ("['a-b==2.1']", []),
        ("[a-b>=3]", [("pypi a-b", ">=3", "2.1")]),
        ("[other]", [("pypi other", "*", "")]),
    ],
)
def test_recipe_asks_for_versions(asked: str, expected: list[tuple[str, str, str]], tmp_path: Path) -> None:
    one = recipe(tmp_path / "mine.yaml", f"  pip: [{{packages: {asked}}}]\n")
    assert values(compare(one, lock())) == expected


def test_variables_of_recipe_are_those_of_its_image(tmp_path: Path) -> None:
    one = recipe(tmp_path / "mine.yaml", "  env: {A: '1', B: '2'}\n")
    made = image(layer(tmp_path / "1", {"a": b""}), env={"A": "1", "PATH": "/bin"})
    assert values(compare(one, made)) == [("B", "2", "")]


def test_other_base_is_a_difference(tmp_path: Path) -> None:
    one = recipe(tmp_path / "mine.yaml")
    other = dataclasses.replace(one, base="base.example.org/a:2")
    assert compare(one, one).equal
    found = compare(one, other)
    assert [(change.name, change.before, change.after) for change in found.base] == [
        ("name", "base.example.org/a:1", "base.example.org/a:2")
    ]
    pinned = (dataclasses.replace(one, base_digest=f"sha256:{digit * 64}") for digit in "12")
    assert [change.name for change in compare(*pinned).base] == ["digest"]
