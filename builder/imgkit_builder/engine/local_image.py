"""One image of the engine, as the source of a .sif or a delta."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.engine import copies, storage, streams
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import translated
from imgkit_builder.engine.images import ImageInfo, find, inspect
from imgkit_builder.image.config import ImageConfig, parse_config


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalImage:
    """An image on a connected engine; `local_image` finds it.

    Everything is read by the image's id: a tag that moves meanwhile cannot mix two images.
    """

    engine: Engine
    name: str
    """Its first tag, or else the requested name."""
    tag: str
    """Its first tag; empty where it has none."""
    config: ImageConfig
    size_bytes: int

    def save(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker save``; the archive names the image's tag where it has one."""
        return streams.save_stream(self.engine, self.tag or self.config.image_id)

    def export(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker export`` of a container made of the image."""
        return streams.export_stream(self.engine, self.config.image_id)

    def folders(self, diff_ids: Sequence[str]) -> tuple[Path, ...] | None:
        """Folders in which the engine keeps the layers `diff_ids`; None where they cannot be read."""
        return storage.layer_folders(self.engine, diff_ids)

    def why_unreadable(self) -> str:
        """The reason why `folders` gives None."""
        return storage.why_unreadable(self.engine)

    def copied(self, layers: int) -> tuple[str, ...] | None:
        """Targets of the last `layers` layers where they only copy; None where they do more."""
        return copies.copied(self.engine, self.config.image_id, layers)

    def fetch(self, paths: Sequence[str], folder: Path) -> tuple[Path | None, ...]:
        """Write a tar of each of `paths` into `folder`; the result has None for a missing path."""
        return copies.fetch(self.engine, self.config.image_id, paths, folder)

    def other(self, image_id: str) -> LocalImage | None:
        """Find another image of the same engine by its id; None where the engine has none."""
        info = find(self.engine, image_id)
        return _opened(self.engine, image_id, info) if info else None


def local_image(engine: Engine, name: str) -> LocalImage:
    """Find the image `name` (tag or id) on `engine`.

    Raises
    ------
    UsageError : the engine has no such image.
    CheckFailed : the image has no layers.
    """
    return _opened(engine, name, inspect(engine, name))


def _opened(engine: Engine, name: str, info: ImageInfo) -> LocalImage:
    return LocalImage(
        engine=engine,
        name=info.tag or name,
        tag=info.tag,
        config=parse_config(_config(engine, info.id), where=name, image_id=info.id),
        size_bytes=info.size_bytes,
    )


def _config(engine: Engine, image_id: str) -> bytes:
    """The OCI image configuration without its history.

    The engine hands out values, not bytes: their digest is not the image id.
    """
    with translated(f"inspect {image_id}", name=image_id):
        data = engine.api.inspect_image(image_id)  # type: ignore[no-untyped-call]  # the stubs forgot it
    layers = (data.get("RootFS") or {}).get("Layers") or []
    return json.dumps(
        {
            "created": data.get("Created") or "",
            "architecture": data.get("Architecture") or "",
            "os": data.get("Os") or "linux",
            "config": data.get("Config") or {},
            "rootfs": {"type": "layers", "diff_ids": layers},
        }
    ).encode()
