"""A STUB of torchrun for tests: real processes like its own, without torch.

``stub_torchrun.py N CODE`` starts N copies of the Python text CODE as torchrun does: each in a session of its
own, told LOCAL_RANK; it forwards HUP, QUIT and TERM as torchrun does, and maps every worker's failure to 1.
"""

import os
import signal
import subprocess
import sys

workers = []


def shut_down(number, _frame):
    for worker in workers:
        worker.send_signal(number)
    for worker in workers:
        worker.wait()
    sys.exit(1)


for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, shut_down)
for rank in range(int(sys.argv[1])):
    env = {**os.environ, "LOCAL_RANK": str(rank)}
    workers.append(subprocess.Popen([sys.executable, "-c", sys.argv[2]], env=env, start_new_session=True))
codes = [worker.wait() for worker in workers]
sys.exit(1 if any(codes) else 0)
