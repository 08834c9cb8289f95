"""The facts of a local image, for ``imgkit show IMAGE``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from imgkit_builder.engine.connection import connect
from imgkit_builder.engine.images import inspect
from imgkit_builder.oci.manifest import STANDIN_LABEL
from imgkit_entrypoints.terminal import shown

SCHEMA = 1
STANDIN_WARNING = "STAND-IN: its base has no NVIDIA software; for tests only, not for a cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """The facts that ``imgkit show`` prints."""

    id: str
    tags: tuple[str, ...]
    platform: str
    size_bytes: int
    digest: str
    recipe: str
    """Name of its recipe; empty for an image that imgkit did not build."""
    base: str
    created: str
    standin: bool
    layers: int
    labels: Mapping[str, str]

    def lines(self) -> list[str]:
        """Aligned lines for people."""
        rows = [
            ("image", ", ".join(self.tags) or "(no tag)"),
            ("id", self.id),
            ("digest", self.digest or "(not from a registry)"),
            ("platform", self.platform),
            ("size", f"{self.size_bytes / 1e6:.1f} MB in {self.layers} layers"),
            ("recipe", self.recipe or "(not built by imgkit)"),
            ("base", self.base),
            ("created", self.created),
            *((f"label {shown(key)}", value) for key, value in sorted(self.labels.items())),
        ]
        width = max(len(key) for key, _ in rows)
        lines = [f"{key:{width}}  {value}".rstrip() for key, value in rows if value]
        return [STANDIN_WARNING, *lines] if self.standin else lines

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, with its schema number."""
        return {"schema": SCHEMA, "kind": "image", **dataclasses.asdict(self)}


def image_facts(name: str) -> ImageFacts:
    """The facts of the engine's image `name`.

    Raises
    ------
    UsageError : there is no such image.
    ToolMissing : no engine.
    """
    with connect() as engine:
        image = inspect(engine, name)
    return ImageFacts(
        id=image.id,
        tags=image.tags,
        platform=image.platform,
        size_bytes=image.size_bytes,
        digest=image.digest,
        recipe=image.labels.get("imgkit.recipe", ""),
        base=image.labels.get("org.opencontainers.image.base.name", ""),
        created=image.labels.get("org.opencontainers.image.created", ""),
        standin=STANDIN_LABEL in image.labels,
        layers=len(image.diff_ids),
        labels=image.labels,
    )
