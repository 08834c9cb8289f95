"""The values that a command line asks of a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from imgkit_entrypoints.schedulers.placement import Placement, Wanted

FAILURES = 3
"""Failures that a run with a range or spares survives where the user gives no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The processes that the user wants on this node; ``auto`` leaves a value to the plan."""

    nproc: str = "auto"
    device: str = "auto"
    max_failures: int | None = None
    """Failures that the run survives by a new attempt; None: `FAILURES` with a range or spares, else 0."""
    start: str = "auto"
    """Whether the workers are forks of torchrun (fork) or interpreters of their own (exec)."""
    log_dir: str | None = None
    prefix: bool = True
    """Each line of output bears ``[host:rank]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds that the supervisor waits."""

    grace_s: float = 60.0
    """Time from a stop request to the end by force."""
    rollcall_s: float = 120.0
    """Time in which all nodes must call, and longest time of torchrun's rendezvous."""
    hang_after_s: float = 60.0
    """Time after which a worker that does not move is reported; 0: never."""
    lost_after_s: float = 30.0
    """Silence after which a node counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The launch's part of a command line."""

    wanted: Wanted
    request: Request
    timeouts: Timeouts
    show_plan: bool
    network_test: bool = True
    """The nodes test the network between them before torchrun starts."""
    secret_file: str | None = None
    """The file that the user or the job script names; ``-`` is standard input."""
    require_secret: bool = False
    """Several nodes do not start without a secret."""
    preflight: str = ""
    """How the nodes are measured before the start, one of `messages.MODES`; empty: not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """An app that may be launched several times, with other arguments or variables each time."""

    words: tuple[str, ...]
    """The app's own arguments; those of the launch are in `asked`."""
    command: tuple[str, ...]
    """Every word that the user typed."""
    asked: LaunchOptions
    place: Placement
    env: Mapping[str, str]
    launch: Callable[[Sequence[str], Mapping[str, str]], int]
    """Launches the app once with the given arguments and added variables; the exit code of this node."""
    say: Callable[[str], None]
