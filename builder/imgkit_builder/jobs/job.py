"""A job as it is resolved: every value found and checked, and the script that submits it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from imgkit_builder.jobs.request import Flags, JobRequest
from imgkit_entrypoints.schedulers.placement import Size

if TYPE_CHECKING:
    from imgkit_builder.recipe.targets import Target

Argv = tuple[str, ...]
"""A command with its arguments, or some of them."""
RuntimeKind = Literal["singularity", "docker", "pyxis", "host", "kubernetes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRecord:
    """What is kept about the code of a run."""

    sha256: str
    """Digest of the code, which is the name of its folder."""
    git: str
    """``git describe --always --dirty`` of its folder; empty where git does not know that."""
    uncommitted: bool
    """Whether no commit holds exactly this code."""

    @property
    def text(self) -> str:
        """The content of ``code.json`` in the run folder."""
        return json.dumps({"schema": 1, **dataclasses.asdict(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundEntryPoints:
    """imgkit's entry points for an image without them, and where they are bound in it."""

    version: str
    """Version of imgkit."""
    folder: str
    """Path on the nodes of the folder with the package and ``system.json``."""
    python: str
    """Path of the Python in the image."""
    site: str
    """The folder of the image that this Python searches for packages."""
    digest: str
    """What `imgkit_builder.jobs.bound` has seen of the image; empty where nothing stands for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What the scheduler gives to a job, checked against the system's limits."""

    size: Size = field(default_factory=lambda: Size(training=1))
    """Nodes that train, and spares."""
    gpus: int = 0
    """GPUs per node."""
    cpus: int | None = None
    """CPUs per node."""
    time: str
    """``HH:MM:SS``, or empty."""
    account: str
    queue: str
    qos: str
    stop_before_s: int = 0
    """Seconds before the time limit at which the program is asked to save; 0: never."""

    @property
    def nodes(self) -> int:
        """Nodes on which the command starts, spares among them."""
        return self.size.started


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What starts a job's command, and what the command finds there."""

    image: str
    """Path of a .sif, an image reference, or without a container the virtual environment, if any."""
    runtime: RuntimeKind
    binds: tuple[str, ...] = ()
    workdir: str = ""
    """Folder of the container in which the command starts; empty: that of the job."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set inside the container: the user's own, and the digest of the code."""
    names: tuple[str, ...] = ()
    """Further variables of the user: their values are in no text, but where the job is submitted."""
    env_file: str = ""
    """Path of a file with more of them; empty if there is none."""
    code: CodeRecord | None = None
    """The code over the image; None if there is none."""
    code_folder: str = ""
    """Path on the nodes of the folder that holds it."""
    bound: BoundEntryPoints | None = None
    """The entry points, where the image has none; None: it has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job: every value found and checked; it runs a command, or makes the .sif of `container`."""

    recipe: Target
    request: JobRequest
    system: str
    """Name of the system that takes the job: the recipe's scheduler, or ``kubeflow`` for ``--format``."""
    name: str
    directory: Path
    allocation: Allocation
    container: Container
    command: Argv = ()
    """Empty for a shell."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """``IMGKIT_*`` variables for the node agent in the container."""
    warnings: tuple[str, ...] = ()

    @property
    def makes_image(self) -> bool:
        """Whether `command` makes the image, and does not run in it."""
        return bool(self.request.image_flag)

    @property
    def runs_entry_point(self) -> bool:
        """Whether `command` is one of imgkit, ``dist-...``; any other runs in any image."""
        return bool(self.command) and self.command[0].startswith("dist-")

    @property
    def is_interactive(self) -> bool:
        """Whether the user works in the nodes by hand, in a shell."""
        return self.request.launch.interactive

    @property
    def title(self) -> str:
        """The job's name in the queue and in the name of its output."""
        return f"{self.name}-sif" if self.makes_image else self.name

    @property
    def outlives_nodes(self) -> bool:
        """Whether the node agents go on when a node is lost: nothing may end them for it."""
        return self.allocation.size.spares > 0 and self.request.launch.max_failures != 0

    @property
    def makes_secret(self) -> bool:
        """Whether each start makes a secret for its nodes, because the user names none."""
        return self.allocation.nodes > 1 and self.request.launch.secret_file is None

    def with_allocation(self, **values: Any) -> Job:
        """Return this job with other values of its allocation."""
        return dataclasses.replace(self, allocation=dataclasses.replace(self.allocation, **values))

    def with_container(self, **values: Any) -> Job:
        """Return this job with other values of its container."""
        return dataclasses.replace(self, container=dataclasses.replace(self.container, **values))

    def flags(self, kind: type[Flags]) -> Flags:
        """The flags that only the job's system has; `kind` is the class that declares them."""
        return self.request.flags(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentInput:
    """What each command on another host reads first from its standard input, because no text may hold it."""

    secret: bool = False
    """A new secret of the run, which the command reads from its own standard input: it is a node agent."""
    names: tuple[str, ...] = ()
    """Variables for the command, with their values here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The exact text and words of a submission."""

    text: str
    submit: Argv
    """The words that submit it."""
    on_stdin: bool = False
    """Whether `submit` reads `text`; otherwise `text` is `submit` as a shell reads it, or its file."""
    foreground: bool = False
    """Whether `submit` is the run itself: its output is the run's, and no job id comes back."""
    remote: tuple[tuple[str, str], ...] = ()
    """Hosts, and the line for the shell of each; ssh starts all of them, and `submit` is not used."""
    sent: SentInput = SentInput()
    """What each of them reads first."""
    head_decides: bool = False
    """Whether the run is over when the first host's line is, and not when that of any host fails."""
    kind: str = ""
    """What the scheduler calls this kind of job, where it finds a job only by that."""
    is_array: bool = False
    """Whether the job is an array of tasks, each with an id, a run folder and an output of its own."""
