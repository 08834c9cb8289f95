"""Modules, files and pages of imgkit that a page, a script or a program in a string names exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"imgkit_builder": "builder", "imgkit_entrypoints": "entrypoints", "imgkit_recipes": "recipes"}
PACKAGE = f"(?:{'|'.join(FOLDERS)})"
DOTTED_NAME = re.compile(rf"\b{PACKAGE}(?:\.[A-Za-z]\w*)+")
IMPORT = re.compile(rf"from ({PACKAGE}[\w.]*) import (?:\(([^)]*)\)|([^\n;\"]*))")
FILE = re.compile(r"\b(?:builder|entrypoints)/imgkit_\w+/[\w/]+\.py\b|(?<![\w/])docs/[\w/-]+\.md\b")
DIFF = re.compile(r"^```diff\n.*?^```$", re.MULTILINE | re.DOTALL)
"""It names what is not there yet; test_extend_page.py applies it."""
NAMES_OF_TESTS = {"imgkit_entrypoints.CHANGED", "imgkit_builder.py", "docs/guides/none.md"}
SKIPPED = ("CHANGELOG.md", "tests/layering/test_named_modules.py")
SUFFIXES = (".py", ".md", ".sh", ".j2", ".yaml", ".yml", ".toml", "")


def exists(name):
    """Return whether `name` is a file or a module, or occurs in the text of the module before it."""
    if "/" in name:
        return (ROOT / name).is_file()
    package, *parts = name.split(".")
    path = ROOT / FOLDERS[package] / package
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if parts and (path / f"{parts[0]}.py").is_file():
        path /= f"{parts.pop(0)}.py"
    else:
        path /= "__init__.py"
    return not parts or re.search(rf"\b{parts[0]}\b", path.read_text(encoding="utf-8")) is not None


def names_in(text):
    yield from DOTTED_NAME.findall(text)
    yield from FILE.findall(text)
    for module, in_parentheses, on_line in IMPORT.findall(text):
        for name in re.findall(r"(?:^|,)\s*([A-Za-z]\w*)", in_parentheses or on_line):
            yield f"{module}.{name}"


def test_named_modules_and_files_exist():
    argv = ["git", "ls-files", "-co", "--exclude-standard"]
    listing = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    missing = []
    for file in listing.splitlines():
        path = ROOT / file
        if file in SKIPPED or path.suffix not in SUFFIXES or not path.is_file():
            continue
        text = DIFF.sub("", path.read_text(encoding="utf-8", errors="replace"))
        for name in set(names_in(text)) - NAMES_OF_TESTS:
            # A recipe names pages of the projects from which its values are.
            is_foreign = name.startswith("docs/") and file.startswith("recipes/")
            if not is_foreign and not exists(name):
                missing.append(f"{file}: {name}")
    assert missing == []


def test_missing_module_and_page_are_noticed():
    text = 'from imgkit_builder.sif import (\n    gone,\n    image as it,\n)  # "see docs/gone.md"'
    names = list(names_in(text))
    assert names == [
        "imgkit_builder.sif",
        "docs/gone.md",
        "imgkit_builder.sif.gone",
        "imgkit_builder.sif.image",
    ]
    assert [exists(name) for name in names] == [True, False, False, True]
