"""Many runs of dist-train from one process that has imported torch; runs in the image.

Ranks are forked, with the environment that torchrun would give them: a run takes half a second instead of
five. Reads Python code in which ``train(RANKS, "ARGS")`` is such a run and returns its exit code.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys

import torch
import torch._dynamo  # the first step of an optimizer imports it; here once instead of in every rank
from saved_states import same, states

from imgkit_entrypoints.apps import ranks
from imgkit_entrypoints.apps.train import __main__ as app

torch.set_num_threads(1)
__all__ = ["same", "states"]


def train(count: int, args: str, folders: str = "", rank_args: tuple[str, ...] = ()) -> int:
    """Train on `count` ranks of one node; with a run folder for each rank in `folders`, each is a node.

    `rank_args` has more arguments for each rank.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    print(f"+ {count} {args}", flush=True)
    sys.argv = ["dist-train", "--log-every", "2", *shlex.split(args)]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            sys.argv += shlex.split(rank_args[rank]) if rank_args else []
            if folders:
                sys.argv += ["--run-dir", folders.split()[rank]]
            local_rank = 0 if folders else rank
            env = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": count, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in env.items()}, MASTER_ADDR="127.0.0.1")
            ranks.run_worker(app.main)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    exec(sys.stdin.read())  # noqa: S102 - the text is the test's own
