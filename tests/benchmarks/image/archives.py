"""Archives to measure with: layers as registries have them, and very many small files."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from pathlib import Path


def with_packed_layers(plain: Path, packed: Path) -> None:
    """Write the archive `plain` again, with each layer compressed by gzip, as registries have them."""
    with tarfile.open(plain) as source, tarfile.open(packed, "w") as target:
        for member in source:
            body = source.extractfile(member) if member.isfile() else None
            if body is None:
                target.addfile(member)
            elif member.size < 1 << 20:
                target.addfile(member, body)
            else:
                with tempfile.TemporaryFile(dir=packed.parent) as spool:
                    with gzip.GzipFile(fileobj=spool, mode="wb", compresslevel=6, mtime=0) as out:
                        shutil.copyfileobj(body, out, 1 << 20)
                    member.size = spool.tell()
                    spool.seek(0)
                    target.addfile(member, spool)


def many_files(path: Path, count: int) -> None:
    """An archive of one layer with `count` files of 16 to 1015 bytes.

    mksquashfs compares a file with all others of its size: a million of one size would take hours.
    """
    layer, digest = path.with_suffix(".layer"), hashlib.sha256()
    with layer.open("wb") as out:
        for number in range(count):
            header = tarfile.TarInfo(f"data/{number // 1000:04}/sample-{number:07}.bin")
            header.size = 16 + number % 1000
            content = (b"%016d" % number).ljust(header.size, b".")
            block = header.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-header.size % 512)
            out.write(block)
            digest.update(block)
        out.write(bytes(1024))
        digest.update(bytes(1024))
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest.hexdigest()}"]},
    }
    listed = [{"Config": "config.json", "RepoTags": ["many:latest"], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as out:
        for name, content in (("config.json", config), ("manifest.json", listed)):
            data = json.dumps(content).encode()
            header = tarfile.TarInfo(name)
            header.size = len(data)
            out.addfile(header, io.BytesIO(data))
        out.add(layer, "layer.tar")
    layer.unlink()
