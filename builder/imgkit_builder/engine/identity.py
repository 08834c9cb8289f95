"""The image id where the engine names an image by its manifest, as it does with containerd's store.

The image id is the digest of the image's configuration, as archives and .sif files record it. The engine's
API does not tell it, but the manifest does. That is a file in containerd's store, and the engine shows it in
a container that is never started. Where the store is in another place, the save stream has the manifest too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any

from imgkit_builder.archive import read, tar_read
from imgkit_builder.archive.tar_read import REGULAR, TarLimits, TarStream
from imgkit_builder.base import files
from imgkit_builder.engine import containers, platforms
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import translated
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, ToolFailed

_CONTENT = "io.containerd.content.v1.content/blobs/sha256"
_OTHER_STORES = (f"/var/lib/containerd/{_CONTENT}", f"/var/lib/desktop-containerd/daemon/{_CONTENT}")
"""The stores of a containerd that the engine did not start: the system's, and Docker Desktop's."""
_INSIDE = "/imgkit-content"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MAX_INDEX_DEPTH = 4

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
        known = files.read_own(kept).strip()
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
        return tar_read.first_file(chunks, most_bytes=read.MAX_JSON_BYTES, name=digest)


def _in_the_archive(engine: Engine, ref: str, platform: str) -> str | None:
    """Read the save stream until the manifest has come by."""
    seen: dict[str, bytes] = {}
    with translated(f"save {ref}"), platforms.get_image(engine, ref, platform) as chunks:
        tar = TarStream(chunks, name=ref, limits=TarLimits(entries=read.MAX_MEMBERS))
        try:
            for member in tar:
                if member.kind == REGULAR and member.size_bytes <= read.MAX_JSON_BYTES:
                    data = b"".join(tar.body())
                    # Only these can be the manifest or an index, and the layers between them stay unread.
                    if data.startswith(b"{"):
                        seen[f"sha256:{member.name.rpartition('/')[2]}"] = data
                        if found := _configuration(ref, platform, seen.get):
                            return found
        except CheckFailed:
            return None
    return None


def _configuration(digest: str, platform: str, look_up: Read) -> str | None:
    """The configuration that the manifest or index `digest` names; None if a file is missing or damaged."""
    for _ in range(_MAX_INDEX_DEPTH + 1):
        raw = look_up(digest)
        if raw is None or f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
            return None
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            document: dict[str, Any] = json_text.parse(raw)
            if "config" in document:
                found = str(document["config"]["digest"])
                return found if _DIGEST.fullmatch(found) else None
            digest = next(str(one["digest"]) for one in document["manifests"] if _is_for(one, platform))
            continue
        return None
    return None


def _is_for(entry: dict[str, Any], platform: str) -> bool:
    stated = entry.get("platform") or {}
    return f"{stated.get('os')}/{stated.get('architecture')}" == platform
