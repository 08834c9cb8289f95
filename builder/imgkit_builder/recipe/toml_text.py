"""Reads TOML on every Python. Standard library only, where that is 3.11 or newer."""

from __future__ import annotations

import sys
from typing import Any

from imgkit_entrypoints.errors import ToolMissing


def parse(text: str) -> dict[str, Any]:
    """The values in `text`.

    Raises
    ------
    ValueError : it is not TOML.
    ToolMissing : this Python has no reader of TOML, as the one-file tool brings none.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            raise ToolMissing(
                f"Python {sys.version_info[0]}.{sys.version_info[1]} cannot read TOML",
                where=sys.executable,
                hint="run imgkit with Python 3.11 or newer, or: python3 -m pip install --user tomli",
            ) from None
    found: dict[str, Any] = tomllib.loads(text)
    return found
