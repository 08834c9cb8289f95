"""Modules of imgkit that a text names exist: in pages, scripts, and programs within strings."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HALVES = {"imgkit_builder": "builder", "imgkit_entrypoints": "entrypoints", "imgkit_recipes": "recipes"}
DOTTED = re.compile(rf"\b(?:{'|'.join(HALVES)})(?:\.[A-Za-z]\w*)+")
IMPORTED = re.compile(rf"from ((?:{'|'.join(HALVES)})[\w.]*) import (?:\(([^)]*)\)|([^\n;\"]*))")
FILE = re.compile(r"\b(?:builder|entrypoints)/imgkit_\w+/[\w/]+\.py\b")
MADE = {"imgkit_entrypoints.CHANGED", "imgkit_builder.py"}
"""Names that a test makes for itself."""
SKIPPED = ("CHANGELOG.md", "tests/layering/test_named_modules.py")
SUFFIXES = (".py", ".md", ".sh", ".j2", ".yaml", ".yml", ".toml", "")


def exists(name: str) -> bool:
    """Whether `name` is a module, or its first part behind a module occurs in that module's text."""
    package, *parts = name.split(".")
    path = ROOT / HALVES[package] / package
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if parts and (path / f"{parts[0]}.py").is_file():
        path /= f"{parts.pop(0)}.py"
    else:
        path /= "__init__.py"
    return not parts or re.search(rf"\b{parts[0]}\b", path.read_text(encoding="utf-8")) is not None


def names(text: str) -> Iterator[str]:
    yield from (found[0] for found in DOTTED.finditer(text))
    for module, within, plain in IMPORTED.findall(text):
        for part in (within or plain).split(","):
            if name := re.match(r"\s*([A-Za-z]\w*)", part):
                yield f"{module}.{name[1]}"


def test_named_modules_and_files_exist() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    wrong = []
    for file in listed.stdout.splitlines():
        path = ROOT / file
        if file in SKIPPED or path.suffix not in SUFFIXES or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        # A diff names what is not there yet; test_extend_page.py applies it.
        text = re.sub(r"^```diff\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        wrong += [f"{file}: {name}" for name in names(text) if name not in MADE and not exists(name)]
        wrong += [f"{file}: {found[0]}" for found in FILE.finditer(text) if not (ROOT / found[0]).is_file()]
    assert wrong == []


def test_name_of_a_module_that_is_gone_is_found() -> None:
    assert not exists("imgkit_builder.sif.no_such_module")
    assert list(names("from imgkit_builder.sif import (\n    gone,\n    image as it,\n)")) == [
        "imgkit_builder.sif",
        "imgkit_builder.sif.gone",
        "imgkit_builder.sif.image",
    ]
