"""A base of 2 MB for tests of engines: busybox, packed as an archive for one or several architectures.

The programs are this machine's in each of them: what an engine reports and chooses does not depend on that,
and steps of a build run without an emulator. Its shell says that every ``python3`` and ``sed`` succeeded.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

BUSYBOX = Path("/bin/busybox")
PROGRAMS = ("cat", "env", "mkdir", "echo", "true", "rm", "chmod", "test", "ping")
SHELL = """#!/bin/busybox sh
# A build asks sed and Python for things that busybox does not have.
sed() { :; }
python3() { :; }
case $1 in
-c) eval "$2" ;;
-*) set "$1" && . "$2" ;;
*) . "$1" ;;
esac
"""
OCI = "application/vnd.oci.image"


def write(target: Path, name: str, archs: Sequence[str] = ("amd64",)) -> dict[str, str]:
    """Write an archive of the image `name`; returns the digest of each architecture's configuration.

    It has OCI's layout and, for engines before release 25, the first architecture in Docker's.
    """
    if not BUSYBOX.exists():
        pytest.skip("busybox is missing: apt-get install busybox-static")
    blobs: dict[str, bytes] = {}
    entries, layers, configs = [], [], {}
    for arch in archs:
        layer = _add_blob(blobs, _layer(arch, name), f"{OCI}.layer.v1.tar")
        layers.append(str(layer["digest"]))
        configuration = {
            "created": "2024-01-01T00:00:00Z",
            "architecture": arch,
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Cmd": ["sh"]},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
            # Podman counts a base's layers in its history. As a stand-in's, it has no date.
            "history": [{"created_by": "busybox"}],
        }
        config = _add_blob(blobs, _json(configuration), f"{OCI}.config.v1+json")
        configs[arch] = str(config["digest"])
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": config,
            "layers": [layer],
        }
        entry = _add_blob(blobs, _json(manifest), f"{OCI}.manifest.v1+json")
        entries.append({**entry, "platform": {"os": "linux", "architecture": arch}})
    top: Mapping[str, Any] = entries[0]
    if len(entries) > 1:
        index = {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": entries}
        top = _add_blob(blobs, _json(index), f"{OCI}.index.v1+json")
    docker = {
        "Config": f"blobs/{configs[archs[0]].replace(':', '/')}",
        "RepoTags": [name],
        "Layers": [f"blobs/{layers[0].replace(':', '/')}"],
    }
    named = {**top, "annotations": {"io.containerd.image.name": name}}
    with tarfile.open(target, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(tar, "manifest.json", _json([docker]))
        _add(tar, "index.json", _json({"schemaVersion": 2, "manifests": [named]}))
        for digest, data in blobs.items():
            _add(tar, f"blobs/sha256/{digest}", data)
    return configs


def _add_blob(blobs: dict[str, bytes], data: bytes, kind: str) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    blobs[digest] = data
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}


def _json(values: object) -> bytes:
    return json.dumps(values).encode()


def _layer(arch: str, name: str) -> bytes:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        _add(tar, "bin/busybox", BUSYBOX.read_bytes(), 0o755)
        for program in PROGRAMS:
            link = tarfile.TarInfo(f"bin/{program}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        _add(tar, "bin/sh", SHELL.encode(), 0o755)
        _add(tar, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\n")
        _add(tar, "etc/arch", arch.encode())
        _add(tar, "etc/name", name.encode())  # two images share no layer
    return layer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    tar.addfile(member, io.BytesIO(data))
