"""An image of three small layers, its archives in each layout, and calls that read them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tars import tar_of_files

from imgkit_builder.archive import stored
from imgkit_builder.archive.oci_folder import OciLayout, write_layout
from imgkit_builder.base.checks import Check
from imgkit_builder.base.progress import Silent
from imgkit_builder.examine.verify import verify_file

LABELS = {"org.opencontainers.image.title": "made", "weird": 'q"uote'}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def layer_tar(name: str, size: int = 1000) -> bytes:
    """Return an uncompressed layer with one file, which begins with its name."""
    return tar_of_files({name: name.encode().ljust(size, b"x")})


@dataclass(kw_only=True)
class SampleImage:
    """An image, and the members of its archive in each layout."""

    layers: list[bytes] = field(
        default_factory=lambda: [layer_tar("one"), layer_tar("two"), layer_tar("three", 70_000)]
    )
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
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest(data)}" for data in self.layers]},
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
        packed = [pack(data) for data in self.layers]
        members = {f"blobs/sha256/{digest(data)}": data for data in (self.config, *packed)}
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "config": {"digest": self.image_id, "size": len(self.config)},
                "layers": [{"digest": f"sha256:{digest(data)}", "size": len(data)} for data in packed],
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
                    "Layers": [f"blobs/sha256/{digest(data)}" for data in packed],
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
        attestation_entry = {"digest": f"sha256:{digest(note)}", "annotations": attestation}
        inner = json.dumps({"manifests": [entry, attestation_entry]}).encode()
        top = {"manifests": [{"digest": f"sha256:{digest(inner)}"}]}
        members |= {f"blobs/sha256/{digest(data)}": data for data in (note, inner)}
        return members | {"index.json": json.dumps(top).encode()}


def lay_out(path: Path, folder: Path, *, unpack_limit_bytes: int | None = None) -> OciLayout:
    """Write the archive as the OCI folder that a runtime gets."""
    folder.mkdir()
    with stored.open_archive(path, folder, unpack_limit_bytes=unpack_limit_bytes) as image:
        return write_layout(image, folder, Silent(), unpack_limit_bytes=unpack_limit_bytes)


def run_checks(path: Path) -> dict[str, Check]:
    """Return the checks of `imgkit verify` by name."""
    return {check.name: check for check in verify_file(path)}


def verdicts(path: Path) -> dict[str, str]:
    return {check.name: check.verdict for check in verify_file(path)}
