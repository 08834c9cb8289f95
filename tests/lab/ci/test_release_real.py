"""``ci/release`` of a clone with an address and a date: two equal builds, the laptop page from the wheel."""

from __future__ import annotations

import re
import subprocess

import pytest
from labkit import ROOT, expect_success, output

import imgkit_entrypoints

# The laptop page's image has the name of a shipped recipe.
pytestmark = [pytest.mark.docker, pytest.mark.soak, pytest.mark.xdist_group("quickstart")]


def test_release_is_built_twice_and_tried(tmp_path, standin):
    copy, version = tmp_path / "copy", imgkit_entrypoints.__version__
    output("git", "clone", "-q", str(ROOT), str(copy))
    for name, old, new in (
        ("pyproject.toml", r"\Z", '\n[project.urls]\nHomepage = "https://code.test/imgkit"\n'),
        ("CHANGELOG.md", rf"^(## \[{version}\]).*$", r"\1 - 2026-12-01"),
        ("CITATION.cff", r"\Z", f"version: {version}\ndate-released: 2026-12-01\n"),
    ):
        text = (copy / name).read_text()
        (copy / name).write_text(re.sub(old, new, text, count=1, flags=re.MULTILINE))
    output("git", "-c", "user.name=x", "-c", "user.email=x@code.test", "commit", "-qam", "x", folder=copy)
    result = expect_success(
        subprocess.run([copy / "ci/release", "--base", standin], capture_output=True, text=True, timeout=900)
    )
    assert result.stdout.count("PASSED") == 2
    assert result.stdout.count("+ dist-train") == result.stdout.count("+ imgkit build") == 1
    assert f"git tag -a v{version} " in result.stdout
    assert "### Added" in (copy / "build/release/notes.md").read_text()
    assert "](https://code.test/imgkit/blob/" in (copy / "build/release/one/README.md").read_text()
