"""Two trees are compared entry by entry, and a difference gets its layer and the line of the recipe."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest
import small_sif

from imgkit_builder.archive.tar_read import DIRECTORY, REGULAR, SYMLINK
from imgkit_builder.delta.layers import Memory
from imgkit_builder.examine import rebuilt
from imgkit_builder.examine.rebuilt import DifferentEntry
from imgkit_builder.recipe import lock_file, targets
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Lock, LockedBase, LockedPlatform, LockRequest
from imgkit_builder.sif.entries import OwnFile

DOCKERFILE = """\
# mine.yaml:3
FROM base
# imgkit: x
ARG A=1

# mine.yaml:5-6
RUN apt-get install \\
    less
# imgkit: the default folder
WORKDIR "/workspace"

# mine.yaml:9
COPY ["copy/0/", "/workspace/"]
"""


def tree(*files: OwnFile, mtime_s: int = 0) -> Memory:
    return Memory((OwnFile(path="etc", kind=DIRECTORY), *files), mtime_s=mtime_s)


def file(path: str, data: bytes, *, mode: int = 0o644) -> OwnFile:
    return OwnFile(path=path, kind=REGULAR, mode=mode, data=data)


def different(had: Memory, made: Memory) -> dict[str, str]:
    return dict(rebuilt.differences((had,), (made,)))


def test_each_kind_of_difference_is_named() -> None:
    had = tree(file("etc/a", b"1"), file("etc/b", b"1"), file("etc/c", b"1"), file("old", b""))
    link = OwnFile(path="etc/c", kind=SYMLINK, link="a")
    made = tree(file("etc/a", b"22"), file("etc/b", b"1", mode=0o600), link, file("new", b""))
    assert different(had, made) == {
        "etc/a": "content (2 bytes, were 1)",
        "etc/b": "mode 600, was 644",
        "etc/c": "a symlink, was a file",
        "new": "only in the new file",
        "old": "only in the old file",
    }


def test_equal_trees_have_no_difference_and_times_count() -> None:
    assert different(tree(file("etc/a", b"1")), tree(file("etc/a", b"1"))) == {}
    late = different(tree(file("etc/a", b"1")), tree(file("etc/a", b"1"), mtime_s=9))
    assert late["etc/a"] == "time 9, was 0"


@pytest.mark.parametrize(
    ("layers", "lines"),
    [
        (2, ["mine.yaml:5-6 (RUN apt-get install \\)", 'mine.yaml:9 (COPY ["copy/0/", "/workspace/"])']),
        (
            3,
            [
                "mine.yaml:5-6 (RUN apt-get install \\)",
                'imgkit: the default folder (WORKDIR "/workspace")',
                'mine.yaml:9 (COPY ["copy/0/", "/workspace/"])',
            ],
        ),
        (7, []),
    ],
)
def test_layers_get_the_lines_that_made_them(layers: int, lines: list[str]) -> None:
    assert list(rebuilt.origins(DOCKERFILE, layers).values()) == lines


def test_uppermost_layer_with_the_file_is_named() -> None:
    layers = [tree(file("etc/a", b"")), tree(file("etc/a", b"1")), tree()]
    made_by = {0: "mine.yaml:5", 1: "mine.yaml:9"}
    found = rebuilt.placed(DifferentEntry(path="etc/a", what="content"), layers, made_by)
    assert (found.layer, found.origin) == (2, "mine.yaml:5")
    lost = DifferentEntry(path="etc/z", what="only in the old file")
    assert rebuilt.placed(lost, layers, made_by) == lost


LOCK = Lock(
    recipe="mine",
    imgkit="0.3.0",
    platforms=(
        LockedPlatform(
            platform="linux/amd64",
            source_date_epoch=1_700_000_000,
            request=LockRequest(base="example.org/base:1"),
            base=LockedBase(name="example.org/base:1", id=f"sha256:{'1' * 64}"),
        ),
    ),
)


def locked_sif(folder: Path, lock: bytes, recipe: Path) -> Path:
    """A .sif whose image says that it was built from `lock` and `recipe`."""
    inside = folder / "root/opt/imgkit"
    inside.mkdir(parents=True)
    (inside / "lock.toml").write_bytes(lock)
    (inside / "recipe.json").write_text(targets.described_json(load(recipe)))
    subprocess.run(
        ["mksquashfs", folder / "root", folder / "root.squashfs", "-comp", "gzip"], check=True, stdout=DEVNULL
    )
    return small_sif.write(folder / "x.sif", (folder / "root.squashfs").read_bytes())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            lambda text: text.replace(b'name = "example.org', b'name = "evil.example'),
            "lock.toml: platforms[0].base.name",
        ),
        (
            lambda text: text.replace(b"base:1", b"base:1\\nRUN id"),
            "lock.toml: platforms[0].request.base",
        ),
        (
            lambda text: text.replace(b"example.org", b"evil.example"),
            "mine.yaml:2: the lock mine.lock is stale",
        ),
        (lambda text: text + b"\xff", "cannot be read"),
        (lambda text: text[: text.index(b"[[platforms")], "platforms: is missing"),
        (
            lambda text: text.replace(b"\n[[platforms", b"\nplatforms = []\n[[x", 1).partition(b"\n[[x")[0],
            "0 platforms",
        ),
    ],
)
def test_lock_in_a_sif_is_checked_as_one_beside_a_recipe(
    tmp_path: Path, call: Callable[..., Any], changed: Callable[[bytes], bytes], said: str
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("image:\n  base: example.org/base:1\n  platform: amd64\n")
    sif = locked_sif(tmp_path, changed(lock_file.text(LOCK).encode()), recipe)
    code, _, err = call("rebuild", str(sif), "--recipe", str(recipe))
    assert (code, said in err) == (2, True), err
