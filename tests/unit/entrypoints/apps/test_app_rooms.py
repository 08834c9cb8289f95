"""Modules of dist-bench and dist-train import in no circle; no app but preflight imports another."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

import imgkit_entrypoints

APPS = Path(imgkit_entrypoints.__file__).parent / "apps"
PREFIX = "imgkit_entrypoints.apps."
FILES = {str(file.relative_to(APPS).with_suffix("")): file for file in APPS.rglob("*.py")}
"""All modules of apps by their paths: ``bench/verdict``, ``ranks``."""


def imported(name: str) -> set[str]:
    """Return the other modules of apps that a module imports, by their paths."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(PREFIX):
            for imported_name in node.names:
                path = f"{node.module}.{imported_name.name}".removeprefix(PREFIX).replace(".", "/")
                is_module = path in FILES or (APPS / path).is_dir()
                modules.add(path if is_module else path.rpartition("/")[0])
    return modules - {name}


@pytest.mark.parametrize("app", ["bench", "train"])
def test_modules_of_an_app_import_in_no_circle(app):
    graph = {name: imported(name) & set(FILES) for name in FILES if name.startswith(f"{app}/")}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_app_imports_another():
    pairs = {(name.partition("/")[0], path.partition("/")[0]) for name in FILES for path in imported(name)}
    apps = {"bench", "train", "hello", "pi", "doctor"}
    wrong = {(importer, app) for importer, app in pairs if app in apps and importer != app}
    assert wrong == {("preflight", "bench")}  # it measures as dist-bench does


@pytest.mark.parametrize("file", sorted(APPS.rglob("__main__.py")), ids=lambda file: file.parent.name)
def test_app_starts_after_all_of_its_functions_are_defined(file):
    last = ast.parse(file.read_text(encoding="utf-8")).body[-1]
    assert isinstance(last, ast.If)
    assert ast.unparse(last.test) == "__name__ == '__main__'"
