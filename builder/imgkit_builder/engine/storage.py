"""Where a local engine keeps the layers of its images; only root can read them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imgkit_builder.engine.connection import Engine

_SHIFTED = ("name=rootless", "name=userns")
"""Security options that change the owners of files on disk."""


def layer_folders(engine: Engine, diff_ids: Sequence[str]) -> tuple[Path, ...] | None:
    """The overlay2 folder of each layer, lowest first; None where they cannot be read.

    Notes
    -----
    The engine names a layer by its chain: the digest of all layers up to it. The folder of that name contains
    the layer's own digest and the name of the overlay2 folder, whose content never changes.
    """
    about = engine.about
    if _obstacle(engine, about):
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


def why_unreadable(engine: Engine) -> str:
    """The reason why `layer_folders` finds nothing."""
    about = engine.about
    return _obstacle(engine, about) or f"{about.get('DockerRootDir')} has no folder of its layers"


def _obstacle(engine: Engine, about: dict[str, Any]) -> str:
    if not engine.is_here:
        return "the engine is on another machine"
    if about.get("Driver") != "overlay2":
        return f"the engine keeps its layers by {about.get('Driver')}, not overlay2"
    if any(option.startswith(_SHIFTED) for option in about.get("SecurityOptions") or ()):
        return "the engine shifts the owners of files on its disk"
    return "" if os.geteuid() == 0 else "only root can read the engine's layers on its disk"


def _chained(chain: str, diff_id: str) -> str:
    """The chain id of the layers up to `diff_id`, as the OCI image specification defines it."""
    if not chain:
        return diff_id
    return f"sha256:{hashlib.sha256(f'{chain} {diff_id}'.encode()).hexdigest()}"
