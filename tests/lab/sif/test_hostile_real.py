"""Images made to harm, given to the real runtime."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from labkit import imgkit
from stored_images import archive, only
from tars import tar_entry

pytestmark = [pytest.mark.singularity]


def write_archive(path, *entries):
    """Write the archive of an image of one layer: a program, and `entries`."""
    path.write_bytes(archive([[tar_entry("bin/sh", Path("/bin/true").read_bytes()), *entries]]))


def test_links_to_this_machine_write_nothing(tmp_path):
    """A runtime that builds writes hosts, resolv.conf and scripts there; imgkit itself follows no link."""
    host = tmp_path / "host"
    host.mkdir()
    env = only("runtime", tmp_path)
    for name in ("etc", ".singularity.d"):
        write_archive(tmp_path / "hostile.tar", tar_entry(name, kind=tarfile.SYMTYPE, linkname=str(host)))
        result = imgkit("sif", "hostile.tar", "--no-test", folder=tmp_path, env=env)
        assert (result.returncode, list(host.iterdir())) == (1, [])
        assert f"/{name} in the image is a link to {str(host)!r}" in result.stderr
        assert not (tmp_path / "hostile.sif").exists()
        result = imgkit("sif", "hostile.tar", "--no-test", folder=tmp_path)
        assert (result.returncode, list(host.iterdir())) == (0, [])
        (tmp_path / "hostile.sif").unlink()


def test_link_within_the_image_converts(tmp_path):
    link = tar_entry("etc", kind=tarfile.SYMTYPE, linkname="usr/etc")
    write_archive(tmp_path / "good.tar", tar_entry("usr/etc/x", b"1"), link)
    result = imgkit("sif", "good.tar", "--no-test", folder=tmp_path)
    assert result.returncode == 0, result.stderr
