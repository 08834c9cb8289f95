"""What a container writes of changed layers, and how it is read: on folders that stand for the layers."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from imgkit_builder.archive import changed_files, tar_read
from imgkit_builder.archive.changed_files import ChangedFiles
from imgkit_builder.delta import tree
from imgkit_builder.delta.layers import Changes, Folder, Memory
from imgkit_builder.engine.show_changed import Refused, ShownPaths, mount_points
from imgkit_builder.sif.entries import ImageEntry
from imgkit_entrypoints.errors import CheckFailed

NOTHING = Memory(())


def files(folder: Path, **texts: str) -> Path:
    """A folder of files; ``__`` in a name stands for ``/``."""
    for name, text in texts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folder.mkdir(exist_ok=True)
    return folder


def shown(
    tmp_path: Path, root: Path, new: tuple[Path, ...], old: tuple[Path, ...] = (), *mounts: str
) -> ChangedFiles:
    """What is written for layers, and read again, in pieces of 7 bytes."""
    found = ShownPaths(
        os.fsencode(root),
        [os.fsencode(one) for one in new],
        [os.fsencode(one) for one in old],
        skip=[b"etc/hosts"],
        mounts=[os.fsencode(one) for one in mounts],
    )
    found.read()
    out = io.BytesIO()
    found.write(out)
    return changed_files.read(pieces(out.getvalue()), tmp_path / "changed.tar", most_bytes=1 << 20)


def pieces(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), 7):
        yield data[at : at + 7]


def names(found: ChangedFiles) -> list[str]:
    return [member.name for member in tar_read.headers(found.tar)]


def test_only_paths_of_layers_are_written_as_the_root_shows_them(tmp_path: Path) -> None:
    root = files(tmp_path / "root", a__b="as it shows", a__other="o", far__c="c", etc__hosts="engine's")
    layer = files(tmp_path / "layer", a__b="as it lies", a__gone="g", etc__hosts="h")
    found = shown(tmp_path, root, (layer,))
    assert names(found) == ["a", "a/b", "etc"]
    assert found.folders["a"].names == {"b", "other"}
    assert found.folders[""].names == {"a", "far", "etc"}
    assert b"as it shows" in found.tar.read_bytes()


def test_what_does_not_show_is_a_whiteout_over_the_base(tmp_path: Path) -> None:
    base = Folder(files(tmp_path / "base", a__gone="g", a__same="s", b="file", run="r"))
    root = files(tmp_path / "root", a__same="s", b__c="now a folder")
    layer = files(tmp_path / "layer", a__gone="g", b__c="now a folder")
    kept = Memory([ImageEntry(names=("run",), kind=tar_read.REGULAR)])
    changes = Changes(shown(tmp_path, root, (layer,)), (base,), kept)
    found = tree.changes((base,), (changes, base))
    assert {path: entry and entry.kind for path, entry in found.items()} == {
        "a": "dir",
        "a/gone": None,
        "b": "dir",
        "b/c": "file",
    }


def test_folder_that_became_a_link_is_not_followed(tmp_path: Path) -> None:
    root = files(tmp_path / "root", elsewhere__b="not of the layer")
    (root / "a").symlink_to("elsewhere")
    layer = files(tmp_path / "layer", a__b="x")
    assert names(shown(tmp_path, root, (), (layer,))) == ["a"]


def test_names_below_a_folder_that_the_base_hid_are_uncovered(tmp_path: Path) -> None:
    """A layer of the base had replaced the folder a; in the new image it shows as lower layers have it."""
    base = Folder(files(tmp_path / "base", a__new="n"))
    root = files(tmp_path / "root", a__low="l", a__deep__er="e")
    found = shown(tmp_path, root, (), (files(tmp_path / "layer", a__new="n"),))
    assert Changes(found, (base,), NOTHING).uncovered() == {"a": {"low", "deep"}}


def test_folder_that_the_base_had_deleted_is_written_whole(tmp_path: Path) -> None:
    root = files(tmp_path / "root", a__b__c="low", a__d="low", other="o")
    (deleted := tmp_path / "deleted").mkdir()
    os.mkfifo(deleted / "a")  # as good as a whiteout, which only root can make
    assert names(shown(tmp_path, root, (), (deleted,))) == ["a", "a/b", "a/b/c", "a/d"]


def test_files_of_the_engine_in_the_root_are_not_uncovered(tmp_path: Path) -> None:
    root = files(tmp_path / "root", **{".dockerenv": "", "a": "a"})
    found = shown(tmp_path, root, (files(tmp_path / "layer", a="a"),), (files(tmp_path / "old"),))
    assert Changes(found, (NOTHING,), NOTHING).uncovered() == {}


def test_other_names_of_a_changed_file_are_found(tmp_path: Path) -> None:
    root = files(tmp_path / "root", a="linked", b="not changed")
    (root / "deep").mkdir()
    (root / "deep/name").hardlink_to(root / "a")
    found = shown(tmp_path, root, (), (files(tmp_path / "layer", a="before"),))
    assert names(found) == ["a", "deep/name"]
    changes = Changes(found, (NOTHING,), NOTHING)
    entry = changes.children("")["a"]
    assert entry.group is not None
    assert sorted(entry.layer.names(entry.group)) == ["a", "deep/name"]


def test_time_of_a_folder_is_that_of_the_uppermost_layer(tmp_path: Path) -> None:
    root, low, top = (files(tmp_path / name, etc__x="x") for name in ("root", "low", "top"))
    os.utime(top / "etc", ns=(0, 1_699_999_999_999_999_999))
    members = {one.name: one for one in tar_read.headers(shown(tmp_path, root, (top, low)).tar)}
    assert members["etc"].mtime_s == 1_699_999_999


def test_folders_that_the_engine_touches_keep_their_time(tmp_path: Path) -> None:
    root, old = (files(tmp_path / name, etc__x="x") for name in ("root", "old"))
    assert names(shown(tmp_path, root, (), (old,))) == ["etc/x"]


def test_layer_of_the_engines_own_is_left_out(tmp_path: Path) -> None:
    own = files(tmp_path / "own", **{".dockerenv": "", "etc__mtab": "", "dev__console": ""})
    root = files(tmp_path / "root", **{".dockerenv": "", "etc__mtab": "", "a": "a"})
    assert names(shown(tmp_path, root, (own, files(tmp_path / "layer", a="a")), (own,))) == ["a"]


def test_undecodable_and_long_names_come_back(tmp_path: Path) -> None:
    root, layer = files(tmp_path / "root"), files(tmp_path / "layer")
    for folder in (root, layer):
        for name in (b"raw\xff", b"new\nline", b"x" * 200):
            (folder / os.fsdecode(name)).write_text("x")
    found = shown(tmp_path, root, (layer,))
    assert found.folders[""].names == set(names(found)) == {path.name for path in root.iterdir()}


@pytest.mark.parametrize("mount", ["a", "a/b"])
def test_mount_over_a_changed_path_is_refused(tmp_path: Path, mount: str) -> None:
    root, layer = (files(tmp_path / name, a__b="x") for name in ("root", "layer"))
    with pytest.raises(Refused, match=f"mounts a file.* over /{mount}"):
        shown(tmp_path, root, (layer,), (), mount)
    shown(tmp_path, root, (files(tmp_path / "another", c="c"),), (), mount)


ROOT = b"228 190 0:62 / / ro,relatime - overlay overlay rw,lowerdir=/a:/b%s"


def test_mount_points_are_unescaped() -> None:
    rows = (ROOT % b"", rb"1 2 0:5 / /a\040b rw - tmpfs tmpfs rw", b"1 2 0:5 / /dev rw - tmpfs tmpfs rw")
    assert mount_points(b"\n".join(rows), b"N\n") == (b"a b", b"dev")


@pytest.mark.parametrize(("option", "default"), [(b",redirect_dir=on", b"N\n"), (b"", b"Y\n")])
def test_storage_with_renamed_folders_is_refused(option: bytes, default: bytes) -> None:
    with pytest.raises(Refused, match="redirect_dir"):
        mount_points(ROOT % option, default)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "cut short"),
        (b"Python 2.7\nhello", "wrote b'Python 2.7"),
        (b"imgkit-changed 1 99\nabc", "cut short"),
        (b"imgkit-changed 1 9999999999\n", "instead of its files"),
        (b"imgkit-changed 1 3\na\0bX", "damaged"),
        (b"imgkit-changed 1 5\na\0b\0c" + bytes(2000), "more than"),
    ],
)
def test_other_output_is_refused(tmp_path: Path, data: bytes, what: str) -> None:
    with pytest.raises(CheckFailed, match=what):
        changed_files.read(pieces(data), tmp_path / "x.tar", most_bytes=1024)
