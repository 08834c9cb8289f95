"""What pip prints in an image becomes one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.packages import failures
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

CONFLICT = """\
ERROR: Cannot install xformers==0.0.20 because these package versions have conflicting dependencies.

The conflict is caused by:
    xformers 0.0.20 depends on torch==2.0.1
    The user requested (constraint) torch==2.3.0+40ec155e58.nv24.3
"""
NO_NETWORK = """\
WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError(...)': /simple/einops/
ERROR: Could not find a version that satisfies the requirement einops (from versions: none)
ERROR: No matching distribution found for einops
"""


def explain(output: str, failure: str = "pip") -> ImgkitError:
    image = {"torch": "2.3.0a0+40ec155e58.nv24.3", "numpy": "1.24.4"}
    answer: dict[str, Any] = {
        "failure": failure,
        "output": output,
        "image": image,
        "python": "3.10.12",
        "machine": "x86_64",
    }
    return failures.explain(
        answer, image=Path("x.sif"), target=Path("/a/x.sqsh"), requirements=("einops",), log="x.log"
    )


def test_conflict_has_both_versions_and_the_way_out() -> None:
    error = explain(CONFLICT)
    assert isinstance(error, UsageError)
    assert error.what == (
        "xformers 0.0.20 needs torch==2.0.1, and the image has torch 2.3.0a0+40ec155e58.nv24.3"
    )
    assert "`pip: [einops]`" in (error.hint or "")
    assert "--replace" not in (error.hint or "")


def test_conflict_over_another_package_names_the_option() -> None:
    error = explain("    The user requested numpy>=2\n    The user requested (constraint) numpy==1.24.4\n")
    assert error.what == "numpy>=2 is asked for, and the image has numpy 1.24.4"
    assert (error.hint or "").endswith("--replace numpy")


def test_missing_network_is_told_from_a_missing_package() -> None:
    error = explain(NO_NETWORK)
    assert isinstance(error, ToolFailed)
    assert error.what == "the image's pip cannot reach a package index from this machine"
    assert "-d wheels --platform" in (error.hint or "")
    assert "or build a recipe with this image's base" in (error.hint or "")
    missing = explain(NO_NETWORK.split("\n", 1)[1])
    assert missing.what == "there is no einops for Python 3.10.12 on x86_64"


@pytest.mark.parametrize(
    ("failure", "output", "what"),
    [
        ("no pip", "", "the image has no pip"),
        ("pip", "no such option: --report", "the image has a pip older than 22.2, which cannot do this"),
        ("protected", "torch", "nothing may replace torch 2.3.0a0"),
        ("pip", "ERROR: something new", "pip failed in the image"),
    ],
)
def test_failure_of_pip_is_explained(failure: str, output: str, what: str) -> None:
    assert explain(output, failure).what.startswith(what)
