"""docs/architecture.md names what exists: modules in its table and its arrows, the files of its walks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HALVES = {
    "builder/…/": ROOT / "builder/imgkit_builder",
    "entrypoints/…/": ROOT / "entrypoints/imgkit_entrypoints",
}
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
BY_VERB = HALVES["builder/…/"] / "cli"
"""Its row says how its files are named, and names those that are no group of verbs."""


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> dict[Path, set[str]]:
    """Folder of each row of the table -> the modules and folders that its text names."""
    found = {}
    for folder, content in re.findall(r"^\| `([^`]+)` \| (.*) \|$", text, re.MULTILINE):
        half = next((half for half in HALVES if folder.startswith(half)), None)
        if half and folder != half:
            names = re.findall(r"`([a-z_]+)/?`", content)
            found[HALVES[half] / folder.removeprefix(half)] = set(names)
    return found


def modules(folder: Path) -> set[str]:
    """Modules and packages in `folder`, without ``__init__``."""
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    return {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")} | packages


def test_table_names_every_module_of_a_package_and_no_other() -> None:
    table = rows(section("Where things are"))
    assert len(table) > 25
    wrong = {}
    for folder, names in table.items():
        unnamed = modules(folder) - names if folder != BY_VERB else set()
        if names - modules(folder) or unnamed:
            wrong[str(folder.relative_to(ROOT))] = (sorted(names - modules(folder)), sorted(unnamed))
    assert wrong == {}


def test_every_package_has_a_row() -> None:
    packages = {
        path.parent
        for half in HALVES.values()
        for path in half.glob("*/__init__.py")
        if path.parent.name != "__pycache__"
    }
    assert packages - rows(section("Where things are")).keys() == set()


def arrows(text: str) -> Iterator[tuple[str, str]]:
    """Package and module, or function, of each arrow in the drawing."""
    drawing = text.split("```", 2)[1]
    for words in re.findall(r"--([a-z][^>]*?)-->", drawing):
        for package, name in re.findall(r"\b([a-z]+)\.([a-z_]+)", words):
            if name != "imgdelta":
                yield package, name


def test_arrows_of_the_drawing_exist() -> None:
    found = list(arrows(PAGE))
    assert len(found) > 15
    missing = []
    for package, name in found:
        folder = next((half / package for half in HALVES.values() if (half / package).is_dir()), None)
        text = (folder / "__init__.py").read_text(encoding="utf-8") if folder else ""
        if folder is None or (name not in modules(folder) and f"def {name}(" not in text):
            missing.append(f"{package}.{name}")
    assert missing == []


def walks() -> dict[str, tuple[int, list[str]]]:
    """Title of each walk -> the number of files in it, and the files."""
    found = {}
    for text in section("Five walks").split("\n### ")[1:]:
        head, text = text.split("\n", 1)
        title, number = re.fullmatch(r"(.+): \d+ before, (\d+) now", head).groups()  # type: ignore[union-attr]
        found[title] = (int(number), re.findall(r"`([^`]+)`", text))
    return found


def test_five_walks_are_counted() -> None:
    found = walks()
    assert len(found) == 5
    for title, (number, files) in found.items():
        assert len(set(files)) == number, title


@pytest.mark.parametrize("title", walks())
def test_files_of_a_walk_exist(title: str) -> None:
    recipes = ROOT / "recipes/imgkit_recipes"
    missing = [
        name
        for name in walks()[title][1]
        if not any((half / f"{name}.py").is_file() for half in HALVES.values())
        and not (recipes / name).is_file()
    ]
    assert missing == []
