"""docs/architecture.md names what exists: packages, layers, and the files of its drawing and its walks."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = PROJECT["tool"]["importlinter"]["contracts"]
HALVES = {
    "builder": ROOT / "builder/imgkit_builder",
    "entrypoints": ROOT / "entrypoints/imgkit_entrypoints",
}


def test_table_has_a_row_for_each_package():
    rows = re.findall(r"^\| `(builder|entrypoints)/…/([a-z]+)/` \|", PAGE, re.MULTILINE)
    folders = {path.parent for half in HALVES.values() for path in half.glob("*/__init__.py")}
    assert sorted(HALVES[half] / package for half, package in rows) == sorted(folders)


@pytest.mark.parametrize("container", ["imgkit_builder", "imgkit_entrypoints"])
def test_page_shows_the_layers(container):
    (layers,) = (contract["layers"] for contract in CONTRACTS if contract.get("containers") == [container])
    assert "\n".join(("```text", *layers, "```")) in PAGE


def has_name(package: Path, name: str) -> bool:
    """Return whether a package has a module or package of this name, or defines a function of this name."""
    is_module = (package / f"{name}.py").is_file() or (package / name).is_dir()
    return is_module or f"def {name}(" in (package / "__init__.py").read_text(encoding="utf-8")


def test_arrows_of_the_drawing_exist():
    drawing = PAGE.split("```", 2)[1]
    labels = re.findall(r"--([a-z][^>]*?)-->", drawing)
    calls = [call for label in labels for call in re.findall(r"\b([a-z]+)\.([a-z_]+)", label)]
    assert len(calls) > 15
    for package, name in calls:
        folders = [half / package for half in HALVES.values() if (half / package).is_dir()]
        assert any(has_name(folder, name) for folder in folders), f"{package}.{name}"


WALKS = re.findall(r"^### [^\n]+: \d+ before, (\d+) now\n\n(.+?)(?=\n#)", PAGE, re.MULTILINE | re.DOTALL)
"""Number of files in each walk, and its text."""


def test_walks_name_files_that_exist_and_count_them():
    assert len(WALKS) == 5
    folders = (*HALVES.values(), ROOT / "recipes/imgkit_recipes")
    for count, text in WALKS:
        names = set(re.findall(r"`([^`]+)`", text))
        assert len(names) == int(count)
        for name in names:
            paths = [folder / suffixed for folder in folders for suffixed in (name, f"{name}.py")]
            assert any(path.is_file() for path in paths), name
