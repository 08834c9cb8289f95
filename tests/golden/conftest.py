"""Linters of rendered text."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def find_linter() -> Callable[[str], str]:
    """``find_linter("shellcheck")``: the path of a linter of the development requirements."""

    def find(name: str) -> str:
        path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        assert path, f"{name} is not installed; pip install -e '.[dev]'"
        return path

    return find
