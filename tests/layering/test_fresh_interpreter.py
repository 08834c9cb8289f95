"""What a command or module loads, tried in a fresh interpreter in which some imports fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sample_image import SampleImage
from tars import tar_of_files

from imgkit_entrypoints.errors import EXIT_TOOL_MISSING

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("docker", "spython", "jinja2", "torch", "pydantic", "requests", "numpy")
HOST = ("imgkit_builder", "imgkit_recipes", "typer", "yaml", *HEAVY)

BLOCKER = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r} or name in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")
        return None

sys.meta_path.insert(0, Blocker())
{body}
"""


def run_blocked(blocked, body):
    """Run `body` in a fresh interpreter in which importing any of `blocked` fails."""
    code = BLOCKER.format(blocked=blocked, body=body)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def import_all(*modules):
    return "\n".join(f"import {module}" for module in modules)


def modules_below(folder, root):
    paths = sorted(path for path in folder.rglob("*.py") if path.name != "__main__.py")
    return [
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in paths
    ]


def test_blocked_import_is_refused():
    assert run_blocked(("docker",), "import docker").stderr.endswith("ImportError: docker is blocked\n")


def test_package_loads_no_module_of_its_own():
    body = (
        "import imgkit_builder\nprint([name for name in sys.modules if name.startswith('imgkit_builder.')])"
    )
    result = run_blocked((*HEAVY, "yaml", "typer"), body)
    assert result.stdout == "[]\n", result.stderr


def test_recipe_data_imports_nothing_heavy():
    blocked = (*HEAVY, "imgkit_builder", "imgkit_entrypoints", "yaml", "typer")
    assert run_blocked(blocked, "import imgkit_recipes").returncode == 0


def test_launcher_starts_without_torch_and_builder():
    root = ROOT / "entrypoints"
    modules = modules_below(root / "imgkit_entrypoints", root)
    launcher = [module for module in modules if module.split(".")[1:2] not in (["apps"], ["run"])]
    assert len(launcher) > 50
    result = run_blocked(HOST, import_all(*launcher))
    assert result.returncode == 0, result.stderr


def test_run_library_imports_torch_at_its_first_use():
    result = run_blocked(("torch",), "import imgkit_entrypoints.run as run\nprint('imported')\nrun.Run")
    assert result.stdout == "imported\n"
    assert result.stderr.endswith("ImportError: torch is blocked\n")


def test_jobs_and_checks_load_pure_python():
    # They load more when they read a recipe. A contract holds sif, archive and what these import.
    root = ROOT / "builder"
    packages = ("examine", "job")
    modules = [module for name in packages for module in modules_below(root / "imgkit_builder" / name, root)]
    modules += [f"imgkit_builder.{name}" for name in ("image.inside", "image.smoke", "recipe.targets")]
    result = run_blocked(("docker", "pydantic", "jinja2", "yaml", "torch", "requests"), import_all(*modules))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("verb", ["", "sif", "build", "render"])
def test_help_imports_nothing_heavy(verb):
    argv = ["imgkit", *verb.split(), "--help"]
    body = f"sys.argv = {argv}\nfrom imgkit_builder.__main__ import main\nmain()"
    result = run_blocked((*HEAVY, "rich.progress"), body)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout


COMPILED_MODULES = """
import sys
from imgkit_builder.__main__ import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
print(code, [name for name, file in files.items() if "-packages" in file and file.endswith(".so")])
"""
WRITTEN = ROOT / "tests/written/0.3.0"


def exit_code_and_compiled(folder, arguments):
    """Run `imgkit ARGUMENTS`, and return its exit code with the compiled modules that it has loaded."""
    archive = folder / "foreign.tar"  # of an image that imgkit did not build
    archive.write_bytes(tar_of_files(SampleImage().legacy_members()))
    env = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    argv = [sys.executable, "-c", COMPILED_MODULES, *arguments.split()]
    with archive.open("rb") as stream:
        result = subprocess.run(
            argv, cwd=folder, env=env, stdin=stream, capture_output=True, text=True, timeout=120
        )
    return result.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "sif --help",
        "sif foreign.tar --no-test -o new.sif",
        "sif - --no-test -o new.sif",
        f"verify {WRITTEN}/small.tar.gz",
        f"verify {WRITTEN}/small.sif",
        f"sif {WRITTEN}/small.tar.gz --no-test -o new.sif",
        f"sif {WRITTEN}/small.tar.gz --format sqsh -o new.sqsh",
    ],
)
def test_command_loads_nothing_compiled(tmp_path, arguments):
    # One environment on a shared file system serves nodes of several architectures.
    assert exit_code_and_compiled(tmp_path, arguments) in ("0 []", f"{EXIT_TOOL_MISSING} []")


def test_command_that_reads_a_recipe_loads_compiled_code(tmp_path):
    assert "pydantic_core" in exit_code_and_compiled(tmp_path, "check mn5")
