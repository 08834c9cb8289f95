"""Image archives written byte by byte, in the layouts that engines write; real ones are in tests/lab."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_image import SampleImage
from tars import tar_of_files


@pytest.fixture
def sample() -> SampleImage:
    """An image of three layers."""
    return SampleImage()


@pytest.fixture
def archive(sample: SampleImage, tmp_path: Path) -> Path:
    """The plain archive of `sample` in the older layout, ``made.tar``."""
    path = tmp_path / "made.tar"
    path.write_bytes(tar_of_files(sample.legacy_members()))
    return path


@pytest.fixture
def zstd() -> Callable[[bytes], bytes]:
    """Compress by the program; skips where there is none."""
    program = shutil.which("zstd")
    if program is None:
        pytest.skip("no zstd program here (apt install zstd)")
    return lambda data: subprocess.run([program, "-qc"], input=data, capture_output=True, check=True).stdout
