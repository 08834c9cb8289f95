"""New files are made by imgkit_entrypoints.files alone: a random name, O_EXCL, then a rename."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("builder/imgkit_builder", "entrypoints/imgkit_entrypoints", "recipes/imgkit_recipes")
TEMPLATES = ROOT / "recipes/imgkit_recipes/templates/job"

PRIVATE = "in a folder that this process has just made with mode 0700"
REASONS: Mapping[str, str] = {
    "builder/imgkit_builder/archive/oci_folder.py": PRIVATE,
    "builder/imgkit_builder/archive/stored.py": PRIVATE,
    "builder/imgkit_builder/sif/plain_tree.py": PRIVATE,
    "builder/imgkit_builder/sif/runtime_build.py": PRIVATE,
    "builder/imgkit_builder/sif/write.py": "changes a part file, and makes none",
    "builder/imgkit_builder/sif/supervisor.py": PRIVATE,
    "builder/imgkit_builder/sif/namespace.py": "files of the kernel",
    "builder/imgkit_builder/apptainer/build.py": PRIVATE,
    "builder/imgkit_builder/buildah/build.py": PRIVATE,
    "builder/imgkit_builder/image/uv_inside.py": "it runs in the base",
    "builder/imgkit_builder/image/members.py": PRIVATE,
    "builder/imgkit_builder/recipe/whole.py": PRIVATE,
    "builder/imgkit_builder/signing/keys.py": PRIVATE,
    "builder/imgkit_builder/sif/table.py": "changes a part file, and makes none",
    "builder/imgkit_builder/lock/inside_apt.py": "it runs in the base, in a layer that nobody keeps",
    "builder/imgkit_builder/lock/inside_pip.py": "it runs in the base, in a layer that nobody keeps",
    "builder/imgkit_builder/engine/copies.py": PRIVATE,
    "builder/imgkit_builder/engine/building.py": "the log, in a folder that mkdir has just made",
    "builder/imgkit_builder/engine/build_program.py": "a pipe",
    "entrypoints/imgkit_entrypoints/files.py": "the one place",
    "entrypoints/imgkit_entrypoints/facts/saved_tree.py": "tests write trees by it",
    "entrypoints/imgkit_entrypoints/facts/rdma.py": "opens a device, and makes nothing",
    "entrypoints/imgkit_entrypoints/run/snapshot_files.py": "O_EXCL, in a folder of mkdir",
}
"""Module -> why it may write without `files`."""

WRITERS = {"write_text", "write_bytes", "rename", "renames", "mkfifo", "mknod", "mktemp", "move", "copyfile"}
WRITERS |= {"copy", "copy2", "touch"}
MODE = re.compile(r"[rwaxbt+]*[wax+][rwaxbt+]*")
FLAGS = re.compile(r"O_(WRONLY|RDWR|CREAT|APPEND|TRUNC)")


def writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that make, rename or open a file for writing, with their lines."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name not in {"open", "fdopen", "replace", *WRITERS}:
            continue
        text = ast.unparse(node)
        owner = ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
        words = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
        if name in ("open", "fdopen") and owner not in ("tarfile", "files"):
            if any(isinstance(one, str) and MODE.fullmatch(one) for one in words) or FLAGS.search(text):
                yield node.lineno, text
        elif (
            (name in WRITERS and owner not in ("dataclasses", "copy", "self") and text != f"{owner}.copy()")
            or (owner == "os" and name == "replace")
            or (name == "replace" and len(node.args) == 1 and not node.keywords and owner != "dataclasses")
        ):
            yield node.lineno, text


def found(text: str) -> list[str]:
    return [call for _, call in writes(ast.parse(text))]


@pytest.mark.parametrize(
    "text",
    [
        "open(path, 'w')",
        "path.open('ab')",
        "open(path, mode='x+b')",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "path.write_text('x')",
        "os.replace(a, b)",
        "temporary.replace(target)",
        "os.rename(a, b)",
        "shutil.copyfile(a, b)",
        "tempfile.mktemp()",
        "path.touch()",
    ],
)
def test_rule_sees_every_way_to_write(text: str) -> None:
    assert found(text)


@pytest.mark.parametrize(
    "text",
    [
        "keyed_hash.copy()",
        "open(path)",
        "path.open('rb')",
        "text.replace('a', 'b')",
        "tempfile.mkdtemp()",
        "os.open(path, os.O_RDONLY)",
    ],
)
def test_rule_lets_readers_pass(text: str) -> None:
    assert found(text) == []


def test_files_are_written_in_one_place() -> None:
    others: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            calls = [f"{line}: {text}" for line, text in writes(ast.parse(path.read_text(encoding="utf-8")))]
            if calls:
                others[str(path.relative_to(ROOT))] = calls
    assert {path: calls for path, calls in others.items() if path not in REASONS} == {}
    assert set(REASONS) - set(others) == set(), "a reason without a writer"


REDIRECTION = re.compile(r"(?<![<0-9&])>>?\s*(?!&|/dev/null|\()(\S+)")
OWN_NAMES = {
    '"$said/$rank"': "a folder of mktemp -d",
    '"$requeued"': "a file of mktemp",
    '"$described"': "a file of mktemp",
    '"$last"': "a file of mktemp",
}


def test_job_scripts_write_to_names_of_mktemp() -> None:
    places: set[str] = set()
    for path in TEMPLATES.glob("*.j2"):
        for text in path.read_text(encoding="utf-8").splitlines():
            if text.lstrip().startswith(("#", "{#", "{%")) or "noclobber" in text or "((" in text:
                continue
            places |= {match[1] for match in REDIRECTION.finditer(text)}
    assert places == set(OWN_NAMES)
