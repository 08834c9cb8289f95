"""torchrun itself, started by the launcher with four things changed.

It ends the remaining workers of a failed or restarting group by HUP: TERM is blocked in them or does nothing,
since schedulers send it to every process, and torchrun would wait 30 s before KILL. After success it leaves
without taking its interpreter apart, which costs 0.4 s with torch in it. Where a program of this package
has failed, and so has said why, it adds no traceback of its own and passes the exit code on. And workers that
it starts again have a store of their own.
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


def renew_stores() -> None:
    """Give the workers a new store each time they are started again.

    torch leaves that to the rendezvous, and each keeps its store. So a worker that is earlier than rank 0
    finds rank 0's address of the attempt before there, and fails or hangs (torch 2.13).
    """
    try:
        from torch.distributed import TCPStore
        from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup
        from torch.distributed.elastic.rendezvous.api import RendezvousInfo  # noqa: F401
    except ImportError:  # older: the keys hold the attempt
        return
    first = SimpleElasticAgent._rendezvous
    served: list[TCPStore] = []  # as long as this process lives

    def rendezvous(self: SimpleElasticAgent, group: WorkerGroup) -> None:
        first(self, group)
        attempt = group.spec.max_restarts - self._remaining_restarts
        if attempt == 0 or not group.spec.rdzv_handler.use_agent_store:
            return
        key = f"imgkit/store/{attempt}"
        if group.group_rank == 0:
            served.append(TCPStore(group.master_addr, 0, is_master=True, wait_for_workers=False))
            group.store.set(key, str(served[-1].port))
        group.master_port = int(group.store.get(key))

    SimpleElasticAgent._rendezvous = rendezvous


if __name__ == "__main__":
    renew_stores()
    api._get_default_signal = lambda: signal.SIGHUP  # torch has no setting for it
    own = any(word.startswith("imgkit_entrypoints.apps.") for word in sys.argv)
    run_worker(quiet_main if own else main)
