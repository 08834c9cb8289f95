"""What pip and apt said becomes an error at the line of the recipe that asked for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from imgkit_builder.lock.answers import Unresolved, explain_failure, read_failure
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import UV_STEP, Recipe

RECIPE = """\
image:
  base: registry.invalid/base:1
  apt:
    - jq
    - no-such-thing
  pip:
    - packages:
        - einops
        - torch==2.1.0
        - Flash_Attn==2.5.5
    - requirements: needed.txt
"""
NO_MATCH = "ERROR: No matching distribution found for deepspeed==0.13.1\n"
NO_WHEEL = """\
no index has a wheel of deepspeed==0.13.1 for this base
  -> if it has only its source, or its file is in the base, keep its wheel next to the lock: \
imgkit lock mine.yaml --keep-files
     its output:
     ERROR: No matching distribution found for deepspeed==0.13.1
"""

FAILURES: dict[str, tuple[int | str, str, str]] = {
    "package of a requirements file": (1, NO_MATCH, f"UsageError: mine.yaml:11 (needed.txt:3): {NO_WHEEL}"),
    "package that no line names": (0, NO_MATCH, f"UsageError: mine.yaml:7: {NO_WHEEL}"),
    "package of a uv.lock": (UV_STEP, NO_MATCH, f"UsageError: mine.yaml:99: {NO_WHEEL}"),
    "another torch than the base's": (
        0,
        """\
Collecting einops
WARNING: something
ERROR: Cannot install torch==2.1.0 because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested torch==2.1.0
    The user requested (constraint) torch==2.13.0+cpu
""",
        """\
UsageError: mine.yaml:9: the step asks for another torch than the base's 2.13.0+cpu, which imgkit protects
  -> remove that version, or choose a base that has it
     its output:
     ERROR: Cannot install torch==2.1.0 because these package versions have conflicting dependencies.
     The conflict is caused by:
         The user requested torch==2.1.0
         The user requested (constraint) torch==2.13.0+cpu
""",
    ),
    "unknown apt package": (
        "apt",
        "Reading...\nE: Unable to locate package no-such-thing\n",
        """\
UsageError: mine.yaml:5: the packages of this step could not be resolved
  -> its output:
     E: Unable to locate package no-such-thing
""",
    ),
    "old pip": (
        0,
        "Usage: pip install\n\nno such option: --report\n",
        """\
UsageError: mine.yaml:7: the base's pip is older than 22.2, and cannot report what it would install
  -> install a newer one: image: {run: [{command: python3 -m pip install 'pip>=23', after: base}]}
     its output:
     Usage: pip install
     no such option: --report
""",
    ),
    "network of pip": (
        0,
        f"WARNING: Retrying after connection broken by 'NewConnectionError(...)'\n{NO_MATCH}",
        """\
ToolFailed: mine.yaml:7: a package index cannot be reached from the base's network
  -> its output:
     ERROR: No matching distribution found for deepspeed==0.13.1
""",
    ),
    "network of apt": (
        0,
        "E: Failed to fetch http://a.example/x  Temporary failure resolving 'a.example'\n",
        """\
ToolFailed: mine.yaml:7: a package index cannot be reached from the base's network
  -> its output:
     E: Failed to fetch http://a.example/x  Temporary failure resolving 'a.example'
""",
    ),
    "words of a setup.py": (
        0,
        """\
Collecting flash-attn==2.5.5
  error: subprocess-exited-with-error
  x egg_info did not run
      FileNotFoundError: [Errno 2] No such file or directory: 'git'
      [end of output]
error: metadata-generation-failed
hint: See above for details.
""",
        """\
ToolFailed: mine.yaml:10: the source of flash-attn==2.5.5 cannot be prepared in this base
  -> its output:
       error: subprocess-exited-with-error
       x egg_info did not run
           FileNotFoundError: [Errno 2] No such file or directory: 'git'
""",
    ),
    "build of a wheel": (
        0,
        """\
building
nvcc was not found
      [end of output]
  ERROR: Failed building wheel for flash-attn
""",
        """\
ToolFailed: mine.yaml:10: the wheel of flash-attn cannot be built in this base
  -> its output:
     building
     nvcc was not found
""",
    ),
}
"""Name to the step that failed, its output, and the kind and text of the error without its last line."""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe whose line 99 has a project with a uv.lock."""
    monkeypatch.chdir(tmp_path)
    Path("needed.txt").write_text("# ours\nnumpy\ndeepspeed==0.13.1\n")
    Path("mine.yaml").write_text(RECIPE)
    recipe = load("./mine.yaml")
    line = dataclasses.replace(recipe.positions["image", "apt"], line=99)
    return dataclasses.replace(recipe, positions={**recipe.positions, ("image", "uv"): line})


@pytest.mark.parametrize("name", FAILURES)
def test_failure_is_an_error_at_its_line(recipe, name):
    step, output, expected = FAILURES[name]
    error = explain_failure(recipe, Unresolved(step, output=output), log="build.log")
    assert f"{type(error).__name__}: {error}" == f"{expected}     full log: build.log"


def test_package_without_wheel_names_its_line_and_the_remedy(recipe):
    error = explain_failure(recipe, Unresolved(0, "no wheel", ("x==1", "flash-attn==2.5.5")), log="")
    _, remedy, *_ = NO_WHEEL.split("\n")
    assert str(error) == f"mine.yaml:10: no wheel\n{remedy}"


@pytest.mark.parametrize("text", ["", "pip\nx", "-2\nx", "99999\nx", "٣\nx"])
def test_failure_of_no_step_is_refused(text):
    with pytest.raises(ValueError, match="the failure names no step of a recipe"):
        read_failure(text)
