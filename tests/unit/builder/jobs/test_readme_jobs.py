"""The job lines of README and of the documentation render as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from imgkit_builder.cli.app import build_app

ROOT = Path(__file__).resolve().parents[4]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def job_lines(page: Path) -> list[str]:
    """The `imgkit run` commands of a page; one with ` ... ` is not a whole command."""
    return [
        part.strip()
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("    imgkit ") and " ... " not in line
        for part in re.split(r"&&|>", line.partition(" #")[0])
        if re.match(r"\s*imgkit run ", part)
    ]


LINES = [
    pytest.param(line, id=f"{page.relative_to(ROOT)}: {line}")
    for page in PAGES
    if "generated" not in page.parts
    for line in dict.fromkeys(job_lines(page))
]


@pytest.fixture
def folder(home: Path) -> Path:
    """A folder with a recipe mine.yaml, where the commands are typed."""
    (home / "mine.yaml").write_text("extends: mn5\nimage:\n  copy:\n    - source: src\n")
    (home / "src").mkdir()
    for remote in (
        ["mn5", "me@far:/gpfs/me", "--recipe", "mn5"],
        ["mlo", "me@far:/mnt/scratch/me", "--recipe", "mlo", "--pvc", "mlo-scratch:/mloscratch"],
    ):
        added = CliRunner().invoke(build_app(), ["remote", "add", *remote])
        assert added.exit_code == 0, added.output
    for name in ("mine.tar", "letters.sif"):
        (home / name).touch()
    return home


@pytest.mark.parametrize("line", LINES)
def test_line_of_the_readme_renders(line, folder):
    args = shlex.split(line)[2:]
    # Files of the example: tests/lab makes real ones, and looks into real images.
    for option in ("--python", "--activate"):
        if option in args:
            del args[args.index(option) : args.index(option) + 2]
    if args[0].startswith("-") or "--on" in args:  # the line belongs into a folder of `imgkit init`
        recipe = "mlo" if "mlo" in args else "./mine.yaml"
        text = f"recipe = '{recipe}'\naccount = 'bsc98'\nqos = 'acc_debug'\ntime = '30m'\n"
        text += "" if "--" in args else "command = ['dist-hello']\n"
        (folder / "imgkit.toml").write_text(text)
    result = CliRunner().invoke(build_app(), ["run", "--dry-run", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_readme_has_a_line_for_every_scheduler():
    recipes = {shlex.split(str(line.values[0]))[2] for line in LINES}
    assert {"mn5", "olivia", "olivia-eap", "rcp", "lambda", "cpu"} <= recipes
