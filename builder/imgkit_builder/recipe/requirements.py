"""The rule for requirements files: the image gets only this file, and the sha256 covers only its bytes."""

from __future__ import annotations

import re

_OTHER_FILE = re.compile(r"-[rce]\b|--(?:requirement|constraint|editable)\b|\.{0,2}/|file:")


def names_other_file(line: str) -> bool:
    """Whether a line of a requirements file reads another file, which the image would not have."""
    return bool(_OTHER_FILE.match(line.strip()))
