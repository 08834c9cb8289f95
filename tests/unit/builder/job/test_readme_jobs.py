"""The README's job lines render as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from imgkit_builder.cli.app import build_app

README = Path(__file__).resolve().parents[4] / "README.md"
LINES = [
    part.strip()
    for line in README.read_text(encoding="utf-8").splitlines()
    if line.startswith("    imgkit ")
    for part in re.split(r"&&", line.partition(" #")[0])
    if re.match(r"\s*imgkit (?:submit|job) ", part)
]


@pytest.mark.parametrize("line", LINES)
def test_line_of_the_readme_renders(line: str) -> None:
    done = CliRunner().invoke(
        build_app(("job", "list")), ["job", *shlex.split(line)[2:]], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()


def test_readme_has_a_line_for_every_scheduler() -> None:
    recipes = {shlex.split(line)[2] for line in LINES}
    assert {"mn5", "olivia", "olivia-eap", "rcp", "lambda", "cpu"} <= recipes
