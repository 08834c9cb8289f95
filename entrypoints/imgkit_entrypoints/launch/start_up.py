"""The time from a job's start to its first step, in parts that follow each other, and the part that may hang.

The node agent measures the first parts and hands them to the workers by a variable; dist-train goes on. All
instants are those of `time.monotonic`, one clock for all processes of a node.

In torchrun's rendezvous, nodes wait for each other's keys in torch's store. Everybody who reaches its port
can delete them (SECURITY.md), and torchrun would wait for 15 minutes. So each torchrun notes in the stop
folder how far it is, the beats of the roll call carry that to the head, and the head ends a rendezvous that
takes too long (attempts.py).
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
from imgkit_entrypoints.rollcall.messages import PHASES, RENDEZVOUS, STARTING, WORKERS

VARIABLE = "IMGKIT_START_UP"
FIRST_ATTEMPT = "IMGKIT_FIRST_ATTEMPT"
"""The instant at which this start's first attempt began on the worker's node, also in later attempts."""


class StartUp:
    """Seconds by the name of the part, in order. The next part begins where the last one ended."""

    def __init__(self, at_s: float, parts: Mapping[str, float] | None = None) -> None:
        self.parts = dict(parts or {})
        self._at_s = at_s

    @classmethod
    def of_worker(cls, env: Mapping[str, str]) -> StartUp:
        """Go on where the node agent that started this worker has stopped; begin here if there was none."""
        began_s = process_began_s()
        try:
            at_s, *entries = env[VARIABLE].split()
            parts = {name: float(value) for name, _, value in (entry.partition("=") for entry in entries)}
            start = cls(float(at_s), parts)
        except (KeyError, ValueError):  # no node agent, or somebody else's variable
            return cls(began_s)
        start.ends("torchrun", began_s)
        return start

    def ends(self, name: str, at_s: float | None = None) -> None:
        """Count the time since the last call to part `name`; it ends at `at_s`, by default now."""
        now_s = time.monotonic() if at_s is None else at_s
        self.parts[name] = self.parts.get(name, 0.0) + max(0.0, now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)

    def text(self) -> str:
        """Return the value of `VARIABLE`."""
        return " ".join((f"{self._at_s:.3f}", *(f"{name}={value:.3f}" for name, value in self.parts.items())))


def first_attempt_s(env: Mapping[str, str]) -> float:
    """Return when the first attempt began; now, if no node agent has started this worker."""
    try:
        return min(float(env[FIRST_ATTEMPT]), time.monotonic())
    except (KeyError, ValueError):  # or somebody else's variable
        return time.monotonic()


LONGEST_S = 400 * 86400
"""No job is older."""


def start_began_s(env: Mapping[str, str], folder: RunFolder | None) -> float:
    """Return when this start began: with its job where Slurm says when, else with this process.

    The job's time counts only in a run's folder: an interactive allocation has begun long before the commands
    in it. A later start of one job begins when the earlier one has last written to the folder.
    """
    process_s = process_began_s()
    job_s = parse_digits(env.get("SLURM_JOB_START_TIME", ""))
    if folder is None or job_s is None:
        return process_s
    age_s = time.time() - max(float(job_s), folder.last_change_s())
    return min(process_s, time.monotonic() - age_s) if 0 <= age_s <= LONGEST_S else process_s


def process_began_s() -> float:
    """Return when this process began; a fork begins with the fork."""
    ticks = int(
        Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    )  # proc_pid_stat(5): starttime
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


@contextlib.contextmanager
def rendezvous(env: Mapping[str, str]) -> Iterator[None]:
    """Note for the node agent when torchrun of this node is in its rendezvous, and when it is past it."""
    note(env, RENDEZVOUS)
    yield
    note(env, WORKERS)


def note(env: Mapping[str, str], phase: str) -> None:
    """Note for the node agent how far torchrun of this node is (`messages.PHASES`)."""
    with contextlib.suppress(KeyError, OSError):  # without a note, nobody ends the start
        files.write_file(Path(env["IMGKIT_STOP_DIR"]) / stop_protocol.PHASE, phase)


def read_phase(stop_folder: Path) -> str:
    """Return how far torchrun of this node is."""
    try:
        phase = files.read_own(stop_folder / stop_protocol.PHASE)
    except (OSError, UnicodeDecodeError):
        return STARTING
    return phase if phase in PHASES else STARTING
