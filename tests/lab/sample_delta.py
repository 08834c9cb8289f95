"""A delta file of zeros with a whole description, for tests of what reads and signs it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from imgkit_builder.delta import descriptor
from imgkit_builder.delta.descriptor import BaseSif, Delta

MANIFEST = bytes(range(100))

KNOWN = Delta(
    image_id="sha256:new",
    diff_ids=("sha256:1", "sha256:2"),
    arch="amd64",
    created="2026-01-01T00:00:00Z",
    source="mn5:latest",
    base=BaseSif(image_id="sha256:old", root_sha256="ab" * 32),
    sha256="",
    size_bytes=4096,
    manifest_sha256=hashlib.sha256(MANIFEST).hexdigest(),
    manifest_bytes=len(MANIFEST),
    imgkit="0.3.0",
)


def put(path: Path) -> Path:
    """Write it to `path`."""
    squashfs = b"hsqs" + bytes(KNOWN.size_bytes - 4)
    path.write_bytes(squashfs)
    descriptor.append(path, MANIFEST, replace(KNOWN, sha256=hashlib.sha256(squashfs).hexdigest()))
    return path
