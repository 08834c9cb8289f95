"""A worker's first steps before the user program: signals and ``--local_rank``.

The supervisor starts torchrun and its workers with the stop signals blocked. This module unblocks them
for the user program and gives them a handler that does nothing. So the program may set handlers of its
own, and the commands that it starts have the usual ones. A process that it forks, such as torch's data
workers, must survive what a scheduler sends to every process. It must still end by
``Process.terminate()``, since multiprocessing waits for it at exit. So in a forked process TERM counts
only if it comes from its parent.

Run by path with the standard library alone, since an import would leave modules of imgkit in the user
program, or take them from its PYTHONPATH: ``python3 user_program.py [--pass-local-rank] [-m] PROGRAM
ARGS``.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that request a stop. guard.py needs no list: it inherits the mask of blocked signals."""


def main(words: list[str]) -> None:
    """Run the program as ``python3 PROGRAM ARGS`` would."""
    if signal.SIGTERM in signal.pthread_sigmask(
        signal.SIG_BLOCK, ()
    ):  # torchrun is above, and the node agent
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        os.register_at_fork(after_in_child=_heed_the_parent)
    options = []
    while words[0] in ("--pass-local-rank", "-m"):
        options.append(words.pop(0))
    program = words[0]
    if "--pass-local-rank" in options:  # where torch.distributed.launch put it
        words.insert(1, f"--local_rank={os.environ['LOCAL_RANK']}")
    sys.argv = words
    if not getattr(sys.flags, "safe_path", False) or sys.path[:1] == [""]:  # Python sets it by what it runs
        sys.path[0] = os.getcwd() if "-m" in options else os.path.dirname(os.path.realpath(program))  # noqa: PTH109, PTH120
    if "-m" in options:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _heed_the_parent() -> None:
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def wait() -> None:
        while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
            pass
        os._exit(0)  # as torch's data workers do: another code would be taken for a crash

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
