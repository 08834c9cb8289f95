"""Remember which image this machine last built from an input.

The key is `ImagePlan.input_sha256`. A caller that knows the image id from here does not have to ask the
engine.
"""

from __future__ import annotations

import re
from pathlib import Path

from imgkit_builder.base import files


def record_build(input_sha256: str, image_id: str) -> None:
    """Store `image_id` as the result of the last build from this input, in a file of the cache."""
    files.write_cache(_record_path(input_sha256), image_id)


def built_image_id(input_sha256: str) -> str:
    """Return the id of the image that was last built here from this input, or "" if none is known."""
    try:
        text = files.read_text(_record_path(input_sha256))
    except OSError:
        return ""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", text):  # a file of the cache may be cut or changed
        return ""
    return text


def _record_path(input_sha256: str) -> Path:
    """Return the path of the file with the id of the image that was last built from this input."""
    return files.cache_dir() / "builds" / input_sha256
