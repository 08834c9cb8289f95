"""Open the process group of a worker, and end the worker without a hang.

torch's process group and gloo's threads can hang or abort at the end of a process. The functions below say
how, and with which versions of torch.
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
"""How long other ranks wait until local rank 0 has left. A loaded machine starts workers seconds apart."""
RELEASE_S = 0.05
"""Time in which a thread of gloo gets the GIL and releases its last work."""
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
    """Join the process group that torchrun prepared, or the one in `store`, and yield its ranks.

    The backend is nccl between GPUs, and gloo otherwise.

    Parameters
    ----------
    timeout_s : time limit of a collective; None for torch's own limits of 10 (nccl) or 30 minutes (gloo).
    device : device of this rank; by default the local rank's GPU if IMGKIT_DEVICE is cuda, and else the CPU.
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
        # With device_id, NCCL connects now and on the right GPU, instead of guessing the GPU at the first
        # collective.
        backend = "nccl"
        options = {"device_id": device}
    connecting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if store is None:  # torchrun has started this worker, and its node agent watches it
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
        # The group's destructor holds the GIL while it waits for a thread of gloo, and that thread may wait
        # for the GIL to release its last work. 4 of 10 ranks hung after a gather (torch 2.3 and 2.5).
        if store is None:
            _alive.append(dist.group.WORLD)  # until the worker leaves
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

    Every rank of the node calls this function. torchrun ends all workers when the first one leaves, so local
    rank 0 leaves first. A rank that still runs after `REFUSE_S` has no torchrun above it, or is the only one
    with this problem, so it prints the lines as well.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(REFUSE_S)
    if not user_program.record_error(text):
        terminal.print_messages(*text.split("\n"))
    sys.exit(exit_code)


def run_worker(main: Callable[[], None], *, end: Callable[[], None] = lambda: None) -> NoReturn:
    """Run a worker's `main`, and end the process with its exit code without finalizing the interpreter.

    DDP keeps the group alive beyond destroy_process_group, and with it gloo's threads, which release their
    last works late. If such a thread asks for the GIL while the interpreter is finalizing, the worker ends
    with SIGABRT after a correct run (torch 2.13 on Python 3.11: 1 run in 8, also of a bare DDP loop).

    An exception is reported by sys.excepthook, and then also ends the process here. Otherwise destructors of
    objects in its frames would wait for the other ranks, which wait for this one. A bare DDP loop in which
    one rank raises hangs until gloo's timeout.

    Python's garbage collector is switched on here. It ignores the objects that imports have made
    (``apps/__init__.py``).

    Parameters
    ----------
    end : called last; what it raises is printed and does not change the exit code.
    """
    gc.freeze()
    gc.enable()
    sys.excepthook = user_program.excepthook
    code = 0
    try:
        main()
    except BaseException as error:
        uncaught = error  # keeps the objects of its frames alive until the process ends
        code = _report_error(uncaught)
    try:
        end()
    except BaseException:
        traceback.print_exc()  # noqa: TID251 - Python's own report
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report_error(error: BaseException) -> int:
    """Report an error that has ended the program of a worker, and return the exit code of the process."""
    if not isinstance(error, SystemExit):
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except ValueError:  # torch 2.3 puts an excepthook of its own in front, which needs the group
            user_program.excepthook(type(error), error, error.__traceback__)
        return EXIT_NO
    if error.code is None:  # as sys.exit() without an argument
        return 0
    if isinstance(error.code, int):
        return error.code
    terminal.print_messages(*str(error.code).split("\n"))
    return EXIT_NO
