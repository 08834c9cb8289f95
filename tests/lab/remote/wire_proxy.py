"""A ProxyCommand with the speed of a wire: ``wire_proxy.py MBIT_PER_S ROUND_TRIP_MS COUNTS COMMAND...``

COMMAND stands for the far end: it speaks SSH on its standard input and output. Each direction carries
MBIT_PER_S and has half the delay. The file COUNTS holds the bytes sent and received so far. What a real wire
has and this one does not: lost packets, and TCP's slow start.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

PIECE_BYTES = 1 << 14
AHEAD_S = 0.1
"""What the sender's buffers hold: this long, at the speed of the wire."""


def carry(source: int, target: int, counted: list[int], at: int, counts: Path) -> None:
    """Move bytes from one file descriptor to another, until the end of the source."""
    byte_s, delay_s = 8e-6 / float(sys.argv[1]), float(sys.argv[2]) / 2000
    under_way: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def read() -> None:
        free_s = time.monotonic()
        while True:
            time.sleep(max(0.0, free_s - AHEAD_S - time.monotonic()))
            data = os.read(source, PIECE_BYTES)
            free_s = max(free_s, time.monotonic()) + len(data) * byte_s
            under_way.put((free_s + delay_s, data))
            if not data:
                return

    threading.Thread(target=read, daemon=True).start()
    while True:
        due_s, data = under_way.get()
        time.sleep(max(0.0, due_s - time.monotonic()))
        if not data:
            os.close(target)
            return
        counted[at] += len(data)
        counts.write_text(f"{counted[0]} {counted[1]}\n")
        while data:
            data = data[os.write(target, data) :]


def main() -> None:
    counts, counted = Path(sys.argv[3]), [0, 0]
    far = subprocess.Popen(sys.argv[4:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    sink = os.dup(far.stdin.fileno())
    far.stdin.close()
    threading.Thread(target=carry, args=(0, sink, counted, 0, counts), daemon=True).start()
    carry(far.stdout.fileno(), 1, counted, 1, counts)
    far.wait()


if __name__ == "__main__":
    main()
