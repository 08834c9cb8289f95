"""Runs scripts in forks of a process that has imported torch, one after the other; runs in the image.

It is the first process of its container. Standard input has a JSON object for each script, standard output
gets its exit code; torchkit.py is the other side.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
import types
from pathlib import Path

import run_many
import train_many

MODULES = {"run_many": run_many, "train_many": train_many}


def main() -> None:
    gc.freeze()  # else a fork that looks at its objects copies the memory of all modules
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            run_script(**request)
        _, status = os.waitpid(child, 0)
        end_other_processes()
        print(os.waitstatus_to_exitcode(status), flush=True)


def run_script(module: str, folder: str, script: str, stdout: str, stderr: str) -> None:
    """Run a script with the names of a module in a folder, and end this process as an interpreter would."""
    os.chdir(folder)
    for stream, path, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, stdout, os.O_WRONLY),
        (2, stderr, os.O_WRONLY),
    ):
        os.dup2(os.open(path, mode), stream)
    program = types.ModuleType("__main__")
    program.__dict__.update(vars(MODULES[module]), __name__="__main__")
    sys.modules["__main__"] = program
    code = 0
    try:
        exec(Path(script).read_text(), program.__dict__)  # noqa: S102 - the text is the test's own
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def end_other_processes() -> None:
    """Kill what a script has left running; -1 stands for all but this process."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.wait()
    except (ProcessLookupError, ChildProcessError):
        return  # there are none


if __name__ == "__main__":
    main()
