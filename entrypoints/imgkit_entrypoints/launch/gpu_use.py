"""Measure how much a run uses its GPUs.

Each node agent reads the GPUs of its node, and the head's agent writes the result of all nodes. On each node,
one nvidia-smi prints a reading every ten seconds until the run ends. Starting nvidia-smi again for each
reading would take 50 to 100 ms of processor time, and seconds on a node with many GPUs. Calling NVML in the
node agent would be cheaper still. But if the driver hangs, such a call would block the process that has to
end the run.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Collection, Sequence
from typing import IO

from imgkit_entrypoints import json_text
from imgkit_entrypoints.facts.host_facts import Gpu
from imgkit_entrypoints.rollcall.messages import GpuUse

START_AFTER_S = 10.0
"""Seconds from the start of the program to the first reading. Until then, it only imports its libraries."""
WRITE_EVERY_S = 60.0
"""Seconds between two writes of the result. Each write is a load on a shared file system."""
# Seconds between two readings, for nvidia-smi's --loop.
_READ_EVERY_S = 10
# A line of nvidia-smi's output with the use in percent and the memory in MiB: "87, 61234". A GPU with MIG
# prints "[N/A], 61234", which is ignored.
_READING = re.compile(rb"(?P<percent>100|[0-9]{1,2}), (?P<memory_MiB>[0-9]{1,9})")
# Longest wait in seconds for nvidia-smi after KILL, since it may hang in the driver.
_END_S = 1.0


def query_argv(gpus: Sequence[Gpu]) -> list[str]:
    """Return the nvidia-smi command that prints the use and the memory of `gpus` every ten seconds.

    The command runs until it is killed. If `gpus` is empty, it prints the use of all GPUs that nvidia-smi
    finds.
    """
    argv = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    if gpus:
        argv.append(f"--id={','.join(gpu.address for gpu in gpus)}")
    return [*argv, f"--loop={_READ_EVERY_S}"]


class GpuMonitor:
    """Collects the readings of this node's GPUs, from `start` until `close`.

    Parameters
    ----------
    argv : the command from `query_argv`. If it is empty, the run uses no GPUs, and there are no readings.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._has_started = False
        self._output: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._partial_line = b""
        self._reading_count = 0
        self._percent_sum = 0
        self._peak_MiB = 0

    def start(self) -> None:
        """Start nvidia-smi in the background. Further calls do nothing.

        If the node has no nvidia-smi, nothing starts, and `read_use` returns None.
        """
        if self._has_started or not self._argv:
            return
        self._has_started = True
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self._output = self._process.stdout
            assert self._output is not None  # noqa: S101 - it is a pipe
            os.set_blocking(self._output.fileno(), False)  # `read_use` must not wait for the next reading

    def read_use(self) -> GpuUse | None:
        """Read the new output of nvidia-smi, and return the GPU use since the start.

        This does not wait. Return None if there are no new readings, or if nvidia-smi was not started. In the
        result, the percentage is the mean of all readings, and the memory is the highest reading of one GPU.
        """
        if self._output is None:
            return None
        output = self._output.read() or b""  # None: there is no new output
        # The text after the last line end is an incomplete line. It is completed in a later call.
        *lines, self._partial_line = (self._partial_line + output).split(b"\n")
        matches = [_READING.fullmatch(line) for line in lines]
        readings = [match for match in matches if match is not None]  # other lines are ignored
        if not readings:
            return None
        for reading in readings:
            self._reading_count += 1
            self._percent_sum += int(reading["percent"])
            self._peak_MiB = max(self._peak_MiB, int(reading["memory_MiB"]))
        return GpuUse(
            readings=self._reading_count,
            gpu_percent=self._percent_sum / self._reading_count,
            memory_MiB=float(self._peak_MiB),
        )

    def close(self) -> None:
        """End nvidia-smi, if it was started."""
        if self._process:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)


def combine_uses(uses: Collection[GpuUse]) -> GpuUse | None:
    """Return the combined GPU use of several nodes, or None if no node has any readings.

    The percentage is the mean of all readings. The memory is the highest use of any single GPU.
    """
    readings = sum(use.readings for use in uses)
    if not readings:
        return None
    # Weight the mean of each node by its number of readings.
    percent_sum = sum(use.gpu_percent * use.readings for use in uses)
    peak_MiB = max(use.memory_MiB for use in uses)
    return GpuUse(readings=readings, gpu_percent=percent_sum / readings, memory_MiB=peak_MiB)


def describe(use: GpuUse) -> str:
    """Return the use as text, such as ``GPUs 87 % in use on average, at most 59.8 GiB of memory``."""
    return (
        f"GPUs {use.gpu_percent:.0f} % in use on average, at most {use.memory_MiB / 1024:.1f} GiB of memory"
    )


def parse(text: str) -> GpuUse | None:
    """Return the use in the text of the file `stop_protocol.GPU_USE`, or None if the text is malformed."""
    try:
        use: GpuUse = json_text.build_value(GpuUse, json_text.parse(text), "GPU use")
    except ValueError:
        return None
    return use
