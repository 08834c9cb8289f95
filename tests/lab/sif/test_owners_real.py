"""The user who runs mksquashfs leaves no trace in a squashfs."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from labkit import public_folder

from imgkit_builder.delta.read_squashfs import SquashfsLayer
from imgkit_builder.sif import squash

PROGRAM = shutil.which("mksquashfs")
pytestmark = [
    pytest.mark.programs("mksquashfs"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user"),
]
CAPABILITY = "\x01\x02"


def tar(*, attributes: bool) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as found:
        for number in range(600):
            info = tarfile.TarInfo(f"file{number}")
            info.uid = info.gid = 7 if number == 5 else 0
            info.size = 5
            if attributes:
                info.pax_headers = {"SCHILY.xattr.security.capability": f"{CAPABILITY}{number}"}
            found.addfile(info, io.BytesIO(b"12345"))
    return buffer.getvalue()


def squashed(folder: Path, user: int, data: bytes, *, sent: set[int]) -> tuple[Path, bool]:
    path = folder / f"{user}.sqfs"
    words = (str(PROGRAM), "-", str(path), "-tar", "-noappend", "-quiet", "-no-progress", "-noI")
    times = ("-mkfs-time", "5", "-root-time", "5", "-offset", "4096")
    become = ("setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups")
    subprocess.run([*become, *words, *times], input=data, check=True)
    os.chown(path, 0, 0)
    squash.set_root(path, 5, offset=4096)
    return path, squash.remove_unused(path, sent, offset=4096)


@pytest.mark.parametrize("attributes", [False, True])
def test_two_users_make_one_squashfs(attributes: bool) -> None:
    folder, data = public_folder("owners"), tar(attributes=attributes)
    try:
        folder.chmod(0o777)
        mine, changed = squashed(folder, 0, data, sent={0, 7})
        assert not changed
        other, changed = squashed(folder, 54321, data, sent={0, 7})
        assert changed
        assert mine.read_bytes() == other.read_bytes()
        layer = SquashfsLayer(other, 4096)
        found = layer.children("")
        assert (found["file5"].uid, found["file6"].uid) == (7, 0)
        if attributes:
            assert found["file599"].xattrs == {"security.capability": f"{CAPABILITY}599".encode()}
    finally:
        shutil.rmtree(folder)


def test_owner_of_a_file_stays() -> None:
    folder = public_folder("owners")
    try:
        folder.chmod(0o777)
        path, changed = squashed(folder, 7, tar(attributes=False), sent={0, 7})
        assert not changed
        assert SquashfsLayer(path, 4096).children("")["file5"].uid == 7
    finally:
        shutil.rmtree(folder)
