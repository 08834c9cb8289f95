"""Find and import the user's own functions: ``package.module:function`` or ``file.py:function``.

Before workers start, the node agent searches the source code for the function, without running the code. So
every node reports a misspelled name early.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
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
    """The signature that a user's function must have.

    `arguments` is the number of positional arguments with which the function is called.
    """

    signature: str
    arguments: int

    @property
    def form(self) -> str:
        """How to name such a function in an option, and its signature, for messages."""
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
    """Return whether the value of an option names a function of the user instead of a built-in one."""
    return ":" in text


def check(text: str, contract: Contract) -> str:
    """Return `text` if it names a function with the signature of `contract`. No code is executed.

    Raises
    ------
    argparse.ArgumentTypeError : there is no such function. The message shows the expected signature.
    """
    try:
        module, _, name = text.rpartition(":")
        _refuse_missing_function(module, name, contract.arguments)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; expected {contract.form}") from error
    return text


def _refuse_missing_function(module: str, name: str, arguments: int) -> None:
    """Raise ValueError if the source code of `module` has no suitable function `name`.

    The function must accept `arguments` positional arguments. If the code defines the name in another way
    than by ``def``, the name is accepted, because the source code does not show what it stands for.
    """
    if not module or not name.isidentifier():
        raise ValueError("not of the form MOD:FN")
    path = _find_source(module)
    if path is None:
        raise ValueError(f"no module {module} found")
    if path.suffix != ".py":  # a compiled module has no source code, so it cannot be checked
        return
    # The module is not imported here: that would run its code, and import torch, which takes seconds.
    source, tree = _parse_source(path)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        # The name may be defined by an import, a class, or an assignment. So it is only refused if it does
        # not occur in the source code at all.
        if not re.search(rb"\b%s\b" % name.encode(), source):
            names = ", ".join(functions) or "none"
            raise ValueError(f"{path} has no function {name}; its functions: {names}")
        return
    function = functions[name]
    # Without this check, the wrong call would only fail on all nodes, after the start of the workers.
    if not _accepts_arguments(function.args, arguments):
        where = f"{path}:{function.lineno}"
        raise ValueError(f"{where}: {name} does not take {arguments} positional arguments")


def _parse_source(path: Path) -> tuple[bytes, ast.Module]:
    """Return the source code of a module, and its syntax tree.

    Raises
    ------
    ValueError : the file cannot be read, or is not valid Python.
    """
    try:
        source = files.read_bytes(path)
        return source, ast.parse(source, str(path))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from error


def _accepts_arguments(arguments: ast.arguments, count: int) -> bool:
    """Return whether a function with these parameters can be called with `count` positional arguments."""
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    if None in arguments.kw_defaults:  # a keyword-only parameter without a default
        return False
    takes_more = arguments.vararg is not None
    return required <= count and (count <= positional or takes_more)


def _find_source(module: str) -> Path | None:
    """Return the path of the source file of ``package.module`` or ``file.py``, or None if there is none.

    The module is not imported. importlib.util.find_spec would import the parent packages, so each part of the
    name is searched for in the folders of its parent package.
    """
    if module.endswith(".py"):
        return Path(module)
    search_path: list[str] = [*sys.path, str(Path.cwd())]
    name_parts = module.split(".")
    spec = None
    for depth in range(1, len(name_parts) + 1):
        spec = PathFinder.find_spec(".".join(name_parts[:depth]), search_path)
        if spec is None:
            return None
        search_path = list(spec.submodule_search_locations or ())  # empty if it is a module and no package
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin)


def load(text: str, contract: Contract) -> Callable[..., Any]:
    """Import the function that `text` names.

    Raises
    ------
    UsageError : the module cannot be imported, or the name does not stand for a function.
    """
    source, _, name = text.rpartition(":")
    if str(Path.cwd()) not in sys.path:
        # The current folder comes last, so that a file such as json.py in it does not hide Python's own
        # module.
        sys.path.append(str(Path.cwd()))
    try:
        module = _import_source(source)
        function = getattr(module, name)
    except Exception as error:
        raise UsageError(
            f"cannot import it: {type(error).__name__}: {error}",
            where=text,
            hint=f"expected {contract.signature}",
        ) from error
    if not callable(function):
        raise UsageError(f"{name} is not a function", where=text, hint=f"expected {contract.signature}")
    loaded: Callable[..., Any] = function
    return loaded


def _import_source(source: str) -> Any:
    """Import ``package.module`` or ``file.py``."""
    if source.endswith(".py"):
        return _import_file(Path(source))
    return importlib.import_module(source)


def _import_file(path: Path) -> Any:
    """Import a file as a module. The name of the module is the absolute path of the file."""
    name = str(path.resolve())
    # --model and --data may name functions in the same file. It is imported only once, so that they share its
    # state.
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The module must be in sys.modules. Otherwise, worker processes could not unpickle the classes in the
    # file.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
