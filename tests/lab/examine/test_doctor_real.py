"""``imgkit doctor`` beside a Docker engine that answers."""

from __future__ import annotations

import pytest

from imgkit_builder.examine import doctor

pytestmark = pytest.mark.docker


@pytest.mark.parametrize("purpose", ["any", "build"])
def test_missing_runtime_is_a_warning_beside_an_engine(tmp_path, monkeypatch, purpose):
    """This machine can build, and the cluster can convert the archive."""
    # No program is on this PATH; the engine is reached by its socket.
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    checks = {check.name: check for check in doctor.check_machine(purpose=purpose)}
    assert checks["docker"].verdict == "ok"
    assert checks["singularity"].verdict == "warn"
