"""Local images of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import translated
from imgkit_builder.recipe.image_reference import BadReference, parse
from imgkit_entrypoints.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """A local image."""

    id: str
    """``sha256:...`` of the image configuration."""
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

    @property
    def tag(self) -> str:
        """Its first tag; empty where it has none."""
        return self.tags[0] if self.tags else ""


def inspect(engine: Engine, name: str) -> ImageInfo:
    """Describe the local image `name` (tag or id); never uses the network.

    Raises
    ------
    UsageError : there is no such image, or `name` is not an image name.
    """
    with translated(f"inspect {name}", name=name):
        data: dict[str, Any] = engine.api.inspect_image(name)  # type: ignore[no-untyped-call]  # the stubs forgot it
    return _info(data, name)


def find(engine: Engine, name: str) -> ImageInfo | None:
    """Like `inspect`, but None where the engine has no such image."""
    import docker.errors

    with translated(f"inspect {name}", name=name):
        try:
            data: dict[str, Any] = engine.api.inspect_image(name)  # type: ignore[no-untyped-call]  # the stubs forgot it
        except docker.errors.ImageNotFound:
            return None
    return _info(data, name)


def _info(data: dict[str, Any], name: str) -> ImageInfo:
    config = data.get("Config") or {}
    tags = [plain(tag) for tag in data.get("RepoTags") or () if tag != "<none>:<none>"]
    # The requested name comes first, so that saving and messages use it.
    tags.sort(key=lambda tag: tag not in (plain(name), f"{plain(name)}:latest"))
    digests = [plain(digest) for digest in data.get("RepoDigests") or () if not digest.startswith("<none>")]
    digests.sort(key=lambda digest: digest.partition("@")[0] != repository(plain(name)))
    pairs = (word.partition("=") for word in config.get("Env") or ())
    return ImageInfo(
        id=str(data["Id"]),
        tags=tuple(tags),
        platform=f"{data.get('Os') or 'linux'}/{data.get('Architecture') or ''}",
        labels=dict(config.get("Labels") or {}),
        env={key: value for key, _, value in pairs},
        entrypoint=tuple(config.get("Entrypoint") or ()),
        cmd=tuple(config.get("Cmd") or ()),
        workdir=str(config.get("WorkingDir") or ""),
        user=str(config.get("User") or ""),
        diff_ids=tuple((data.get("RootFS") or {}).get("Layers") or ()),
        size_bytes=int(data.get("Size") or 0),
        digest=digests[0] if digests else "",
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
