"""Any archive of one image to an OCI folder with uncompressed layers, checked against the image's digests.

A runtime converts that about twice as fast as ``docker-archive:``, whose layers it compresses on the way in.
Both layouts of ``docker save`` are read: the older one names layers by v1 id and has its manifest.json last,
the one of Docker 25 and later is an OCI folder as well. Names in the archive are looked up, never used as
paths.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import posixpath
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imgkit_builder.archive import compressed
from imgkit_builder.archive.tarstream import HARD_LINK, REGULAR, SYMLINK, TarStream
from imgkit_builder.base.progress import Reporter
from imgkit_builder.image.config import ImageConfig, parse_config
from imgkit_entrypoints.errors import CheckFailed, UsageError

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_MEMBERS = 20_000
_MAX_JSON_BYTES = 16 << 20
_MAX_LINKS = 8
_MAX_INDEX_DEPTH = 4
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


@dataclass(slots=True)
class _Spool:
    """Members of an archive as numbered files."""

    folder: Path
    files: dict[str, tuple[Path, str]] = field(default_factory=dict)
    """Name to the file and the hex sha256 of its bytes."""
    links: dict[str, str] = field(default_factory=dict)

    def find(self, name: str) -> tuple[Path, str] | None:
        """The file `name`, through links inside the archive."""
        name = posixpath.normpath(name)
        for _ in range(_MAX_LINKS):
            if name in self.files:
                return self.files[name]
            if name not in self.links:
                return None
            name = self.links[name]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selected:
    """One image of an archive or folder."""

    config: Path
    layers: tuple[tuple[Path, str | None], ...]
    """Files and, where it is known, the hex sha256 of the bytes."""
    names: tuple[str, ...]


def from_archive(path: Path, folder: Path, report: Reporter) -> Laid:
    """Lay out a docker or OCI archive, plain or compressed, below `folder` (made; must not exist).

    Raises
    ------
    CheckFailed : cut short, damaged, or a layer that differs from the image configuration.
    UsageError : several images, none, or not an image archive at all.
    ToolMissing : a zstd archive and no ``zstd`` program.
    """
    total = path.stat().st_size
    source = compressed.chunks(path, advance=lambda done: report.advance(done, total))
    return from_chunks(source, folder, name=str(path))


def from_chunks(
    chunks: Iterator[bytes],
    folder: Path,
    *,
    name: str,
    report: Reporter | None = None,
    expected_bytes: int | None = None,
) -> Laid:
    """Like `from_archive`, from a stream of uncompressed bytes; `name` is for messages."""
    spool = _Spool(folder=folder / "spool")
    spool.folder.mkdir(parents=True)
    stream = TarStream(chunks, name=name)
    for number, member in enumerate(stream):
        if number > _MAX_MEMBERS:
            raise UsageError(_not_an_image(f"more than {_MAX_MEMBERS} members"), where=name, hint=_SAVE_HINT)
        known = posixpath.normpath(member.name)
        if member.kind == REGULAR:
            target, digest = spool.folder / str(number), hashlib.sha256()
            with target.open("wb", buffering=0) as out:
                for piece in stream.body():
                    _write_all(out.fileno(), piece)
                    digest.update(piece)
                    if report:
                        report.advance(stream.position, expected_bytes)
            spool.files[known] = (target, digest.hexdigest())
        elif member.kind in (SYMLINK, HARD_LINK):
            base = posixpath.dirname(known) if member.kind == SYMLINK else ""
            spool.links[known] = posixpath.normpath(posixpath.join(base, member.link))
    stream.drain()
    laid = _assemble(_select(spool, name), folder, name=name, owned=True)
    shutil.rmtree(spool.folder)
    return laid


def from_folder(source: Path, folder: Path, report: Reporter) -> Laid:
    """Lay out an OCI folder: plain layers are hard links (copies across file systems), others unpacked.

    Raises
    ------
    CheckFailed : a blob is missing or differs from its digest.
    UsageError : several images, none, or no OCI folder.
    """
    folder.mkdir(parents=True)
    index = _json(source / "index.json", where=str(source))
    names, manifest = _from_index(index, lambda digest: _blob(source, digest), where=str(source))
    selected = _from_manifest(
        manifest, lambda digest: (_blob(source, digest), None), names, where=str(source)
    )
    return _assemble(selected, folder, name=str(source), owned=False, report=report)


def empty(config: ImageConfig, folder: Path) -> Path:
    """An OCI folder of an image with the same configuration and one layer without files; returns it."""
    layer = bytes(10240)
    digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    values = json.loads(config.raw)
    values["rootfs"] = {"type": "layers", "diff_ids": [digest]}
    values["history"] = []
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)
    (blobs / digest.removeprefix("sha256:")).write_bytes(layer)
    _finish(folder, json.dumps(values).encode(), [(digest, len(layer))])
    return folder


def peek(path: Path) -> ImageConfig | None:
    """The image configuration of a plain archive, without reading its layers; None where it cannot be had."""
    try:
        if compressed.kind(path) != "plain":
            return None
        with tarfile.open(path, "r:") as archive:

            def text(name: str) -> bytes:
                member = archive.getmember(name)
                stream = archive.extractfile(member) if member.size <= _MAX_JSON_BYTES else None
                return stream.read() if stream else b""

            images = json.loads(text("manifest.json"))
            return parse_config(text(images[0]["Config"]), where=str(path)) if len(images) == 1 else None
    except (OSError, tarfile.TarError, ValueError, KeyError, TypeError, UsageError, CheckFailed):
        return None


_SAVE_HINT = "make it with: imgkit save RECIPE|IMAGE, or: docker save -o FILE.tar REPOSITORY:TAG"


def _not_an_image(found: str) -> str:
    return f"no image archive: {found} (docker export and docker save differ: the first has no image)"


def _select(spool: _Spool, where: str) -> _Selected:
    manifest, index = spool.find("manifest.json"), spool.find("index.json")
    if manifest is not None:
        return _from_docker(spool, _json(manifest[0], where=f"{where}: manifest.json"), where)
    if index is None:
        raise UsageError(_not_an_image("it has no manifest.json"), where=where, hint=_SAVE_HINT)

    def blob(digest: str) -> tuple[Path, str | None]:
        found = spool.find(f"blobs/sha256/{_hex(digest, where)}")
        if found is None:
            raise CheckFailed(f"{digest} is missing in it", where=where)
        return found

    names, chosen = _from_index(_json(index[0], where=where), lambda digest: blob(digest)[0], where=where)
    return _from_manifest(chosen, blob, names, where=where)


def _from_docker(spool: _Spool, images: Any, where: str) -> _Selected:
    try:
        described = [(one["Config"], one.get("Layers") or [], one.get("RepoTags") or []) for one in images]
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckFailed(f"its manifest.json cannot be read: {error!r}", where=where) from error
    if len(described) != 1:
        tags = sorted(tag for _, _, names in described for tag in names)
        raise UsageError(
            f"it holds {len(described)} images ({', '.join(tags) or 'without tags'}); a .sif is made of one",
            where=where,
            hint=f"docker save -o FILE.tar {tags[0] if tags else 'REPOSITORY:TAG'}",
        )
    name, layer_names, tags = described[0]
    found = [spool.find(str(one)) for one in (name, *layer_names)]
    missing = [str(one) for one, file in zip((name, *layer_names), found, strict=True) if file is None]
    if missing:
        raise CheckFailed(f"its manifest names {missing[0]!r}, which is not in it", where=where)
    files = [file for file in found if file is not None]
    return _Selected(config=files[0][0], layers=tuple(files[1:]), names=tuple(tags))


def _from_index(index: Any, blob: Any, *, where: str, depth: int = 0) -> tuple[tuple[str, ...], Any]:
    """Names and the manifest of the only image of an OCI index."""
    try:
        entries = [
            one
            for one in index["manifests"]
            # buildx adds attestations as images of an unknown platform.
            if (one.get("platform") or {}).get("architecture") != "unknown"
        ]
        if len(entries) != 1:
            labels = [_name(one) or (one.get("platform") or {}).get("architecture", "?") for one in entries]
            raise UsageError(
                f"it holds {len(entries)} images ({', '.join(map(str, labels))}); a .sif is made of one",
                where=where,
                hint="copy one out, for example: skopeo copy oci:DIR:NAME oci:OTHER",
            )
        chosen = _json(blob(entries[0]["digest"]), where=where)
        if "manifests" in chosen and depth < _MAX_INDEX_DEPTH:
            names, manifest = _from_index(chosen, blob, where=where, depth=depth + 1)
            return names or _names(entries[0]), manifest
        return _names(entries[0]), chosen
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckFailed(f"its index.json cannot be read: {error!r}", where=where) from error


def _name(entry: Any) -> str:
    annotations = entry.get("annotations") or {}
    # containerd writes the whole name, skopeo the tag alone.
    return str(
        annotations.get("io.containerd.image.name")
        or annotations.get("org.opencontainers.image.ref.name", "")
    )


def _names(entry: Any) -> tuple[str, ...]:
    name = _name(entry)
    return (name,) if name else ()


def _from_manifest(manifest: Any, blob: Any, names: tuple[str, ...], *, where: str) -> _Selected:
    try:
        config = blob(manifest["config"]["digest"])[0]
        return _Selected(
            config=config, layers=tuple(blob(one["digest"]) for one in manifest["layers"]), names=names
        )
    except (TypeError, KeyError) as error:
        raise CheckFailed(f"its OCI manifest cannot be read: {error!r}", where=where) from error


def _assemble(
    selected: _Selected, folder: Path, *, name: str, owned: bool, report: Reporter | None = None
) -> Laid:
    """Write blobs, manifest and index; `owned` files may be renamed, others are linked or copied."""
    config = parse_config(_read_small(selected.config, name), where=name)
    if len(selected.layers) != len(config.diff_ids):
        raise CheckFailed(
            f"it has {len(selected.layers)} layers, its configuration {len(config.diff_ids)}", where=name
        )
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)
    sizes: list[tuple[str, int]] = []
    for number, ((path, digest), diff_id) in enumerate(zip(selected.layers, config.diff_ids, strict=True), 1):
        target = blobs / diff_id.removeprefix("sha256:")
        # Equal layers (several empty ones, say) share one file, which may be the one already renamed.
        if not target.exists():
            found = _store(path, digest, target, owned=owned)
            if found != target.name:
                raise CheckFailed(
                    f"layer {number} of {len(config.diff_ids)} is damaged: its sha256 is {found}, "
                    f"should be {target.name}",
                    where=name,
                    hint="copy the archive again and compare its .sha256 (imgkit verify), or save it again",
                )
        sizes.append((diff_id, target.stat().st_size))
        if report:
            report.advance(sum(size for _, size in sizes))
    _finish(folder, config.raw, sizes)
    return Laid(
        folder=folder, config=config, names=selected.names, layer_bytes=sum(size for _, size in sizes)
    )


def _store(path: Path, digest: str | None, target: Path, *, owned: bool) -> str:
    """Put the uncompressed bytes of `path` at `target`; returns their hex sha256."""
    if not path.exists():
        return "of a file that is not there (or that another layer claimed)"
    if compressed.kind(path) == "plain":
        if digest is None:
            digest = _sha256(path)
        if owned:
            path.rename(target)
        else:
            _link_or_copy(path, target)
        return digest
    unpacked = hashlib.sha256()
    with target.open("wb", buffering=0) as out:
        for chunk in compressed.chunks(path):
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


def _blob(source: Path, digest: str) -> Path:
    return source / "blobs/sha256" / _hex(digest, str(source))


def _hex(digest: Any, where: str) -> str:
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise CheckFailed(f"{digest!r} where a sha256 digest belongs", where=where)
    return digest.removeprefix("sha256:")


def _read_small(path: Path, where: str) -> bytes:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckFailed(f"a JSON member of more than {_MAX_JSON_BYTES >> 20} MiB", where=where)
        return path.read_bytes()
    except OSError as error:
        raise CheckFailed(f"{path.name} cannot be read: {error.strerror}", where=where) from error


def _json(path: Path, *, where: str) -> Any:
    try:
        return json.loads(_read_small(path, where))
    except ValueError as error:
        raise CheckFailed(f"{path.name} is not JSON: {error}", where=where) from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as stream:
            while chunk := stream.read(compressed.CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise CheckFailed(f"{path.name} cannot be read: {error.strerror}", where=str(path)) from error
    return digest.hexdigest()


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
