"""Many clients of torch's own store at once, as the agents of many nodes are; rows for docs/benchmarks.md.

    PYTHON tests/benchmarks/rollcall/store.py [--clients N ...]

PYTHON has torch; imgkit is not needed. A simulation: the server is a process of its own, and one further
process holds all clients, a thread for each. Each client connects, sets a key and waits for a common one,
which the last client sets: torchrun's agents do so before their workers start.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.distributed import TCPStore

HERE = "127.0.0.1"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="*", default=[64, 256, 1000])
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(
        f"Simulation. torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    )
    print("| clients | all connected s | all keys set and read s | CPU of the server s |\n|---|---|---|---|")
    for clients in options.clients:
        print(once(clients), flush=True)


def once(clients: int) -> str:
    """One run, as a row of the table."""
    reader, writer = os.pipe()
    server = os.fork()
    if not server:
        store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        signal.pause()
    try:
        port = int(os.read(reader, 10))
        connected, finished = threading.Barrier(clients + 1), threading.Barrier(clients + 1)
        threads = [
            threading.Thread(target=client, args=(port, rank, clients, connected, finished), daemon=True)
            for rank in range(clients)
        ]
        start_s = time.perf_counter()
        for thread in threads:
            thread.start()
        connected.wait(timeout=300)
        met = time.perf_counter()
        finished.wait(timeout=300)
        end = time.perf_counter()
        used = int(Path(f"/proc/{server}/schedstat").read_text().split()[0]) / 1e9
        for task in Path(f"/proc/{server}/task").iterdir():  # the store serves in a thread
            if task.name != str(server):
                used += int((task / "schedstat").read_text().split()[0]) / 1e9
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    return f"| {clients:,} | {met - start_s:.2f} | {end - met:.2f} | {used:.2f} |"


def client(
    port: int, rank: int, clients: int, connected: threading.Barrier, finished: threading.Barrier
) -> None:
    """One client."""
    store = TCPStore(HERE, port, wait_for_workers=False, timeout=datetime.timedelta(seconds=300))
    connected.wait()
    store.set(f"rank{rank}", str(rank))
    if store.add("count", 1) == clients:
        store.set("all", "1")
    store.wait(["all"])
    finished.wait()


if __name__ == "__main__":
    sys.exit(main())
