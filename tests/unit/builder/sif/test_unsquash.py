"""Files of a squashfs, read by unsquashfs, and what is noted in an image."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest
import small_sif
from file_tree import write_program

from imgkit_builder.sif import objects, unsquash
from imgkit_builder.sif.baked_facts import BakedFacts, Distribution
from imgkit_builder.sif.unsquash import Squashfs
from imgkit_entrypoints.errors import CheckFailed, ToolFailed, ToolMissing

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


def test_named_files_are_read(squashfs):
    contents = Squashfs(path=squashfs, offset=4096).read(["a/one", "a/[x]*", "absent", "a"])
    assert contents == {"a/one": b"1", "a/[x]*": b"odd"}
    assert {path.name for path in squashfs.parent.iterdir()} == {"x", "one", "image"}


def test_nothing_is_read_through_a_link_of_the_image(squashfs):
    assert Squashfs(path=squashfs, offset=4096).read(["link/one", "away/one"]) == {}


def test_files_are_listed_with_mode_and_owner(squashfs):
    listed = {file.path: file for file in Squashfs(path=squashfs, offset=4096).list_files("a")}
    assert listed.keys() == {"a", "a/one", "a/[x]*", "a/x"}
    listed_file = listed["a/one"]
    assert (listed_file.mode, listed_file.uid, listed_file.gid, listed_file.size) == ("-rw-r--r--", 0, 0, "1")


def test_damaged_squashfs_is_refused(squashfs):
    squashfs.write_bytes(squashfs.read_bytes()[:4200])
    with pytest.raises(CheckFailed, match="unsquashfs cannot read it"):
        Squashfs(path=squashfs, offset=4096).read(["a/one"])
    with pytest.raises(ToolFailed):
        list(Squashfs(path=squashfs, offset=4096).list_files())


def test_missing_program_says_what_installs_it(squashfs, monkeypatch):
    (squashfs.parent / "bin").mkdir()
    monkeypatch.setenv("PATH", str(squashfs.parent / "bin"))
    monkeypatch.setattr(unsquash.mksquashfs, "find_programs", tuple)
    with pytest.raises(ToolMissing, match="not on this machine") as caught:
        Squashfs(path=squashfs, offset=4096).read(["a/one"])
    assert "squashfs-tools" in (caught.value.hint or "")


def test_program_that_cannot_unpack_the_compression_is_named(squashfs, monkeypatch):
    error = "Filesystem uses zstd compression, this is unsupported by this version"
    script = f"case $1 in -help) echo ' -o[ffset] N' ;; *) echo '{error}'; exit 1 ;; esac"
    tool = write_program(squashfs.parent / "bin/unsquashfs", script)  # a stand-in for one without zstd
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    with pytest.raises(ToolMissing, match="uses zstd"):
        Squashfs(path=squashfs, offset=4096).read(["a/one"])


def test_facts_of_a_file_by_another_program_are_read(tmp_path):
    folder = tmp_path / "image/opt/imgkit"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    path = tmp_path / "x.sqsh"
    subprocess.run(["mksquashfs", tmp_path / "image", path, "-quiet"], check=True, capture_output=True)
    assert unsquash.baked_facts(path) == BakedFacts(manifest="{}", distributions=None)


def test_facts_in_a_record_need_no_program(tmp_path, monkeypatch):
    facts = BakedFacts(manifest="{}", system="é", distributions=(Distribution(name="a", folder="/x"),))
    path = small_sif.write(tmp_path / "x.sif")
    objects.put_record(path, dataclasses.replace(small_sif.record(), facts=facts))
    monkeypatch.setenv("PATH", "")
    assert unsquash.baked_facts(path) == facts
