"""Modules of dist-bench and dist-train import in no circle; no app but preflight imports another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import imgkit_entrypoints

APPS = Path(imgkit_entrypoints.__file__).parent / "apps"
PREFIX = "imgkit_entrypoints.apps."


def imported(file: Path) -> set[str]:
    """The modules of apps that `file` imports, as paths: ``bench/verdict``, ``ranks``."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(PREFIX):
            for name in node.names:
                path = f"{node.module}.{name.name}".removeprefix(PREFIX).replace(".", "/")
                is_module = (APPS / f"{path}.py").exists() or (APPS / path).is_dir()
                modules.add(path if is_module else path.rpartition("/")[0])
    return modules


def app_of(path: str) -> str:
    return path.partition("/")[0]


@pytest.mark.parametrize("app", ["bench", "train"])
def test_modules_of_an_app_import_in_no_circle(app: str) -> None:
    files = {str(file.relative_to(APPS).with_suffix("")): file for file in (APPS / app).rglob("*.py")}
    unresolved = {name: imported(file) & set(files) - {name} for name, file in files.items()}
    while ready := {name for name, needs in unresolved.items() if not needs & set(unresolved)}:
        unresolved = {name: needs for name, needs in unresolved.items() if name not in ready}
    assert unresolved == {}


def test_no_app_imports_another() -> None:
    apps = {"bench", "train", "hello", "pi", "doctor"}
    wrong = {
        f"{file.relative_to(APPS)} -> {path}"
        for file in APPS.rglob("*.py")
        for path in imported(file)
        if app_of(path) in apps
        and (app := app_of(str(file.relative_to(APPS).with_suffix("")))) != app_of(path)
        and (app, app_of(path)) != ("preflight", "bench")  # it measures as dist-bench does
    }
    assert wrong == set()


@pytest.mark.parametrize("file", sorted(APPS.rglob("__main__.py")), ids=lambda file: file.parent.name)
def test_app_starts_after_all_of_its_functions_are_defined(file: Path) -> None:
    last = ast.parse(file.read_text(encoding="utf-8")).body[-1]
    assert isinstance(last, ast.If)
    assert ast.unparse(last.test) == "__name__ == '__main__'"
