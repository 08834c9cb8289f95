"""What import-linter cannot see of imports and names, and the page on the architecture."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import grimp
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = PROJECT["tool"]["importlinter"]["contracts"]
FOLDERS = {"imgkit_builder": ROOT / "builder", "imgkit_entrypoints": ROOT / "entrypoints"}
HALVES = [folder / name for name, folder in FOLDERS.items()]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_entry_points_import_the_standard_library_and_torch():
    graph = grimp.build_graph("imgkit_entrypoints", include_external_packages=True)
    libraries = {module for module in graph.modules if graph.is_module_squashed(module)}
    # wandb: a run names this logger, and its image has it.
    assert libraries - sys.stdlib_module_names == {"torch", "wandb"}


def package_layers():
    """Return the layer of each package in the contracts. A larger number is a lower layer."""
    layers = [
        (contract["containers"][0], layer)
        for contract in CONTRACTS
        if "containers" in contract
        for layer in contract["layers"]
    ]
    return {
        f"{container}.{package}": number
        for number, (container, layer) in enumerate(layers)
        for package in re.split(r" [|:] ", layer)
    }


MODULE_NAME = re.compile(r"\bimgkit_(?:builder|entrypoints)(?:\.[a-z_]\w*)+")


def names_in_strings(text):
    """Yield the modules that the strings of a program name, with the line; docstrings do not count."""
    tree = ast.parse(text)
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    docstrings = {id(row.value) for body in bodies for row in body if isinstance(row, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for name in MODULE_NAME.findall(node.value):
                yield name, node.lineno


def test_no_string_names_a_module_above_its_own_package():
    layers = package_layers()
    upward = []
    for half, folder in FOLDERS.items():
        for path in sorted((folder / half).rglob("*/*.py")):
            package = ".".join(path.relative_to(folder).parts[:2])
            for name, line in names_in_strings(path.read_text(encoding="utf-8")):
                if layers.get(".".join(name.split(".")[:2]), 0) < layers[package]:
                    upward.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert upward == []


def test_name_in_a_string_is_noticed():
    text = '"""imgkit_builder.cli"""\nrun("-m", "imgkit_entrypoints.apps.train", "imgkit_builder")'
    assert list(names_in_strings(text)) == [("imgkit_entrypoints.apps.train", 2)]


@pytest.mark.parametrize("half", FOLDERS)
def test_class_name_has_one_meaning(half):
    texts = (path.read_text(encoding="utf-8") for path in FOLDERS[half].rglob("*.py"))
    names = Counter(name for text in texts for name in re.findall(r"^ *class (\w+)", text, re.MULTILINE))
    assert [name for name, count in names.items() if count > 1] == []


def test_table_has_a_row_for_each_package():
    rows = re.findall(r"^\| `(builder|entrypoints)/…/([a-z]+)/` \|", PAGE, re.MULTILINE)
    paths = (path.parent for half in HALVES for path in half.glob("*/__init__.py"))
    assert sorted(rows) == sorted((path.parent.parent.name, path.name) for path in paths)


@pytest.mark.parametrize("container", FOLDERS)
def test_page_shows_the_layers(container):
    (layers,) = (contract["layers"] for contract in CONTRACTS if contract.get("containers") == [container])
    assert "\n".join(("```text", *layers, "```")) in PAGE


def has_name(package, name):
    """Return whether a package has a module or package of this name, or defines a function of this name."""
    is_module = (package / f"{name}.py").is_file() or (package / name).is_dir()
    return is_module or f"def {name}(" in (package / "__init__.py").read_text(encoding="utf-8")


def test_arrows_of_the_drawing_exist():
    drawing = PAGE.split("```", 2)[1]
    labels = re.findall(r"--([a-z][^>]*?)-->", drawing)
    calls = [call for label in labels for call in re.findall(r"\b([a-z]+)\.([a-z_]+)", label)]
    assert len(calls) > 15
    for package, name in calls:
        folders = [half / package for half in HALVES if (half / package).is_dir()]
        assert any(has_name(folder, name) for folder in folders), f"{package}.{name}"


WALKS = re.findall(r"^### [^\n]+: \d+ before, (\d+) now\n\n(.+?)(?=\n#)", PAGE, re.MULTILINE | re.DOTALL)
"""Number of files in each walk, and its text."""


def test_walks_name_files_that_exist_and_count_them():
    assert len(WALKS) == 5
    folders = (*HALVES, ROOT / "recipes/imgkit_recipes")
    for count, text in WALKS:
        names = set(re.findall(r"`([^`]+)`", text))
        assert len(names) == int(count)
        for name in names:
            paths = [folder / suffixed for folder in folders for suffixed in (name, f"{name}.py")]
            assert any(path.is_file() for path in paths), name
