"""The configuration of a local image as JSON, for who makes something else of the image than a container."""

from __future__ import annotations

import json

from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import translated


def image_config(engine: Engine, name: str) -> bytes:
    """The OCI image configuration of the local image `name`, without its history.

    The engine hands out the values, not the bytes: their digest is not the image id.

    Raises
    ------
    UsageError : no such image.
    """
    with translated(f"inspect {name}", name=name):
        data = engine.api.inspect_image(name)  # type: ignore[no-untyped-call]  # the stubs forgot it
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
