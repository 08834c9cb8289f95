"""imgkit_entrypoints.files alone makes files and opens others', and imgkit_entrypoints.terminal alone prints.

A reader that opens a path by itself waits for ever for a named pipe, and reads /dev/zero without end.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("builder/imgkit_builder", "entrypoints/imgkit_entrypoints", "recipes/imgkit_recipes")
TEMPLATES = ROOT / "recipes/imgkit_recipes/templates/job"

PRIVATE = "in a folder that this process has just made with mode 0700"
REASONS: Mapping[str, str] = {
    "builder/imgkit_builder/archive/oci_folder.py": PRIVATE,
    "builder/imgkit_builder/archive/stored.py": PRIVATE,
    "builder/imgkit_builder/sif/squash.py": PRIVATE,
    "builder/imgkit_builder/sif/frame.py": "changes a part file, and makes none",
    "builder/imgkit_builder/sif/supervisor.py": PRIVATE,
    "builder/imgkit_builder/sif/namespace.py": "files of the kernel",
    "builder/imgkit_builder/apptainer/build.py": PRIVATE,
    "builder/imgkit_builder/image/members.py": PRIVATE,
    "builder/imgkit_builder/lock/inside.py": "it runs in the base, in a layer that nobody keeps",
    "builder/imgkit_builder/remote/rsync_shell.py": PRIVATE,
    "builder/imgkit_builder/engine/image_source.py": PRIVATE,
    "builder/imgkit_builder/engine/building.py": "a pipe; the log, in a folder that mkdir has just made",
    "entrypoints/imgkit_entrypoints/files.py": "the one place",
    "entrypoints/imgkit_entrypoints/facts/network.py": "opens a device, and makes nothing",
    "entrypoints/imgkit_entrypoints/launch/compile_cache.py": PRIVATE,
    "entrypoints/imgkit_entrypoints/run/disk.py": "O_EXCL, in a folder of mkdir",
    "entrypoints/imgkit_entrypoints/launch/user_program.py": "it runs by path; O_EXCL, and a rename",
}
"""Module -> why it may write without `files`."""

WRITERS = {"write_text", "write_bytes", "rename", "renames", "mkfifo", "mknod", "mktemp", "move", "copyfile"}
WRITERS |= {"copy", "copy2", "touch"}
MODE = re.compile(r"[rwaxbt+]*[wax+][rwaxbt+]*")
FLAGS = re.compile(r"O_(WRONLY|RDWR|CREAT|APPEND|TRUNC)")


def _name(called: ast.expr) -> str:
    """The last word of what a call calls."""
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that make, rename or open a file for writing, with their lines."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = _name(called)
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


def check(rule: Callable[[ast.AST], Iterator[tuple[int, str]]], reasons: Mapping[str, str]) -> None:
    """Check that `rule` finds something in the modules of `reasons`, and in no other."""
    others: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            calls = [f"{line}: {text}" for line, text in rule(ast.parse(path.read_text(encoding="utf-8")))]
            if calls:
                others[str(path.relative_to(ROOT))] = calls
    assert {path: calls for path, calls in others.items() if path not in reasons} == {}
    assert set(reasons) - set(others) == set(), "a reason without a place"


def test_files_are_written_in_one_place() -> None:
    check(writes, REASONS)


IN_BASE = "it runs in the base, whose output imgkit reads"
PRINTERS: Mapping[str, str] = {
    "entrypoints/imgkit_entrypoints/terminal.py": "the one place",
    "entrypoints/imgkit_entrypoints/apps/ranks.py": "Python's traceback of a fault in a program",
    "builder/imgkit_builder/cli/common.py": "asks a question, escaped",
    "builder/imgkit_builder/cli/progress.py": "the live display, whose texts are escaped",
    "builder/imgkit_builder/image/inside_uv.py": IN_BASE,
    "builder/imgkit_builder/lock/inside.py": IN_BASE,
    "builder/imgkit_builder/remote/rsync_shell.py": "its output is for rsync, its errors are for imgkit",
    "builder/imgkit_builder/sif/supervisor.py": "its standard output is a pipe to imgkit",
}
"""Module -> why it may print without `terminal`."""

PRINTING = {"print", "input", "echo", "secho", "confirm", "prompt", "print_exc", "print_exception"}
PRINTER = re.compile(r"(^|\.)(typer|click|traceback|console|error)$|^$")
"""Whose functions of these names print: Python's own, and those of some modules."""
STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__")


def prints(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that print, exits with a text, and uses of a standard stream beyond a question or a flush."""
    nodes = [*ast.walk(tree)]
    asked = {one.value for one in nodes if isinstance(one, ast.Attribute) and one.attr in ("isatty", "flush")}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in STREAMS and node not in asked:
            if getattr(node.value, "id", "") == "sys":
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            is_exit = name in ("exit", "SystemExit") and any(map(_is_text, node.args))
            if is_exit or (name in PRINTING and PRINTER.search(owner)):
                yield node.lineno, ast.unparse(node)


def _is_text(value: ast.expr) -> bool:
    """Whether Python would print `value` as the last words of a process, and it is no constant."""
    return isinstance(value, ast.JoinedStr) or ast.unparse(value).startswith(("str(", "repr("))


@pytest.mark.parametrize(
    "text",
    [
        "print(x)",
        "print(x, file=stream)",
        "sys.stderr.write(x)",
        "sys.stdout.buffer.write(x)",
        "stream = sys.stdout",
        "typer.echo(x)",
        "typer.confirm(x)",
        "self._progress.console.print(x)",
        "traceback.print_exc()",
        "logging.basicConfig(stream=sys.stderr)",
        "sys.exit(str(error))",
        "raise SystemExit(f'{host} is lost')",
    ],
)
def test_rule_sees_every_way_to_print(text: str) -> None:
    assert [*prints(ast.parse(text))]


@pytest.mark.parametrize(
    "text",
    [
        "sys.stdout.isatty()",
        "sys.stderr.flush()",
        "terminal.out(x)",
        "pprint(x)",
        "sys.exit(1)",
        "sys.exit('x')",
    ],
)
def test_rule_lets_the_terminal_module_print(text: str) -> None:
    assert [*prints(ast.parse(text))] == []


def test_one_module_prints() -> None:
    check(prints, PRINTERS)


KERNEL = "files of the kernel"
OWN = "files of imgkit's own packages"
READERS: Mapping[str, str] = {
    "builder/imgkit_builder/oci/platform.py": KERNEL,
    "builder/imgkit_builder/cli/recipes.py": "a build context, and no file",
    "builder/imgkit_builder/engine/build_guard.py": KERNEL,
    "builder/imgkit_builder/engine/building.py": PRIVATE,
    "builder/imgkit_builder/image/context.py": "a build context, and no file",
    "builder/imgkit_builder/image/inside_uv.py": "it runs in the base",
    "builder/imgkit_builder/image/wheel.py": OWN,
    "builder/imgkit_builder/lock/inside.py": "it runs in the base, in a layer that nobody keeps",
    "builder/imgkit_builder/sif/mksquashfs.py": KERNEL,
    "builder/imgkit_builder/sif/runtime.py": PRIVATE,
    "entrypoints/imgkit_entrypoints/facts/reader.py": "quicker, for thousands of files in /sys",
    "entrypoints/imgkit_entrypoints/files.py": "the one place",
    "entrypoints/imgkit_entrypoints/launch/guard.py": KERNEL,
    "entrypoints/imgkit_entrypoints/rollcall/secret.py": "standard input, and a file by stricter rules",
    "entrypoints/imgkit_entrypoints/launch/compile_cache.py": "the stream of a file that `files` has opened",
}
"""Module -> why it may open a file without `files`."""

READING = ("read_text", "read_bytes", "open", "ZipFile")
READ_MODE = re.compile(r"r?[bt]?([:|].*)?")
OF_A_PATH = {"mode", "encoding", "errors", "buffering", "closefd", "opener"}
OWN_OR_KERNEL = re.compile(r"importlib\.resources|\bFOLDER\b|['\"]/(proc|sys)/")


def reads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that open a file for reading, with their lines; not of imgkit's own files or the kernel's."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, name = node.func, _name(node.func)
        if name not in READING:
            continue
        text = ast.unparse(node)
        owner = ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
        if owner == "files" or OWN_OR_KERNEL.search(text):
            continue
        given = {one.arg: one.value for one in node.keywords}
        places = node.args[0 if owner not in ("", "tarfile", "zipfile") else 1 :]
        mode = given.get("mode", places[0] if places else ast.Constant("r"))
        opens = isinstance(mode, ast.Constant) and READ_MODE.fullmatch(str(mode.value))
        if (
            (name in ("read_text", "read_bytes") and owner)
            or (name == "open" and owner == "os" and "O_RDONLY" in text and "O_DIRECTORY" not in text)
            or (name in ("open", "ZipFile") and owner != "os" and opens and given.keys() <= OF_A_PATH)
        ):
            yield node.lineno, text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("open(path)", True),
        ("open(path, 'rb')", True),
        ("path.open()", True),
        ("path.open('rb', buffering=0)", True),
        ("path.open(encoding='utf-8')", True),
        ("path.read_text()", True),
        ("(folder / name).read_bytes()", True),
        ("os.open(path, os.O_RDONLY)", True),
        ("tarfile.open(path)", True),
        ("files.open_regular(path)", False),
        ("files.read_text(path)", False),
        ("path.open('wb')", False),
        ("layer.open(bodies=True)", False),
        ("Path('/proc/self/status').read_text()", False),
        ("tarfile.open(fileobj=stream)", False),
    ],
)
def test_rule_sees_every_way_to_read(text: str, found: bool) -> None:
    assert bool(list(reads(ast.parse(text)))) is found


def test_files_of_others_are_opened_in_one_place() -> None:
    check(reads, READERS)


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
