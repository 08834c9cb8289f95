"""A tar as plain files: nothing is written through a link, and what cannot be true is refused."""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from imgkit_builder.sif.squashers import PlainTree
from imgkit_entrypoints.errors import CheckFailed, ToolFailed


def tar(*members: tuple[str, bytes, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as out:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            out.addfile(info)
    return buffer.getvalue()


def write(root: Path, data: bytes) -> PlainTree:
    tree = PlainTree(root=root)
    with tree.written() as sink:
        sink.write(data)
    return tree


FOLDER, FILE = ("d", tarfile.DIRTYPE, ""), ("d/f", tarfile.REGTYPE, "")


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([FILE], "before its folder"),
        ([FOLDER, FOLDER], "comes twice"),
        ([FOLDER, ("d/l", tarfile.LNKTYPE, "nowhere")], "hard link to 'nowhere'"),
        ([FOLDER, ("d/l", tarfile.LNKTYPE, "../../etc/hosts")], "hard link"),
        ([FOLDER, ("d/l", tarfile.LNKTYPE, "d")], "hard link to 'd'"),
    ],
)
def test_tar_that_cannot_be_true_is_refused(
    tmp_path: Path, members: Sequence[tuple[str, bytes, str]], why: str
) -> None:
    with pytest.raises(CheckFailed, match=why):
        write(tmp_path / "tree", tar(*members))


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A link is no folder, wherever it leads."""
    outside = tmp_path / "outside"
    outside.mkdir()
    with pytest.raises(CheckFailed, match="before its folder"):
        write(tmp_path / "tree", tar(("l", tarfile.SYMTYPE, str(outside)), ("l/x", tarfile.REGTYPE, "")))
    assert list(outside.iterdir()) == []


def test_file_that_comes_twice_is_refused(tmp_path: Path) -> None:
    link = ("d/f", tarfile.SYMTYPE, str(tmp_path / "victim"))
    with pytest.raises(ToolFailed, match="'d/f' of the image cannot be written to disk: File exists"):
        write(tmp_path / "tree", tar(FOLDER, link, FILE))
    assert not (tmp_path / "victim").exists()


def test_fault_while_much_is_sent_ends_the_sender(tmp_path: Path) -> None:
    """The reader ends first; more than a pipe holds is still to come."""
    with pytest.raises(CheckFailed, match="comes twice"):
        write(tmp_path / "tree", tar(FOLDER, FOLDER, *[FILE] * 20_000))


def test_fault_of_the_sender_comes_first(tmp_path: Path) -> None:
    tree = PlainTree(root=tmp_path / "tree")

    def interrupted() -> None:
        with tree.written() as sink:
            sink.write(tar(FOLDER)[:100])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_full_disk_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller knows which disk it is, and what helps."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "utime", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "tree", tar(FOLDER))


def test_files_are_private_until_they_are_squashed(tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", tar(FOLDER, FILE))
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tree.root, tree.root / "d", tree.root / "d/f")]
    assert modes == [0o700, 0o700, 0o600]
    assert list(tree.pseudo_file()) == [b"d m 644 0 0\n", b"d/f m 644 0 0\n"]
