"""torchrun itself, started by the launcher with two things changed.

It ends the remaining workers of a failed or restarting group by HUP: TERM is blocked in them or does nothing,
since schedulers send it to every process, and torchrun would wait 30 s before KILL. And after success it
leaves without taking its interpreter apart, which costs 0.4 s with torch in it.
"""

from __future__ import annotations

import signal

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.run import main

from imgkit_entrypoints.apps.ranks import run_worker

if __name__ == "__main__":
    api._get_default_signal = lambda: signal.SIGHUP  # torch has no setting for it
    run_worker(main)
