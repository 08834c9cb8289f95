"""Small image archives in the layouts that engines write; the real ones are in tests/lab."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

LAYERS = (b"first layer " * 5000, b"second layer " * 7000)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_tar(path: Path, members: Sequence[tuple[str, bytes | str]]) -> Path:
    """A tar of `members`; text content makes a symbolic link."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def config_of(layers: Sequence[bytes], arch: str = "amd64") -> bytes:
    diff_ids = [f"sha256:{digest(layer)}" for layer in layers]
    config = {"os": "linux", "architecture": arch, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    return json.dumps(config).encode()


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def legacy(path: Path, layers: Sequence[bytes] = LAYERS, *, images: int = 1) -> Path:
    """As ``docker save`` of engines before 25: v1 folders, manifest.json last."""
    config = config_of(layers)
    names = [f"{index:064x}/layer.tar" for index in range(len(layers))]
    entry = {"Config": f"{digest(config)}.json", "RepoTags": ["small:1"], "Layers": names}
    members = [*zip(names, layers, strict=True), (f"{digest(config)}.json", config)]
    return write_tar(path, [*members, ("manifest.json", to_json([entry] * images))])


def oci(
    path: Path, layers: Sequence[bytes] = LAYERS, *, packed: bool = False, docker: bool = True
) -> tuple[Path, str]:
    """As ``docker save`` from 25 on, or a plain OCI archive (`docker` False); also the manifest's digest."""
    config = config_of(layers)
    blobs = [gzip.compress(layer, mtime=0) if packed else layer for layer in layers]
    manifest = to_json(
        {
            "config": {"digest": f"sha256:{digest(config)}"},
            "layers": [{"digest": f"sha256:{digest(blob)}"} for blob in blobs],
        }
    )
    note = to_json({"config": {"digest": f"sha256:{digest(b'')}"}, "layers": []})
    attestation = {"vnd.docker.reference.type": "attestation-manifest"}
    index = to_json(
        {
            "manifests": [
                {"digest": f"sha256:{digest(manifest)}"},
                {"digest": f"sha256:{digest(note)}", "annotations": attestation},
            ]
        }
    )
    top = to_json({"manifests": [{"digest": f"sha256:{digest(index)}"}]})
    everything = [config, manifest, note, index, *blobs]
    members: list[tuple[str, bytes | str]] = [(f"blobs/sha256/{digest(data)}", data) for data in everything]
    members.append(("index.json", top))
    if docker:
        layer_names = [f"blobs/sha256/{digest(blob)}" for blob in blobs]
        entry = {"Config": f"blobs/sha256/{digest(config)}", "RepoTags": ["small:1"], "Layers": layer_names}
        members.append(("manifest.json", to_json([entry])))
    return write_tar(path, members), f"sha256:{digest(manifest)}"


@pytest.fixture
def archive_path(tmp_path: Path) -> Path:
    """A good archive in the older layout."""
    return legacy(tmp_path / "small.tar")


@pytest.fixture
def make_legacy() -> Callable[..., Path]:
    return legacy


@pytest.fixture
def make_oci() -> Callable[..., tuple[Path, str]]:
    return oci


@pytest.fixture
def make_tar() -> Callable[..., Path]:
    return write_tar


@pytest.fixture
def layers() -> tuple[bytes, ...]:
    return LAYERS


@pytest.fixture
def image_config() -> Callable[..., bytes]:
    return config_of
