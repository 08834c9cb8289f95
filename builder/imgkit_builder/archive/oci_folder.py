"""Write an image as an OCI folder with uncompressed layers, and verify the digests of the layers.

A runtime converts such a folder about twice as fast as a ``docker-archive:``, whose layers it first
compresses.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.archive.compressed import Allowance
from imgkit_builder.archive.stored import StoredImage, StoredLayer, hash_chunks
from imgkit_builder.base.progress import Reporter
from imgkit_builder.oci.config import ImageConfig

_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
_BLOBS_FOLDER = "blobs/sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class OciLayout:
    """An OCI folder that a runtime can build from, with ``build oci:FOLDER``."""

    folder: Path
    config: ImageConfig
    names: tuple[str, ...]
    """Tags of the image in its archive."""
    layer_bytes: int
    """Total size of the uncompressed layers."""

    @property
    def layer_paths(self) -> list[Path]:
        """The files of the layers, lowest first."""
        return [_blob_path(self.folder, digest) for digest in self.config.diff_ids]


def write_layout(
    image: StoredImage, folder: Path, report: Reporter, *, unpack_limit_bytes: int | None = None
) -> OciLayout:
    """Write `image` to the new folder `folder` as an OCI folder with uncompressed layers.

    A layer that is already an uncompressed file of its own is not copied. It becomes a hard link.

    Raises
    ------
    CheckFailed : a layer is damaged, or the layers unpack to more than `unpack_limit_bytes`.
    """
    config = image.selected.config
    (folder / _BLOBS_FOLDER).mkdir(parents=True)
    # All layers share one allowance. With a limit per layer, a hostile image of many layers could fill the
    # disk.
    allowance = Allowance(image.stored_bytes, image.where, unpack_limit_bytes)
    layers: list[dict[str, object]] = []
    layer_bytes = 0
    for number, layer in enumerate(image.layers, 1):
        path = _blob_path(folder, layer.diff_id)
        if not path.exists():  # equal layers share one file
            sha256 = _write_layer(layer, path, allowance)
            # The file is named after the digest that the image declares. A damaged layer has another one.
            image.refuse_other_digest(number, sha256)
        size_bytes = path.stat().st_size
        layers.append({"mediaType": _LAYER_TYPE, "digest": layer.diff_id, "size": size_bytes})
        layer_bytes += size_bytes
        report.advance(layer_bytes)
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST_TYPE,
        "config": _write_blob(folder, config.raw, _CONFIG_TYPE),
        "layers": layers,
    }
    # A runtime reads index.json first, and finds all other files by their digests.
    descriptor = _write_blob(folder, json.dumps(manifest).encode(), _MANIFEST_TYPE)
    index = {"schemaVersion": 2, "manifests": [descriptor]}
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}', encoding="utf-8")
    return OciLayout(folder=folder, config=config, names=image.selected.names, layer_bytes=layer_bytes)


def _blob_path(folder: Path, digest: str) -> Path:
    """Return the path of the file in the OCI folder `folder` that has this digest, ``sha256:...``."""
    return folder / _BLOBS_FOLDER / digest.removeprefix("sha256:")


def _write_blob(folder: Path, data: bytes, media_type: str) -> dict[str, object]:
    """Write `data` to a file named after its digest, and return the descriptor that refers to this file."""
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    _blob_path(folder, digest).write_bytes(data)
    return {"mediaType": media_type, "digest": digest, "size": len(data)}


def _write_layer(layer: StoredLayer, target: Path, allowance: Allowance) -> str:
    """Write the unpacked bytes of `layer` to `target`, and return their sha256 in hex.

    If the layer is already an uncompressed file of its own, it is linked and not copied. `allowance` limits
    the bytes to which a compressed layer unpacks.
    """
    region = layer.region
    # The region is a whole file or a part of an archive, and in an archive it begins after a tar header.
    is_whole_file = region.start == 0
    if layer.compress == "none" and is_whole_file:
        _link_or_copy(region.path, target)
        return region.sha256()
    digest = hashlib.sha256()
    with target.open("wb") as file, contextlib.closing(layer.plain(allowance)) as chunks:
        file.writelines(hash_chunks(chunks, digest))
    return digest.hexdigest()


def _link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, which needs no space. If that is not possible, copy the file."""
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        # The target is on another file system, the kernel protects files of other users, or the file system
        # has no hard links.
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EMLINK):
            raise
        shutil.copyfile(source, target)  # noqa: TID251 - a folder of this process
