"""Local images of the engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imgkit_builder.engine import identity, platforms
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import translated
from imgkit_builder.recipe.image_reference import BadReference, parse
from imgkit_entrypoints.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """A local image."""

    ref: str
    """The engine's own name for it, ``sha256:...``: what requests to the engine take."""
    id: str
    """``sha256:...`` of the image configuration; archives and .sif files record it."""
    tags: tuple[str, ...]
    platform: str
    """``linux/amd64``."""
    labels: Mapping[str, str]
    env: Mapping[str, str]
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    workdir: str
    user: str
    diff_ids: tuple[str, ...]
    """Digests of the uncompressed layers, lowest first."""
    size_bytes: int
    digest: str
    """``repo@sha256:...``; empty for an image that never saw a registry."""
    manifest: str = ""
    """``sha256:...`` of its manifest where the engine prefers another platform of the image; else empty."""

    @property
    def tag(self) -> str:
        """Its first tag; empty where it has none."""
        return self.tags[0] if self.tags else ""


def inspect(engine: Engine, name: str, *, platform: str | None = None) -> ImageInfo:
    """Describe the local image `name` (tag or id); never uses the network.

    Of an image with several platforms it describes `platform`, or else the one that the engine prefers.

    Raises
    ------
    UsageError : there is no such image, or `name` is not an image name.
    """
    with translated(f"inspect {name}", name=name):
        data = platforms.inspect_image(engine, name, platform)
    return _info(engine, data, name)


def find(engine: Engine, name: str, *, platform: str | None = None) -> ImageInfo | None:
    """Like `inspect`, but None where the engine has no such image."""
    import docker.errors

    with translated(f"inspect {name}", name=name):
        try:
            data = platforms.inspect_image(engine, name, platform)
        except docker.errors.ImageNotFound:
            return None
    return _info(engine, data, name)


def with_layers(engine: Engine, diff_ids: Sequence[str]) -> ImageInfo | None:
    """Find a local image with exactly the layers `diff_ids`, under any name or none."""
    import docker.errors

    with translated("list the images"):
        for ref in engine.api.images(quiet=True):
            # It may be removed meanwhile.
            with contextlib.suppress(docker.errors.ImageNotFound):
                data = platforms.inspect_image(engine, ref, None)
                if _layers(data) == tuple(diff_ids):
                    return _info(engine, data, ref)
    return None


def remove(engine: Engine, name: str) -> None:
    """Remove the image `name`, with the layers that no other image has; a missing image is no error."""
    import docker.errors

    with translated(f"remove the image {name}"), contextlib.suppress(docker.errors.ImageNotFound):
        engine.api.remove_image(name, force=True)


def config_json(engine: Engine, image: ImageInfo) -> bytes:
    """The OCI configuration of `image` without its history.

    The engine hands out values, not bytes: their digest is not the image id.
    """
    with translated(f"inspect {image.ref}", name=image.ref):
        data = platforms.inspect_image(engine, image.ref, image.platform)
    return json.dumps(
        {
            "created": data.get("Created") or "",
            "architecture": data.get("Architecture") or "",
            "os": data.get("Os") or "linux",
            "config": data.get("Config") or {},
            "rootfs": {"type": "layers", "diff_ids": _layers(data)},
        }
    ).encode()


def _layers(data: dict[str, Any]) -> tuple[str, ...]:
    return tuple((data.get("RootFS") or {}).get("Layers") or ())


def _info(engine: Engine, data: dict[str, Any], name: str) -> ImageInfo:
    ref, platform, config = str(data["Id"]), platforms.platform_of(data), data.get("Config") or {}
    tags = [plain(tag) for tag in data.get("RepoTags") or () if tag != "<none>:<none>"]
    # The requested name comes first, so that saving and messages use it.
    tags.sort(key=lambda tag: tag not in (plain(name), f"{plain(name)}:latest"))
    digests = [plain(digest) for digest in data.get("RepoDigests") or () if not digest.startswith("<none>")]
    # The requested one comes first: Podman lists each name with each digest that the image has anywhere.
    digests.sort(key=lambda one: (one != plain(name), one.partition("@")[0] != repository(plain(name))))
    pairs = (word.partition("=") for word in config.get("Env") or ())
    return ImageInfo(
        ref=ref,
        id=identity.image_id(engine, ref, platform),
        tags=tuple(tags),
        platform=platform,
        labels=dict(config.get("Labels") or {}),
        env={key: value for key, _, value in pairs},
        entrypoint=tuple(config.get("Entrypoint") or ()),
        cmd=tuple(config.get("Cmd") or ()),
        workdir=str(config.get("WorkingDir") or ""),
        user=str(config.get("User") or ""),
        diff_ids=_layers(data),
        size_bytes=int(data.get("Size") or 0),
        digest=digests[0] if digests else "",
        manifest=str(data.get("Manifest") or ""),
    )


_PREFIXES = ("docker.io/library/", "docker.io/", "localhost/")


def plain(name: str) -> str:
    """`name` without the registry that Podman puts before a short name: ``mn5:1`` of ``localhost/mn5:1``."""
    return next((name.removeprefix(one) for one in _PREFIXES if name.startswith(one)), name)


def check_name(name: str, *, where: str | None = None) -> None:
    """Raise UsageError where `name` is not an image reference, before the engine is asked."""
    try:
        parse(name)
    except BadReference as error:
        raise UsageError(f"not an image name: {error.what}", where=where, hint=error.hint) from error


def repository(name: str) -> str:
    """``host:5000/group/name`` of ``host:5000/group/name:tag@sha256:...``."""
    plain = name.partition("@")[0]
    head, colon, tail = plain.rpartition(":")
    return head if colon and "/" not in tail else plain
