"""What import-linter cannot see of imports and names (its contracts stand in pyproject.toml)."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
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


def test_entry_points_import_the_standard_library_and_torch():
    graph = grimp.build_graph("imgkit_entrypoints", include_external_packages=True)
    libraries = {module for module in graph.modules if graph.is_module_squashed(module)}
    # wandb: a run names this logger, and its image has it.
    assert libraries - sys.stdlib_module_names == {"torch", "wandb"}


def package_layers() -> dict[str, int]:
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


def names_in_strings(text: str) -> Iterator[tuple[str, int]]:
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
