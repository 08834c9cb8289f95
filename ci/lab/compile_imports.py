"""Write byte code of what nearly every start in the stand-in image imports. ci/lab/base-image runs it there.

Without it, importing torch takes 5 s of CPU instead of 2, and the first step of an optimizer, which imports
torch._dynamo, 2.6 s instead of 1. Nothing compares the byte code with its source, not even by time: all times
in the image become one fixed time.
"""

import importlib
import py_compile
import sys

MODULES = (
    "json",
    "subprocess",
    "pip._internal.commands.install",
    "pip._internal.commands.check",
    "numpy",
    "torch.distributed.run",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.utils.data",
    "torch.distributed._tensor",
)


def main() -> None:
    """Compile the source of every module that is loaded once `MODULES` are imported."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:  # the small stand-in has no torch
            continue
    for module in list(sys.modules.values()):
        source = getattr(module, "__file__", None) or ""
        if source.startswith("/") and source.endswith(".py"):  # torch.ops claims to be "_ops.py"
            py_compile.compile(source, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


if __name__ == "__main__":
    main()
