"""The process group that every app opens, and how a worker leaves."""

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
"""Time that the others give local rank 0 to leave first; a loaded machine starts workers seconds apart."""
RELEASE_S = 0.05
"""Time in which a thread of gloo gets the GIL and releases its last work."""
_alive: list[object] = []


@contextlib.contextmanager
def opened(
    timeout_s: int | None = None,
    *,
    device: torch.device | None = None,
    store: dist.Store | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> Iterator[Ranks]:
    """Join the process group that torchrun prepared, or the one in `store`: nccl between GPUs, else gloo.

    A collective that takes longer than `timeout_s` fails; None leaves torch's own limits of 10 or 30 minutes.

    Parameters
    ----------
    device : device of this rank; None: the local rank's GPU if IMGKIT_DEVICE is cuda, else the CPU.
    store, rank, world_size : the group without torchrun.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    if device is None:
        cuda = os.environ.get("IMGKIT_DEVICE", "cpu") == "cuda"
        device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    backend, connected = "gloo", {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # device_id makes NCCL connect now, on the right GPU, instead of guessing it at the first collective.
        backend, connected = "nccl", {"device_id": device}
    with contextlib.nullcontext() if store else watchdog.connecting(os.environ):
        dist.init_process_group(
            backend, timeout=timeout, store=store, rank=rank, world_size=world_size, **connected
        )
    try:
        yield Ranks(
            rank=dist.get_rank(), local_rank=local_rank, world_size=dist.get_world_size(), device=device
        )
    finally:
        # The group's destructor holds the GIL and waits for a thread of gloo, which may wait for the GIL to
        # release its last work: 4 of 10 ranks hung after a gather (torch 2.3 and 2.5).
        if store is None:
            _alive.append(dist.group.WORLD)  # until the worker leaves
        else:
            time.sleep(RELEASE_S)
        dist.destroy_process_group()


def refuse(text: str, exit_code: int) -> NoReturn:
    """Report the lines of `text` once per node and leave with `exit_code`; every rank of the node calls this.

    torchrun ends all others when the first one leaves, so local rank 0 leaves first. Another rank that still
    runs after `REFUSE_S` has no torchrun above it, or is the only one with this reason: it prints it as well.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(REFUSE_S)
    if not user_program.report(text):
        terminal.print_messages(*text.split("\n"))
    sys.exit(exit_code)


def run_worker(main: Callable[[], None], *, end: Callable[[], None] = lambda: None) -> NoReturn:
    """Run a worker's `main` and leave with its exit code, without finalizing the interpreter.

    DDP keeps the group alive beyond destroy_process_group, and with it gloo's threads, which release their
    last works late. If such a thread asks for the GIL of an interpreter that is finalizing, the worker ends
    with SIGABRT after a correct run (torch 2.13 on Python 3.11: 1 run in 8, also of a bare DDP loop).
    An exception also ends the process here, reported by sys.excepthook. Destructors of objects in its frames
    would wait for the other ranks, which wait for this one: a bare DDP loop in which one rank raises hangs
    until gloo's timeout.

    `end` is called last, and changes nothing of the exit code.

    Python's garbage collector starts here, and ignores what the imports have made (``apps/__init__.py``).
    """
    gc.freeze()
    gc.enable()
    sys.excepthook = user_program.excepthook
    code: object = 0
    try:
        main()
    except BaseException as error:
        uncaught = error  # keeps the objects of its frames alive until the process ends
        if isinstance(uncaught, SystemExit):
            code = 0 if uncaught.code is None else uncaught.code
        else:
            try:
                sys.excepthook(type(error), error, error.__traceback__)
            except ValueError:  # torch 2.3 puts one of its own in front, which needs the group
                user_program.excepthook(type(error), error, error.__traceback__)
            code = EXIT_NO
    if not isinstance(code, int):
        terminal.print_messages(*str(code).split("\n"))
        code = EXIT_NO
    try:
        end()
    except BaseException:
        traceback.print_exc()  # noqa: TID251 - Python's own report
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
