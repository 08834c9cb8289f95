"""Who may import what: read from the sources, and tried in fresh interpreters with the others blocked."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILDER = ROOT / "builder/imgkit_builder"
RECIPES = ROOT / "recipes/imgkit_recipes"
ENTRYPOINTS = ROOT / "entrypoints/imgkit_entrypoints"

HEAVY = ("docker", "spython", "jinja2", "torch", "pydantic", "requests", "numpy")
PURE_MODULES = (
    "archive",
    "base",
    "delta",
    "examine",
    "image/inside",
    "image/smoke",
    "job",
    "oci",
    "recipe/targets",
    "sif",
)
"""They import pure Python only: one environment on a shared file system serves several architectures."""

BLOCKER = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"layering: {{name}} must not be imported here")
        return None

sys.meta_path.insert(0, Blocker())
{body}
"""


def blocked(names: tuple[str, ...], body: str) -> subprocess.CompletedProcess[str]:
    """Run `body` in a fresh interpreter in which importing any of `names` fails."""
    code = BLOCKER.format(blocked=set(names), body=body)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def import_all(names: list[str]) -> str:
    """Python text that imports the modules of these names."""
    plain = [name.removesuffix(".__init__") for name in names]
    return f"import importlib\nfor name in {plain!r}: importlib.import_module(name)"


OUTSIDE = "[name for name in sys.modules if name.startswith(('imgkit_builder.', 'imgkit_entrypoints'))"


def test_loading_a_recipe_imports_little_besides_its_package() -> None:
    body = f"""
import sys
from imgkit_builder.recipe.load import load
for name in ("mn5", "rcp", "cpu"):
    load(name)
print(*{OUTSIDE} and not name.startswith("imgkit_builder.recipe")])
"""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) <= 9, done.stdout


def test_recipe_names_nothing_of_job() -> None:
    named = [
        path.name for path in (BUILDER / "recipe").glob("*.py") if "imgkit_builder.job" in path.read_text()
    ]
    assert named == []


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


@functools.cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Full names of the modules that `path` imports, wherever in the file, with the line."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield node.module or "", node.lineno


def importers(module: str, *folders: Path) -> set[str]:
    """Files (relative to the checkout) that import `module` or something in it."""
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in files(folder)
        for name, _ in imports(path)
        if name == module or name.startswith(module + ".")
    }


def test_only_engine_imports_docker() -> None:
    found = importers("docker", BUILDER, RECIPES, ENTRYPOINTS)
    assert found, "the rule below would hold for an empty tree"
    assert {path for path in found if not path.startswith("builder/imgkit_builder/engine/")} == set()


def test_only_the_runtime_imports_spython() -> None:
    found = importers("spython", BUILDER, RECIPES, ENTRYPOINTS)
    assert found == {"builder/imgkit_builder/sif/runtime.py"}


WITH_TORCH = ("apps", "run")
"""Rooms of the image half that may import torch; the others start in any image."""


def room_of(path: Path) -> str:
    return path.relative_to(ENTRYPOINTS).parts[0]


def test_only_apps_and_run_import_torch() -> None:
    found = importers("torch", BUILDER, RECIPES, ENTRYPOINTS)
    assert found, "the rule below would hold for an empty tree"
    allowed = tuple(f"entrypoints/imgkit_entrypoints/{room}/" for room in WITH_TORCH)
    assert {path for path in found if not path.startswith(allowed)} == set()


RUN = "entrypoints/imgkit_entrypoints/run"


def test_modules_that_read_pickles_are_imported_in_one_place() -> None:
    modules = ("pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal")
    readers = {f"{RUN}/{name}.py" for name in ("checkpoint", "run", "state_tree", "tracked")}
    assert {path for name in modules for path in importers(name, BUILDER, RECIPES, ENTRYPOINTS)} == readers


def test_entrypoints_import_the_standard_library_only() -> None:
    allowed = sys.stdlib_module_names | {"imgkit_entrypoints"}
    foreign = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(ENTRYPOINTS)
        for name, line in imports(path)
        if name.split(".")[0] not in (allowed | {"torch"} if room_of(path) in WITH_TORCH else allowed)
    ]
    # Where a run names the logger, and the image has it.
    assert [found.rpartition(":")[2] for found in foreign if "/train/loggers.py:" in found] == [" wandb"]
    assert [found for found in foreign if "/train/loggers.py:" not in found] == []


def test_run_library_imports_torch_at_its_first_use() -> None:
    done = blocked(("torch",), "import imgkit_entrypoints.run as run\nprint('imported')\nrun.Run")
    assert done.stdout == "imported\n"
    assert "layering: torch must not be imported here" in done.stderr


def test_package_loads_no_module_of_its_own() -> None:
    body = (
        "import imgkit_builder\nprint([name for name in sys.modules if name.startswith('imgkit_builder.')])"
    )
    done = blocked((*HEAVY, "yaml", "typer"), body)
    assert done.stdout == "[]\n", done.stderr


def test_dependencies_never_point_back() -> None:
    assert importers("imgkit_builder", RECIPES, ENTRYPOINTS) == set()
    assert importers("imgkit_recipes", ENTRYPOINTS) == set()
    assert importers("imgkit_entrypoints", RECIPES) == set()


def test_launcher_starts_without_torch_and_builder() -> None:
    names = [
        ".".join(path.relative_to(ENTRYPOINTS.parent).with_suffix("").parts)
        for path in files(ENTRYPOINTS)
        if room_of(path) not in WITH_TORCH and path.name != "__main__.py"
    ]
    done = blocked(("torch", "imgkit_builder", "imgkit_recipes", "typer", "yaml", *HEAVY), import_all(names))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words", [["--help"], ["sif", "--help"], ["build", "--help"], ["render", "--help"]], ids=" ".join
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    body = f"sys.argv = ['imgkit', *{words!r}]\nfrom imgkit_builder.__main__ import main\nmain()"
    done = blocked((*HEAVY, "rich.progress"), body)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["sif", "--help"],
        ["sif", "absent.tar"],
        ["verify", __file__],
        ["apply", __file__, __file__],
    ],
    ids=" ".join,
)
def test_calls_import_nothing_compiled(words: list[str]) -> None:
    """One environment serves nodes of several architectures."""
    body = f"""
import sys
from imgkit_builder.__main__ import main
sys.argv = ["imgkit", *{words!r}]
try:
    main()
except SystemExit as end:
    assert end.code in (0, 2), end
files = [str(getattr(module, "__file__", "")) for module in sys.modules.values()]
assert "imgkit_builder.cli.app" in sys.modules
assert not [file for file in files if "-packages" in file and file.endswith(".so")]
"""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_recipe_data_imports_nothing_heavy() -> None:
    done = blocked((*HEAVY, "imgkit_builder", "imgkit_entrypoints", "yaml", "typer"), "import imgkit_recipes")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", PURE_MODULES)
def test_cluster_side_is_pure_python(module: str) -> None:
    place = BUILDER / module
    assert place.is_dir() or place.with_suffix(".py").is_file()
    paths = files(place) if place.is_dir() else [place.with_suffix(".py")]
    names = [".".join(path.relative_to(BUILDER.parent).with_suffix("").parts) for path in paths]
    heavy = ("docker", "pydantic", "jinja2", "yaml", "zstandard", "torch", "requests")
    done = blocked(heavy, import_all(names))
    assert done.returncode == 0, done.stderr


def test_blocker_refuses_what_it_names() -> None:
    done = blocked(("docker",), "import docker")
    assert done.returncode == 1
    assert "layering: docker must not be imported here" in done.stderr


STARTERS = {
    "builder/imgkit_builder/apptainer/definition.py": "its program runs in the base, without this package",
    "builder/imgkit_builder/base/process.py": "it is the way to start a program",
    "builder/imgkit_builder/engine/address.py": "ssh runs as long as its connection",
    "builder/imgkit_builder/engine/building.py": "a guard outlives imgkit, to end a build",
    "builder/imgkit_builder/engine/containers.py": "a guard outlives imgkit, to remove a container",
    "builder/imgkit_builder/job/ssh/fanout.py": "one ssh per host, side by side",
    "builder/imgkit_builder/lock/inside.py": "it runs in the base, without this package",
    "builder/imgkit_builder/remote/rsync_shell.py": "rsync runs it, without this package",
    "builder/imgkit_builder/sif/squash.py": "imgkit writes its standard input while it runs",
    "builder/imgkit_builder/sif/runtime.py": "spython starts the runtime; the module names its errors",
    "builder/imgkit_builder/image/inside.py": "it runs in the image, without this package",
}
"""File of the builder -> why it may name subprocess; docs/architecture.md has the reasons."""


def test_programs_are_started_in_one_place() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in files(BUILDER)
        if re.search(r"\bsubprocess\.|import subprocess", path.read_text(encoding="utf-8"))
    }
    assert found == STARTERS.keys()
