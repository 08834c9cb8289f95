"""Declare what a user can request of a job: its allocation, its launch and its container.

Each field that `option_field` makes is a flag of ``imgkit run`` (`base.flags`). Flags that only one system
has are fields of that system's own subclass of `SystemFlags`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from imgkit_builder.base import flags
from imgkit_builder.base.flags import USUAL, nested_request, option_field

# Runtimes that a user can choose by --runtime. The others follow from the system and the command.
RuntimeName = Literal["singularity", "docker", "pyxis", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFlags:
    """Base class of the flags that only one system has. A system without such flags uses this class."""

    @property
    def default_nodes(self) -> int:
        """Number of nodes of a job without ``--nodes``."""
        return 1

    @property
    def system(self) -> str:
        """Name of the system that takes the job instead of the recipe's, if a flag chooses one, or ""."""
        return ""


Flags = TypeVar("Flags", bound=SystemFlags)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRequest:
    """The queue of a job, its account and its time limit. An empty value means "as in the recipe"."""

    time: str = option_field(
        "", metavar="HH:MM:SS", group=USUAL, help="Time limit, for example 00:30:00, 90m or 2h."
    )
    account: str = option_field("", "--account", "-A", group=USUAL, help="Account or project to charge.")
    queue: str = option_field("", "--queue", "-q", group=USUAL, help="Queue, partition or RunAI project.")
    qos: str = option_field("", group=USUAL, help="Quality of service (Slurm).")
    options: tuple[str, ...] = option_field(
        (), "--option", metavar="WORD", help="Additional scheduler option, one word: --option=--exclusive."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRequest(QueueRequest):
    """The resources that the scheduler is asked for. None and empty values mean "as in the recipe"."""

    nodes: str = option_field(
        "",
        metavar="N|N+S",
        group=USUAL,
        help="Number of nodes (default: 1, or all --hosts). 16+1 takes 17 nodes, one as a spare for a node "
        "that is lost.",
    )
    gpus: int | None = option_field(None, metavar="G", help="GPUs per node (default: all).")
    cpus: int | None = option_field(None, metavar="C", help="CPUs per node.")
    mem: str = option_field("", metavar="SIZE", help="Memory per node, for example 440G.")
    mem_per_gpu: str = option_field("", metavar="SIZE", help="Memory per GPU, for example 110G.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitRequest(QueueRequest):
    """The request for a job that makes an image: ``imgkit sif --submit`` or ``imgkit build --submit``."""

    system: str = option_field(
        "", metavar="RECIPE", help="Recipe whose system takes the job (default: the image's)."
    )
    name: str = option_field("", help="Job name (default: the recipe's name with -sif).")
    directory: Path = option_field(
        Path(), metavar="DIR", help="Folder in which the job runs; relative paths of other options are in it."
    )
    templates: Path | None = option_field(
        None, metavar="DIR", help="Folder of custom templates; they replace the shipped ones."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The command that runs on each node, and how it starts and stops."""

    command: tuple[str, ...] = ()
    """A ``dist-*`` command or any other program, with its arguments. It is empty for an interactive shell."""
    nproc: int | None = option_field(None, metavar="N", help="Processes per node (default: one per GPU).")
    max_failures: int | None = option_field(
        None,
        metavar="K",
        help="Failures (lost nodes or workers) to survive before the run is aborted (default: 3 with spares, "
        "else 0).",
    )
    preflight: bool = option_field(
        False, help="Measure all nodes first, for a minute at most, and start without outliers or not at all."
    )
    stop_before_s: int | None = option_field(
        None,
        "--stop-before",
        metavar="SECONDS",
        help="Ask the program to save this long before the time limit (Slurm); 0: never.",
    )
    interactive: bool = option_field(
        False, "--interactive", "-i", help="Allocate nodes for interactive work."
    )
    secret_file: Path | None = option_field(
        None,
        metavar="FILE",
        help="Shared secret by which nodes authenticate each other, at this path on all of them (default: "
        "the job creates a new one at each start).",
    )
    require_secret: bool = option_field(False, help="Refuse multi-node runs without a shared secret.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRequest:
    """The container, and the code, folders and variables that the command finds in it."""

    image: str = option_field(
        "",
        metavar="PATH|REF",
        help="Image to run, also one that imgkit did not build (default: RECIPE.sif here, or RECIPE:latest); "
        "for imgkit run, its path on the remote.",
    )
    code: Path | None = option_field(
        None,
        metavar="DIR",
        group=USUAL,
        help="Folder of code: each run starts in a copy of its own, /workspace in the container.",
    )
    no_code: bool = option_field(False, help="Run without code, even if imgkit.toml sets it.")
    # Fields without `option_field` have no flag. Only imgkit.toml and the Python API set `data` and
    # `requirements`.
    data: tuple[str, ...] = ()
    """Folders of data, as imgkit.toml names them.

    ``data/letters`` is a folder of the project, ``/gpfs/letters:/data`` is a path of the cluster, and
    ``hf://datasets/me/letters`` is a repository of the hub.
    """
    packages: tuple[str, ...] = option_field(
        (), metavar="FILE", help="File of imgkit add with packages for the image; may be repeated."
    )
    requirements: tuple[str, ...] = ()
    """Packages that imgkit.toml lists for the image. If the file with them is missing, it is made."""
    allow: tuple[str, ...] = option_field(
        (), metavar="NAME", help="With --code: ship this file even though its name looks like a secret."
    )
    yes: bool = option_field(False, help="With --code: do not ask above 100 MB or 10,000 files.")
    workdir: str = option_field(
        "",
        metavar="/DIR",
        help="Folder of the container in which the command starts (default: /workspace with --code, or the "
        "recipe's image.workdir, else the job's folder); .: the job's folder.",
    )
    binds: tuple[str, ...] = option_field(
        (), "--bind", metavar="/SRC[:/DEST[:ro]]", help="Folder to mount into the container."
    )
    env: tuple[str, ...] = option_field(
        (),
        metavar="NAME[=VALUE]",
        group=USUAL,
        help="Environment variable for the program. NAME alone takes the value from here "
        "and shows it nowhere.",
    )
    env_file: Path | None = option_field(
        None,
        metavar="FILE",
        help="Private file with lines NAME=VALUE, at this path on all nodes, which read it at the start.",
    )
    runtime: RuntimeName | None = option_field(
        None, help="What starts the program (default: the recipe's runtime); host: no container."
    )
    python: str = option_field(
        "",
        metavar="PATH",
        help="Python of an image that imgkit did not build (default: its python3); imgkit binds its entry "
        "points there.",
    )
    activate: str = option_field(
        "",
        metavar="COMMAND",
        help="Command of bash that activates an environment of such an image first, for example "
        "'source /opt/venv/bin/activate' or '$WITH_CONDA'.",
    )

    @property
    def python_flag(self) -> str:
        """The flag by which the user chooses a Python of the image: ``--python``, ``--activate`` or ""."""
        if self.python:
            return "--python"
        if self.activate:
            return "--activate"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectSource:
    """The imgkit.toml that provides the values of a request for which no flag was given."""

    file: Path
    recipe: str
    """The recipe that the file names, or ""."""
    lines: Mapping[str, str]
    """The position of each key of the file, for messages: ``{"queue": "imgkit.toml:4"}``."""
    sets_directory: bool
    """Whether the job runs in the file's folder, because no flag names another folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRecord:
    """The code of a run, as the run's record describes it."""

    sha256: str
    """Digest of the code, which is the name of its folder in the store."""
    git: str
    """Output of ``git describe --always --dirty`` in the code's folder, or "" outside of a repository."""
    uncommitted: bool
    """Whether the code has changes that are not committed. It is true outside of a repository."""

    @property
    def text(self) -> str:
        """The content of ``code.json`` in the run folder."""
        return json.dumps({"schema": 1, **dataclasses.asdict(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedRun:
    """The run of an earlier job that a new job continues."""

    job: str
    """The id of the earlier job, with ``@REMOTE`` for a job on a remote."""
    folder: Path
    """The run folder, on the machine on which the job runs."""
    code: CodeRecord | None = None
    """The code of the run, if the new job goes on with the run's copy as it is. With None, today's code is
    sent.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job that runs a command on its nodes."""

    allocation: AllocationRequest = nested_request(AllocationRequest)
    launch: LaunchRequest = nested_request(LaunchRequest)
    container: ContainerRequest = nested_request(ContainerRequest)
    name: str = option_field("", help="Job name (default: the recipe's name).")
    directory: Path = option_field(Path(), metavar="DIR", help="Folder in which the job runs.")
    group_readable: bool = option_field(
        False, help="Let your group read the run folder, which is closed to others by default (Slurm, PBS)."
    )
    templates: Path | None = option_field(
        None, metavar="DIR", help="Folder of custom templates; they replace the shipped ones."
    )
    system_flags: tuple[SystemFlags, ...] = ()
    """Flags that only one system has: one object for each system of which a flag was given."""
    project: ProjectSource | None = None
    """The imgkit.toml that provides values for which no flag was given, or None without such a file."""
    resumed: ResumedRun | None = None
    """The run that the job continues in the same run folder, or None for a job that starts a new run."""

    @classmethod
    def of(cls, **values: Any) -> JobRequest:
        """Return a request with these values, for example ``JobRequest.of(nodes="2", stop_before_s=60)``.

        The names are those of the fields, also of the fields of `allocation`, `launch` and `container`. No
        two fields have the same name, so a name need not say where its field is.

        Raises
        ------
        TypeError : a request has no field with such a name.
        """
        return flags.replace_fields(cls(), values)

    def changed(self, **values: Any) -> JobRequest:
        """Return a copy of this request with other values, by the names that `of` takes."""
        return flags.replace_fields(self, values)

    @property
    def project_folder(self) -> Path:
        """The folder of imgkit.toml, or the current one if the request uses no such file."""
        return self.project.file.parent if self.project else Path()

    @property
    def names_directory(self) -> bool:
        """Whether the user names the job's folder. A folder that imgkit.toml sets does not count."""
        is_set_by_project = self.project is not None and self.project.sets_directory
        return self.directory != Path() and not is_set_by_project

    def flags(self, kind: type[Flags]) -> Flags:
        """Return the values of the flags that the class `kind` declares.

        A flag that was not given has its default.
        """
        for system_flags in self.system_flags:
            if isinstance(system_flags, kind):
                return system_flags
        return kind()
