"""What is asked for (`Request`), what it comes to (`Job`), and what is submitted (`Script`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from imgkit_builder.delta.descriptor import Delta
from imgkit_builder.recipe.model import Recipe

PbsStart = Literal["pals", "pbsdsh", "ssh"]
Format = Literal["runai", "pytorchjob", "trainjob"]
RunBy = Literal["singularity", "docker", "host", "kubernetes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """A delta to lay over the image, and what it says of itself."""

    path: Path
    delta: Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The flags of ``imgkit job``; None and empty mean "as the recipe says"."""

    command: tuple[str, ...] = ()
    """``dist-...`` with its arguments."""
    nodes: str = ""
    """``N``, or ``MIN:MAX`` for an elastic run; without it one, or as many as `hosts`."""
    gpus: int | None = None
    """Of each node."""
    cpus: int | None = None
    """Of each node."""
    nproc: int | None = None
    """Processes on each node, where not one for each GPU."""
    time: str = ""
    account: str = ""
    queue: str = ""
    qos: str = ""
    image: str = ""
    overlay: Overlay | None = None
    name: str = ""
    binds: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    """``NAME=VALUE``."""
    options: tuple[str, ...] = ()
    """Further options for the scheduler, verbatim, one word each."""
    directory: Path = Path()
    stop_before_s: int | None = None
    """Seconds before the time limit at which the program is asked to save; 0 never."""
    interactive: bool = False
    archive: Path | None = None
    """Convert this archive to a .sif instead of running a command."""
    runtime: RunBy | None = None
    pbs_start: PbsStart = "pals"
    format: Format = "runai"
    pvcs: tuple[str, ...] = ()
    """``CLAIM:/PATH`` volumes of pods."""
    hosts: tuple[str, ...] = ()
    direct: bool = False
    """MPI: one rank for each GPU started by mpirun itself, without torchrun."""
    ssh: bool = False
    """MPI systems: started by ssh, without mpirun."""
    templates: Path | None = None
    """A folder whose templates come before the shipped ones."""
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request after all values were found and held against the system's limits."""

    recipe: Recipe
    request: Request
    command: tuple[str, ...]
    name: str
    min_nodes: int
    nodes: int
    gpus: int
    """Of each node."""
    cpus: int | None
    time: str
    """``HH:MM:SS``, or empty."""
    account: str
    queue: str
    qos: str
    image: str
    """Path of a .sif, an image reference, or without a container the virtual environment, if any."""
    overlay: str
    """Path of a delta over `image`; empty without."""
    run_by: RunBy
    binds: tuple[str, ...]
    env: Mapping[str, str]
    """Set for the program inside the container: as the user wrote it, and what tells of a delta."""
    settings: Mapping[str, str]
    """``IMGKIT_*`` variables for the launcher in the container."""
    directory: Path
    stop_before_s: int
    """0: the program is not asked to stop before the time limit."""
    warnings: tuple[str, ...] = field(default=())

    @property
    def elastic(self) -> bool:
        """Whether nodes may come and go."""
        return self.min_nodes != self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What would be submitted, exactly."""

    text: str
    submit: tuple[str, ...]
    """Words that submit it."""
    on_stdin: bool = False
    """Whether `submit` reads `text`; otherwise `text` is `submit` as a shell reads it, or its file."""
    foreground: bool = False
    """Whether `submit` is the run itself: its output is the run's, and no job id comes back."""
    remote: tuple[tuple[str, str], ...] = ()
    """Instead of `submit`: hosts, and for each the line that its shell runs; all are started by ssh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is kept of a submitted job, so that its id is enough to follow it."""

    id: str
    system: str
    """Module of ``systems`` that submitted it."""
    name: str
    recipe: str
    directory: Path
    queue: str = ""
    """Where it was submitted to; some systems find a job only by both."""
