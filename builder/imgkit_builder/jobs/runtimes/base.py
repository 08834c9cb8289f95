"""The base of the runtimes: what is the same for most of them, and where they differ."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.base.process import Finished
from imgkit_builder.image.wheel import PACKAGE
from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.code_tree import CODE_PLACE
from imgkit_builder.jobs.job import Argv, Job, RuntimeKind
from imgkit_builder.recipe.targets import Target
from imgkit_builder.sif import image, sqsh
from imgkit_builder.workflow import baked
from imgkit_entrypoints import system
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import mounted_code
from imgkit_entrypoints.rules import site_variables
from imgkit_entrypoints.system import HOST, HOST_FOLDERS, JOB_FOLDER, SYSTEM_JSON, Partition

Runner = Callable[[Sequence[str]], Finished]
"""Runs a command where the job is submitted, to its end; exit code 127 where a program is missing."""

_GPU_OPTIONS = ("--nv", "--nvccli", "--rocm", "--gpus=all", "--gpu", "--device=nvidia.com/gpu=all")
"""Options that a job without GPUs leaves out."""

_READ_ENV = (
    'while IFS= read -r text || [ "$text" ]; do case ${{text%%=*}} in "" | [0-9]* | *[!A-Za-z0-9_]*) ;; '
    '*) export "${{text?}}" ;; esac; done < {file}'
)
"""Reads lines NAME=VALUE without executing them, and skips all others."""

_ACTIVATE = """\
eval "$1" >&2 || { echo "imgkit: the command of --activate failed with exit code $?: $1" >&2; exit 3; }
shift
exec "$@"
"""

_EDGE_BYTES = 65536
"""Bytes of each end of an image file that stand for its content.

A .sif begins with its table and its superblock, and ends with the tables of its squashfs, which hold the
place, size and time of every file. To read all of it would take a minute on each node.
"""

_NOT_SET = "the job needs it, and no module has set it on this node (system.runtime.modules)"

SQSH_SUFFIXES = (".sqsh", ".squashfs")
_BELOW_HOST_FOLDERS = tuple(f"{folder}/" for folder in HOST_FOLDERS)


class Runtime(abc.ABC):
    """What starts a job's command on a node: a container runtime, or nothing but the node itself."""

    kind: RuntimeKind
    """Its name in ``system.runtime.kind`` and ``--runtime``."""
    usual_options: Argv = ()
    """Its options where the recipe's runtime is of another kind."""
    image_suffix: str = ""
    """Suffix of the image files that it starts; empty: it starts none."""
    has_container: bool = True
    """Whether the command runs in a container."""
    is_isolated: bool = False
    """Whether the command sees neither folders nor variables of the machine that submits the job."""
    environment_by_options: bool = False
    """Whether options set the variables and the folder of the command; else it has those of the shell that
    starts it.
    """
    serves_image: bool = False
    """Whether a process of the job serves the image's files: a signal to all processes would end it too."""
    without_mounts: str = ""
    """What to do where it mounts no folders, for the user who chooses a Python of the image."""
    opens_shells: bool = False
    """Whether a login shell on a node of a running job can open a shell in the job's image."""
    verb_words: int = 2
    """Number of words before its options, such as ``docker run``."""
    input_options: Argv = ()
    """Options by which the command reads the standard input."""
    terminal_options: Argv = ()
    """Options by which the command gets the terminal."""

    @property
    def mounts_folders(self) -> bool:
        """Return whether the command runs in a container that mounts folders of its node."""
        return self.has_container and not self.is_isolated

    # The image

    @abc.abstractmethod
    def image(self, text: str, recipe: str, directory: Path) -> str:
        """Return the path or the name of the image that `text` means, the value of ``--image``.

        Parameters
        ----------
        recipe : name of the recipe, which is part of the default.
        directory : folder of the job.

        Raises
        ------
        UsageError : it cannot start such an image, or none is named.
        """

    def image_title(self, name: str) -> str:
        """Return the part of an image's name that says what is in it."""
        return name

    def is_foreign(self, job: Job) -> bool:
        """Return whether imgkit did not build the image, by its record, or the user chooses a Python in it.

        Raises
        ------
        UsageError : the image is an encrypted .sif.
        """
        path = Path(job.container.image)
        sif = image.read(path) if image.is_sif(path) else None
        if sif is not None and sif.encrypted:
            raise UsageError(
                "the .sif is encrypted: each node would need its key",
                where=str(path),
                hint="ask its owner for one that is not, or for the archive: imgkit sif ARCHIVE",
            )
        if job.request.container.python_flag:
            return True
        if sif is not None and sif.record is None:
            return True
        return self._lacks_manifest(path)

    def _lacks_manifest(self, path: Path) -> bool:
        """Return whether `path` is an image here that holds no manifest of imgkit."""
        is_image = image.is_sif(path) or sqsh.is_sqsh(path)
        return is_image and not baked.has_manifest(path)

    def arch_error(self, job: Job) -> UsageError | None:
        """Return the error for a file that is here and not for the nodes' architecture; None if it fits."""
        path = Path(job.container.image)
        arch = "" if job.makes_image else self._image_arch(path)
        node_archs = {platform.removeprefix("linux/") for platform in job.recipe.platforms}
        if not arch or arch in node_archs:
            return None
        return UsageError(
            f"the image is for {arch}, but the nodes are {' or '.join(sorted(node_archs))}",
            where=str(path),
            hint=f"imgkit build {job.recipe.name} --platform {min(node_archs)}, then imgkit sif",
        )

    def _image_arch(self, path: Path) -> str:
        """Return the architecture of the image file; empty if it is unknown or the image is no file."""
        return baked.arch(path) if sqsh.is_sqsh(path) else ""

    def image_digest(self, job: Job, run: Runner) -> str:
        """Return what stands for the image's content, or "folder" for a folder, which has only its path.

        The digest is empty where `run` finds no image.
        """
        check = f'if [ -d "$1" ]; then echo folder; elif [ -r "$1" ]; then {_edges("$1")}; fi'
        fields = run(("sh", "-c", check, "sh", job.container.image)).output.split()
        return fields[0] if fields else ""

    # Checks

    def check(self, job: Job) -> None:
        """Raise UsageError for what it cannot do in this job; here, for what needs an image file."""
        if job.request.container.code is not None:
            raise UsageError(
                f"the code is mounted over a .sif, but {self.kind} does not run one",
                where="--code",
                hint=f"leave it out; a folder that all nodes see: --bind DIR:/{CODE_PLACE}",
            )
        if job.container.image and sqsh.is_sqsh(Path(job.container.image)):
            raise UsageError(
                f"{self.kind} does not start a .sqsh",
                where=job.container.image,
                hint="--runtime singularity; or on a cluster with pyxis: --runtime pyxis",
            )

    def check_submission(self, job: Job) -> None:
        """Check the image and the variables of this machine before the job waits in a queue.

        Raises
        ------
        UsageError : the image does not exist or is for other nodes, or a variable would change the start.
        CheckFailed : the image is cut short.
        """
        error = self.arch_error(job)
        if error is not None:
            raise error

    def refuse_python(self, job: Job, flag: str) -> None:
        """Raise UsageError if imgkit can bind no entry points into the image, whose Python `flag` chooses."""
        if not self.mounts_folders:
            message, hint = f"{self.kind} binds nothing into an image", self.without_mounts
            raise UsageError(message, where=flag, hint=hint)

    def belongs_to_service(self, program: str) -> bool:
        """Return whether the containers of `program` belong to a service of the node, and not to the job."""
        return False

    def can_mount(self, path: str) -> bool:
        """Return whether it can mount something at this path."""
        return re.fullmatch(r"/[^:,\x00-\x1f]*", path) is not None

    def warnings(self, job: Job) -> Iterator[str]:
        """Yield warnings about requests that the user may not have meant."""
        yield from ()

    # The start

    def argv(self, job: Job, command: Argv, *, forward: Argv = ()) -> Argv:
        """Return the argv that starts `command` in the job's image, with the user's variables set.

        Parameters
        ----------
        forward : variables that docker copies from its own environment; other runtimes copy all.
        """
        python = self._entry_point_python(job)
        if python and command and command[0].startswith("dist-"):
            # Not by PYTHONPATH: the workers start with -I, too.
            command = (python, "-I", "-m", PACKAGE, *command)
        return self._start(job, (*_activation(job), *self._env_argv(job), *command), forward)

    def _start(self, job: Job, command: Argv, forward: Argv) -> Argv:
        """Return the argv that starts `command` as it is."""
        return command

    def _entry_point_python(self, job: Job) -> str:
        """Return the Python that runs ``dist-*`` programs; empty where the image has these programs."""
        # Only images of imgkit have them; the installed package does not.
        return job.container.bound.python if job.container.bound else ""

    def _env_argv(self, job: Job) -> Argv:
        """Return env with the variables that it sets inside the container; nothing if there is none."""
        if self.environment_by_options:
            return ()
        # By env: apptainer and older versions of singularity execute $(...) in the values of --env and
        # SINGULARITYENV_*, and a variable that the image sets overrides an exported one.
        variables = [f"{name}={value}" for name, value in job.container.env.items()]
        if self.has_container:
            variables += [quoting.Shell(f'"{name}=${name}"') for name in self.system_variables(job)]
        return ("env", *variables) if variables else ()

    def shell(self, job: Job) -> Argv:
        """Return the argv of a shell in the job's image."""
        return self.argv(dataclasses.replace(job, command=()), ("bash",))

    def shell_line(self, job: Job) -> str:
        """Return the line of a login shell that opens a shell like `shell`, with the variables of the job.

        Empty if the runtime cannot do that while the job runs.
        """
        if not self.opens_shells:
            return ""
        job = dataclasses.replace(job, command=())
        load = [f"module load {shlex.quote(name)}" for name in self.modules(job)]
        argv = map(quoting.quote, self.shell(job))
        return " && ".join((*load, *self.exports(job), f"exec {' '.join(argv)}"))

    def with_options(self, argv: Argv, *options: str) -> Argv:
        """Return `argv`, which starts the job's container, with further options for the runtime.

        Raises
        ------
        UsageError : there is no container.
        """
        if options and not self.has_container:
            raise UsageError(
                f"{options[0]} is an option for a container, but --runtime {self.kind} has none",
                where="--option",
                hint="leave it out",
            )
        return (*argv[: self.verb_words], *options, *argv[self.verb_words :])

    def node_check(self, job: Job) -> Argv:
        """Return the argv that looks at each node before Slurm starts the container; usually nothing does."""
        return ()

    def _facts(self, recipe: Target) -> system.Runtime:
        """Return ``system.runtime`` of the recipe, or the usual values if that is of another kind."""
        facts = recipe.system.runtime
        if facts.kind == self.kind:
            return facts
        return system.Runtime(command=self.kind, options=self.usual_options)

    def program(self, recipe: Target) -> str:
        """Return the runtime's command."""
        return self._facts(recipe).command

    def options(self, job: Job) -> Argv:
        """Return the options of every start."""
        options = self._facts(job.recipe).options
        if job.allocation.gpus:
            return options
        return tuple(option for option in options if option not in _GPU_OPTIONS)

    def passes_gpus(self, job: Job) -> bool:
        """Return whether the command sees the GPUs of its node."""
        return not self.has_container or bool(set(self.options(job)) & set(_GPU_OPTIONS))

    def modules(self, job: Job) -> tuple[str, ...]:
        """Return the environment modules that the start needs, in load order."""
        return self._facts(job.recipe).modules

    # The variables

    def exports(self, job: Job) -> tuple[str, ...]:
        """Return shell lines that set variables of the runtime and of the node agent."""
        container, variables = job.container, self.system_variables(job)
        binds = container.binds if self.has_container else ()
        names = site_variables(*job.recipe.system.runtime.host_libs, *variables.values(), *binds)
        lines = [f': "${{{name}:?imgkit: {_NOT_SET}}}"' for name in names if name != JOB_FOLDER]
        lines += quoting.exports(job.settings)
        if container.env_file:
            lines.append(_READ_ENV.format(file=shlex.quote(container.env_file)))
        if container.bound is not None and container.bound.digest:
            lines.append(self._refuse_changed_image(job, container.bound.digest))
        if JOB_FOLDER in site_variables(*variables.values()):
            lines += quoting.exports({JOB_FOLDER: str(job.directory)})
        if not self.environment_by_options:
            lines += quoting.default_exports(variables)
        return tuple(lines)

    def system_variables(self, job: Job) -> Mapping[str, str]:
        """Return the variables of ``system.env`` for the job's command, without those that the user sets.

        ``dist-*`` get none: they read them in the image, and leave out what does not fit the node. Without an
        image, they get all of them, too.
        """
        if self.has_container and job.runs_entry_point:
            return {}
        facts = job.recipe.system
        users = {*job.container.env, *job.container.names}
        if facts.partitions.get(job.allocation.queue, Partition()).interfaces:
            # The system's are those of other nodes.
            users.update(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"))
        if job.container.env_file:
            # Its values must stand in no argument list, and Docker would prefer the system's. The file may be
            # on the nodes alone.
            with contextlib.suppress(OSError):
                rows = files.read_text(Path(job.container.env_file), errors="replace").splitlines()
                users.update(row.partition("=")[0] for row in rows)
        return {name: value for name, value in facts.env.items() if name not in users}

    def _refuse_changed_image(self, job: Job, digest: str) -> str:
        """Return shell lines that end the job on a node where its image is missing or has another digest."""
        command, answer = self._digest_command(job, digest)
        return f"""\
image={shlex.quote(job.container.image)}
if [ "$({command})" != "{answer}" ]; then
    echo "imgkit: $image has changed since its job was submitted, or this node lacks it: submit again" >&2
    exit 2
fi"""

    def _digest_command(self, job: Job, digest: str) -> tuple[str, str]:
        """Return the shell command that prints the digest of ``$image``, and what it prints for `digest`."""
        return _edges("$image"), f"{digest}  -"

    # The mounts

    def mounts(self, job: Job) -> tuple[str, ...]:
        """Return what the container mounts of the host, ``SRC[:DEST[:ro]]``.

        These are the code, libraries, folders of the recipe and the user, entry points and the job's folder.
        """
        container = job.container
        code = (f"/{CODE_PLACE}", mounted_code.CODE_JSON) if container.code else ()
        entry_points: tuple[str, ...] = ()
        if container.bound:
            folder, site = container.bound.folder, container.bound.site
            system_json = f"{folder}/{SYSTEM_JSON.name}:{SYSTEM_JSON}:ro"
            entry_points = (f"{folder}/{PACKAGE}:{site}/{PACKAGE}:ro", system_json)
        return (
            *(f"{container.code_folder}{path}:{path}:ro" for path in code),
            *self._library_mounts(job),
            *container.binds,
            *entry_points,
            str(job.directory),
        )

    def _library_mounts(self, job: Job) -> Iterator[str]:
        """Return mounts of the host's libraries, below `HOST` where the node agent chooses among them."""
        facts = job.recipe.system
        libraries = facts.runtime.host_libs
        if facts.fabric.host_libs == "auto":
            other_folders = (folder for folder in libraries if not folder.startswith(_BELOW_HOST_FOLDERS))
            return (f"{folder}:{HOST}{folder}:ro" for folder in (*HOST_FOLDERS, *other_folders))
        # Docker would need an option for LD_LIBRARY_PATH, too: only the node agent uses libraries there.
        folders = () if self.environment_by_options else libraries
        return (f"{folder}:{folder}:ro" for folder in folders)

    def listed_libraries(self, job: Job) -> tuple[str, ...]:
        """Return the recipe's folders of libraries, unless the node agent chooses among them."""
        facts = job.recipe.system
        if facts.fabric.host_libs == "auto" and self.has_container:
            return ()
        return facts.runtime.host_libs

    # A look into an image that imgkit did not build

    def probe_argv(self, job: Job, probe: Argv) -> Argv:
        """Return the argv that runs `probe` in the image on this machine, with the modules that are here.

        Raises
        ------
        ToolMissing : nothing on this machine starts the image.
        """
        argv, modules = self.argv(job, probe), self.modules(job)
        if not modules:
            return argv
        # Where there are no modules, the runtime may be on PATH; if it is not, bash says so.
        load = shlex.join(("module", "load", *modules))
        script = f'if type module > /dev/null 2>&1; then {load} || exit; fi; exec "$@"'
        return ("bash", "-lc", script, "bash", *argv)

    def probe_program(self, job: Job) -> str:
        """Return the program of `probe_argv` or its modules; empty if it is known to be here."""
        return job.recipe.module_line or self.program(job.recipe)

    def typed_shell(self, job: Job) -> str:
        """Return the command that people type for a shell in the image."""
        return f"{self.program(job.recipe)} exec {job.container.image} bash"


def check_reference(text: str) -> str:
    """Return `text`, the name of an image; raise UsageError if a program would take it for an option."""
    if text.startswith("-"):
        raise UsageError(f"{text!r} is not an image", where="--image")
    return text


def with_targets(mounts: Iterable[str]) -> Iterator[str]:
    """Yield `mounts` as ``SRC:DEST[:ro]``, for runtimes that take no shorter form."""
    return (mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)


def _edges(variable: str) -> str:
    """Return the shell command that prints the digest of the ends and the size of the file in `variable`."""
    ends = f'head -c {_EDGE_BYTES} "{variable}"; tail -c {_EDGE_BYTES} "{variable}"'
    return f'{{ {ends}; stat -L -c %s "{variable}"; }} | sha256sum'


def _activation(job: Job) -> Argv:
    """Return words that activate an environment of the image, before the words that run in it."""
    command = job.request.container.activate
    if re.fullmatch(r"\$\w+|\$\{\w+\}", command):
        command = f'eval "{command}"'  # the command in a variable, which may have several parts
    return ("bash", "-c", _ACTIVATE, "bash", command) if command else ()
