"""The shipped recipe mn5 as an image and as a .sif on the stand-in, made once for all tests that run it."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TAG = f"imgkit-test-mn5-{os.getpid()}:latest"


def imgkit(*words: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "imgkit_builder", *map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session", autouse=True)
def _stop_folders() -> Iterator[None]:
    """Remove what launchers leave that are killed together with their guard: their folders for marks."""

    def present() -> set[Path]:
        return {folder for place in ("/tmp", "/dev/shm") for folder in Path(place).glob("imgkit-stop-*")}

    before = present()
    yield
    for folder in present() - before:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def mn5_image(standin: str) -> Iterator[str]:
    """Name of the image."""
    try:
        imgkit("build", "mn5", "--base", standin, "--tag", TAG)
        yield TAG
    finally:
        subprocess.run(["docker", "rmi", "--force", TAG], capture_output=True, check=False)


@pytest.fixture(scope="session")
def mn5_sif(mn5_image: str) -> Iterator[Path]:
    """The image as a .sif, squashed straight from the engine: the fast way."""
    # Not pytest's own folder, which only its owner may enter: an ordinary user reads this file.
    folder = Path("/tmp") / f"imgkit-sif-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        imgkit("sif", mn5_image, "--from", "daemon", "-o", folder / "mn5.sif")
        yield folder / "mn5.sif"
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def user() -> Iterator[str]:
    """An ordinary user of this machine; made where root may, else whoever runs the tests."""
    if os.geteuid() != 0:
        yield pwd.getpwuid(os.geteuid()).pw_name
        return
    name = "imgkit-line"
    subprocess.run(["useradd", "--create-home", name], check=True)
    try:
        yield name
    finally:
        subprocess.run(["userdel", "--remove", name], check=True, capture_output=True)
