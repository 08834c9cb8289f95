"""A job with all its values resolved and checked, and the script that submits it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from imgkit_builder.base.process import Finished
from imgkit_builder.jobs.memory import Memory
from imgkit_builder.jobs.request import CodeRecord, Flags, JobRequest
from imgkit_entrypoints.schedulers.placement import Size
from imgkit_entrypoints.system import WORKSPACE

if TYPE_CHECKING:
    from imgkit_builder.recipe.targets import Target

# A command with its arguments, or a part of such a command.
Argv = tuple[str, ...]
# A function that runs a command on one machine, and returns when the command has ended. A command that fails
# does not raise.
Runner = Callable[[Sequence[str]], Finished]
# A function that runs a script of sh on one machine, and returns the output. The parameters are the script,
# its arguments, and the chunks of its standard input.
RunScript = Callable[[str, Iterable[str], Iterable[bytes]], bytes]
# Names of the runtimes. With "no-container", the command is imgkit itself, which makes an image file.
RuntimeKind = Literal["singularity", "docker", "pyxis", "host", "kubernetes", "no-container"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataMount:
    """A folder of data that the job's command reads."""

    source: str
    """The path on the nodes. It may begin with a variable of the site, such as ``$SCRATCH/letters``."""
    target: str
    """The path by which the command reads the data, such as ``/data``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountedEntryPoints:
    """imgkit's entry points for an image without them, and where they are mounted in it."""

    version: str
    """Version of imgkit."""
    folder: str
    """Path on the nodes of the folder with the package and ``system.json``."""
    python: str
    """Path of the Python in the image."""
    site: str
    """The folder of the image that this Python searches for packages."""
    digest: str
    """Digest of the image when imgkit inspected it, or "" for an image that is a folder.

    The job refuses to start if the image has another digest then.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The resources that a job asks the scheduler for, checked against the system's limits."""

    size: Size = field(default_factory=lambda: Size(training=1))
    """Numbers of nodes that train, and of spares."""
    gpus: int = 0
    """GPUs per node."""
    cpus: int | None = None
    """CPUs per node. None leaves the number to the scheduler."""
    memory: Memory | None = None
    """Memory per node. None leaves it to the scheduler."""
    time: str
    """The time limit as ``HH:MM:SS``, or "" for the scheduler's default."""
    account: str
    queue: str
    qos: str
    stop_before_s: int = 0
    """Seconds before the time limit at which the program is asked to save. 0 means never."""

    @property
    def nodes(self) -> int:
        """Number of nodes on which the command starts, including the spares."""
        return self.size.started


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The container of a job's command, and the code, folders and variables that the command finds in it."""

    image: str
    """Path of a .sif, or an image reference.

    Without a container, it is the path of a virtual environment, or empty. For the runtime ``no-container``,
    it is the path of the image that the command makes.
    """
    runtime: RuntimeKind
    binds: tuple[str, ...] = ()
    workdir: str = ""
    """Folder of the container in which the command starts, or "" for the job's folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set for the command: the user's own, and those of a job with code."""
    names: tuple[str, ...] = ()
    """Names of further variables of the user. No script contains their values, because they may be secret."""
    env_file: str = ""
    """Path of a file with further variables, or ""."""
    code: CodeRecord | None = None
    """The code of which the run gets a copy, or None for a run without code."""
    code_folder: str = ""
    """Path on the nodes of the code's folder in the store."""
    data: tuple[DataMount, ...] = ()
    """The folders of data, which are mounted read-only."""
    packages: tuple[str, ...] = ()
    """Paths on the nodes of the files of `imgkit add`, with packages for the image."""
    entry_points: MountedEntryPoints | None = None
    """The entry points that are mounted into the image, or None if the image needs none or has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job with all its values, as `resolve.resolve_job` has checked them."""

    recipe: Target
    request: JobRequest
    system: str
    """Name of the system that takes the job: the recipe's scheduler, or ``kubeflow`` for ``--format``."""
    name: str
    directory: Path
    allocation: Allocation
    container: Container
    command: Argv = ()
    """The command and its arguments, or () for an interactive shell."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """``IMGKIT_*`` variables for the node agent in the container."""
    run_folder: str = ""
    """Path of the run folder if imgkit itself makes it before the job starts.

    imgkit does so for jobs with code that start at once, and for jobs in pods whose files a remote stores. If
    the path is empty, the job's script makes the folder, and names it in IMGKIT_RUN_DIR.
    """
    warnings: tuple[str, ...] = ()

    @property
    def workspace(self) -> str:
        """The folder on the nodes with the run's copy of its code.

        It may begin with ``$IMGKIT_RUN_DIR``, which the shell of the job's script expands.
        """
        return f"{self.run_folder or '$IMGKIT_RUN_DIR'}/{WORKSPACE}"

    @property
    def runs_entry_point(self) -> bool:
        """Whether `command` is one of imgkit's entry points, such as ``dist-run``."""
        return bool(self.command) and self.command[0].startswith("dist-")

    @property
    def is_interactive(self) -> bool:
        """Whether the user works on the nodes in a shell."""
        return self.request.launch.interactive

    @property
    def outlives_nodes(self) -> bool:
        """Whether the node agents go on when a node is lost, so that a spare can replace it.

        The launcher of such a job must not end the other node agents.
        """
        return self.allocation.size.spares > 0 and self.request.launch.max_failures != 0

    @property
    def makes_secret(self) -> bool:
        """Whether each start creates a secret for its nodes, because the user named no secret file."""
        return self.allocation.nodes > 1 and self.request.launch.secret_file is None

    def with_warning(self, warning: str) -> Job:
        """Return this job with one more warning, or unchanged if `warning` is empty."""
        if not warning:
            return self
        return dataclasses.replace(self, warnings=(*self.warnings, warning))

    def with_allocation(self, **values: Any) -> Job:
        """Return this job with other values of its allocation."""
        return dataclasses.replace(self, allocation=dataclasses.replace(self.allocation, **values))

    def with_container(self, **values: Any) -> Job:
        """Return this job with other values of its container."""
        return dataclasses.replace(self, container=dataclasses.replace(self.container, **values))

    def with_system_facts(self, **values: Any) -> Job:
        """Return this job with other values under ``system`` of its recipe, for example another ``queue``."""
        system_facts = dataclasses.replace(self.recipe.system, **values)
        return dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, system=system_facts))

    def flags(self, kind: type[Flags]) -> Flags:
        """Return the values of the flags that only the job's system has.

        Parameters
        ----------
        kind : the class of the system that declares the flags.
        """
        return self.request.flags(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInput:
    """Secret values that each command on another host reads first from its standard input.

    A script must not contain these values, and neither must the arguments of a command, which all users see.
    """

    secret: bool = False
    """Whether a new secret is sent, by which the node agents of the run authenticate each other."""
    names: tuple[str, ...] = ()
    """Names of variables that are sent with the values that they have on this machine."""


NO_INPUT = HostInput()


class HostCommand(NamedTuple):
    """A command line for the shell of a host."""

    host: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The exact text of a job, and the command that submits it."""

    text: str
    submit: Argv
    """The command that submits the job: ``sbatch --parsable``."""
    on_stdin: bool = False
    """Whether `submit` reads `text` from its standard input.

    If not, `text` is the content of a file that `submit` names, or only shows the command to people.
    """
    foreground: bool = False
    """Whether `submit` is the run itself. Its output is then that of the run, and it prints no job id."""
    host_commands: tuple[HostCommand, ...] = ()
    """The commands that ssh starts, one for each host. `submit` is then not used."""
    host_input: HostInput = NO_INPUT
    """Input that the command line of each host reads first."""
    head_decides: bool = False
    """Whether the run ends with the command of the first host. If not, it ends when any command fails."""
    kind: str = ""
    """The scheduler's name for this kind of job, if its commands need that name to find a job."""
    is_array: bool = False
    """Whether the job is an array of tasks. Each task has an id, a run folder and an output of its own."""
