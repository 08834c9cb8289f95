"""torchrun itself, started by the launcher with four changes.

It ends the remaining workers of a failed group by HUP. TERM is blocked in them or does nothing,
since schedulers send it to every process, and torchrun would wait 30 s before KILL. When the launcher ends
it, by HUP or QUIT, it prints nothing: the launcher has said why. After success it exits without tearing its
interpreter down, which takes 0.4 s with torch. If a program of this package has failed, it has printed the
reason; torchrun then adds no traceback and passes the exit code on.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from types import FrameType

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.run import main

from imgkit_entrypoints.apps.ranks import run_worker


def quiet_main() -> None:
    """Run `main` without its traceback; only for a worker that a signal ended, torchrun's box is printed."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    hush()
    try:
        main()
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode > 0:
            sys.exit(first.exitcode)
        sys.exit(str(error))


def hush() -> None:
    """Keep torchrun from logging what it does with its workers."""
    for name in (api.__name__, "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def ends_silently(run: Callable[[], None]) -> None:
    """Run torchrun by `run`; where the launcher ends it, without a word.

    Other signals than the launcher's are blocked here, or end torchrun at once.
    """
    name = "_terminate_process_handler"  # torch has no setting for this
    by_torch = getattr(api, name, None)
    if by_torch is not None:

        def ended(number: int, frame: FrameType | None) -> None:
            hush()
            by_torch(number, frame)

        setattr(api, name, ended)
    try:
        run()
    except api.SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    api._get_default_signal = lambda: signal.SIGHUP  # torch has no setting for this
    own = any(word.startswith("imgkit_entrypoints.apps.") for word in sys.argv)
    run_worker(lambda: ends_silently(quiet_main if own else main))
