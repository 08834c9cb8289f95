"""The image id where the engine names an image by its manifest, as it does with containerd's store.

The image id is the digest of the image's configuration, as archives and .sif files record it. The engine's
API does not tell it, but the manifest does. That is a file in containerd's store, and the engine shows it in
a container that is never started. Where the store is in another place, the save stream has the manifest too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

from imgkit_builder.base import files
from imgkit_builder.engine import containers, platforms
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import translated
from imgkit_entrypoints.errors import ImgkitError, ToolFailed

_CONTENT = "io.containerd.content.v1.content/blobs/sha256"
_OTHER_STORES = (f"/var/lib/containerd/{_CONTENT}", f"/var/lib/desktop-containerd/daemon/{_CONTENT}")
"""The stores of a containerd that the engine did not start: the system's, and Docker Desktop's."""
_INSIDE = "/imgkit-content"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_JSON_BYTES = 4 << 20
"""Registries refuse larger manifests; larger files are layers."""

Read = Callable[[str], bytes | None]
"""The file with a digest; None if there is none."""


def image_id(engine: Engine, ref: str, platform: str) -> str:
    """``sha256:...`` of the configuration of the image that `engine` calls `ref`, for `platform`.

    Notes
    -----
    It is kept in a file: a manifest never changes. Without a cache folder it is read again, 0.15 s each time.

    Raises
    ------
    ToolFailed : the engine has no readable manifest of the image.
    """
    if not engine.names_manifests or not _DIGEST.fullmatch(ref):
        return ref
    name = f"{ref.removeprefix('sha256:')}-{platform.replace('/', '-')}"
    kept = files.cache_dir() / "image-ids" / name
    with contextlib.suppress(OSError, ValueError):
        known = kept.read_text(encoding="ascii").strip()
        if _DIGEST.fullmatch(known):
            return known
    found = _in_the_store(engine, ref, platform) or _in_the_archive(engine, ref, platform)
    if found is None:
        raise ToolFailed(
            f"the engine does not show the manifest of {ref}",
            hint="pull or build the image again; see: journalctl -u docker -n 50",
        )
    files.write_cache(kept, f"{found}\n")
    return found


def _in_the_store(engine: Engine, ref: str, platform: str) -> str | None:
    for place in (f"{engine.root}/containerd/daemon/{_CONTENT}", *_OTHER_STORES):
        # The engine refuses a folder that is not there.
        with (
            contextlib.suppress(ImgkitError),
            containers.created(
                engine, ref, ["true"], purpose="read", platform=platform, shown={place: _INSIDE}
            ) as container,
        ):
            if found := _configuration(ref, platform, functools.partial(_read, engine, container)):
                return found
    return None


def _read(engine: Engine, container: str, digest: str) -> bytes | None:
    import docker.errors

    with translated(f"read {digest} from the engine's store"):
        try:
            chunks, _ = engine.api.get_archive(container, f"{_INSIDE}/{digest.removeprefix('sha256:')}")
        except docker.errors.NotFound:
            return None
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
            return _content(tar, tar.next())


def _in_the_archive(engine: Engine, ref: str, platform: str) -> str | None:
    """Read the save stream until the manifest has come by."""
    seen: dict[str, bytes] = {}
    with translated(f"save {ref}"), platforms.get_image(engine, ref, platform) as chunks:
        try:
            with tarfile.open(fileobj=_Onwards(chunks), mode="r|") as tar:
                for member in tar:
                    data = _content(tar, member)
                    if data is not None:
                        seen[f"sha256:{member.name.rpartition('/')[2]}"] = data
                        if found := _configuration(ref, platform, seen.get):
                            return found
        except tarfile.TarError:
            return None
    return None


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo | None) -> bytes | None:
    if member is None or not member.isreg() or member.size > _MAX_JSON_BYTES:
        return None
    stream = tar.extractfile(member)
    return stream.read() if stream else None


def _configuration(digest: str, platform: str, read: Read) -> str | None:
    """The configuration that the manifest or index `digest` names; None if a file is missing."""
    raw = read(digest)
    if raw is None or f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
        return None
    document: dict[str, Any] = json.loads(raw)
    if "config" in document:
        return str(document["config"]["digest"])
    for entry in document.get("manifests", ()):
        stated = entry.get("platform") or {}
        if f"{stated.get('os')}/{stated.get('architecture')}" == platform:
            return _configuration(str(entry["digest"]), platform, read)
    return None


class _Onwards(io.RawIOBase):
    """Chunks as a file that can only be read onwards."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # typeshed: WriteableBuffer
        self._rest = self._rest or next(self._chunks, b"")
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
