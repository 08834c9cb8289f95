"""Entries as plain files: nothing is written through a link, and what cannot be true is refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from imgkit_builder.archive.tar_read import DIRECTORY, HARD_LINK, REGULAR, SYMLINK
from imgkit_builder.sif.entries import ImageEntry
from imgkit_builder.sif.squash import UnpackedTree
from imgkit_entrypoints.errors import CheckFailed, ToolFailed

Member = tuple[str, bytes, str]
FOLDER: Member = ("d", DIRECTORY, "")
FILE: Member = ("d/f", REGULAR, "")


def write(root: Path, *members: Member) -> UnpackedTree:
    tree = UnpackedTree(root)
    for name, kind, link in members:
        tree.add(ImageEntry(names=(name,), kind=kind, link=link, mode=0o644))
    return tree


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([FILE], "before its folder"),
        ([FOLDER, FOLDER], "comes twice"),
        ([FOLDER, ("d/..", REGULAR, "")], "comes twice, or before its folder"),
        ([("/etc", REGULAR, "")], "before its folder"),
        ([FOLDER, ("d/l", HARD_LINK, "nowhere")], "hard link to 'nowhere'"),
        ([FOLDER, ("d/l", HARD_LINK, "../../etc/hosts")], "hard link"),
        ([FOLDER, ("d/l", HARD_LINK, "d")], "hard link to 'd'"),
        ([("s", b"7", "")], "unknown type"),
    ],
)
def test_entries_that_cannot_be_true_are_refused(tmp_path, members, problem):
    with pytest.raises(CheckFailed, match=problem):
        write(tmp_path / "tree", *members)


def test_nothing_is_written_through_a_link(tmp_path):
    """A link is no folder, wherever it leads."""
    outside = tmp_path / "outside"
    outside.mkdir()
    with pytest.raises(CheckFailed, match="before its folder"):
        write(tmp_path / "tree", ("l", SYMLINK, str(outside)), ("l/x", REGULAR, ""))
    assert list(outside.iterdir()) == []


def test_file_that_comes_twice_is_refused(tmp_path):
    link = ("d/f", SYMLINK, str(tmp_path / "victim"))
    with pytest.raises(ToolFailed, match="'d/f' of the image cannot be written to disk: File exists"):
        write(tmp_path / "tree", FOLDER, link, FILE)
    assert not (tmp_path / "victim").exists()


def test_full_disk_is_told_as_it_is(tmp_path, monkeypatch):
    """The caller knows which disk it is, and what helps."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "utime", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "tree", FOLDER)


def test_files_are_private_until_they_are_squashed(tmp_path):
    tree = write(tmp_path / "tree", FOLDER, FILE)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tree.root, tree.root / "d", tree.root / "d/f")]
    assert modes == [0o700, 0o700, 0o600]
    assert list(tree.pseudo_file()) == [b"d m 644 0 0\n", b"d/f m 644 0 0\n"]


def test_further_names_are_hard_links_and_special_names_are_quoted(tmp_path):
    tree = UnpackedTree(tmp_path / "tree")
    tree.add(ImageEntry(names=("a", 'b "c"#'), kind=REGULAR, mode=0o4755, uid=7).with_content(b"x"))
    assert (tree.root / "a").samefile(tree.root / 'b "c"#')
    assert list(tree.pseudo_file()) == [b"a m 4755 7 0\n", b'b\\ \\"c\\"\\# m 4755 7 0\n']
