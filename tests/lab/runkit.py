"""Compare the run folders of tests: the newest checkpoints, as torch reads them in the stand-in image."""

from __future__ import annotations

from pathlib import Path

from labkit import ROOT, in_image

COMPARE = "import sys; from saved_states import same; same('/one', '/other', *sys.argv[1:])"


def assert_same_state(image: str, one: Path, other: Path, *names: str) -> None:
    """Fail if the newest checkpoints of two runs differ; by default in any object."""
    mounted = [f"{one}:/one:ro", f"{other}:/other:ro", f"{ROOT}/tests/lab:/lab:ro"]
    options = [word for mount in mounted for word in ("--volume", mount)]
    done = in_image(image, "python3", "-c", COMPARE, *names, options=(*options, "--env", "PYTHONPATH=/lab"))
    assert done.returncode == 0, done.stdout + done.stderr
