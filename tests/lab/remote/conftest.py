"""The far host of a module, as the test's own process reaches it."""

from __future__ import annotations

import pytest


@pytest.fixture
def far(served, monkeypatch):
    """Return the host of the module's fixture `served`, with the variables of its ssh in the environment."""
    served.enter(monkeypatch)
    served.direct()
    return served
