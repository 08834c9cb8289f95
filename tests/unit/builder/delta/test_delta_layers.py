"""The kinds of layers: a tar, a squashfs; and a tree to a tar."""

from __future__ import annotations

import io
import os
import random
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from imgkit_builder.delta import tree, write_squashfs
from imgkit_builder.delta.layers import Tar
from imgkit_builder.delta.read_squashfs import SquashfsLayer
from imgkit_builder.delta.tree import TreeEntry
from imgkit_builder.sif import squash
from imgkit_entrypoints.errors import CheckFailed, ToolMissing


def packed_tar(entries: Iterable[tuple[str, TreeEntry | None]]) -> bytes:
    """What mksquashfs reads."""
    sink = io.BytesIO()
    squash.write_tar(write_squashfs.image_entries(entries), sink)
    return sink.getvalue()


def archive(path: Path, members: Iterable[tuple[str, bytes, str]]) -> Tar:
    """A tar of (name, type, link target or content)."""
    with tarfile.open(path, "w") as tar:
        for name, kind, text in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            data = text.encode() if kind == tarfile.REGTYPE else b""
            info.size, info.linkname = len(data), "" if data else text
            info.mode = 0o777 if kind == SYM else 0o644
            tar.addfile(info, io.BytesIO(data))
    return Tar(path)


FILE, DIR, LINK, SYM = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE


def test_whiteouts_of_a_tar(tmp_path: Path) -> None:
    members = [("d/", DIR, ""), ("d/.wh..wh..opq", FILE, ""), ("d/.wh.x", FILE, ""), (".wh.gone", FILE, "")]
    layer = archive(tmp_path / "layer.tar", [*members, ("d/.wh..wh.plnk", FILE, "")])
    assert {name: entry.kind for name, entry in layer.children("").items()} == {
        "d": "dir",
        "gone": "whiteout",
    }
    assert layer.children("")["d"].opaque
    assert {name: entry.kind for name, entry in layer.children("d").items()} == {"x": "whiteout"}


def test_deleted_and_made_again_hides_what_was(tmp_path: Path) -> None:
    layer = archive(tmp_path / "layer.tar", [(".wh.d", FILE, ""), ("d/", DIR, ""), ("d/new", FILE, "1")])
    below = archive(tmp_path / "below.tar", [("d/", DIR, ""), ("d/old", FILE, "1")])
    assert [path for path, _ in tree.everything((layer, below))] == ["d", "d/new"]


def test_folder_without_an_entry_takes_mode_from_below(tmp_path: Path) -> None:
    layer = archive(tmp_path / "layer.tar", [("./d/new", FILE, "1")])
    assert layer.children("")["d"].implied
    below = archive(tmp_path / "below.tar", [("d", DIR, "")])
    node = tree.find((layer, below), "d")
    assert node is not None
    assert node.entry.layer is below


def test_hard_links_of_a_tar_are_one_file(tmp_path: Path) -> None:
    members = [("a", FILE, "text"), ("b", LINK, "a"), ("c", LINK, "b"), ("s", SYM, "a")]
    layer = archive(tmp_path / "layer.tar", members)
    entries = layer.children("")
    assert len({entry.group for name, entry in entries.items() if name != "s"}) == 1
    assert sorted(layer.names(entries["a"].group or 0)) == ["a", "b", "c"]
    assert b"".join(layer.content(entries["c"])) == b"text"
    assert entries["s"].link == "a"


def test_hard_link_out_of_the_layer_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="not a file in its layer"):
        archive(tmp_path / "layer.tar", [("b", LINK, "a")]).children("")


@pytest.mark.parametrize(
    "members",
    [
        [(str(number), LINK, str((number + 1) % 2000)) for number in range(2000)],
        [("d/" * 900 + "f", FILE, "1")],
        [("d/.wh...", FILE, "")],
    ],
    ids=["circle of hard links", "deep folders", "whiteout of .."],
)
def test_hostile_layer_refused(tmp_path: Path, members: list[tuple[str, bytes, str]]) -> None:
    with pytest.raises(CheckFailed):
        archive(tmp_path / "layer.tar", members).children("")


def test_sparse_file_has_its_zeros(tmp_path: Path) -> None:
    with (tmp_path / "holes").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    subprocess.run(
        ["tar", "-S", "-C", str(tmp_path), "-cf", str(tmp_path / "layer.tar"), "holes"], check=True
    )
    layer = Tar(tmp_path / "layer.tar")
    entry = layer.children("")["holes"]
    assert b"".join(layer.content(entry)) == bytes(1 << 20) + b"end"
    assert (tmp_path / "layer.tar").stat().st_size < 1 << 17


def test_tar_that_is_none_refused(tmp_path: Path) -> None:
    (tmp_path / "layer.tar").write_bytes(b"x" * 2000)
    with pytest.raises(CheckFailed, match="an incomplete or damaged tar archive"):
        Tar(tmp_path / "layer.tar").children("")


@pytest.mark.programs("mksquashfs")
@pytest.mark.parametrize("compression", ["gzip", "xz", "zstd"])
def test_squashfs_gives_back_what_was_put_in(tmp_path: Path, compression: str) -> None:
    members = [
        *[("d/", DIR, ""), ("d/small", FILE, "x"), ("d/empty", FILE, ""), ("d/two", LINK, "d/small")],
        *[
            ("big", FILE, "0123456789" * 40_000),
            ("zeros", FILE, "\0" * 300_000),
            ("s", SYM, "/an/" + "y" * 150),
        ],
        *[(f"many/{number:04}", FILE, str(number)) for number in range(600)],
        *[("ü\nname", FILE, "1"), ("fifo", tarfile.FIFOTYPE, "")],
    ]
    layer = archive(tmp_path / "layer.tar", members)
    entries = dict(tree.everything((layer,)))
    entries |= {"gone": None, "owned": TreeEntry(
        layer=layer, kind="char", mode=0o4711, uid=3_000_000, gid=4321, mtime_s=5, device=(300, 70_000),
        xattrs={"user.a": b"\0" * 40, "security.capability": b"\1\0"},
    )}  # fmt: skip
    target = tmp_path / "x.sqfs"
    packed = packed_tar(sorted(entries.items()))
    words = ("mksquashfs", "-", target, "-tar", "-noappend", "-quiet", "-no-progress", "-comp", compression)
    subprocess.run(words, input=packed, check=True, capture_output=True)
    read = SquashfsLayer(target)
    found = dict(tree.everything((read,)))
    assert found.keys() == entries.keys() - {"gone"}
    assert read.children("")["gone"].kind == "whiteout"
    for path, entry in found.items():
        known = entries[path]
        assert known is not None
        about = ("kind", "mode", "uid", "gid", "mtime_s", "size_bytes", "link", "device")
        if path != "many":  # made for its files, by mksquashfs
            assert [getattr(entry, name) for name in about] == [getattr(known, name) for name in about], path
        assert dict(entry.xattrs) == {
            name: value for name, value in known.xattrs.items() if name[:5] != "user."
        }
        if entry.kind == "file":
            assert tree.digest(entry) == tree.digest(known)
    assert sorted(read.names(found["d/two"].group or 0)) == ["d/small", "d/two"]


def test_damaged_squashfs_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hsqs" + bytes(20))
    with pytest.raises(CheckFailed, match="damaged"):
        SquashfsLayer(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"none" + bytes(200))
    with pytest.raises(CheckFailed, match="not a squashfs"):
        SquashfsLayer(tmp_path / "x")


def packed(folder: Path, target: Path, *options: str) -> bytes:
    """A squashfs of the files in `folder`."""
    words = ("mksquashfs", folder, target, "-noappend", "-quiet", "-no-progress", *options)
    subprocess.run(words, check=True)
    return target.read_bytes()


def read_all(path: Path) -> None:
    layer = SquashfsLayer(path)
    for _, entry in tree.everything((layer,)):
        if entry.kind == "file":
            assert sum(map(len, layer.content(entry))) == entry.size_bytes
        if entry.group is not None:
            layer.names(entry.group)


@pytest.mark.programs("mksquashfs")
@pytest.mark.parametrize("compression", ["gzip", "xz", "zstd"])
def test_any_damage_is_named_and_never_a_traceback(tmp_path: Path, compression: str) -> None:
    """A damaged number becomes a place, a size or an index: Python raises another error for each."""
    folder = tmp_path / "files"
    (folder / "d").mkdir(parents=True)
    (folder / "a").write_bytes(os.urandom(9000))
    (folder / "d/hard").hardlink_to(folder / "a")
    (folder / "d/link").symlink_to("../a")
    os.mkfifo(folder / "fifo")
    whole = packed(folder, tmp_path / "good", "-comp", compression, "-b", "4096")
    chance, refused = random.Random(1), 0  # noqa: S311 - the same damage in every run
    for _ in range(150):
        data = bytearray(whole)
        # Half of the damage is in the superblock, which holds most places and sizes.
        at = chance.choice((chance.randrange(8, 96), chance.randrange(len(data))))
        data[at] = chance.choice((0, 1, 127, 128, 255))
        (tmp_path / "bad").write_bytes(data)
        try:
            read_all(tmp_path / "bad")
        except (CheckFailed, ToolMissing):
            refused += 1
    assert refused > 20


@pytest.mark.programs("mksquashfs")
@pytest.mark.parametrize("name", [b"../..", b"inn/r", b"in\0er"])
def test_name_that_leads_out_refused(tmp_path: Path, name: bytes) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files/inner").write_text("1")
    whole = packed(tmp_path / "files", tmp_path / "good", "-noI")
    at = whole.index(b"inner")
    (tmp_path / "bad").write_bytes(whole[:at] + name + whole[at + 5 :])
    with pytest.raises(CheckFailed, match="damaged"):
        read_all(tmp_path / "bad")


@pytest.mark.programs("mksquashfs")
def test_folder_within_itself_refused(tmp_path: Path) -> None:
    """Its only entry leads back to the folder: a reader that does not look never ends."""
    (tmp_path / "files/outer").mkdir(parents=True)
    (tmp_path / "files/outer/again").mkdir()
    whole = packed(tmp_path / "files", tmp_path / "good", "-noI")
    layer = SquashfsLayer(tmp_path / "good")
    layer.children("")
    entries = {path: reference for reference, path in layer._folder_at.items()}
    # An entry is: place of its inode, number, type, length of the name, name.
    at = whole.index(b"again") - 8
    place = (entries["outer"] & 0xFFFF).to_bytes(2, "little")
    (tmp_path / "bad").write_bytes(whole[:at] + place + whole[at + 2 :])
    with pytest.raises(CheckFailed, match="damaged"):
        read_all(tmp_path / "bad")


def test_compression_nobody_can_undo_refused(tmp_path: Path) -> None:
    header = bytearray(96)
    header[:4], header[20], header[28] = b"hsqs", 3, 4
    (tmp_path / "x").write_bytes(header)
    with pytest.raises(ToolMissing, match="lzo"):
        SquashfsLayer(tmp_path / "x")


@pytest.mark.programs("mksquashfs")
def test_root_folder_is_roots_whoever_made_it(tmp_path: Path) -> None:
    packed = packed_tar([("a", TreeEntry(layer=archive(tmp_path / "t", []), kind="fifo", mode=0o600))])
    target = tmp_path / "x.sqfs"
    words = ("mksquashfs", "-", target, "-tar", "-noappend", "-quiet", "-no-progress", "-noI")
    as_user = ("-root-uid", "1234", "-root-gid", "1234")
    subprocess.run((*words, *as_user), input=packed, check=True, capture_output=True)
    assert squash.set_root(target, 77)
    root = SquashfsLayer(target).root
    assert (root.uid, root.gid, root.mtime_s) == (0, 0, 77)
