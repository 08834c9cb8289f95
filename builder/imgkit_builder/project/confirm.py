"""What an ``imgkit.toml`` of another person could do: its values are shown before the first run with them."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.project.toml_file import ProjectValues


def shown(values: ProjectValues) -> tuple[tuple[str, str], ...]:
    """The values that decide where the job runs, what it can reach and what it does, each with its name."""
    env = (one if "=" in one else f"{one} (with its value from here)" for one in values.env)
    return (
        *((("remote", values.remote),) if values.remote else ()),
        *(("env", one) for one in env),
        *(("bind", one) for one in values.binds),
        *((("code", values.code),) if values.code else ()),
        *((("command", shlex.join(values.command)),) if values.command else ()),
    )


def digest(values: ProjectValues) -> str:
    """The digest of exactly these values; whole, as two files with one short digest can be found."""
    named = [values.remote, values.env, values.binds, values.command, *filter(None, [values.code])]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


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
