"""torchrun itself, started by the launcher with three things changed.

It ends the remaining workers of a failed or restarting group by HUP: TERM is blocked in them or does nothing,
since schedulers send it to every process, and torchrun would wait 30 s before KILL. After success it leaves
without taking its interpreter apart, which costs 0.4 s with torch in it. And where a program of this package
has failed, and so has said why, it adds no traceback of its own and passes the exit code on.
"""

from __future__ import annotations

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.run import main

from imgkit_entrypoints.apps.ranks import run_worker


def quiet_main() -> None:
    """`main`; a worker that ended by itself has said why, of one that a signal ended torchrun's box tells."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in (api.__name__, "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        main()
    except api.SignalException as error:  # the launcher's, which has said why
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode > 0:
            sys.exit(first.exitcode)
        sys.exit(str(error))


if __name__ == "__main__":
    api._get_default_signal = lambda: signal.SIGHUP  # torch has no setting for it
    own = any(word.startswith("imgkit_entrypoints.apps.") for word in sys.argv)
    run_worker(quiet_main if own else main)
