"""Remember which image this machine last built from the same input.

The key is the digest `ImagePlan.input_sha256`. A caller that finds the image id here does not need to ask the
engine.
"""

from __future__ import annotations

import re
from pathlib import Path

from imgkit_builder.base import files


def record_build(input_sha256: str, image_id: str) -> None:
    """Store `image_id` in the cache, as the result of the last build with this input."""
    files.write_cache(_record_path(input_sha256), image_id)


def built_image_id(input_sha256: str) -> str:
    """Return the id of the image that was last built here from this input, or "" if it is unknown."""
    try:
        text = files.read_text(_record_path(input_sha256))
    except OSError:
        return ""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", text):  # a file in the cache may be damaged
        return ""
    return text


def _record_path(input_sha256: str) -> Path:
    """Return the path of the cache file for this input. The file holds the id of the image."""
    return files.cache_dir() / "builds" / input_sha256
