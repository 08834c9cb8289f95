"""Image archives made byte by byte, in the layouts that engines write; the real ones are in tests/lab."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

LABELS = {"org.opencontainers.image.title": "made", "weird": 'q"uote'}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def layer(name: str, size: int = 1000) -> bytes:
    """An uncompressed layer with one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = size
        tar.addfile(member, io.BytesIO(name.encode().ljust(size, b"x")))
    return buffer.getvalue()


@dataclass(kw_only=True)
class Made:
    """An image whose archive is made by `legacy` or `modern`."""

    layers: list[bytes] = field(default_factory=lambda: [layer("one"), layer("two"), layer("three", 70_000)])
    arch: str = "amd64"
    labels: dict[str, str] = field(default_factory=lambda: dict(LABELS))
    tags: list[str] = field(default_factory=lambda: ["made:latest"])

    @property
    def config(self) -> bytes:
        return json.dumps(
            {
                "architecture": self.arch,
                "os": "linux",
                "created": "2024-03-20T00:00:00Z",
                "config": {"Env": ["A=1"], "Labels": self.labels},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest(one)}" for one in self.layers]},
            }
        ).encode()

    @property
    def image_id(self) -> str:
        return f"sha256:{digest(self.config)}"

    def legacy_members(self) -> dict[str, bytes]:
        """The layout of docker before 25: v1 ids, manifest.json last."""
        config_name = f"{digest(self.config)}.json"
        members: dict[str, bytes] = {config_name: self.config}
        names = []
        for number, data in enumerate(self.layers):
            v1 = digest(f"v1 {number}".encode())
            members[f"{v1}/VERSION"] = b"1.0"
            members[f"{v1}/json"] = b"{}"
            members[f"{v1}/layer.tar"] = data
            names.append(f"{v1}/layer.tar")
        members["manifest.json"] = json.dumps(
            [{"Config": config_name, "RepoTags": self.tags, "Layers": names}]
        ).encode()
        return members

    def modern_members(self, pack: Callable[[bytes], bytes] = bytes) -> dict[str, bytes]:
        """The layout of docker from 25 on: an OCI folder and a manifest.json; `pack` compresses layers."""
        packed = [pack(one) for one in self.layers]
        members = {f"blobs/sha256/{digest(data)}": data for data in (self.config, *packed)}
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "config": {"digest": self.image_id, "size": len(self.config)},
                "layers": [{"digest": f"sha256:{digest(one)}", "size": len(one)} for one in packed],
            }
        ).encode()
        members[f"blobs/sha256/{digest(manifest)}"] = manifest
        entry: dict[str, Any] = {"digest": f"sha256:{digest(manifest)}", "size": len(manifest)}
        entry["annotations"] = {"io.containerd.image.name": self.tags[0]}
        members["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
        members["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
        members["manifest.json"] = json.dumps(
            [
                {
                    "Config": f"blobs/sha256/{digest(self.config)}",
                    "RepoTags": self.tags,
                    "Layers": [f"blobs/sha256/{digest(one)}" for one in packed],
                }
            ]
        ).encode()
        return members

    def oci_members(self, pack: Callable[[bytes], bytes] = bytes) -> dict[str, bytes]:
        """The layout of BuildKit: no manifest.json, and an index in the index, with an attestation."""
        members = self.modern_members(pack)
        del members["manifest.json"]
        (entry,) = json.loads(members["index.json"])["manifests"]
        note = json.dumps({"config": {"digest": f"sha256:{digest(b'')}"}, "layers": []}).encode()
        attestation = {"vnd.docker.reference.type": "attestation-manifest"}
        noted = {"digest": f"sha256:{digest(note)}", "annotations": attestation}
        inner = json.dumps({"manifests": [entry, noted]}).encode()
        top = {"manifests": [{"digest": f"sha256:{digest(inner)}"}]}
        members |= {f"blobs/sha256/{digest(data)}": data for data in (note, inner)}
        return members | {"index.json": json.dumps(top).encode()}

    @staticmethod
    def layer(name: str, size: int = 1000) -> bytes:
        """An uncompressed layer with one file."""
        return layer(name, size)

    @staticmethod
    def tar(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
        """A plain tar; `links` are symlinks."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, target in (links or {}).items():
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, target
                tar.addfile(link)
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        return buffer.getvalue()


@pytest.fixture
def made() -> Made:
    """An image of three layers."""
    return Made()


@pytest.fixture
def archive(made: Made, tmp_path: Path) -> Path:
    """Its plain archive of the older layout, ``made.tar``."""
    path = tmp_path / "made.tar"
    path.write_bytes(made.tar(made.legacy_members()))
    return path


@pytest.fixture
def zstd() -> Callable[[bytes], bytes]:
    """Compress by the program; skips where there is none."""
    program = shutil.which("zstd")
    if program is None:
        pytest.skip("no zstd program here (apt install zstd)")
    return lambda data: subprocess.run([program, "-qc"], input=data, capture_output=True, check=True).stdout
