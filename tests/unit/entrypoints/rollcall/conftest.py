"""A roll call between threads of one process, with short waits."""

from __future__ import annotations

import pytest
from rollcall_nodes import head_placement

from imgkit_entrypoints.rollcall import gather, join, session
from imgkit_entrypoints.schedulers.placement import Placement


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "CHECK_S", 0.02)
    monkeypatch.setattr(join, "RETRY_S", 0.02)
    monkeypatch.setattr(session, "BEAT_S", 0.1)
    monkeypatch.setattr(session, "LINGER_S", 0.1)


@pytest.fixture
def placement() -> Placement:
    return head_placement()
