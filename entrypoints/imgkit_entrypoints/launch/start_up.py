"""Measure the parts of a start, from the start of the job to the first step, and report torchrun's phases.

The node agent measures the first parts and passes them to the workers in a variable. dist-train measures the
rest. All times are of `time.monotonic`, which is the same clock for all processes of a node.

In torchrun's rendezvous, nodes wait for each other's keys in torch's store. Anyone who can reach the store's
port can delete these keys (SECURITY.md), and torchrun would then wait for 15 minutes. So each torchrun writes
its phase into the stop folder, and the heartbeats carry the phase to the head. The head ends a rendezvous
that takes too long (attempts.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.arguments import parse_digits
from imgkit_entrypoints.launch import stop_protocol
from imgkit_entrypoints.launch.stop_protocol import RunFolder
from imgkit_entrypoints.launch.watchdog import read_stat
from imgkit_entrypoints.rollcall.messages import PHASES, RENDEZVOUS, STARTING, WORKERS

VARIABLE = "IMGKIT_START_UP"
"""Variable with the time at which the last part ended, and the seconds of each part.

An example is ``8123.500 container=3.200 ...``.
"""
FIRST_ATTEMPT = "IMGKIT_FIRST_ATTEMPT"
"""Variable with the time at which the first attempt of this start began on the node.

The value is the same in all attempts.
"""


class StartUp:
    """The seconds of each part of a start, in order. Each part begins when the previous one ends."""

    def __init__(self, end_s: float, parts: Mapping[str, float] | None = None) -> None:
        self.parts = dict(parts or {})
        self._last_end_s = end_s
        """End of the last part, or the beginning of the start, on the monotonic clock."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> StartUp:
        """Return how long each part of the start has taken until the start of this worker.

        The node agent has measured the first parts. This method adds the part ``torchrun``, from the start of
        torchrun until this process has started. Without a node agent, nothing was measured, so the result has
        no parts. `env` is the environment of the worker, in which `VARIABLE` contains the first parts.
        """
        worker_start_s = process_start_s()
        try:
            end_s, *entries = env[VARIABLE].split()  # "8123.500 container=3.200 node_agent=0.400"
            parts = {}
            for entry in entries:
                name, _, seconds = entry.partition("=")
                parts[name] = float(seconds)
            start_up = cls(float(end_s), parts)
        except (KeyError, ValueError):  # there is no node agent, or the variable is not imgkit's
            return cls(worker_start_s)
        start_up.record("torchrun", worker_start_s)
        return start_up

    def record(self, name: str, end_s: float | None = None) -> None:
        """Record that the part `name` lasted from the end of the previous part until `end_s`.

        `end_s` is on the monotonic clock, and None means now. If the part was recorded before, its time grows
        by the new time.
        """
        if end_s is None:
            end_s = time.monotonic()
        self.parts[name] = self.parts.get(name, 0.0) + max(0.0, end_s - self._last_end_s)
        self._last_end_s = max(self._last_end_s, end_s)

    def variables(self, first_attempt_s: float) -> dict[str, str]:
        """Return variables that pass the parts, and the time of the first attempt, to the workers."""
        fields = [f"{self._last_end_s:.3f}"]
        for name, seconds in self.parts.items():
            fields.append(f"{name}={seconds:.3f}")
        return {VARIABLE: " ".join(fields), FIRST_ATTEMPT: f"{first_attempt_s:.3f}"}


def first_attempt_s(env: Mapping[str, str]) -> float:
    """Return when the first attempt began, on the monotonic clock.

    Without a node agent, return the current time.
    """
    try:
        return min(float(env[FIRST_ATTEMPT]), time.monotonic())
    except (KeyError, ValueError):  # there is no node agent, or the variable is not imgkit's
        return time.monotonic()


# 400 days in seconds. A job cannot be older, so an earlier start time is wrong.
LONGEST_S = 400 * 86400


def start_time_s(env: Mapping[str, str], folder: RunFolder | None) -> float:
    """Return when this start of the run began, on the monotonic clock.

    For a run with a folder and a Slurm job, that is the start of the job. If the job starts the run a second
    time, it is the time at which the previous start last wrote to the folder. In all other cases, it is the
    start of this process: an interactive allocation begins long before the commands in it.
    """
    own_start_s = process_start_s()
    job_start_epoch_s = parse_digits(env.get("SLURM_JOB_START_TIME", ""))
    if folder is None or job_start_epoch_s is None:
        return own_start_s
    # `last_change_epoch_s` is 0 if the job starts the run for the first time.
    start_epoch_s = max(float(job_start_epoch_s), folder.last_change_epoch_s())
    # The monotonic clock does not count from the epoch, so the time is converted by its age.
    age_s = time.time() - start_epoch_s
    if not 0 <= age_s <= LONGEST_S:  # impossible, so a clock was set wrongly
        return own_start_s
    return min(own_start_s, time.monotonic() - age_s)


def process_start_s() -> float:
    """Return when this process began, on the monotonic clock.

    For a forked process, that is the time of the fork.
    """
    # The start is in clock ticks since boot, on a clock that also runs while the machine sleeps.
    start_ticks = int(read_stat("self")["starttime"])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


@contextlib.contextmanager
def rendezvous(env: Mapping[str, str]) -> Iterator[None]:
    """Report to the node agent that torchrun is in its rendezvous, in which all nodes meet.

    Use this as a context around the rendezvous. At the end of the context, torchrun is reported to be past
    it. If the rendezvous raises an error, nothing more is reported.
    """
    write_phase(env, RENDEZVOUS)
    yield
    write_phase(env, WORKERS)


def write_phase(env: Mapping[str, str], phase: str) -> None:
    """Write the phase of this node's torchrun, one of `messages.PHASES`, for the node agent.

    Without a node agent, do nothing. If the file cannot be written, the head does not limit the time of the
    start.
    """
    with contextlib.suppress(KeyError, OSError):
        files.write_file(Path(env["IMGKIT_STOP_DIR"]) / stop_protocol.PHASE, phase)


def read_phase(stop_folder: Path) -> str:
    """Return the phase of this node's torchrun. It is `STARTING` as long as torchrun has not written any."""
    try:
        phase = files.read_own(stop_folder / stop_protocol.PHASE)
    except (OSError, UnicodeDecodeError):
        return STARTING
    return phase if phase in PHASES else STARTING
