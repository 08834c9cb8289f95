"""Which image this machine last built from a build context: then nobody has to ask the engine."""

from __future__ import annotations

import re
from pathlib import Path

from imgkit_builder.base import files


def record_build(context_sha256: str, image_id: str) -> None:
    """Keep `image_id` as the result of the last build from this context."""
    files.write_cache(_path(context_sha256), image_id)


def built_image_id(context_sha256: str) -> str:
    """Return the id of the image that was last built from this context. Return "" if none is known here."""
    try:
        text = files.read_text(_path(context_sha256))
    except OSError:
        return ""
    return text if re.fullmatch(r"sha256:[0-9a-f]{64}", text) else ""


def _path(context_sha256: str) -> Path:
    return files.cache_dir() / "builds" / context_sha256
