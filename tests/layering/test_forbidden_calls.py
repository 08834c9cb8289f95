"""Calls that few modules may use. Ruff refuses most of them (pyproject.toml); tests find what ruff cannot."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("builder/imgkit_builder", "entrypoints/imgkit_entrypoints", "recipes/imgkit_recipes")
TEMPLATES = ROOT / "recipes/imgkit_recipes/templates/job"


def refused_lines(*lines):
    """Return the lines that ruff refuses in a module of each half."""
    imports = "import json, os, shutil, sys, tarfile, tempfile, traceback, typing, torch, typer\n"
    options = ["--quiet", "--select", "T20,TID251", "--output-format", "json", "--stdin-filename"]
    refused = []
    for module in ("builder/imgkit_builder/sif/check.py", "entrypoints/imgkit_entrypoints/apps/hello.py"):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", "check", *options, module, "-"],
            cwd=ROOT,
            input=imports + "\n".join(lines),
            capture_output=True,
            text=True,
            timeout=60,
        )
        refused.append([lines[row["location"]["row"] - 2] for row in json.loads(result.stdout)])
    assert refused[0] == refused[1]
    return refused[0]


def test_foreign_json_and_tars_have_one_reader():
    calls = ("json.loads(text)", "json.load(stream)", "json.JSONDecoder()", "tarfile.open(path)")
    assert refused_lines(*calls, "json.dumps(value)", "tarfile.TarInfo(name)") == list(calls)


def test_one_module_compares_data_with_annotations():
    assert refused_lines("typing.get_type_hints(model)") == ["typing.get_type_hints(model)"]


def test_pickles_are_read_in_one_place():
    calls = (
        "torch.load(path)",
        "torch.distributed.all_gather_object(rows, value)",
        "from torch.distributed import broadcast_object_list",
        "from torch.distributed import checkpoint",
    )
    assert refused_lines(*calls, "torch.distributed.all_gather(rows, value)") == list(calls)


def test_one_module_prints():
    calls = (
        "print(text)",
        "print(text, file=sys.stderr)",
        "sys.stderr.write(text)",
        "sys.stdout.buffer.write(data)",
        "typer.echo(text)",
        "typer.confirm(text)",
        "traceback.print_exc()",
    )
    assert refused_lines(*calls, "sys.stdout.isatty()", "sys.stderr.flush()") == list(calls)


@functools.cache
def product_modules():
    """Return the text of each module by its path."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def calls_in(text, names):
    """Yield each call of a function or method of these names, with its object and its name."""
    if not any(f"{name}(" in text for name in names):
        return  # parsing is slow
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr in names:
            yield node, ast.unparse(node.func.value), node.func.attr
        elif isinstance(node.func, ast.Name) and node.func.id in names:
            yield node, "", node.func.id


FOREIGN_TEXT = re.compile(r"f['\"]|str\(|repr\(")


def exits_with_foreign_text(text):
    """Return the lines on which a program ends with a text that Python prints as it is."""
    return [
        call.lineno
        for call, _, _ in calls_in(text, ("exit", "SystemExit"))
        if any(FOREIGN_TEXT.match(ast.unparse(argument)) for argument in call.args)
    ]


def test_no_exit_prints_a_foreign_text():
    assert exits_with_foreign_text("sys.exit(str(error))\nraise SystemExit(f'{host} is lost')") == [1, 2]
    assert exits_with_foreign_text("sys.exit(1)\nsys.exit('text')\nsys.exit(terminal.shown(error))") == []
    assert [path for path, text in product_modules().items() if exits_with_foreign_text(text)] == []


OWN_FOLDER = "in a folder that this process has made with mode 0700"
IN_BASE = "it runs in the base, without this package"
KERNEL = "files of the kernel"
WRITERS = {
    "entrypoints/imgkit_entrypoints/files.py": "the one place",
    "builder/imgkit_builder/apptainer/build.py": OWN_FOLDER,
    "builder/imgkit_builder/archive/oci_folder.py": OWN_FOLDER,
    "builder/imgkit_builder/archive/stored.py": OWN_FOLDER,
    "builder/imgkit_builder/engine/building.py": OWN_FOLDER,
    "builder/imgkit_builder/engine/image_source.py": OWN_FOLDER,
    "builder/imgkit_builder/image/members.py": OWN_FOLDER,
    "builder/imgkit_builder/lock/inside.py": IN_BASE,
    "builder/imgkit_builder/packages/inside.py": IN_BASE,
    "builder/imgkit_builder/jobs/remote/rsync_shell.py": OWN_FOLDER,
    "builder/imgkit_builder/sif/objects.py": "changes a part file, and makes none",
    "builder/imgkit_builder/sif/namespace.py": KERNEL,
    "builder/imgkit_builder/sif/squash.py": OWN_FOLDER,
    "builder/imgkit_builder/sif/supervisor.py": OWN_FOLDER,
    "entrypoints/imgkit_entrypoints/launch/compile_cache.py": OWN_FOLDER,
    "entrypoints/imgkit_entrypoints/launch/user_program.py": "it runs by path; O_EXCL, and a rename",
    "entrypoints/imgkit_entrypoints/run/disk.py": "renames within a run folder",
    "entrypoints/imgkit_entrypoints/terminal.py": "opens descriptors 1 and 2, and no path",
}
"""Module -> why it may make or rename a file without `files`."""
READERS = {
    "entrypoints/imgkit_entrypoints/files.py": "the one place",
    "builder/imgkit_builder/cli/recipes.py": "a build context, and no file",
    "builder/imgkit_builder/engine/build_guard.py": KERNEL,
    "builder/imgkit_builder/engine/building.py": OWN_FOLDER,
    "builder/imgkit_builder/image/context.py": "a build context, and no file",
    "builder/imgkit_builder/image/inside_uv.py": IN_BASE,
    "builder/imgkit_builder/image/wheel.py": "files of imgkit's own packages",
    "builder/imgkit_builder/lock/inside.py": IN_BASE,
    "builder/imgkit_builder/packages/inside.py": IN_BASE,
    "builder/imgkit_builder/oci/platform.py": KERNEL,
    "builder/imgkit_builder/sif/mksquashfs.py": KERNEL,
    "builder/imgkit_builder/sif/runtime.py": OWN_FOLDER,
    "entrypoints/imgkit_entrypoints/rollcall/secret.py": "standard input",
}
"""Module -> why it may read a file without `files`."""
OWN_OR_KERNEL = re.compile(r"importlib\.resources|\bFOLDER\b|['\"]/(proc|sys)/")
NO_PATHS = ("files", "os", "tarfile", "dataclasses")
"""Their functions take no path, are the one place, or are forbidden by ruff."""
WRITE = ("write_text", "write_bytes", "touch", "rename")
READ = ("read_text", "read_bytes")
OPTIONS_OF_OPEN = {"mode", "encoding", "errors", "buffering", "closefd", "opener"}


@functools.cache
def file_access(text):
    """Return "read" if a program opens a file by its path, and "write" if it makes or renames one."""
    access = set()
    for call, owner, name in calls_in(text, (*WRITE, *READ, "replace", "open")):
        mode = open_mode(call, owner) if name == "open" else ""
        is_rename = name == "replace" and len(call.args) == 1 and not call.keywords  # of a str it takes two
        if owner in NO_PATHS:
            continue
        if name in WRITE or is_rename or re.search("[wax+]", mode):
            access.add("write")
        elif (mode or (name in READ and owner)) and not OWN_OR_KERNEL.search(ast.unparse(call)):
            access.add("read")
    return frozenset(access)


def open_mode(call, owner):
    """Return the mode of ``open(path)`` or ``path.open()``, or an empty text for other functions `open`."""
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    arguments = call.args if owner else call.args[1:]
    mode = options.get("mode", arguments[0] if arguments else ast.Constant("r"))
    is_mode = isinstance(mode, ast.Constant) and re.fullmatch("[rwaxbt+]+", str(mode.value))
    return str(mode.value) if is_mode and options.keys() <= OPTIONS_OF_OPEN else ""


@pytest.mark.parametrize(
    ("text", "access"),
    [
        ("open(path, 'w')", {"write"}),
        ("path.open('ab')", {"write"}),
        ("open(path, mode='x+b')", {"write"}),
        ("path.write_text('x')", {"write"}),
        ("temporary.replace(target)", {"write"}),
        ("path.touch()", {"write"}),
        ("open(path)", {"read"}),
        ("path.open('rb', buffering=0)", {"read"}),
        ("path.open(encoding='utf-8')", {"read"}),
        ("(folder / name).read_bytes()", {"read"}),
        ("files.read_text(path)", set()),
        ("layer.open(bodies=True)", set()),
        ("Path('/proc/self/status').read_text()", set()),
        ("text.replace('a', 'b')", set()),
    ],
)
def test_access_to_a_file_is_noticed(text, access):
    assert file_access(text) == access


def modules_with(access):
    return {path for path, text in product_modules().items() if access in file_access(text)}


def test_files_are_written_in_one_place():
    assert modules_with("write") == WRITERS.keys()
    calls = ("os.open(path, flags)", "os.replace(a, b)", "shutil.copyfile(a, b)", "tempfile.mktemp()")
    assert refused_lines(*calls, "tempfile.mkdtemp()", "shutil.rmtree(path)") == list(calls)


def test_files_of_others_are_opened_in_one_place():
    assert modules_with("read") == READERS.keys()


REDIRECTION = re.compile(r"(?<![<0-9&])>>?\s*(?!&|/dev/null|\()(\S+)")
CLOSED_NAMES = {'"$said/$rank"', '"$secret"', '"$dir/code.json"', '"$last"'}
"""Names of mktemp, and names in the run folder, which is closed to others."""


def test_job_scripts_write_where_others_cannot():
    targets: set[str] = set()
    for path in TEMPLATES.glob("*.j2"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.lstrip().startswith(("#", "{#", "{%")) or "noclobber" in line or "((" in line:
                continue
            targets.update(REDIRECTION.findall(line))
    assert targets == CLOSED_NAMES
