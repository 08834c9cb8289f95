"""The process group as every app opens it."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from imgkit_entrypoints.errors import EXIT_NO

REFUSE_S = 5.0
"""The others' patience with local rank 0; a loaded machine starts workers seconds apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This worker's place."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it; a clock read before says nothing."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def opened(timeout_s: int | None = None) -> Iterator[Ranks]:
    """Join the process group that torchrun prepared: nccl where IMGKIT_DEVICE is cuda, else gloo.

    A collective that takes longer than `timeout_s` fails; None leaves torch's own limits of 10 or 30 minutes.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    if os.environ.get("IMGKIT_DEVICE", "cpu") == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        # device_id makes NCCL connect now, on the right GPU, instead of guessing at the first collective.
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout)
    try:
        yield Ranks(
            rank=dist.get_rank(), local_rank=local_rank, world_size=dist.get_world_size(), device=device
        )
    finally:
        dist.destroy_process_group()


def refuse(text: str, exit_code: int) -> NoReturn:
    """Leave with `exit_code` and say why, which every rank of a node knows alike, once a node.

    torchrun ends all others when the first one leaves, so local rank 0 goes first. One of the others that is
    still there after `REFUSE_S` is alone with its reason, or has no torchrun above it, and says it too.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(REFUSE_S)
    print(text, file=sys.stderr, flush=True)
    sys.exit(exit_code)


def run_worker(main: Callable[[], None]) -> NoReturn:
    """Run a worker's `main` and leave with its exit code, without finalizing the interpreter.

    DDP keeps the group alive beyond destroy_process_group, and so gloo's threads, which drop their last
    works late. A thread that then asks for the GIL of an interpreter being finalized ends the worker with
    SIGABRT after a run that was right (torch 2.13 on Python 3.11: 1 run in 8, also of a bare DDP loop).
    An exception ends it here too, with its traceback: what dies with its frames waits for the other ranks,
    which wait for this one (a bare DDP loop in which one rank raises hangs until gloo's timeout).
    """
    code: object = 0
    try:
        main()
    except BaseException as error:
        kept = error  # and all that its frames hold, until the process is gone
        if isinstance(kept, SystemExit):
            code = 0 if kept.code is None else kept.code
        else:
            traceback.print_exc()
            code = EXIT_NO
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = EXIT_NO
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
