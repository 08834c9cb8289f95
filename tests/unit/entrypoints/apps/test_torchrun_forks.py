"""The program of a forked worker, in an interpreter whose torch is a stub."""

from __future__ import annotations

import subprocess
import sys

import pytest

STUB = """
import importlib.abc, importlib.machinery, importlib, sys, types
from unittest.mock import MagicMock

class Anything(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "torch":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Anything(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
from imgkit_entrypoints.apps import torchrun

argv = (sys.executable, "-I", "-u", "-m", sys.argv[1], *sys.argv[2:])
module = torchrun._find_own_module(argv)
importlib.import_module(module)  # as run_with_forks does for all workers
torchrun._run_own_module(module, argv)
"""


def forked(*args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-W", "always::RuntimeWarning", "-c", STUB, *args]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("app", ["pi", "doctor"])
def test_forked_worker_starts_without_a_warning(app: str):
    result = forked(f"imgkit_entrypoints.apps.{app}", "--help")
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout
    assert result.stderr == ""


def test_wrong_argument_of_a_forked_worker_is_refused():
    result = forked("imgkit_entrypoints.apps.pi", "--no-such-option")
    assert result.returncode == 2
    assert "--no-such-option" in result.stderr
