"""A ProxyCommand that loses its connection: the Nth connection ends after the Nth number of bytes in a file.

``cut_proxy.py PORT FILE``; connections behind the last number are never cut.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import sys
from pathlib import Path


def limit(file: Path) -> int:
    """Take the first number out of the file; a very large one if there is none."""
    with file.open("r+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        first, *rest = stream.read().split() or ["1000000000000"]
        stream.seek(0)
        stream.truncate()
        stream.write(" ".join(rest))
    return int(first)


def main() -> None:
    port, file = int(sys.argv[1]), Path(sys.argv[2])
    remaining = limit(file)
    far = socket.create_connection(("127.0.0.1", port))
    passed = file.with_suffix(".passed")
    while remaining > 0:
        for source in select.select([0, far], [], [])[0]:
            data = os.read(0, 1 << 16) if source == 0 else far.recv(1 << 16)
            if not data:
                return
            remaining -= len(data)
            if source == 0:
                with passed.open("a") as stream:
                    stream.write(f"{len(data)}\n")
            if source == 0:
                far.sendall(data)
            else:
                os.write(1, data)


if __name__ == "__main__":
    main()
