"""Where a local engine keeps the layers of its images, for whoever may read there: root."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.errors import translated

_SHIFTED = ("name=rootless", "name=userns")
"""Security options under which the owners on disk are not those of the image."""


def layer_folders(engine: Engine, diff_ids: Sequence[str]) -> tuple[Path, ...] | None:
    """The overlay2 folder of each layer, lowest first; None where they are not to be had.

    Notes
    -----
    The engine names a layer by its chain: the digest of all layers up to it. What it keeps of that name holds
    the layer's own digest and the name of the folder, in which nothing changes once the layer is there.
    """
    if not engine.is_here or os.geteuid() != 0:
        return None
    with translated("ask where the engine keeps its layers"):
        about: dict[str, Any] = engine.api.info()
    options = [option for option in about.get("SecurityOptions") or () if option.startswith(_SHIFTED)]
    if about.get("Driver") != "overlay2" or options:
        return None
    root, chain, found = Path(str(about.get("DockerRootDir"))), "", []
    for diff_id in diff_ids:
        chain = _chained(chain, diff_id)
        known = root / "image/overlay2/layerdb/sha256" / chain.removeprefix("sha256:")
        try:
            if (known / "diff").read_text(encoding="ascii") != diff_id:
                return None
            folder = root / "overlay2" / (known / "cache-id").read_text(encoding="ascii") / "diff"
        except OSError:
            return None
        if not folder.is_dir():
            return None
        found.append(folder)
    return tuple(found)


def _chained(chain: str, diff_id: str) -> str:
    """The name of the layers up to `diff_id`, by the OCI image specification."""
    if not chain:
        return diff_id
    return f"sha256:{hashlib.sha256(f'{chain} {diff_id}'.encode()).hexdigest()}"
