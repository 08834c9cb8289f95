"""What an ``imgkit.toml`` of another person could do: its values are shown before the first run with them."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.project.toml_file import ProjectValues

_DIGITS = 12


def shown(values: ProjectValues) -> Mapping[str, str]:
    """The values that decide where the job runs, what it can reach and what it does, as lines of text."""
    return {
        name: text
        for name, text in (
            ("remote", values.remote),
            ("env", ", ".join(_env(values))),
            ("binds", ", ".join(values.binds)),
            ("command", shlex.join(values.command)),
        )
        if text
    }


def _env(values: ProjectValues) -> Iterator[str]:
    yield from (one if "=" in one else f"{one} (with its value from here)" for one in values.env)


def digest(values: ProjectValues) -> str:
    """The digest of exactly these values."""
    named = [values.remote, values.env, values.binds, values.command]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:_DIGITS]


def is_known(values: ProjectValues) -> bool:
    """Whether there is nothing to confirm, or this user has confirmed these values on this machine."""
    return not shown(values) or _mark(values).is_file()


def remember(values: ProjectValues, file: Path) -> None:
    """Take these values as confirmed from now on; `file` states them.

    Raises
    ------
    OSError : the state folder cannot be written.
    """
    mark = _mark(values)
    mark.parent.mkdir(parents=True, exist_ok=True)
    files.put(mark, f"{file}\n")


def _mark(values: ProjectValues) -> Path:
    return files.state_dir() / "confirmed" / digest(values)
