"""What is made once for a whole run of the lab tests, and the order in which workers take the tests."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit import imgkit_json, locked, ordinary_user, shared_folder


@pytest.fixture(scope="session", autouse=True)
def _shared() -> None:
    """The folder is there, so that the end of the run cleans up."""
    shared_folder()


@pytest.fixture(scope="session")
def mn5_image(standin: str) -> str:
    """Name of the shipped recipe mn5's image on the stand-in; the first worker that needs it builds it."""
    tags = shared_folder() / "tags"
    tag = f"imgkit-test-mn5-{shared_folder().name}:latest"
    with locked("mn5"):
        if not tags.exists():
            imgkit_json("build", "mn5", "--base", standin, "--tag", tag)
            tags.write_text(tag)
    return tag


@pytest.fixture(scope="session")
def mn5_sif(mn5_image: str) -> Path:
    """The image as a .sif, squashed straight from the engine, which is the fast way."""
    sif = shared_folder() / "mn5.sif"
    with locked("mn5"):
        if not sif.exists():
            imgkit_json("sif", mn5_image, "--from", "daemon", "-o", sif)
    return sif


@pytest.fixture(scope="session")
def user() -> Iterator[str]:
    """An ordinary user of this machine: a new one where root runs the tests, else whoever does."""
    if os.geteuid() != 0:
        yield pwd.getpwuid(os.geteuid()).pw_name
        return
    with ordinary_user() as name:
        yield name
