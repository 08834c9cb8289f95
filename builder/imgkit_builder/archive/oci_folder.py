"""Write the image of any archive as an OCI folder with uncompressed layers, and check it against its digests.

A runtime converts that about twice as fast as ``docker-archive:``, whose layers it compresses on the way in.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive import compressed, read, stored
from imgkit_builder.archive.compressed import Allowance
from imgkit_builder.archive.read import MAX_JSON_BYTES, SelectedImage
from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.oci.config import ImageConfig
from imgkit_entrypoints.errors import CheckFailed, UsageError

_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """An OCI folder that is ready for ``build oci:FOLDER``."""

    folder: Path
    config: ImageConfig
    names: tuple[str, ...]
    """Tags that the archive knows the image by."""
    layer_bytes: int
    """Sum over the uncompressed layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file of the image on disk."""

    path: Path
    sha256: str | None
    """Hex digest of its bytes; None where nobody has read them yet."""

    def document(self) -> bytes | None:
        """Return its bytes; None if it has more than `MAX_JSON_BYTES`."""
        try:
            return files.read_bytes(self.path) if self.path.stat().st_size <= MAX_JSON_BYTES else None
        except OSError as error:
            raise _unreadable(self.path, error) from error


def from_archive(
    path: Path, folder: Path, report: Reporter, *, unpack_limit_bytes: int | None = None
) -> Laid:
    """Lay out a docker or OCI archive, plain or compressed, below `folder` (made; must not exist).

    Raises
    ------
    CheckFailed : cut short, damaged, too large once unpacked, or a layer that differs from the configuration.
    UsageError : several images, none, or not an image archive at all.
    ToolMissing : a zstd archive and no ``zstd`` program.
    """
    total = path.stat().st_size
    allowance = Allowance(total, str(path), unpack_limit_bytes)
    with contextlib.closing(
        compressed.chunks(path, advance=lambda done: report.advance(done, total), allowance=allowance)
    ) as chunks:
        return from_chunks(chunks, folder, name=str(path), allowance=allowance)


def from_chunks(
    chunks: Iterator[bytes],
    folder: Path,
    *,
    name: str,
    report: Reporter | None = None,
    expected_bytes: int | None = None,
    allowance: Allowance | None = None,
) -> Laid:
    """Like `from_archive`, from a stream of uncompressed bytes; `name` is for messages."""
    spool = folder / "spool"
    spool.mkdir(parents=True)
    numbers = itertools.count()

    def store(_: str, size_bytes: int, pieces: Iterator[memoryview]) -> _File:
        target, digest = spool / str(next(numbers)), hashlib.sha256()
        with target.open("wb", buffering=0) as out:
            for piece in pieces:
                _write_all(out.fileno(), piece)
                digest.update(piece)
        return _File(path=target, sha256=digest.hexdigest())

    counted = _counted(chunks, report, expected_bytes) if report else chunks
    members = read.members(counted, store, where=name)
    laid = _assemble(
        read.select(members.find, where=name), folder, name=name, owned=True, allowance=allowance
    )
    shutil.rmtree(spool)
    return laid


def from_folder(
    source: Path, folder: Path, report: Reporter, *, unpack_limit_bytes: int | None = None
) -> Laid:
    """Lay out an OCI folder: plain layers are hard links (copies across file systems), others unpacked.

    Raises
    ------
    CheckFailed : a blob is missing, differs from its digest, or is larger than the limit once unpacked.
    UsageError : several images, none, or no OCI folder.
    """
    folder.mkdir(parents=True)

    def find(name: str) -> _File | None:
        path = source / name
        return _File(path=path, sha256=None) if path.exists() else None

    selected = read.select_oci(find, where=str(source))
    packed_bytes = sum(path.stat().st_size for path in source.glob("blobs/sha256/*"))
    allowance = Allowance(packed_bytes, str(source), unpack_limit_bytes)
    return _assemble(selected, folder, name=str(source), owned=False, report=report, allowance=allowance)


def peek(path: Path) -> ImageConfig | None:
    """The image configuration of a plain archive, without reading its layers; None where there is none."""
    try:
        return stored.open_image(path).selected.config if compressed.kind(path) == "none" else None
    except (OSError, UsageError, CheckFailed):
        return None


def _counted(chunks: Iterator[bytes], report: Reporter, expected_bytes: int | None) -> Iterator[bytes]:
    done = 0
    for chunk in chunks:
        done += len(chunk)
        report.advance(done, expected_bytes)
        yield chunk


def _assemble(
    image: SelectedImage[_File],
    folder: Path,
    *,
    name: str,
    owned: bool,
    report: Reporter | None = None,
    allowance: Allowance | None = None,
) -> Laid:
    """Write blobs, manifest and index; `owned` files may be renamed, others are linked or copied."""
    config = image.config
    image.refuse_faults(name)
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)
    sizes: list[tuple[str, int]] = []
    for number, ((_, file), diff_id) in enumerate(zip(image.layers, config.diff_ids, strict=True), 1):
        target = blobs / diff_id.removeprefix("sha256:")
        # Equal layers (several empty ones, say) share one file, which may be the one already renamed.
        if not target.exists():
            found = _store(file, target, owned=owned, allowance=allowance)
            if found != target.name:
                raise CheckFailed(
                    f"layer {number} of {len(config.diff_ids)} is damaged: its sha256 is {found}, "
                    f"should be {target.name}",
                    where=name,
                    hint=read.AGAIN,
                )
        sizes.append((diff_id, target.stat().st_size))
        if report:
            report.advance(sum(size for _, size in sizes))
    _finish(folder, config.raw, sizes)
    return Laid(folder=folder, config=config, names=image.names, layer_bytes=sum(size for _, size in sizes))


def _store(file: _File, target: Path, *, owned: bool, allowance: Allowance | None) -> str:
    """Put the uncompressed bytes of `file` at `target`; return their hex sha256."""
    if owned and file.sha256 == target.name:
        file.path.rename(target)
        return target.name
    if owned and not file.path.exists():
        return str(
            file.sha256
        )  # another layer is the same plain file: its digest is known, and is not this one
    if compressed.kind(file.path) == "none":
        digest = file.sha256 or _sha256(file.path)
        if not owned:
            _link_or_copy(file.path, target)
        return digest
    unpacked = hashlib.sha256()
    with target.open("wb", buffering=0) as out:
        for chunk in compressed.chunks(file.path, allowance=allowance):
            unpacked.update(chunk)
            _write_all(out.fileno(), memoryview(chunk))
    return unpacked.hexdigest()


def _link_or_copy(source: Path, target: Path) -> None:
    source = source.resolve()
    try:
        os.link(source, target)
    except OSError as error:
        # Across file systems, where the kernel protects others' files, or where there are no hard links.
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EMLINK):
            raise
        shutil.copyfile(source, target)


def _finish(folder: Path, config: bytes, layers: list[tuple[str, int]]) -> None:
    blobs = folder / "blobs/sha256"

    def put(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST_TYPE,
        "config": put(config, _CONFIG_TYPE),
        "layers": [{"mediaType": _LAYER_TYPE, "digest": digest, "size": size} for digest, size in layers],
    }
    index = {"schemaVersion": 2, "manifests": [put(json.dumps(manifest).encode(), _MANIFEST_TYPE)]}
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}', encoding="utf-8")


def _sha256(path: Path) -> str:
    try:
        with files.open_regular(path, buffering=0) as stream:
            return files.sha256(stream, 0, path.stat().st_size)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckFailed:
    return CheckFailed(f"{path.name} cannot be read: {error.strerror}", where=str(path))


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
