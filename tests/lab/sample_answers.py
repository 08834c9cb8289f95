"""What a container without anything of imgkit answers when imgkit looks into it."""

from __future__ import annotations

import json
from typing import Any

_SEEN = {
    "machine": "x86_64",
    "python": "3.11.2",
    "torch": "",
    "torch_error": "",
    "cuda": "",
    "nccl": "",
    "pip_conflicts": [],
    "files": {},
}


def answer_line(**changes: Any) -> str:
    """Return its line, with some other values."""
    return "IMGKIT-SEEN " + json.dumps({**_SEEN, **changes})
