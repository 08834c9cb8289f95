"""Every refusal of ``imgkit`` as its user reads it: the cases in ``refusals``, see tests/kit/refusals.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import refusals

from imgkit_builder.cli import app


@pytest.mark.parametrize("case", refusals.load_cases(Path(__file__).parent / "refusals"))
def test_refusal_is_as_recorded(
    case,
    tmp_path,
    monkeypatch,
    capsys,
):
    refusals.check(case, app.main, tmp_path, monkeypatch, capsys)
