"""One image of the engine, as the source of a .sif or a delta."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.engine import copies, storage, streams
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.images import ImageInfo, config_json, find, inspect, with_layers
from imgkit_builder.oci.config import ImageConfig, parse_config


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalImage:
    """An image on a connected engine; `local_image` finds it.

    Everything is read by the image's id: a tag that moves meanwhile cannot mix two images.
    """

    engine: Engine
    name: str
    """Its first tag, or else the requested name."""
    info: ImageInfo
    config: ImageConfig

    @property
    def size_bytes(self) -> int:
        """Size of its layers, uncompressed."""
        return self.info.size_bytes

    def save(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker save``; the archive names the image's tag where it has one."""
        return streams.save_stream(self.engine, self.info.tag or self.info.ref)

    def export(self) -> AbstractContextManager[Iterator[bytes]]:
        """Stream ``docker export`` of a container made of the image."""
        return streams.export_stream(self.engine, self.info.ref)

    def folders(self, diff_ids: Sequence[str]) -> tuple[Path, ...] | None:
        """Folders in which the engine keeps the layers `diff_ids`; None where they cannot be read."""
        return storage.layer_folders(self.engine, diff_ids)

    def why_unreadable(self) -> str:
        """The reason why `folders` gives None."""
        return storage.why_unreadable(self.engine)

    def copied(self, layers: int) -> tuple[str, ...] | None:
        """Targets of the last `layers` layers where they only copy; None where they do more."""
        return copies.copied(self.engine, self.info.ref, layers)

    def fetch(self, paths: Sequence[str], folder: Path) -> tuple[Path | None, ...]:
        """Write a tar of each of `paths` into `folder`; the result has None for a missing path."""
        return copies.fetch(self.engine, self.info.ref, paths, folder, platform=self.info.platform)

    def other(self, image_id: str, diff_ids: Sequence[str]) -> LocalImage | None:
        """Find another image of the same engine by its id or else by its layers; None where there is none."""
        # An engine with containerd's store does not find an image by the id that a .sif records.
        info = find(self.engine, image_id) or with_layers(self.engine, diff_ids)
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
        info=info,
        config=parse_config(config_json(engine, info), where=name, image_id=info.id),
    )
