"""Give inputs to the readers in a process with little memory: a line with a target and a size, then the bytes.

It answers one line for each: ``ok``, ``refused``, or the fault as JSON. Steps are calls of functions; memory is
what the process may have above its start and the input.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import traceback
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent))

import targets

ROOM_BYTES = 64 << 20
STEPS, STEPS_PER_BYTE = 3_000_000, 400
"""A reader that walks in circles passes this in seconds."""


class _TooManyStepsError(BaseException):
    """No reader catches it."""


class _Steps:
    def __init__(self) -> None:
        self.remaining = 0

    def count(self, _frame: FrameType, _event: str, _argument: object) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            raise _TooManyStepsError


def _size_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def run(target: targets.Target, data: bytes, folder: Path, base_bytes: int, *, steps: _Steps) -> str:
    """Run one input; returns the answer."""
    limit = max(base_bytes, 0) + ROOM_BYTES + len(data)
    answer = "ok"
    if base_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    steps.remaining = STEPS + STEPS_PER_BYTE * len(data)
    sys.setprofile(steps.count)
    try:
        target.run(data, folder)
    except target.refusals:
        answer = "refused"
    except BaseException as error:
        sys.setprofile(None)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        last = traceback.extract_tb(error.__traceback__)[-12:]
        where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in last]
        answer = json.dumps({"error": type(error).__name__, "says": str(error)[:300], "where": where})
    finally:
        sys.setprofile(None)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return answer


def main() -> None:
    """Serve until the input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    steps, warm = _Steps(), set()
    base = 0
    memory_folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory_folder) as above:
        for line in source:
            name, size = line.split()
            data, target = source.read(int(size)), targets.by_name(name.decode())
            if target.name not in warm:
                # What a reader imports, opens and keeps on its first use counts as the start.
                warm.add(target.name)
                for seed in target.seeds():
                    run(target, seed, targets.empty_folder(Path(above)), 0, steps=steps)
                base = max(base, _size_bytes())
            answer = run(target, data, targets.empty_folder(Path(above)), base, steps=steps)
            sink.write(answer.encode() + b"\n")
            sink.flush()


if __name__ == "__main__":
    main()
