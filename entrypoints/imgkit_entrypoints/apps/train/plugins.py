"""The user's own functions: ``package.module:function`` or ``file.py:function``.

The node agent first searches the source text for the function, without running it. So every node reports a
misspelt name before a process starts.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The signature that a function must have."""

    signature: str
    arguments: int

    @property
    def form(self) -> str:
        """The form of the argument and the signature, for messages."""
        return f"MOD:FN or file.py:FN with {self.signature}"


MODEL = Contract(signature="def FN(config) -> torch.nn.Module", arguments=1)
DATA = Contract(signature="def FN(config, split) -> a torch Dataset of tuples of tensors", arguments=2)
STEP = Contract(
    signature="def FN(model, batch) -> the mean loss of the batch's samples, or (loss, {name: number})",
    arguments=2,
)
LOGGER = Contract(
    signature="def FN(config) -> an object with log(step, {name: number}) and close()", arguments=1
)


def is_plugin(text: str) -> bool:
    """Whether `text` names a function of the user rather than something built in."""
    return ":" in text


def check(text: str, contract: Contract) -> str:
    """Return `text` if it names a function with the signature of `contract`; executes nothing.

    Raises
    ------
    argparse.ArgumentTypeError : there is no such function; the message shows the signature.
    """
    module, _, name = text.rpartition(":")

    def no(reason: str) -> argparse.ArgumentTypeError:
        return argparse.ArgumentTypeError(f"{text!r}: {reason}; expected {contract.form}")

    if not module or not name.isidentifier():
        raise no("not of the form MOD:FN")
    path = Path(module) if module.endswith(".py") else _find(module)
    if path is None:
        raise no(f"no module {module} found")
    if path.suffix != ".py":
        return text  # a compiled module has no source text
    try:
        tree = ast.parse(files.read_bytes(path), str(path))
    except OSError as error:
        raise no(f"cannot read {path}: {error.strerror}") from error
    except SyntaxError as error:
        raise no(f"{path}:{error.lineno}: {error.msg}") from error
    functions = [
        node
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name
    ]
    if functions:
        if not _takes(functions[-1].args, contract.arguments):
            raise no(
                f"{path}:{functions[-1].lineno}: {name} does not take {contract.arguments} positional "
                "arguments"
            )
    elif not any(
        isinstance(node, ast.alias | ast.Name | ast.ClassDef) and _bound(node) == name
        for node in ast.walk(tree)
    ):
        names = ", ".join(node.name for node in tree.body if isinstance(node, ast.FunctionDef)) or "none"
        raise no(f"{path} has no function {name}; its functions: {names}")
    return text


def _bound(node: ast.alias | ast.Name | ast.ClassDef) -> str:
    if isinstance(node, ast.alias):
        return node.asname or node.name
    return node.id if isinstance(node, ast.Name) else node.name


def _takes(arguments: ast.arguments, count: int) -> bool:
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    keywords = [default for default in arguments.kw_defaults if default is None]
    return not keywords and required <= count and (count <= positional or arguments.vararg is not None)


def _find(module: str) -> Path | None:
    """Find the file of `module` without importing the module or its parents."""
    search_path: list[str] | None = [*sys.path, str(Path.cwd())]
    spec = None
    for depth, _ in enumerate(module.split("."), start=1):
        spec = PathFinder.find_spec(".".join(module.split(".")[:depth]), search_path)
        if spec is None:
            return None
        search_path = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.origin else None


def load(text: str, contract: Contract) -> Callable[..., Any]:
    """Import the function that `text` names.

    Raises
    ------
    UsageError : its module cannot be imported, or the name is not callable.
    """
    source, _, name = text.rpartition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last, so that a json.py here does not hide Python's own
    try:
        module = _from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        function = getattr(module, name)
    except Exception as error:
        raise UsageError(
            f"cannot import it: {type(error).__name__}: {error}",
            where=text,
            hint=f"expected {contract.signature}",
        ) from error
    if not callable(function):
        raise UsageError(f"{name} is not a function", where=text, hint=f"expected {contract.signature}")
    result: Callable[..., Any] = function
    return result


def _from_file(path: Path) -> Any:
    name = str(path.resolve())
    if name in sys.modules:  # --model and --data from one file share its state
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # data workers unpickle the classes that it defines
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
