"""The base class of the runtimes. It implements what most of them share.

The variables of a job reach the command in one of two ways. Docker gets them as options
(`passes_variables_as_options`). Other runtimes inherit imgkit's settings from the shell that starts them, and
``env`` sets the user's variables inside the container.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.base import files
from imgkit_builder.image.wheel import PACKAGE
from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Argv, Container, Job, Runner, RuntimeKind
from imgkit_builder.packages import record
from imgkit_builder.sif import image, sqsh
from imgkit_builder.workflow import baked
from imgkit_entrypoints import system
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import site_variables
from imgkit_entrypoints.system import HOST, HOST_FOLDERS, JOB_FOLDER, SYSTEM_JSON, WORKSPACE

if TYPE_CHECKING:
    from imgkit_builder.recipe.targets import Target

# Options of Apptainer, Singularity, Docker and Podman that give a container access to the GPUs of its node.
# They are left out in a job without GPUs.
_GPU_OPTIONS = ("--nv", "--nvccli", "--rocm", "--gpus=all", "--gpu", "--device=nvidia.com/gpu=all")

_EXPORT_ENV_FILE = (
    'while IFS= read -r text || [ "$text" ]; do case ${{text%%=*}} in "" | [0-9]* | *[!A-Za-z0-9_]*) ;; '
    '*) export "${{text?}}" ;; esac; done < {file}'
)
"""Shell text that exports the lines ``NAME=VALUE`` of a file.

It executes nothing, and skips all other lines.
"""

# Shell text that runs the command of --activate, and then the program in the same shell, so that the program
# gets the variables that the command has set. The output of the command goes to standard error, so that it is
# separate from the program's output.
_RUN_ACTIVATED = """\
eval "$1" >&2 || { echo "imgkit: the command of --activate failed with exit code $?: $1" >&2; exit 3; }
shift
exec "$@"
"""


# The end of the shell's message about a missing variable: "SCRATCH: imgkit: no module has set it ...".
_UNSET_VARIABLE_MESSAGE = "no module has set it on this node (system.runtime.modules)"

SQSH_SUFFIXES = (".sqsh", ".squashfs")
"""Suffixes of a plain squashfs. They are used to recognize a file that is not on this machine."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""Variable with the indices of the GPUs that a program may use: ``0,1,2,3``.

At some sites, Slurm shows only one GPU to the only task of a node, unless srun inherits this variable.
"""
# Starts of paths that are inside one of `HOST_FOLDERS`, such as "/usr/lib64/". They need no mount of their
# own.
_HOST_FOLDER_PREFIXES = tuple(f"{folder}/" for folder in HOST_FOLDERS)


# Shell text that prints the digest of the image file in its first argument. For a folder it prints "folder",
# and for a file that cannot be read nothing.
_PRINT_DIGEST = f'if [ -d "$1" ]; then echo folder; elif [ -r "$1" ]; then {record.digest_command("$1")}; fi'


class Runtime(abc.ABC):
    """A way to start a job's command on a node, in a container or on the node itself."""

    kind: RuntimeKind
    """Name of the runtime in ``system.runtime.kind`` and ``--runtime``."""
    usual_options: Argv = ()
    """Options for a recipe whose own runtime is of another kind, so that it sets no options for this one."""
    image_suffix: str = ""
    """Suffix of the image files that the runtime starts. It is empty if the runtime starts no files."""
    has_container: bool = True
    """Whether the command runs in a container."""
    is_isolated: bool = False
    """Whether the command sees no folders and no variables of the machine that submits the job."""
    passes_variables_as_options: bool = False
    """Whether options of the runtime set the variables and the working directory of the command.

    If not, the command inherits them from the shell that starts the runtime.
    """
    serves_image: bool = False
    """Whether a process of the job serves the files of the image.

    Such a process must not receive the signals that are meant for the program. If it ended, the files would
    be gone.
    """
    squashfs_options: str = ""
    """Options of a mount for the content of a squashfs. It is empty if the runtime has no such mounts."""
    no_mounts_hint: str = ""
    """Hint for a user who chooses a Python in the image, if the runtime mounts no folders."""
    opens_shells: bool = False
    """Whether a login shell on a node of a running job can open another shell in the job's image."""
    options_index: int = 2
    """Index of the first option in the argv that starts a container: 2 for ``docker run OPTIONS``."""

    def data_links(self, job: Job) -> Mapping[str, str]:
        """Return the links to data folders to create in the run's copy of its code, each with its target.

        For example: ``{"data/letters": "/scratch/me/imgkit/data/..."}``. The links replace mounts for
        runtimes that mount no folders. For all other runtimes, the result is empty.
        """
        if self.mounts_folders:
            return {}
        return {data.target.removeprefix(f"/{WORKSPACE}/"): data.source for data in job.container.data}

    def used_flags(self) -> tuple[str, ...]:
        """Return the flags in `systems.OPTIONAL` that this runtime itself passes on to the container."""
        return ()

    @property
    def mounts_folders(self) -> bool:
        """Whether the command runs in a container that mounts folders of its node."""
        return self.has_container and not self.is_isolated

    # The image

    @abc.abstractmethod
    def image(self, reference: str, recipe_name: str, directory: Path) -> str:
        """Return the path or the name of the image for `reference`, the value of ``--image``.

        Parameters
        ----------
        reference : the value of ``--image``. If it is empty, the runtime chooses a default.
        recipe_name : the name of the recipe, which is part of the default.
        directory : the folder of the job.

        Raises
        ------
        UsageError : the runtime cannot start such an image, or has no default and `reference` is empty.
        """

    def needs_entry_points(self, job: Job) -> bool:
        """Return whether imgkit must bind its entry points (``dist-run`` and others) into the image.

        This is necessary if imgkit did not build the image, or if the user chooses another Python in it.

        Raises
        ------
        UsageError : the image is an encrypted .sif.
        """
        path = Path(job.container.image)
        if image.is_sif(path):
            sif = image.read(path)
            if sif.encrypted:  # imgkit cannot look into it
                raise UsageError(
                    "the .sif is encrypted: each node would need its key",
                    where=str(path),
                    hint="ask its owner for one that is not, or for the archive: imgkit sif ARCHIVE",
                )
            if sif.record is None:  # imgkit writes its record into each .sif
                return True
        chooses_python = job.request.container.python_flag != ""
        return chooses_python or self._lacks_manifest(path)

    def _lacks_manifest(self, path: Path) -> bool:
        """Return whether `path` is an image file on this machine that contains no manifest of imgkit.

        Every image that imgkit builds contains a manifest.
        """
        is_image = image.is_sif(path) or sqsh.is_sqsh(path)
        return is_image and not baked.has_manifest(path)

    def arch_error(self, job: Job) -> UsageError | None:
        """Return the error for an image file that the processors of the nodes cannot run.

        The result is None if they can run it. It is also None if the architecture of the image is unknown,
        for example because the file is not on this machine.
        """
        path = Path(job.container.image)
        arch = self._image_arch(path)  # "" if it is unknown
        node_archs = {platform.removeprefix("linux/") for platform in job.recipe.platforms}
        if not arch or arch in node_archs:
            return None
        return UsageError(
            f"the image is for {arch}, but the nodes are {' or '.join(sorted(node_archs))}",
            where=str(path),
            hint=f"imgkit build {job.recipe.name} --platform {min(node_archs)}, then imgkit sif",
        )

    def _image_arch(self, path: Path) -> str:
        """Return the architecture of the image file, such as ``arm64``, or "" if it is unknown."""
        if not sqsh.is_sqsh(path):
            return ""
        return baked.read_arch(path)

    def image_digest(self, job: Job, run: Runner) -> str:
        """Return a digest of the job's image, which changes when the content of the image changes.

        The digest is computed on the machine where `run` runs commands. If the image does not exist or cannot
        be read there, the result is empty. If the image is a folder, the result is the text "folder", because
        a digest of all its files would take too long.
        """
        fields = run(("sh", "-c", _PRINT_DIGEST, "sh", job.container.image)).output.split()
        return fields[0] if fields else ""

    # Checks

    def check(self, job: Job) -> None:
        """Check that the runtime can do what the job requests.

        Raises
        ------
        UsageError : the image is a .sqsh, which this runtime cannot start.
        """
        if job.container.image and sqsh.is_sqsh(Path(job.container.image)):
            raise UsageError(
                f"{self.kind} does not start a .sqsh",
                where=job.container.image,
                hint="--runtime singularity; or on a cluster with pyxis: --runtime pyxis",
            )

    def check_submission(self, job: Job) -> None:
        """Check that the nodes can run the image, before the job waits in a queue.

        Some runtimes also check whether the image exists and is complete, and the variables of this machine.

        Raises
        ------
        UsageError : the image is for other processors than those of the nodes, or a further check failed.
        CheckFailed : the image is cut short. Only pyxis raises this error.
        """
        error = self.arch_error(job)
        if error is not None:
            raise error

    def refuse_python(self, job: Job, flag: str) -> None:
        """Raise UsageError if imgkit cannot bind its entry points for a Python that the user chooses.

        Parameters
        ----------
        flag : the flag by which the user chooses the Python.
        """
        if not self.mounts_folders:
            message = f"{self.kind} binds nothing into an image"
            raise UsageError(message, where=flag, hint=self.no_mounts_hint)

    def can_mount(self, path: str) -> bool:
        """Return whether the runtime can mount something at `path`, which must be absolute."""
        return re.fullmatch(r"/[^:,\x00-\x1f]*", path) is not None

    def warnings(self, job: Job) -> Iterator[str]:
        """Yield warnings about requests that the user may not have intended."""
        yield from ()

    # The start

    def argv(self, job: Job, command: Argv, *, forward: Argv = ()) -> Argv:
        """Return the argv that starts `command` in the job's image, with the user's variables set.

        In the image, up to four programs start one after the other before ``dist-run train.py``::

            bash -c SCRIPT bash 'conda activate ml'     (--activate)
            env LR=0.1                                  (variables of the user and of the recipe's system)
            sh -c SCRIPT sh                             (the search path for added packages)
            /opt/python -I -m imgkit_entrypoints        (an image without imgkit's entry points)

        Parameters
        ----------
        forward : names of variables that docker passes on from its own environment. Other runtimes pass on
            all variables.
        """
        python = self._entry_point_python(job)
        python_argv: Argv = ()
        if python and command and command[0].startswith("dist-"):
            # PYTHONPATH cannot be used to find the package. Python ignores it with -I, and the entry points
            # start their workers with -I as well.
            python_argv = (python, "-I", "-m", PACKAGE)
        # --activate comes before the user's variables, so that it cannot replace them. The search path comes
        # after both, because it is put before the PYTHONPATH that they set.
        prefix = (*_activation_argv(job), *self._env_argv(job), *_packages_argv(job), *python_argv)
        return self._start(job, (*prefix, *command), forward)

    def _start(self, job: Job, command: Argv, forward: Argv) -> Argv:
        """Return the argv that starts `command` in the container.

        `argv`, the only caller, has already added the user's variables to `command`.

        Parameters
        ----------
        forward : names of variables that docker passes on from its own environment. Other runtimes pass on
            all variables.
        """
        return command  # without a container, nothing has to be added

    def _entry_point_python(self, job: Job) -> str:
        """Return the path of the Python that runs a ``dist-*`` command: ``PYTHON -I -m PACKAGE dist-run``.

        This is needed in an image that imgkit did not build. imgkit binds only the package of the entry
        points into it, and not their programs. An image of imgkit contains the programs, so the result is
        empty.
        """
        entry_points = job.container.entry_points
        return entry_points.python if entry_points else ""

    def _env_argv(self, job: Job) -> Argv:
        """Return the start of a command that sets variables inside the container: ``env NAME=VALUE ...``.

        They are the variables of the user and of the recipe's system, for example
        ``env LR=0.1 "NCCL_DEBUG=$NCCL_DEBUG"``. The result is empty if there are none, or if options of the
        runtime set them.
        """
        # env is used instead of --env and SINGULARITYENV_*, in whose values Apptainer and older versions of
        # Singularity execute $(...). It is used instead of exported variables, because a variable that the
        # image sets would override them.
        if self.passes_variables_as_options:
            return ()
        assignments = quoting.assignments(job.container.env)
        if self.has_container:
            # `exports` sets the variables of the recipe's system in the shell of the node, which replaces
            # $NAME by the value. Without a container, the command inherits them from that shell.
            assignments += [quoting.ShellText(f'"{name}=${name}"') for name in self.system_variables(job)]
        if not assignments:
            return ()
        return ("env", *assignments)

    def shell(self, job: Job) -> Argv:
        """Return the argv of a shell in the job's image."""
        # Without a command, `system_variables` returns all variables, including those that a dist-* command
        # sets itself.
        return self.argv(dataclasses.replace(job, command=()), ("bash",))

    def shell_line(self, job: Job) -> str:
        """Return a command line that opens a shell in the job's image, with the variables of the job.

        `imgkit shell --job` runs this line in a login shell on a node of the running job. If the runtime
        cannot open a second container beside the job, the line is "".
        """
        if not self.opens_shells:
            return ""
        # Without a command, the shell gets all variables, including those that a dist-* command sets itself.
        shell_job = dataclasses.replace(job, command=())
        shell = " ".join(map(quoting.quote, self.shell(shell_job)))
        return " && ".join((*self.environment_lines(shell_job), f"exec {shell}"))

    def with_options(self, argv: Argv, options: Argv) -> Argv:
        """Return `argv`, which starts the job's container, with further options for the runtime.

        ``docker run --rm IMAGE`` -> ``docker run OPTIONS --rm IMAGE``

        Raises
        ------
        UsageError : there are options, but the runtime has no container.
        """
        if options and not self.has_container:
            raise UsageError(
                f"{options[0]} is an option for a container, but --runtime {self.kind} has none",
                where="--option",
                hint="leave it out",
            )
        # Runtimes differ in where their options begin: "docker run" has two words before them.
        program_and_verb = argv[: self.options_index]
        return (*program_and_verb, *options, *argv[self.options_index :])

    def with_input(self, argv: Argv, *, is_terminal: bool) -> Argv:
        """Return `argv`, which starts the job's container, so that its command can read the standard input.

        Parameters
        ----------
        is_terminal : whether the input is a terminal.
        """
        return argv  # only Docker needs options for that

    def node_check(self, job: Job) -> Argv:
        """Return the argv that checks each node before Slurm starts the container there.

        Only pyxis needs such a check. For all other runtimes, the result is empty.
        """
        return ()

    def _configuration(self, recipe: Target) -> system.Runtime:
        """Return ``system.runtime`` of the recipe, or defaults if that is for a runtime of another kind."""
        configuration = recipe.system.runtime
        if configuration.kind == self.kind:
            return configuration
        return system.Runtime(command=self.kind, options=self.usual_options)

    def program(self, recipe: Target) -> str:
        """Return the name or path of the runtime's program, such as ``apptainer``."""
        return self._configuration(recipe).command

    def options(self, job: Job) -> Argv:
        """Return the options of the runtime for the job. In a job without GPUs, GPU options are left out."""
        options = self._configuration(job.recipe).options
        if job.allocation.gpus:
            return options
        return tuple(option for option in options if option not in _GPU_OPTIONS)

    def passes_gpus(self, job: Job) -> bool:
        """Return whether the command sees the GPUs of its node."""
        return not self.has_container or bool(set(self.options(job)) & set(_GPU_OPTIONS))

    def modules(self, job: Job) -> tuple[str, ...]:
        """Return the environment modules that the runtime needs, in the order in which to load them."""
        return self._configuration(job.recipe).modules

    # The variables

    def environment_lines(self, job: Job) -> list[str]:
        """Return shell lines that load the modules and set the variables of the job on a node."""
        lines = [f"module load {shlex.quote(name)}" for name in self.modules(job)]
        lines += self.exports(job)
        return lines

    def exports(self, job: Job) -> tuple[str, ...]:
        """Return shell lines that set the variables of the job on a node, before the command starts.

        The lines end the job in two cases: if a variable of the site, such as $SCRATCH, is not set, or if the
        image has changed since imgkit looked for Python in it.
        """
        container = job.container
        variables = self.system_variables(job)
        # The check comes first, because the lines after it use the variables of the site.
        lines = self._require_site_variables(job, variables)
        lines += quoting.export_lines(job.settings)  # imgkit's own variables
        if container.env_file:
            lines.append(_EXPORT_ENV_FILE.format(file=shlex.quote(container.env_file)))
        if container.entry_points is not None and container.entry_points.digest:
            lines.append(self._refuse_changed_image(job, container.entry_points.digest))
        # A value in system.env can contain the path of the job's folder, as a variable that only imgkit can
        # set. So it is set before those values, or before docker gets them.
        if JOB_FOLDER in site_variables(*variables.values()):
            lines += quoting.export_lines({JOB_FOLDER: str(job.directory)})
        if not self.passes_variables_as_options:
            lines += quoting.default_exports(variables)
        return tuple(lines)

    def _require_site_variables(self, job: Job, variables: Mapping[str, str]) -> list[str]:
        """Return shell lines that end the job on a node where a variable of the site is not set.

        Paths and values in the recipe can contain variables that modules of the site set, such as $SCRATCH.
        If such a variable is empty, a path would lead to another folder. `JOB_FOLDER` is not checked, because
        imgkit itself sets it.

        Parameters
        ----------
        variables : the variables of the recipe's system, whose values may contain variables of the site.
        """
        texts = [*job.recipe.system.runtime.host_libs, *variables.values()]
        if self.has_container:
            texts += job.container.binds
        lines = []
        for name in site_variables(*texts):
            if name != JOB_FOLDER:
                lines.append(f': "${{{name}:?imgkit: {_UNSET_VARIABLE_MESSAGE}}}"')
        return lines

    def system_variables(self, job: Job) -> Mapping[str, str]:
        """Return the variables in the recipe's ``system.env`` that are set for the job's command.

        A variable that the user sets is left out. In a container, a ``dist-*`` command gets only
        `VISIBLE_GPUS`, which is CUDA_VISIBLE_DEVICES. Such a command itself reads ``system.env`` in the
        image, and leaves out values that are wrong for its node.
        """
        system_facts = job.recipe.system
        left_out_names = user_variables(job.container)  # a new set, which is changed below
        partition = system_facts.partitions.get(job.allocation.queue)
        if partition is not None and partition.interfaces:
            # The nodes of this partition have other network interfaces than those in system.env.
            left_out_names |= {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}
        reads_env_in_image = self.has_container and job.runs_entry_point
        variables = {}
        for name, value in system_facts.env.items():
            if name in left_out_names:
                continue
            if name == VISIBLE_GPUS:
                # system.env lists all GPUs of a node, but the job may have requested fewer. For 2 GPUs,
                # "0,1,2,3" -> "0,1". With 0 GPUs, the value is empty, which hides them all.
                indices = value.split(",")[: job.allocation.gpus]
                variables[name] = ",".join(indices)
            elif not reads_env_in_image:
                variables[name] = value
        return variables

    def _refuse_changed_image(self, job: Job, digest: str) -> str:
        """Return shell lines that end the job on a node if its image is missing or has another digest.

        imgkit has looked for Python in the image with this `digest`, and binds its entry points to a path
        that it found there. In a changed image, this path may be wrong.
        """
        command, expected_output = self._digest_command(job, digest)
        return f"""\
image={shlex.quote(job.container.image)}
if [ "$({command})" != "{expected_output}" ]; then
    echo "imgkit: $image has changed since its job was submitted, or this node lacks it: submit again" >&2
    exit 2
fi"""

    def _digest_command(self, job: Job, digest: str) -> tuple[str, str]:
        """Return the shell command that prints the digest of ``$image``, and the output that is expected."""
        return record.digest_command("$image"), f"{digest}  -"

    # The mounts

    def mounts(self, job: Job) -> tuple[str, ...]:
        """Return the mounts of the job's container, each as ``SRC[:DEST[:ro]]``. SRC is a path on the node.

        The order is: the run's copy of the code, the data, added packages, the host's libraries, the folders
        of the recipe and of the user, the entry points for an image that imgkit did not build, and the job's
        folder.
        """
        container = job.container
        mounts = []
        if container.code:
            mounts.append(f"{job.workspace}:/{WORKSPACE}")
        mounts += [f"{data.source}:{data.target}:ro" for data in container.data]
        for position, file in enumerate(container.packages, 1):
            mounts.append(f"{file}:{record.mount_path(position)}:{self.squashfs_options}")
        mounts += self._library_mounts(job)
        mounts += container.binds
        entry_points = container.entry_points
        if entry_points:
            folder = entry_points.folder
            mounts.append(f"{folder}/{PACKAGE}:{entry_points.package_folder}/{PACKAGE}:ro")
            mounts.append(f"{folder}/{SYSTEM_JSON.name}:{SYSTEM_JSON}:ro")
        # The job's folder has the same path in the container as on the node.
        mounts.append(str(job.directory))
        return tuple(mounts)

    def _library_mounts(self, job: Job) -> Iterator[str]:
        """Yield mounts of the host's libraries, such as those for its network, each as ``SRC:DEST:ro``.

        With ``fabric.host_libs: auto``, the node agent chooses single libraries in the container. The host's
        folders are then mounted below `HOST`, where no program finds them without the node agent:
        ``/usr:/run/imgkit/host/usr:ro``. Otherwise, the folders that the recipe lists are mounted at their
        own paths.
        """
        system_facts = job.recipe.system
        listed_folders = system_facts.runtime.host_libs
        node_agent_chooses = system_facts.fabric.host_libs == "auto"
        if node_agent_chooses:
            folders = list(HOST_FOLDERS)
            # A listed folder below one of `HOST_FOLDERS` is mounted together with it.
            folders += [folder for folder in listed_folders if not folder.startswith(_HOST_FOLDER_PREFIXES)]
            for folder in folders:
                yield f"{folder}:{HOST}{folder}:ro"
            return
        # With Docker, libraries of the host are used only if the node agent chooses them. The listed folders
        # would also need an option for LD_LIBRARY_PATH.
        if self.passes_variables_as_options:
            return
        for folder in listed_folders:
            yield f"{folder}:{folder}:ro"

    def listed_libraries(self, job: Job) -> tuple[str, ...]:
        """Return the recipe's folders of libraries that are added to LD_LIBRARY_PATH.

        If the node agent chooses single libraries (``fabric.host_libs: auto``), the result is empty.
        """
        system_facts = job.recipe.system
        if system_facts.fabric.host_libs == "auto" and self.has_container:
            return ()
        return system_facts.runtime.host_libs

    # Inspecting an image that imgkit did not build

    def probe_argv(self, job: Job, probe: Argv) -> Argv:
        """Return the argv that runs `probe` in the image on this machine.

        The probe is a short program that reports what the image contains. If the recipe has environment
        modules, they are loaded first.

        Raises
        ------
        ToolMissing : no program on this machine can start the image.
        """
        argv = self.argv(job, probe)
        modules = self.modules(job)
        if not modules:
            return argv
        # If there is no module command, the runtime may be on PATH already. If it is not, bash reports the
        # missing program.
        load_modules = shlex.join(("module", "load", *modules))
        script = f'if type module > /dev/null 2>&1; then {load_modules} || exit; fi; exec "$@"'
        return ("bash", "-lc", script, "bash", *argv)

    def probe_program(self, job: Job) -> str:
        """Return what `probe_argv` needs on this machine, for error messages: ``module load singularity``.

        It is the command that loads the recipe's modules, or otherwise the name of the runtime's program. If
        `probe_argv` itself looks for a program, the result is empty.
        """
        return job.recipe.module_line or self.program(job.recipe)

    def typed_shell(self, job: Job) -> str:
        """Return the command that a user can type to open a shell in the image."""
        return f"{self.program(job.recipe)} exec {job.container.image} bash"


def check_reference(text: str) -> str:
    """Return `text`, the name of an image.

    Raise UsageError if it begins with "-" and so looks like an option.
    """
    if text.startswith("-"):
        raise UsageError(f"{text!r} is not an image", where="--image")
    return text


def user_variables(container: Container) -> set[str]:
    """Return the names of the variables that the user sets by ``--env`` or ``--env-file``."""
    names = {*container.env, *container.names}
    if container.env_file:
        # The names in the file are needed because a variable of system.env must not replace a variable in the
        # file. Otherwise `_env_argv` would put the value from the file, which may be secret, into an
        # argument, and Docker would prefer the value of system.env. If the file is only on the nodes, the
        # names are unknown.
        with contextlib.suppress(OSError):
            lines = files.read_text(Path(container.env_file), errors="replace").splitlines()
            names.update(line.partition("=")[0] for line in lines)
    return names


def with_targets(mounts: Iterable[str]) -> Iterator[str]:
    """Yield each mount with its target, for runtimes that require one: ``/data`` -> ``/data:/data``."""
    for mount in mounts:
        if ":" in mount:
            yield mount
        else:
            yield f"{mount}:{mount}"


def _activation_argv(job: Job) -> Argv:
    """Return the start of a command that first runs the command line of ``--activate`` in the image.

    For example, ``--activate 'conda activate ml'`` sets variables in the container. The job's command then
    runs in the same shell. Without ``--activate``, the result is empty.
    """
    command_line = job.request.container.activate
    if not command_line:
        return ()
    if re.fullmatch(r"\$\w+|\$\{\w+\}", command_line):
        # The command is in a variable, for example "$WITH_CONDA". The shell would split its value into words
        # and run a single program. A second eval parses the value as shell text, which may contain several
        # commands.
        command_line = f'eval "{command_line}"'
    # The script evaluates its first argument, the command line, and then runs the arguments after it.
    return ("bash", "-c", _RUN_ACTIVATED, "bash", command_line)


def _packages_argv(job: Job) -> Argv:
    """Return the start of a command that lets Python find added packages before those of the image.

    Added packages are the files of `imgkit add`. Without such files, the result is empty.
    """
    count = len(job.container.packages)
    if not count:
        return ()
    return ("sh", "-c", record.search_path_script(count), "sh")
