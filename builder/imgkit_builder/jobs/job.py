"""A job whose values are all chosen and checked, and the script that submits it."""

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
# A function that runs a command on one machine, and waits for its end. A command that fails does not raise an
# exception.
Runner = Callable[[Sequence[str]], Finished]
# A function that runs a script of sh on one machine, and returns its output. The parameters are the script,
# its arguments, and the chunks of its standard input.
RunScript = Callable[[str, Iterable[str], Iterable[bytes]], bytes]
# Names of the runtimes. With "no-container", imgkit itself is the command, which creates an image file.
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
    """imgkit's entry points (``dist-run`` and others), as they are mounted into an image without them."""

    version: str
    """Version of imgkit."""
    folder: str
    """The folder on the nodes that contains the package and ``system.json``."""
    python: str
    """Path of the Python in the image."""
    package_folder: str
    """The folder of the image in which this Python looks for packages."""
    digest: str
    """Digest of the image at the time when imgkit inspected it, or "" for an image that is a folder.

    The job refuses to start if the image has another digest by then.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The resources that a job requests from the scheduler.

    They have been checked against the system's limits.
    """

    size: Size = field(default_factory=lambda: Size(training=1))
    """The number of nodes that train, and the number of spare nodes, which replace nodes that fail."""
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
    """How many seconds before the time limit the program is asked to save its state. 0 means never."""

    @property
    def nodes(self) -> int:
        """Number of nodes on which the command starts, including the spare nodes."""
        return self.size.started


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The image in which a job's command runs, and the code, folders and variables for the command."""

    image: str
    """Path of a .sif, or the name of an image.

    Without a container, it is the path of a virtual environment, or empty. For the runtime ``no-container``,
    it is the path of the image file that the command creates.
    """
    runtime: RuntimeKind
    binds: tuple[str, ...] = ()
    workdir: str = ""
    """Folder of the container in which the command starts, or "" for the job's folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set for the command: those of the user, and those that a job with code needs."""
    names: tuple[str, ...] = ()
    """Names of further variables of the user. Their values may be secret, so no script contains them."""
    env_file: str = ""
    """Path of a file with further variables, or ""."""
    code: CodeRecord | None = None
    """The version of the code that the run gets a copy of, or None for a run without code."""
    code_folder: str = ""
    """Path on the nodes of the folder in the store that contains this version of the code."""
    data: tuple[DataMount, ...] = ()
    """The folders of data, which are mounted read-only."""
    packages: tuple[str, ...] = ()
    """Paths on the nodes of the files that `imgkit add` has created, with further packages for the image."""
    entry_points: MountedEntryPoints | None = None
    """The entry points that are mounted into the image.

    None means that the image needs none or has its own.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job with all its values. `resolve.resolve_job` has chosen and checked them."""

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
    """Variables ``IMGKIT_*`` for the node agent, imgkit's process on each node."""
    run_folder: str = ""
    """Path of the run folder if imgkit itself creates it before the job starts.

    imgkit does so for jobs with code that start at once, and for jobs in pods whose files are on a remote. If
    the path is empty, the job's script creates the folder and sets IMGKIT_RUN_DIR to its path.
    """
    warnings: tuple[str, ...] = ()

    @property
    def workspace(self) -> str:
        """The folder on the nodes that contains the run's copy of its code.

        The path may begin with ``$IMGKIT_RUN_DIR``, which the shell of the job's script expands.
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
        """Whether the job goes on when a node fails, because a spare node can replace the lost node.

        The launcher of such a job, for example srun, must not end the processes on the other nodes.
        """
        return self.allocation.size.spares > 0 and self.request.launch.max_failures != 0

    @property
    def makes_secret(self) -> bool:
        """Whether each start creates a new secret for its nodes, because the user has named no secret file.

        The nodes of a run recognize each other by the secret. A job on a single node needs none.
        """
        return self.allocation.nodes > 1 and self.request.launch.secret_file is None

    def with_warning(self, warning: str) -> Job:
        """Return this job with one more warning. If `warning` is empty, return it unchanged."""
        if not warning:
            return self
        return dataclasses.replace(self, warnings=(*self.warnings, warning))

    def with_allocation(self, **values: Any) -> Job:
        """Return a copy of this job with some values of its allocation replaced."""
        return dataclasses.replace(self, allocation=dataclasses.replace(self.allocation, **values))

    def with_container(self, **values: Any) -> Job:
        """Return a copy of this job with some values of its container replaced."""
        return dataclasses.replace(self, container=dataclasses.replace(self.container, **values))

    def with_system_facts(self, **values: Any) -> Job:
        """Return a copy of this job with other values under ``system`` of its recipe, such as ``queue``."""
        system_facts = dataclasses.replace(self.recipe.system, **values)
        return dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, system=system_facts))

    def flags(self, kind: type[Flags]) -> Flags:
        """Return the values of the flags that only the job's system has, such as ``--pbs-start`` of PBS.

        Parameters
        ----------
        kind : the class that declares the flags of the system.
        """
        return self.request.flags(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInput:
    """Secret values that each command on another host first reads from its standard input.

    They must not be in a script or in the arguments of a command, which all users can see.
    """

    secret: bool = False
    """Whether a new secret is sent, by which the node agents of the run recognize each other."""
    names: tuple[str, ...] = ()
    """Names of the variables to send. Their values are those of this process."""


NO_INPUT = HostInput()


class HostCommand(NamedTuple):
    """A command line for the shell of a host."""

    host: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The text of a job, and the command that submits the job."""

    text: str
    submit: Argv
    """The command that submits the job: ``sbatch --parsable``."""
    on_stdin: bool = False
    """Whether `submit` reads `text` from its standard input.

    If not, `text` is the content of a file that `submit` names, or shows people the command to run.
    """
    foreground: bool = False
    """Whether `submit` is the run itself, instead of a submission.

    It then prints the run's output, and no job id.
    """
    host_commands: tuple[HostCommand, ...] = ()
    """The commands that ssh starts, one on each host. If there are any, `submit` is not used."""
    host_input: HostInput = NO_INPUT
    """The input that the command on each host reads first."""
    head_decides: bool = False
    """Whether the run ends when the command of the first host, the head, ends.

    If not, it ends when any command fails.
    """
    kind: str = ""
    """The scheduler's name for this kind of job, if its commands need the name to find the job."""
    is_array: bool = False
    """Whether the job is an array of tasks. Each task has its own id, run folder and output."""
