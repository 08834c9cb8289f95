"""Compare the run folders of tests: the newest checkpoints, as torch reads them in the stand-in image."""

from __future__ import annotations

from pathlib import Path

from labkit import ROOT, in_image

COMPARE = "import sys; from saved_states import same; same('/first', '/second', *sys.argv[1:])"


def assert_same_state(image: str, first: Path, second: Path, *names: str) -> None:
    """Fail if the newest checkpoints of two runs differ; by default in any object."""
    mounted = [f"{first}:/first:ro", f"{second}:/second:ro", f"{ROOT}/tests/lab:/lab:ro"]
    options = [option for mount in mounted for option in ("--volume", mount)]
    result = in_image(image, "python3", "-c", COMPARE, *names, options=(*options, "--env", "PYTHONPATH=/lab"))
    assert result.returncode == 0, result.stdout + result.stderr
