"""Options from a file, turned into command-line words, so that one set of rules checks both."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from imgkit_entrypoints import files, json_text


def words(path: Path) -> tuple[str, ...]:
    """Return the options in the file as flags.

    Raises
    ------
    OSError : the file cannot be read.
    ValueError : the file holds no table of options, or this image cannot parse its format.
    """
    try:
        content = _parsed(path)
    except RecursionError:
        raise ValueError("its brackets lie too deep within each other") from None
    if not isinstance(content, dict):
        raise ValueError("the file holds no table of options")
    if "config" in content:
        raise ValueError("the file names another file with `config`; only --config can")
    found: list[str] = []
    for key, value in content.items():
        flag = "--" + str(key).replace("_", "-").removesuffix("-s")  # config.json has stop_after_s
        if isinstance(value, bool):
            found += [flag] if value else []  # YAML parses `off` as false
        elif isinstance(value, dict | list):  # in YAML, few bytes can make one of gigabytes
            raise ValueError(f"`{key}` holds more than one value")
        elif value is not None:
            found.append(f"{flag}={value}")
    return tuple(found)


def _parsed(path: Path) -> Any:
    if path.suffix == ".toml":
        try:
            import tomllib  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise ValueError("TOML needs Python 3.11; use JSON instead") from None
        return tomllib.loads(files.read_text(path))
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path)
    return json_text.load(path)


def _yaml(path: Path) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ValueError("YAML needs PyYAML, which is not installed; use JSON instead") from None
    try:
        return yaml.safe_load(files.read_text(path))
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error
