"""``imgkit doctor`` beside a Docker engine that answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from imgkit_builder.examine import doctor

pytestmark = pytest.mark.docker


@pytest.mark.parametrize(("purpose", "verdict"), [("any", "warn"), ("build", "warn"), ("sif", "fail")])
def test_missing_runtime_fails_only_converters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, purpose: str, verdict: str
) -> None:
    # No program is on this PATH; the engine is reached by its socket.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = {check.name: check for check in doctor.examine(purpose=purpose)}
    assert found["docker"].verdict == "ok"
    assert found["singularity"].verdict == verdict
