"""How much a run uses its GPUs: each node agent reads its own, and the head's writes the result.

One nvidia-smi on each node prints a reading every ten seconds until the run ends. To start one for each
reading would take 50 to 100 ms of a processor, and seconds on a node with many GPUs. To call NVML in the node
agent would be cheaper still, but a driver that hangs would hold up the process that has to end the run then.
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
"""Time of the program before the first reading, in which it imports its libraries."""
WRITE_EVERY_S = 60.0
"""Time between two writes of the result during a run: each is a burden for a shared file system."""
_READ_EVERY_S = 10
_READING = re.compile(rb"(100|[0-9]{1,2}), ([0-9]{1,9})")
"""A line of the query: ``87, 61234``. A GPU with MIG prints ``[N/A], 61234``, which does not count."""
_END_S = 1.0
"""Longest wait for nvidia-smi after KILL, since it may hang in the driver."""


def query_argv(gpus: Sequence[Gpu]) -> list[str]:
    """Return the command that prints use and memory of `gpus` for ever; without any, of all that it sees."""
    argv = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    if gpus:
        argv.append(f"--id={','.join(gpu.address for gpu in gpus)}")
    return [*argv, f"--loop={_READ_EVERY_S}"]


class GpuMonitor:
    """Adds up the readings of this node's GPUs, from `start` to `close`.

    Parameters
    ----------
    argv : the command of `query_argv`; empty: the run uses no GPUs.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = argv
        self._output: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._partial_line = b""
        self._readings = self._percent_sum = self._peak_MiB = 0

    def start(self) -> None:
        """Start nvidia-smi at the first call. A node without it has no readings."""
        argv, self._argv = self._argv, ()
        if not argv:
            return
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self._output = self._process.stdout
            assert self._output is not None  # noqa: S101 - it is a pipe
            os.set_blocking(self._output.fileno(), False)

    def read(self) -> GpuUse | None:
        """Take in what nvidia-smi has printed, and return the use until now; None if there is nothing new."""
        if self._output is None:
            return None
        data = self._output.read() or b""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        matches = [match for match in map(_READING.fullmatch, lines) if match]
        for match in matches:
            self._readings += 1
            self._percent_sum += int(match[1])
            self._peak_MiB = max(self._peak_MiB, int(match[2]))
        if not matches:
            return None
        return GpuUse(
            readings=self._readings,
            gpu_percent=self._percent_sum / self._readings,
            memory_MiB=float(self._peak_MiB),
        )

    def close(self) -> None:
        """End nvidia-smi."""
        if self._process:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)


def combine(uses: Collection[GpuUse]) -> GpuUse | None:
    """Return the use of several nodes together; None if no node has read anything."""
    readings = sum(use.readings for use in uses)
    if not readings:
        return None
    percent_sum = sum(use.gpu_percent * use.readings for use in uses)
    peak_MiB = max(use.memory_MiB for use in uses)
    return GpuUse(readings=readings, gpu_percent=percent_sum / readings, memory_MiB=peak_MiB)


def describe(use: GpuUse) -> str:
    """Return the use as people read it."""
    return (
        f"GPUs {use.gpu_percent:.0f} % in use on average, at most {use.memory_MiB / 1024:.1f} GiB of memory"
    )


def parse(text: str) -> GpuUse | None:
    """Return the use in the text of a run folder's `stop_protocol.GPU_USE`; None if it is another text."""
    try:
        use: GpuUse = json_text.build_value(GpuUse, json_text.parse(text), "GPU use")
    except ValueError:
        return None
    return use
