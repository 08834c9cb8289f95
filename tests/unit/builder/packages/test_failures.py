"""What pip prints in an image becomes one error."""

from __future__ import annotations

from pathlib import Path

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


def explain(output: str, failure: str = "pip", remote: str = "") -> ImgkitError:
    answer = {
        "failure": failure,
        "output": output,
        "image": {"torch": "2.3.0a0+40ec155e58.nv24.3", "numpy": "1.24.4"},
        "python": "3.10.12",
        "machine": "x86_64",
    }
    return failures.explain(
        answer,
        image=Path("x.sif"),
        target=Path("/a/x.sqsh"),
        requirements=("einops",),
        log="x.log",
        remote=remote,
    )


NUMPY = "    The user requested numpy>=2\n    The user requested (constraint) numpy==1.24.4\n"


@pytest.mark.parametrize(
    ("failure", "output", "kind", "what", "hint"),
    [
        ("no pip", "", UsageError, "the image has no pip", "build one that has it: a recipe"),
        (
            "pip",
            "no such option: --report",
            UsageError,
            "the image has a pip older than 22.2, which cannot do this",
            "build one that has it: a recipe",
        ),
        (
            "protected",
            "torch",
            UsageError,
            "nothing may replace torch 2.3.0a0+40ec155e58.nv24.3, which belongs to the image's torch",
            "with another base: a recipe",
        ),
        (
            "pip",
            "ERROR: something new",
            ToolFailed,
            "pip failed in the image",
            "something new\nfull log: x.log",
        ),
        ("pip", "No space left on device", ToolFailed, "the disk of /a is full", "-o FILE on a larger disk"),
        (
            "pip",
            CONFLICT,
            UsageError,
            "xformers 0.0.20 needs torch==2.0.1, and the image has torch 2.3.0a0+40ec155e58.nv24.3",
            "build an image with another torch: a recipe with this image's base and `pip: [einops]`",
        ),
        (
            "pip",
            NUMPY,
            UsageError,
            "numpy>=2 is asked for, and the image has numpy 1.24.4",
            "another version of it, or let it replace the image's: --replace numpy\n",
        ),
        (
            "pip",
            NO_NETWORK,
            ToolFailed,
            "the image's pip cannot reach a package index from this machine",
            "imgkit add einops --image x.sif --wheels wheels; or build a recipe with this image's base",
        ),
        (
            "pip",
            NO_NETWORK.split("\n", 1)[1],
            UsageError,
            "there is no einops for Python 3.10.12 on x86_64",
            "check its name and version at the index\nERROR: Could not find",
        ),
    ],
)
def test_failure_of_pip_is_explained(failure, output, kind, what, hint):
    error = explain(output, failure)
    assert type(error) is kind
    assert error.what == what
    assert hint in f"{error.hint}\n"
    assert ("--replace" in f"{error.hint}") == ("--replace" in hint)


def test_wheels_are_downloaded_for_the_image():
    platform = "-d wheels --platform manylinux_2_28_x86_64 --python-version 3.10.12 einops"
    assert platform in (explain(NO_NETWORK).hint or "")
    assert (explain(NO_NETWORK, remote="mn5").hint or "").partition("; or ")[0].endswith("wheels --on mn5")
