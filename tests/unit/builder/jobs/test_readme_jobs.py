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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe mine.yaml, where the commands are typed."""
    (tmp_path / "mine.yaml").write_text("extends: mn5\nimage:\n  copy:\n    - source: src\n")
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    remote = ["remote", "add", "mn5", "me@far:/gpfs/me", "--recipe", "mn5"]
    added = CliRunner().invoke(build_app(), remote)
    assert added.exit_code == 0, added.output
    for name in ("mine.tar", "letters.sif"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("line", LINES)
def test_line_of_the_readme_renders(line: str, folder: Path) -> None:
    words = shlex.split(line)[2:]
    # Files of the example: tests/lab makes real ones, and looks into real images.
    for option in ("--python", "--activate"):
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    if words[0].startswith("-") or "--on" in words:  # the line belongs into a folder of `imgkit init`
        text = "recipe = './mine.yaml'\naccount = 'bsc98'\nqos = 'acc_debug'\ntime = '30m'\n"
        text += "" if "--" in words else "command = ['dist-hello']\n"
        (folder / "imgkit.toml").write_text(text)
    done = CliRunner().invoke(build_app(), ["run", "--dry-run", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()


def test_readme_has_a_line_for_every_scheduler() -> None:
    recipes = {shlex.split(str(line.values[0]))[2] for line in LINES}
    assert {"mn5", "olivia", "olivia-eap", "rcp", "lambda", "cpu"} <= recipes
