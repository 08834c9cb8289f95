"""What mksquashfs loses or says is noticed, though it exits with 0."""

from __future__ import annotations

import shutil
import tarfile

import pytest
from file_tree import write_program
from stored_images import archive

from imgkit_builder.base.progress import Silent
from imgkit_builder.sif import convert
from imgkit_builder.sif.conversion import Options
from imgkit_builder.sif.entries import Archive
from imgkit_entrypoints.errors import CheckFailed, ToolFailed

REAL = shutil.which("mksquashfs")
pytestmark = pytest.mark.programs("mksquashfs")


def install(folder, script, monkeypatch):
    """Put a mksquashfs first on PATH that does `script` where it gets a tar."""
    lossy = f'case "$*" in *-tar*) {script};; *) exec {REAL} "$@";; esac'
    program = write_program(folder / "bin/mksquashfs", lossy)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))


def sif(folder, **attributes):
    info, gone = tarfile.TarInfo("kept"), tarfile.TarInfo("gone")
    info.pax_headers = {f"SCHILY.xattr.{name.replace('__', '.')}": text for name, text in attributes.items()}
    (folder / "x.tar").write_bytes(archive([[(info, b""), (gone, b"")]]))
    target = folder / "x.sif"
    return convert.convert(Archive(path=folder / "x.tar"), target, Options(test=False), Silent()).path


def test_lost_file_is_noticed(tmp_path, monkeypatch):
    install(tmp_path, f'tar --delete -f - gone | {REAL} "$@"', monkeypatch)
    with pytest.raises(CheckFailed, match="other names than were sent"):
        sif(tmp_path)
    assert not (tmp_path / "x.sif").exists()


def test_unknown_line_is_a_failure(tmp_path, monkeypatch):
    install(tmp_path, f'{REAL} "$@"; echo "I left something out"', monkeypatch)
    with pytest.raises(ToolFailed, match="printed something unexpected") as caught:
        sif(tmp_path)
    assert "I left something out" in str(caught.value.hint)


def test_killed_mksquashfs_names_a_job(tmp_path, monkeypatch):
    install(tmp_path, "kill -9 $$", monkeypatch)
    with pytest.raises(ToolFailed, match="mksquashfs failed with exit code -9") as caught:
        sif(tmp_path)
    assert "let a job do this: the same command with --submit --time 1h" in str(caught.value.hint)


def test_attribute_that_no_squashfs_holds_is_no_failure(tmp_path):
    """An access list, for example; mksquashfs says that it leaves it out."""
    assert sif(tmp_path, system__posix_acl_access="x", user__kept="y").exists()
