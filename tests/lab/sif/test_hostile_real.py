"""Images made to harm, given to the real runtime."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from labkit import imgkit
from stored_images import only

pytestmark = [pytest.mark.singularity]

Entry = tuple[str, bytes, bytes]
"""Name, kind, and content or target of a link."""


def tar_of(entries: Sequence[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, value in entries:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o755
            if kind == tarfile.SYMTYPE:
                info.linkname = value.decode()
            info.size = len(value) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(value))
    return buffer.getvalue()


def archive(path: Path, *entries: Entry) -> Path:
    """An image of one layer: a program, and `entries`."""
    layer = tar_of([("bin/sh", tarfile.REGTYPE, Path("/bin/true").read_bytes()), *entries])
    digest = hashlib.sha256(layer).hexdigest()
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"diff_ids": [f"sha256:{digest}"]}}
    raw = json.dumps(config).encode()
    name = f"{hashlib.sha256(raw).hexdigest()}.json"
    listed = [{"Config": name, "RepoTags": ["hostile:1"], "Layers": [f"{digest}.tar"]}]
    files = {f"{digest}.tar": layer, name: raw, "manifest.json": json.dumps(listed).encode()}
    path.write_bytes(tar_of([(name, tarfile.REGTYPE, data) for name, data in files.items()]))
    return path


def test_links_to_this_machine_write_nothing(tmp_path: Path) -> None:
    """A runtime that builds writes hosts, resolv.conf and scripts there; imgkit itself follows no link."""
    host = tmp_path / "host"
    host.mkdir()
    target, old = str(host).encode(), only("runtime", tmp_path)
    for name in ("etc", ".singularity.d"):
        archive(tmp_path / "hostile.tar", (name, tarfile.SYMTYPE, target))
        done = imgkit("sif", "hostile.tar", "--no-test", folder=tmp_path, env=old)
        assert (done.returncode, list(host.iterdir())) == (1, [])
        assert f"/{name} in the image is a link to {str(host)!r}" in done.stderr
        assert not (tmp_path / "hostile.sif").exists()
        done = imgkit("sif", "hostile.tar", "--no-test", folder=tmp_path)
        assert (done.returncode, list(host.iterdir())) == (0, [])
        (tmp_path / "hostile.sif").unlink()


def test_link_within_the_image_converts(tmp_path: Path) -> None:
    entries = (("usr/etc/x", tarfile.REGTYPE, b"1"), ("etc", tarfile.SYMTYPE, b"usr/etc"))
    archive(tmp_path / "good.tar", *entries)
    done = imgkit("sif", "good.tar", "--no-test", folder=tmp_path)
    assert done.returncode == 0, done.stderr
