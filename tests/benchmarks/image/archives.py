"""Archives to measure with: layers as registries have them, and very many small files."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SMALL_BYTES = 1 << 20


def with_packed_layers(plain: Path, packed: Path, *command: str) -> None:
    """Write the archive `plain` again, with large layers compressed by a command, as in registries."""
    with tarfile.open(plain) as source, tarfile.open(packed, "w") as target:
        for member in source:
            body = source.extractfile(member) if member.isfile() else None
            if body is None or member.size < _SMALL_BYTES:
                target.addfile(member, body)
                continue
            with tempfile.TemporaryFile(dir=packed.parent) as spool:
                with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=spool) as program:
                    shutil.copyfileobj(body, program.stdin, 1 << 20)
                member.size = spool.seek(0, io.SEEK_END)
                spool.seek(0)
                target.addfile(member, spool)


def in_parts(plain: Path, parted: Path, parts: int) -> None:
    """Write the archive `plain` again, with its largest layer cut into `parts` of about one size.

    Images from NVIDIA have about fifty layers; the stand-in has a single one.
    """
    with tarfile.open(plain) as source, tempfile.TemporaryDirectory(dir=parted.parent) as name:
        listed = json.loads(_file(source, "manifest.json"))
        config = json.loads(_file(source, listed[0]["Config"]))
        paths = listed[0]["Layers"]
        largest = max(range(len(paths)), key=lambda number: source.getmember(paths[number]).size)
        with tarfile.open(fileobj=source.extractfile(paths[largest])) as layer:
            part_paths = list(_parts(layer, Path(name), parts))
        layer_paths = [Path(name) / f"kept-{number}" for number in range(len(paths))]
        for number, path in enumerate(layer_paths):
            with path.open("wb") as out:
                shutil.copyfileobj(source.extractfile(paths[number]), out, 1 << 20)
        files = [*layer_paths[:largest], *part_paths, *layer_paths[largest + 1 :]]
        digests = [*config["rootfs"]["diff_ids"]]
        digests[largest : largest + 1] = [f"sha256:{_sha256(path)}" for path in part_paths]
        config["rootfs"]["diff_ids"] = digests
        names = [f"{number}/layer.tar" for number in range(len(files))]
        image_manifest = [{"Config": "config.json", "RepoTags": ["parts:latest"], "Layers": names}]
        with tarfile.open(parted, "w") as target:
            for path, inside in zip(files, names, strict=True):
                target.add(path, inside)
            _add(target, "config.json", config)
            _add(target, "manifest.json", image_manifest)


def _parts(layer: tarfile.TarFile, folder: Path, parts: int) -> Iterator[Path]:
    members = layer.getmembers()
    share = sum(member.size for member in members) / parts
    size, at = 0, 0
    for number in range(parts):
        path = folder / f"part-{number}"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as out:
            while at < len(members) and (size < share * (number + 1) or number == parts - 1):
                member = members[at]
                out.addfile(member, layer.extractfile(member) if member.isreg() else None)
                size, at = size + member.size, at + 1
        yield path


def _file(archive: tarfile.TarFile, name: str) -> bytes:
    body = archive.extractfile(name)
    assert body is not None
    return body.read()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _add(archive: tarfile.TarFile, name: str, content: object) -> None:
    data = json.dumps(content).encode()
    header = tarfile.TarInfo(name)
    header.size = len(data)
    archive.addfile(header, io.BytesIO(data))


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
            _add(out, name, content)
        out.add(layer, "layer.tar")
    layer.unlink()
