"""Requests, the job that each becomes, the `Script` to submit, and the `SubmittedJob` to follow.

Fields declare the flags of ``imgkit run`` (`flag`); a scheduler declares its own in a class of the same kind.
``cli/job_flags.py`` turns them into options.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from imgkit_builder.job.ssh import fanout
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.schedulers.placement import Size

if TYPE_CHECKING:
    from imgkit_builder.recipe.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag, as its field declares it."""

    field: str
    names: tuple[str, ...]
    """``--account``, then short forms: ``-A``."""
    type: Any
    """The field's type: str, int, bool, Path or a Literal, also with ``| None``. A flag of the type
    ``tuple[str, ...]`` can be repeated.
    """
    default: Any
    metavar: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFlags:
    """Base of the flags that only one system has; by itself, the flags of a system without any."""

    @property
    def default_nodes(self) -> int:
        """Number of nodes of a job without ``--nodes``."""
        return 1

    @property
    def system(self) -> str:
        """Name of another system that takes the job because of a flag; empty: none does."""
        return ""


def flag(default: Any, *names: str, help: str, metavar: str = "") -> Any:
    """A dataclass field that is a flag.

    Parameters
    ----------
    default : also decides whether the flag was given.
    names : the flag's words; default: ``--`` and the field's name.
    help : one line of ``imgkit run --help``.
    metavar : the value's name in ``--help``.
    """
    return field(default=default, metadata={"names": names, "help": help, "metavar": metavar})


def declared(owner: type[Any]) -> tuple[Flag, ...]:
    """The flags that dataclass `owner` declares, in order."""
    types = typing.get_type_hints(owner)  # noqa: TID251 - makes options of them
    return tuple(
        Flag(
            field=item.name,
            names=item.metadata["names"] or (f"--{item.name.replace('_', '-')}",),
            type=types[item.name],
            default=item.default,
            metavar=item.metadata["metavar"],
            help=item.metadata["help"],
        )
        for item in dataclasses.fields(owner)
        if "help" in item.metadata
    )


def flags_in(flags: Any) -> tuple[str, ...]:
    """The flags in `flags` that differ from their defaults, by their first name."""
    return tuple(
        flag_spec.names[0]
        for flag_spec in declared(type(flags))
        if getattr(flags, flag_spec.field) != flag_spec.default
    )


RuntimeName = Literal["singularity", "docker", "pyxis", "host"]
RunBy = Literal["singularity", "docker", "pyxis", "host", "kubernetes"]
Flags = TypeVar("Flags", bound=SystemFlags)


# Without slots: a class cannot have several bases with slots.
@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What every job requests of its scheduler; None and empty mean "as in the recipe"."""

    time: str = flag("", metavar="HH:MM:SS", help="Time limit, for example 00:30:00, 90m or 2h.")
    account: str = flag("", "--account", "-A", help="Account or project to charge.")
    queue: str = flag("", "--queue", "-q", help="Queue, partition or RunAI project.")
    qos: str = flag("", help="Quality of service (Slurm).")
    image: str = flag(
        "",
        metavar="PATH|REF",
        help="Image to run, also one that imgkit did not build (default: RECIPE.sif here, or RECIPE:latest); "
        "for imgkit run, its path on the remote.",
    )
    name: str = flag("", help="Job name (default: the recipe's name).")
    options: tuple[str, ...] = flag(
        (), "--option", metavar="WORD", help="Additional scheduler option, passed through unchanged."
    )
    directory: Path = flag(Path(), metavar="DIR", help="Folder in which the job runs.")
    templates: Path | None = flag(
        None, metavar="DIR", help="Folder of custom templates; they replace the shipped ones."
    )
    project: Mapping[str, str] = field(default_factory=dict)
    """Where the imgkit.toml below the flags states each key, and "" its name; empty without such a file."""
    system_flags: tuple[SystemFlags, ...] = ()
    """Flags of single systems that were given: a value of each system's `flags` class."""


@dataclass(frozen=True, kw_only=True)
class NodeRequest:
    """How many nodes and processes run the command, and how they start and stop."""

    nodes: str = flag(
        "",
        metavar="N|N+S",
        help="Number of nodes (default: 1, or all --hosts). 16+1 takes 17 nodes, one as a spare for a node "
        "that is lost.",
    )
    max_failures: int | None = flag(
        None,
        metavar="K",
        help="Failures (lost nodes or workers) to survive before the run is aborted (default: 3 with spares, "
        "else 0).",
    )
    gpus: int | None = flag(None, metavar="G", help="GPUs per node (default: all).")
    cpus: int | None = flag(None, metavar="C", help="CPUs per node.")
    preflight: bool = flag(
        False, help="Measure all nodes first, for a minute at most, and start without outliers or not at all."
    )
    nproc: int | None = flag(None, metavar="N", help="Processes per node (default: one per GPU).")
    stop_before_s: int | None = flag(
        None,
        "--stop-before",
        metavar="SECONDS",
        help="Ask the program to save this long before the time limit (Slurm); 0: never.",
    )
    interactive: bool = flag(False, "--interactive", "-i", help="Allocate nodes for interactive work.")
    secret_file: Path | None = flag(
        None,
        metavar="FILE",
        help="Shared secret by which nodes authenticate each other, at this path on all of them (default: "
        "the job creates a new one at each start).",
    )
    require_secret: bool = flag(False, help="Refuse multi-node runs without a shared secret.")


@dataclass(frozen=True, kw_only=True)
class ContainerRequest:
    """What the command finds in its container."""

    code: Path | None = flag(
        None, metavar="DIR", help="Folder of code to mount over /workspace of the image, without a build."
    )
    no_code: bool = flag(False, help="Do not mount code, even if imgkit.toml sets it.")
    allow: tuple[str, ...] = flag(
        (), metavar="NAME", help="With --code: ship this file even though its name looks like a secret."
    )
    yes: bool = flag(False, help="With --code: do not ask for confirmation above 100 MB.")
    workdir: str = flag(
        "",
        metavar="/DIR",
        help="Folder of the container in which the command starts (default: the recipe's image.workdir, or "
        "/workspace with --code, else the job's folder); .: the job's folder.",
    )
    binds: tuple[str, ...] = flag(
        (), "--bind", metavar="/SRC[:/DEST[:ro]]", help="Folder to mount into the container."
    )
    env: tuple[str, ...] = flag(
        (),
        metavar="NAME[=VALUE]",
        help="Environment variable for the program. NAME alone takes the value from here "
        "and shows it nowhere.",
    )
    env_file: Path | None = flag(
        None,
        metavar="FILE",
        help="Private file with lines NAME=VALUE, at this path on all nodes, which read it at the start.",
    )
    runtime: RuntimeName | None = flag(
        None, help="What starts the program (default: the recipe's runtime); host: no container."
    )
    python: str = flag(
        "",
        metavar="PATH",
        help="Python of an image that imgkit did not build (default: its python3); imgkit binds its entry "
        "points there.",
    )
    activate: str = flag(
        "",
        metavar="COMMAND",
        help="Command of bash that activates an environment of such an image first, for example "
        "'source /opt/venv/bin/activate' or '$WITH_CONDA'.",
    )


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """The .sif that a job makes instead of running a command; `Allocation.image` names the file."""

    archive: Path | None = flag(
        None, "--sif", metavar="ARCHIVE", help="Submit a job that converts ARCHIVE to a .sif."
    )
    build: str = flag(
        "",
        metavar="RECIPE|FILE",
        help="Submit a job that builds a recipe's .sif without Docker (imgkit build --with apptainer).",
    )
    base_from: Path | None = flag(
        None,
        metavar="PATH",
        help="With --build: an archive, an OCI folder or a .sif of the base (default: its registry).",
    )

    @property
    def image_flag(self) -> str:
        """The flag by which the job makes a .sif; empty: it runs a command."""
        if self.archive is not None:
            return "--sif"
        return "--build" if self.build else ""


@dataclass(frozen=True, kw_only=True)
class Request(ImageRequest, ContainerRequest, Allocation, NodeRequest):
    """A job that runs a command on its nodes, or makes a .sif."""

    command: tuple[str, ...] = ()
    """``dist-...`` with its arguments."""

    def flags(self, kind: type[Flags]) -> Flags:
        """The flags that only one system has; `kind` is the class that declares them."""
        return next((flags for flags in self.system_flags if isinstance(flags, kind)), kind())


def refuse_mixed(request: Request) -> None:
    """Raise UsageError for a flag of another kind of job than the one that `request` asks for."""
    where = request.image_flag
    if request.base_from is not None and where != "--build":
        raise UsageError("--base-from without --build", where="--base-from", hint="--build RECIPE")
    if not where:
        return
    shared = {name for item in declared(Allocation) for name in item.names} | {where, "--base-from"}
    excess = [name for name in flags_in(request) if name not in shared]
    excess += [f"the command {program}" for program in request.command[:1]]
    if excess:
        message, hint = f"{where} cannot be combined with {excess[0]}", "use only one of them"
        raise UsageError(message, where=where, hint=hint)


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
    """What `imgkit_builder.job.bound` has seen of the image; empty where nothing stands for it."""


@dataclass(frozen=True, kw_only=True)
class Grant:
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


@dataclass(frozen=True, kw_only=True)
class Container:
    """What starts a job's command, and what the command finds there."""

    image: str
    """Path of a .sif, an image reference, or without a container the virtual environment, if any."""
    run_by: RunBy
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


@dataclass(frozen=True, kw_only=True)
class Job(Container, Grant):
    """A job: every value found and checked; it runs a command, or makes the .sif `image`."""

    recipe: Target
    request: Request
    system: str
    """Name of the system that takes the job: the recipe's scheduler, or ``kubeflow`` for ``--format``."""
    name: str
    directory: Path
    command: tuple[str, ...] = ()
    """Empty for a shell."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """``IMGKIT_*`` variables for the node agent in the container."""
    warnings: tuple[str, ...] = ()

    @property
    def makes_image(self) -> bool:
        """Whether `command` makes `image`, and does not run in it."""
        return bool(self.request.image_flag)

    @property
    def runs_entry_point(self) -> bool:
        """Whether `command` is one of imgkit, ``dist-...``; any other runs in any image."""
        return bool(self.command) and self.command[0].startswith("dist-")

    @property
    def title(self) -> str:
        """The job's name in the queue and in the name of its output."""
        return f"{self.name}-sif" if self.makes_image else self.name

    @property
    def outlives_nodes(self) -> bool:
        """Whether the node agents go on when a node is lost: nothing may end them for it."""
        return self.size.spares > 0 and self.request.max_failures != 0

    @property
    def makes_secret(self) -> bool:
        """Whether each start makes a secret for its nodes, because the user names none."""
        return self.nodes > 1 and self.request.secret_file is None

    def flags(self, kind: type[Flags]) -> Flags:
        """The flags that only the job's system has; `kind` is the class that declares them."""
        return self.request.flags(kind)


JobState = Literal["", "waiting", "running", "succeeded", "failed", "cancelled", "ended"]
"""State of a submitted job. Empty: nobody has said; ``ended``: nobody knows how it ended."""
FINAL_STATES: tuple[JobState, ...] = ("succeeded", "failed", "cancelled", "ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """What a scheduler's command says about a job."""

    state: JobState
    text: str
    """The part of its output that people read."""
    code: int | None = None
    """The exit code of the job, or the largest one of an array's tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The exact text and words of a submission."""

    text: str
    submit: tuple[str, ...]
    """The words that submit it."""
    on_stdin: bool = False
    """Whether `submit` reads `text`; otherwise `text` is `submit` as a shell reads it, or its file."""
    foreground: bool = False
    """Whether `submit` is the run itself: its output is the run's, and no job id comes back."""
    remote: tuple[tuple[str, str], ...] = ()
    """Hosts, and the line for the shell of each; ssh starts all of them, and `submit` is not used."""
    sent: fanout.Sent = fanout.NOTHING
    """What each of them reads first."""
    head_decides: bool = False
    """Whether the run is over when the first host's line is, and not when that of any host fails."""
    kind: str = ""
    """What the scheduler calls this kind of job, where it finds a job only by that."""
    is_array: bool = False
    """Whether the job is an array of tasks, each with an id, a run folder and an output of its own."""


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """How its scheduler finds a submitted job."""

    id: str
    """The scheduler's, or one of imgkit's own where `SubmittedJob.answer` holds none."""
    system: str
    """Name of the system that took it."""
    name: str
    directory: Path
    queue: str = ""
    """The queue that it was submitted to; some systems find a job only by both."""
    cluster: str = ""
    """The cluster that the scheduler printed with the id, which is then unique only with it."""
    kind: str = ""
    """What the scheduler calls this kind of job; some find a job only by it."""
    remote: str = ""
    """Name of the remote on which it was submitted; empty: here."""
    array: bool = False
    """Whether it is an array; each task has an id, a run folder and an output of its own."""
    shell_line: str = ""
    """The line that opens a shell on a node, in a container like the job's; empty for pods."""

    @property
    def handle(self) -> str:
        """The word for it here: its id, with the name of its remote."""
        return f"{self.id}@{self.remote}" if self.remote else self.id


@dataclass(frozen=True, kw_only=True)
class SubmittedJob(QueuedJob):
    """What is kept about a submitted job, so that its id is enough to follow it."""

    recipe: str
    answer: str | None = None
    """What the scheduler printed instead of an id; None where it printed one."""
    code: CodeRecord | None = None
    bound_entry_points: str = ""
    """Version of imgkit's entry points that were bound into the image; empty where it has its own."""
    submitted: str = ""
    """When, UTC."""
    command: tuple[str, ...] = ()
    image_id: str = ""
    """The image; empty where that is not known."""
    state: JobState = ""
    """What imgkit last knew."""
    cancelled: bool = False
    """Whether imgkit has cancelled it. A scheduler forgets that, and a run that saves ends with a code."""
    fetched: str = ""
    """The folder here that holds the run's files; empty before the first fetch."""
