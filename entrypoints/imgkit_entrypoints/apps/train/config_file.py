"""Options from a file: as words of a command line, so that one set of rules checks both."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any


def words(path: Path) -> tuple[str, ...]:
    """What the file says, as flags.

    Raises
    ------
    OSError : it cannot be read.
    ValueError : it is no table of options, or nothing here reads its format.
    """
    content = _parsed(path)
    if not isinstance(content, dict):
        raise ValueError("holds no table of options")
    if "config" in content:
        raise ValueError("a file cannot name another one by config")
    found: list[str] = []
    for key, value in content.items():
        flag = "--" + str(key).replace("_", "-").removesuffix("-s")  # config.json says stop_after_s
        if isinstance(value, bool):
            found += [flag] if value else []  # YAML's `off`, too, is no
        elif value is not None:
            found.append(f"{flag}={value}")
    return tuple(found)


def _parsed(path: Path) -> Any:
    if path.suffix == ".toml":
        try:
            import tomllib  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise ValueError("TOML needs Python 3.11; JSON works here too") from None
        return tomllib.loads(path.read_text())
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path)
    return json.loads(path.read_text())


def _yaml(path: Path) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ValueError("YAML needs PyYAML, which is not here; JSON works without it") from None
    try:
        return yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"is no YAML: {' '.join(str(error).split())}") from error
