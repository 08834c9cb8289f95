"""Answers that a real apt (Debian 12) and pip (23.0.1) gave, with example hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def apt_answer() -> str:
    """Return what apt printed about jq and libnuma1."""
    return (HERE / "apt_answer.txt").read_text()


@pytest.fixture
def pip_report() -> str:
    """Return pip's report of einops, requests[socks] and tqdm, which was named by its URL."""
    return (HERE / "pip_report.json").read_text()
