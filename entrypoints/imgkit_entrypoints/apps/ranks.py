"""Open the process group of a worker, and end the worker without a hang.

At the end of a process, torch's process group and gloo's threads can hang or abort the process. The functions
below explain how this happens, and with which versions of torch.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import EXIT_NO
from imgkit_entrypoints.launch import user_program, watchdog
from imgkit_entrypoints.run.ranks import Ranks

REFUSE_S = 5.0
"""How many seconds other ranks wait for local rank 0 to exit first.

On a busy machine, workers start several seconds apart.
"""
RELEASE_S = 0.05
"""Time in seconds that a thread of gloo needs to acquire the GIL and to release its last work."""
# Process groups that must not be destroyed before the worker ends.
_alive: list[object] = []


@contextlib.contextmanager
def join_group(
    timeout_s: int | None = None,
    *,
    device: torch.device | None = None,
    store: dist.Store | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> Iterator[Ranks]:
    """Join a process group, and yield an object with its rank, world size and device.

    By default, this is the group that torchrun has prepared. The backend is nccl between GPUs, and gloo
    between CPUs. The group is destroyed when the ``with`` block ends.

    Parameters
    ----------
    timeout_s : time limit of a collective, or None for torch's own limits of 10 (nccl) or 30 minutes (gloo).
    device : device of this rank. The default is the local rank's GPU if IMGKIT_DEVICE is cuda, or else the
        CPU.
    store, rank, world_size : the group to join if torchrun has not prepared one.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    timeout = None
    if timeout_s is not None:
        timeout = datetime.timedelta(seconds=timeout_s)
    if device is None:
        device = _choose_device(local_rank)
    backend = "gloo"
    options = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # With device_id, NCCL connects immediately and on the right GPU. Otherwise, it guesses the GPU at the
        # first collective.
        backend = "nccl"
        options = {"device_id": device}
    connecting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    # A worker that torchrun has started is watched while it connects, because connecting may hang.
    if store is None:
        connecting = watchdog.connecting(os.environ)
    with connecting:
        dist.init_process_group(
            backend, timeout=timeout, store=store, rank=rank, world_size=world_size, **options
        )
    try:
        yield Ranks(
            rank=dist.get_rank(), local_rank=local_rank, world_size=dist.get_world_size(), device=device
        )
    finally:
        _leave_group(keep_alive=store is None)


def _leave_group(*, keep_alive: bool) -> None:
    """Destroy the process group without a hang.

    The destructor of the group holds the GIL while it waits for a thread of gloo. That thread may need the
    GIL to release its last work, so both wait forever. 4 of 10 ranks hung after a gather (torch 2.3 and 2.5).
    With `keep_alive`, the group stays alive until the worker exits. Otherwise, the thread first gets time to
    release its work.
    """
    if keep_alive:
        _alive.append(dist.group.WORLD)
    else:
        time.sleep(RELEASE_S)
    dist.destroy_process_group()


def _choose_device(local_rank: int) -> torch.device:
    """Return the GPU of a local rank, or the CPU if the launch does not use GPUs."""
    if os.environ.get("IMGKIT_DEVICE") == "cuda":
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def refuse(text: str, exit_code: int) -> NoReturn:
    """Print the lines of `text` once per node, and end this worker with `exit_code`.

    Every rank of the node calls this function. Local rank 0 prints the lines and exits. torchrun then ends
    the other workers, while they wait for up to 5 s. If a worker is still running after this time, it was not
    started by torchrun, or it is the only one with this problem. It then prints the lines, too.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(REFUSE_S)
    # If there is a node agent, it prints the recorded error after the run, and must be the only one to do so.
    is_recorded = user_program.record_error(text)
    if not is_recorded:
        terminal.print_messages(*text.split("\n"))
    sys.exit(exit_code)


def run_worker(main: Callable[[], None], *, end: Callable[[], None] = lambda: None) -> NoReturn:
    """Run a worker's `main`, and end the process with its exit code without finalizing the interpreter.

    A normal exit can crash. DDP keeps the process group and gloo's threads alive after destroy_process_group,
    and these threads release their last work late. If such a thread requests the GIL while the interpreter is
    being finalized, the worker ends with SIGABRT after a correct run. This happened in 1 of 8 runs with torch
    2.13 on Python 3.11, even in a minimal DDP loop.

    If `main` raises an exception, it is reported by sys.excepthook, and the process ends here, too.
    Otherwise, destructors of objects in the exception's frames would wait for other ranks, which in turn wait
    for this rank. A minimal DDP loop in which one rank raises hangs until gloo's timeout.

    This function also switches on Python's garbage collector, which is off while modules are imported
    (``apps/__init__.py``). The objects that exist so far are excluded from garbage collection.

    Parameters
    ----------
    end : function that is called last. If it raises an exception, this is printed and does not change the
        exit code.
    """
    gc.freeze()  # the objects of imported modules stay alive anyway, so do not examine them
    gc.enable()
    sys.excepthook = user_program.excepthook
    code = 0
    try:
        main()
    except BaseException as error:
        # This reference keeps the objects in the frames alive, so their destructors do not run.
        uncaught = error
        code = _report_error(uncaught)
    try:
        end()
    except BaseException:
        traceback.print_exc()  # noqa: TID251 - Python's own report
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report_error(error: BaseException) -> int:
    """Report an error that has ended the program of a worker, and return the exit code of the process.

    `run_worker` has set sys.excepthook to `user_program.excepthook`, which reports the error to the node
    agent (imgkit's process on each node), or prints it. A library may have set another one since.
    """
    if not isinstance(error, SystemExit):
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except ValueError:  # torch 2.3 installs its own excepthook, which fails without a process group
            user_program.excepthook(type(error), error, error.__traceback__)
        return EXIT_NO  # 1, as for any Python program that ends with an exception
    # sys.exit accepts an exit code, None for success, or a message.
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    terminal.print_messages(*str(error.code).split("\n"))
    return EXIT_NO
