"""TOML on a Python without a reader of it."""

from __future__ import annotations

import sys

import pytest

from imgkit_builder.recipe import toml_text
from imgkit_entrypoints.errors import ToolMissing


def test_text_becomes_values() -> None:
    assert toml_text.parse("[a]\nb = [1]\n") == {"a": {"b": [1]}}
    with pytest.raises(ValueError, match="Invalid value"):
        toml_text.parse("a = ")


def test_python_without_reader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(ToolMissing, match=r"Python 3\.10 cannot read TOML"):
        toml_text.parse("a = 1")
