"""Files of a squashfs that imgkit did not write, read by unsquashfs; and each file against a manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import small_sif
from file_tree import write_program

from imgkit_builder.archive.tar_read import REGULAR, SYMLINK
from imgkit_builder.base.checks import Check
from imgkit_builder.examine.verify import verify
from imgkit_builder.sif import sqsh, unsquash
from imgkit_builder.sif.entries import ImageEntry
from imgkit_builder.sif.file_manifest import BakedFacts, ManifestWriter
from imgkit_builder.sif.unsquash import Squashfs
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing, UsageError

pytestmark = pytest.mark.programs("mksquashfs", "unsquashfs")


@pytest.fixture
def squashfs(tmp_path: Path) -> Path:
    """A squashfs behind 4 KiB of something else."""
    folder = tmp_path / "image"
    (folder / "a").mkdir(parents=True)
    (folder / "a/one").write_text("1")
    (folder / "a/[x]*").write_text("odd")
    (folder / "a/x").write_text("not meant")
    (folder / "link").symlink_to("a")
    (folder / "away").symlink_to(tmp_path)
    (tmp_path / "one").write_text("of the host")
    path = tmp_path / "x"
    path.write_bytes(bytes(4096))
    options = ("-noappend", "-offset", "4096", "-all-root", "-quiet", "-no-progress")
    subprocess.run(["mksquashfs", folder, path, *options], check=True, capture_output=True)
    return path


def test_named_files_are_read(squashfs: Path) -> None:
    contents = Squashfs(path=squashfs, offset=4096).read(["a/one", "a/[x]*", "absent", "a"])
    assert contents == {"a/one": b"1", "a/[x]*": b"odd"}
    assert {path.name for path in squashfs.parent.iterdir()} == {"x", "one", "image"}


def test_nothing_is_read_through_a_link_of_the_image(squashfs: Path) -> None:
    assert Squashfs(path=squashfs, offset=4096).read(["link/one", "away/one"]) == {}


def test_files_are_listed_with_mode_and_owner(squashfs: Path) -> None:
    listed = {file.path: file for file in Squashfs(path=squashfs, offset=4096).listed("a")}
    assert listed.keys() == {"a", "a/one", "a/[x]*", "a/x"}
    listed_file = listed["a/one"]
    assert (listed_file.mode, listed_file.uid, listed_file.gid, listed_file.size) == ("-rw-r--r--", 0, 0, "1")


def test_damaged_squashfs_is_refused(squashfs: Path) -> None:
    squashfs.write_bytes(squashfs.read_bytes()[:4200])
    with pytest.raises(CheckFailed, match="unsquashfs cannot read it"):
        Squashfs(path=squashfs, offset=4096).read(["a/one"])
    with pytest.raises(ToolFailed):
        list(Squashfs(path=squashfs, offset=4096).listed())


def test_missing_program_says_what_installs_it(squashfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (squashfs.parent / "bin").mkdir()
    monkeypatch.setenv("PATH", str(squashfs.parent / "bin"))
    monkeypatch.setattr(unsquash.mksquashfs, "candidates", tuple)
    with pytest.raises(ToolMissing, match="not on this machine") as caught:
        Squashfs(path=squashfs, offset=4096).read(["a/one"])
    assert "squashfs-tools" in (caught.value.hint or "")


def test_program_that_cannot_unpack_the_compression_is_named(
    squashfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = "Filesystem uses zstd compression, this is unsupported by this version"
    script = f"case $1 in -help) echo ' -o[ffset] N' ;; *) echo '{error}'; exit 1 ;; esac"
    tool = write_program(squashfs.parent / "bin/unsquashfs", script)  # a stand-in for one without zstd
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    with pytest.raises(ToolMissing, match="uses zstd"):
        Squashfs(path=squashfs, offset=4096).read(["a/one"])


# ---- each file against the manifest


def described(path: Path, entries: list[ImageEntry]) -> Path:
    """Append the manifest of `entries` and the record to the squashfs `path`."""
    writer = ManifestWriter(path.parent / "manifest")
    for entry in writer.recorded(entries):
        entry.read()
    manifest = writer.finish(BakedFacts())
    record = dataclasses.replace(
        small_sif.record(),
        arch="amd64",
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        manifest_bytes=len(manifest),
    )
    _, checksum = sqsh.Sqsh().put_record(path, record, manifest, lambda *_: None)
    Path(f"{path}.sha256").write_text(f"{checksum}  {path.name}\n")
    return path


def image(folder: Path) -> Path:
    tree = folder / "tree"
    tree.mkdir()
    (tree / "a").write_text("1")
    (tree / "a").chmod(0)
    (tree / "l -> x").symlink_to("a")
    path = folder / "x.sqsh"
    subprocess.run(
        ["mksquashfs", tree, path, "-all-root", "-quiet", "-no-progress"], check=True, capture_output=True
    )
    shutil.rmtree(tree)
    return path


A = ImageEntry(names=("a",), kind=REGULAR, mode=0).with_content(b"1")
LINK = ImageEntry(names=("l -> x",), kind=SYMLINK, link="a")


def files_check(path: Path) -> Check:
    (found,) = (check for check in verify(path, each_file=True) if check.name == "files")
    return found


def test_each_file_is_as_the_manifest_says(tmp_path: Path) -> None:
    found = files_check(described(image(tmp_path), [A, LINK]))
    assert (found.verdict, "2, each as the file manifest says" in found.found) == ("ok", True)


@pytest.mark.parametrize(
    ("entries", "name"),
    [
        ([A.with_content(b"2"), LINK], "/a"),
        ([A.changed(mode=0o644), LINK], "/a"),
        ([A.changed(uid=5), LINK], "/a"),
        ([A, LINK.changed(link="b")], "/l -> x"),
        ([A], "/l -> x"),
        ([A, LINK, ImageEntry(names=("more",), kind=REGULAR)], "/more"),
    ],
)
def test_file_that_differs_from_the_manifest_is_named(
    tmp_path: Path, entries: list[ImageEntry], name: str
) -> None:
    found = files_check(described(image(tmp_path), entries))
    assert (found.verdict, name in found.found) == ("fail", True), found


def test_manifest_that_was_changed_fails(tmp_path: Path) -> None:
    path = described(image(tmp_path), [A, LINK])
    data = bytearray(path.read_bytes())
    data[sqsh.manifest_offset(path) + 30] ^= 1
    path.write_bytes(data)
    (found,) = (check for check in verify(path) if check.name == "files")
    assert (found.verdict, "its file manifest is damaged" in found.found) == ("fail", True)


def test_file_without_a_manifest_has_nothing_to_compare(tmp_path: Path) -> None:
    path = image(tmp_path)
    assert files_check(path).verdict == "skip"
    assert [check for check in verify(path) if check.name == "files"] == []


def test_archive_has_no_files_to_compare(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(bytes(1024))
    with pytest.raises(UsageError, match=r"only a \.sif or \.sqsh"):
        verify(tmp_path / "x.tar", each_file=True)


def test_disk_without_room_for_the_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = described(image(tmp_path), [A, LINK])
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr("imgkit_builder.examine.unpacked.disk_usage", lambda _: full)
    with pytest.raises(UsageError, match="are free in") as caught:
        verify(path, each_file=True)
    assert "IMGKIT_TMPDIR" in (caught.value.hint or "")
