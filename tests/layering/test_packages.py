"""The packages of both halves: which imports or names which, downwards only; one class name, one meaning.

`PACKAGES` is the table of allowed arrows. docs/architecture.md prints it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HALVES = {"imgkit_builder": ROOT / "builder", "imgkit_entrypoints": ROOT / "entrypoints"}
VALUES = (
    "errors",
    "system",
    "rules",
    "files",
    "fence",
    "arguments",
    "json_text",
    "secret_patterns",
    "terminal",
)
"""Modules at the top of the image half whose values both halves share; together they count as one package."""

_TABLE: Mapping[str, Mapping[str, str]] = {
    "builder": {
        "api": "workflow job apptainer sif recipe base entrypoints/values",
        "cli": "workflow remote project examine job delta apptainer lock sif engine archive "
        "image recipe oci base entrypoints/values",
        "workflow": "remote project job delta apptainer sif inventory engine archive image recipe oci base "
        "entrypoints/values",
        "remote": "job delta sif recipe base entrypoints/values",
        "project": "job image recipe base entrypoints/launch entrypoints/values",
        "examine": "delta apptainer sif engine archive recipe oci base entrypoints/values",
        "job": "delta sif image recipe oci base entrypoints/cli entrypoints/launch entrypoints/rollcall "
        "entrypoints/schedulers entrypoints/values",
        "delta": "sif archive base entrypoints/launch entrypoints/values",
        "apptainer": "sif archive image recipe oci base entrypoints/values",
        "lock": "engine image recipe oci base entrypoints/values",
        "sif": "inventory archive oci base entrypoints/values",
        "inventory": "oci entrypoints/values",
        "engine": "archive image recipe oci base entrypoints/values",
        "archive": "oci base entrypoints/values",
        "image": "recipe oci base entrypoints/cli entrypoints/values",
        "recipe": "oci entrypoints/values",
        "oci": "entrypoints/values",
        "base": "entrypoints/values",
    },
    "entrypoints": {
        "cli": "doctor launch rollcall schedulers fabric facts values",
        "apps/preflight": "apps/bench apps doctor launch rollcall facts",
        "apps/bench": "apps run launch fabric facts values",
        "apps/train": "apps run launch values",
        "apps": "run doctor launch facts values",
        "run": "launch values",
        "doctor": "schedulers fabric facts values",
        "launch": "rollcall schedulers fabric facts values",
        "rollcall": "schedulers values",
        "schedulers": "values",
        "fabric": "facts values",
        "facts": "values",
        "values": "",
    },
}
"""Half -> package -> the packages that it may import, top to bottom; other half: with its name."""


def _full(half: str, package: str) -> str:
    return package if package.split("/")[0] in _TABLE else f"{half}/{package}"


PACKAGES: dict[str, tuple[str, ...]] = {
    f"{half}/{package}": tuple(_full(half, name) for name in below.split())
    for half, packages in _TABLE.items()
    for package, below in packages.items()
}
"""Room -> the packages that it may import, top to bottom."""

TWICE: Mapping[str, str] = {}
"""Class name -> why it may occur more than once in a half."""


def sources(half: str) -> list[Path]:
    return sorted(path for path in (HALVES[half] / half).rglob("*.py") if "__pycache__" not in path.parts)


def module_of(path: Path, half: str) -> str:
    return ".".join(path.relative_to(HALVES[half]).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def is_module(name: str) -> bool:
    half = name.split(".")[0]
    place = HALVES[half] / name.replace(".", "/")
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


@functools.cache
def imported(path: Path) -> tuple[tuple[str, int], ...]:
    """Modules of the two halves that `path` imports, wherever in the file, with the line."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in HALVES:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if is_module(full) else node.module), node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in HALVES:
                    yield alias.name, node.lineno


def package_of(module: str) -> str:
    """``builder/job``, ``entrypoints/apps/train``, ``entrypoints/values``; each app has its own."""
    half, *parts = module.split(".")
    top = half.removeprefix("imgkit_")
    if not parts:
        return f"{top}/{'api' if top == 'builder' else 'values'}"  # the Python API; the version
    if parts[0] in VALUES:
        return f"{top}/values"
    if parts[0] == "apps" and len(parts) > 1 and (HALVES[half] / half / "apps" / parts[1]).is_dir():
        return f"{top}/apps/{parts[1]}"
    return f"{top}/{parts[0]}"


def arrows() -> dict[tuple[str, str], list[str]]:
    """(package, package it imports) -> where."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for half in HALVES:
        for path in sources(half):
            if path.name == "__main__.py" and path.parent.name == half:
                continue  # starts the command line: above every package
            here = package_of(module_of(path, half))
            for module, line in imported(path):
                if (there := package_of(module)) != here:
                    found[here, there].append(f"{path.relative_to(ROOT)}:{line}")
    return found


NAME = re.compile(rf"\b(?:{'|'.join(HALVES)})(?:\.[a-z_]\w*)+")


def named(text: str) -> Iterator[tuple[str, int]]:
    """Modules of the two halves in the strings of a program, with the line; docstrings do not count."""
    tree = ast.parse(text)
    bodies = (node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list))
    told = {id(one.value) for body in bodies for one in body if isinstance(one, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield from ((name, node.lineno) for name in NAME.findall(node.value))


def printed() -> str:
    """The table as docs/architecture.md has it."""
    lines = ["| package | imports |", "|---|---|"]
    for package, below in PACKAGES.items():
        lines.append(f"| `{package}` | {', '.join(f'`{name}`' for name in below) or 'nothing of imgkit'} |")
    return "\n".join(lines)


def test_every_arrow_between_packages_is_in_the_table() -> None:
    surprising = {
        f"{a} -> {b}": where for (a, b), where in sorted(arrows().items()) if b not in PACKAGES.get(a, ())
    }
    assert surprising == {}


def test_no_string_names_a_module_above_its_own_package() -> None:
    order = list(PACKAGES)
    upward = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for half in HALVES
        for path in sources(half)
        for name, line in named(path.read_text(encoding="utf-8"))
        if order.index(package_of(name)) < order.index(package_of(module_of(path, half)))
    ]
    assert upward == []


def test_name_in_a_string_is_found() -> None:
    text = '"""imgkit_builder.cli"""\nrun("-m", "imgkit_entrypoints.apps.train", "imgkit_builder")'
    assert list(named(text)) == [("imgkit_entrypoints.apps.train", 2)]


def test_table_allows_no_arrow_that_nobody_needs() -> None:
    used = set(arrows())
    assert [(a, b) for a, below in PACKAGES.items() for b in below if (a, b) not in used] == []


def test_arrows_of_the_table_point_down() -> None:
    order = list(PACKAGES)
    upward = [
        (a, b)
        for a, below in PACKAGES.items()
        for b in below
        if b not in order or order.index(b) <= order.index(a)
    ]
    assert upward == []


def test_architecture_page_prints_the_table() -> None:
    assert printed() in (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), "\n" + printed()


@pytest.mark.parametrize("half", HALVES)
def test_modules_import_each_other_in_no_circle(half: str) -> None:
    below = {
        module_of(path, half): {module for module, _ in imported(path) if module.startswith(half)}
        for path in sources(half)
    }
    circle = find_circle(below)
    assert circle == []


def find_circle(below: Mapping[str, set[str]]) -> list[str]:
    """The modules of one circle, or none. A package that names its own modules closes no circle."""
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        for other in sorted(below.get(module, ())):
            if not module.startswith(other + ".") and (found := visit(other)):
                return found
        path.pop()
        done.add(module)
        return []

    for module in sorted(below):
        if found := visit(module):
            return found
    return []


def test_new_arrow_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "builder/sif", ())
    with pytest.raises(AssertionError, match="builder/sif -> builder/archive"):
        test_every_arrow_between_packages_is_in_the_table()


def test_circle_is_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@functools.cache
def classes(half: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources(half):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


@pytest.mark.parametrize("half", HALVES)
def test_class_name_has_one_meaning(half: str) -> None:
    twice = {name: where for name, where in classes(half).items() if len(where) > 1 and name not in TWICE}
    assert twice == {}


def test_exceptions_are_still_needed() -> None:
    assert [name for name in TWICE if all(len(classes(half).get(name, ())) < 2 for half in HALVES)] == []
