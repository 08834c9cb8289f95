"""Quotes values for their place in a Dockerfile.

Notes
-----
Docker's classic builder expands ``$``, quotes and backslashes in ENV, LABEL, WORKDIR and COPY; in COPY even
after it has decoded its JSON. It expands nothing in RUN.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence


def docker_quote(value: str) -> str:
    """Double quotes for ENV, LABEL and WORKDIR, with ``$`` escaped."""
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'


def docker_key(value: str) -> str:
    """The name of a label, quoted only where it must be."""
    return value if re.fullmatch(r"[A-Za-z0-9._/-]+", value) else docker_quote(value)


def copy_words(words: Sequence[str]) -> str:
    """The JSON form of COPY; the builder expands each word once more after decoding it."""
    return json.dumps([re.sub(r"""([\\"'$])""", r"\\\1", word) for word in words], ensure_ascii=False)
