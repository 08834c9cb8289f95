"""Many runs of programs on `Run` from one process that has imported torch; runs in the image.

Ranks are forked, with the environment that torchrun would give them, as in apps/train_many.py. In the scripts
of torchkit.py, ``start(RANKS, PROGRAM, FOLDER)`` is such a run and returns the ranks' exit codes.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._dynamo  # the first step of an optimizer imports it; here once instead of in every rank
import torch.distributed as dist
from saved_states import same, states
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from imgkit_entrypoints.errors import ImgkitError
from imgkit_entrypoints.run import Run
from imgkit_entrypoints.run.step_loop import StepLoop

torch.set_num_threads(1)
__all__ = ["DataLoader", "IterableDataset", "Path", "Run", "TensorDataset", "dist", "same", "states"]


def start(count, program, folder, *, at=0, how=signal.SIGKILL, rank=0, pause=0.0, args=(), **env):
    """Start `count` ranks of a file or a function; `rank` gets the signal `how` at the end of step `at`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    children = []
    for local_rank in range(count):
        child = os.fork()
        if child == 0:
            worker_env = {
                "RANK": local_rank,
                "LOCAL_RANK": local_rank,
                "WORLD_SIZE": count,
                "MASTER_PORT": port,
            }
            os.environ.update({name: str(value) for name, value in {**worker_env, **env}.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", IMGKIT_RUN_DIR=folder)
            if local_rank == rank and at:
                signal_at(at, how)
            if pause:
                slowly(pause)
            leave(program, args)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(count, "ranks ended with", codes, flush=True)
    return codes


def signal_at(step, how):
    count_step = StepLoop._count_step

    def count_and_signal(loop):
        count_step(loop)
        if loop.read_step() == step:
            os.kill(os.getpid(), how)

    StepLoop._count_step = count_and_signal


def slowly(pause):
    count_step = StepLoop._count_step

    def count_slowly(loop):
        time.sleep(pause)
        count_step(loop)

    StepLoop._count_step = count_slowly


def leave(program, args):
    """Run the program, and end like an interpreter: with its code, or 1 after a traceback."""
    code = 0
    try:
        if callable(program):
            dist.init_process_group("gloo")
            program()
        else:
            sys.argv = [program, *args]
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except ImgkitError as error:
        print("refused:", error, file=sys.stderr, flush=True)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)
