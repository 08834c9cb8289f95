"""Folders of small files: a fake machine's /proc and /sys, a project, the code beside a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

FakeProgram = Callable[[str, str], Path]
"""The fixture ``fake_program``."""


def write_files(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write each file below `root`, and return `root`.

    An absolute path is one of the fake machine. Text gets a newline at its end, as files of /proc have it.
    """
    for path, content in files.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
    return root


def write_program(path: Path, script: str, shell: str = "sh") -> Path:
    """Write a script of `shell` that stands in for the program at `path`, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/{shell}\n{script}\n")
    path.chmod(0o755)
    return path
