"""Who starts an image: root, or an ordinary user."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(params=["root", "ordinary user"])
def as_user(request):
    """The argv before a command that runs as root, and as an ordinary user."""
    if request.param == "root":
        return ("env", "USER=root")
    if os.geteuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    name = request.getfixturevalue("user")
    return ("runuser", "-u", name, "--", "env", f"USER={name}")
