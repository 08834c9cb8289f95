"""pyxis, a plug-in of Slurm. Its options let srun start a step of a job in a container of enroot.

Notes
-----
The following facts were observed with pyxis 0.24 and enroot 4.1, or read in pyxis' args.c:

* Variables of the image override those of the job, and LANG, LANGUAGE and LC_ALL of the job are dropped. The
  only exceptions are variables that --container-env (from 0.15 on) names. PATH does not come from the image's
  ENV, but from /etc/profile, as in a login shell in the image. So the container first runs a line of shell
  that reads PATH from enroot's /etc/environment, and env sets the job's variables.
* A mount becomes a line of fstab with three fields, which are separated by blanks. So no path in it can
  contain a blank.
* The whole step runs in the container, where the commands of Slurm are missing. So nothing in the step can
  ask Slurm.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Argv, Job
from imgkit_builder.jobs.runtimes.base import SQSH_SUFFIXES, Runtime, with_targets
from imgkit_builder.jobs.runtimes.singularity import Singularity
from imgkit_builder.sif import image, sqsh
from imgkit_entrypoints.errors import ToolMissing, UsageError
from imgkit_entrypoints.rules import SITE_VARIABLE

_SET_IMAGE_PATH = (
    'if [ -r /etc/environment ]; then while IFS= read -r line || [ "$line" ]; do '
    'case $line in PATH=/*) export "$line" ;; esac; done < /etc/environment; fi; '
)
"""Shell text that sets PATH to the value in the image's ENV, which it reads from /etc/environment.

enroot and imgkit write the value to that file without quotes.
"""
_NEEDS_FILE_HINT = (
    "imgkit binds its entry points only into a file: "
    "enroot import -o NAME.sqsh docker://REGISTRY#NAME:TAG, then --image NAME.sqsh"
)
# Shell text that ends a job with a dist-* command if its image, from a registry, was not built by imgkit.
_REQUIRE_ENTRY_POINTS = (
    "command -v dist-run > /dev/null || "
    '{ echo "imgkit: the image has no dist-run, so imgkit did not build it; '
    f'{_NEEDS_FILE_HINT}" >&2; exit 2; }}; '
)
# "SRC", "SRC:DEST" or "SRC:DEST:ro". Characters are excluded that would end the option or a field of fstab,
# or that have a meaning for a shell.
_MOUNT = re.compile(r"[^\s,$\\\"'#:]+(:[^\s,$\\\"'#:]+){0,2}")

_CHECK_NODE = (
    'if [ "${SLURM_RESTART_COUNT-}" ]; then (unset ENROOT_DATA_PATH; '
    "for old in $(enroot list 2> /dev/null); do "
    'case $old in "pyxis_$SLURM_JOB_ID"[._]*) enroot remove -f "$old" ;; esac; done); fi; '
    '[ "$1" ] || exit 0; '
    '[ -r "$1" ] || { echo "imgkit: node $(uname -n) has no $1, or may not read it" >&2; exit 2; }; '
    "PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin; command -v unsquashfs > /dev/null || exit 0; "
    'said=$(unsquashfs -l "$1" etc/environment 2>&1) || echo "imgkit: unsquashfs of node $(uname -n) cannot '
    'read $1$2: $(printf %s "$said" | head -n 1); it starts only where pyxis mounts it by squashfuse" >&2'
)
"""Shell text that checks a node before the container starts there. `Pyxis.node_check` describes the checks.

The first argument is the image file, or empty for an image in a registry. The second is a note for the
warning. If unsquashfs cannot read the image, the text only prints a warning, because squashfuse may be able
to read it. Only pyxis knows which of the two it uses.
"""

_STARTERS = ("apptainer", "singularity", "enroot")
"""Programs that can start a .sqsh without srun. imgkit inspects an image with the first one on PATH."""


class Pyxis(Runtime):
    """pyxis and enroot, which start containers under Slurm."""

    kind = "pyxis"
    image_suffix = ".sqsh"

    def image(self, reference: str, recipe_name: str, directory: Path) -> str:
        """Return the image in the form that pyxis accepts: a path of a .sqsh, or ``[REGISTRY#]NAME[:TAG]``.

        If `reference` is empty, the image is the recipe's .sqsh in the job's `directory`.

        Raises
        ------
        UsageError : pyxis would start another image than the user means, or `reference` is not an image.
        """
        if reference.endswith(".sif"):
            hint = "imgkit sif IMAGE -o NAME.sqsh"
            raise UsageError("pyxis does not start a .sif", where=f"--image {reference}", hint=hint)
        if not reference:
            return str(directory / f"{recipe_name}.sqsh")
        if _is_file(reference):
            return str(directory / reference)
        _refuse_misread_registry(reference)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@:/#+-]*", reference):
            hint = "REGISTRY#NAME:TAG, or a .sqsh"
            raise UsageError(f"{reference!r} is not an image", where="--image", hint=hint)
        return reference

    def check(self, job: Job) -> None:
        """Check that pyxis can run the job.

        Raises
        ------
        UsageError : the job must go on when a node fails, or the path of a mount has characters that pyxis
            cannot mount.
        """
        size = job.allocation.size
        if job.outlives_nodes:
            raise UsageError(
                f"--nodes {size}: with pyxis the whole step is in the container, where no "
                "node can ask Slurm which nodes are left",
                where="--nodes",
                hint=f"--nodes {size.training}",
            )
        for mount in job.container.binds:
            self._refuse_unmountable(mount, where="--bind, or system.runtime.binds")
        self._refuse_unmountable(str(job.directory), where="--directory")

    def _refuse_unmountable(self, mount: str, *, where: str) -> None:
        """Raise UsageError for a mount that pyxis cannot write to fstab, the list of mounts."""
        if not self.can_mount(mount):
            hint = "a path without blanks, quotes and \\ $ # ,"
            raise UsageError(f"pyxis cannot mount {mount!r}", where=where, hint=hint)

    def check_submission(self, job: Job) -> None:
        """Check the image, and the variables of this machine, before the job waits in a queue.

        Raises
        ------
        UsageError : the image does not exist or is for other nodes, or a variable would change how the job
            starts.
        CheckFailed : the image is cut short.
        """
        _refuse_pyxis_variables()
        if not _is_file(job.container.image):
            return
        path = Path(job.container.image)
        if not sqsh.is_sqsh(path):
            problem = "is not a .sqsh" if path.exists() else "does not exist"
            hint = f"imgkit sif {job.recipe.name} -o {job.recipe.name}.sqsh, or --image PATH"
            raise UsageError(f"the image {problem}", where=job.container.image, hint=hint)
        sqsh.check_structure(path)
        super().check_submission(job)

    def refuse_python(self, job: Job, flag: str) -> None:
        """Raise UsageError if `flag` chooses a Python in an image that is in a registry and not in a file."""
        if not _is_file(job.container.image):
            message = f"imgkit does not look into {job.container.image}, an image of a registry"
            raise UsageError(message, where=flag, hint=_NEEDS_FILE_HINT)

    def can_mount(self, path: str) -> bool:
        """Return whether pyxis can mount `path`, which has the form ``SRC[:DEST[:ro]]``.

        pyxis writes the mount to a line of fstab, whose fields are separated by blanks. So the path must not
        contain a blank. A variable of the site is allowed, because a shell replaces it before pyxis gets the
        mount.
        """
        # "x" stands for the value of a variable, which is not known here.
        expanded = SITE_VARIABLE.sub("x", path)
        return _MOUNT.fullmatch(expanded) is not None

    def warnings(self, job: Job) -> Iterator[str]:
        """Yield a warning if the compression of the image cannot be read by all nodes."""
        path = Path(job.container.image)
        compressor = _read_compression(path)
        supported = ("gzip", "xz", "lzo", job.recipe.system.runtime.compression)
        if compressor and compressor not in supported:
            yield (
                f"{path.name} is compressed with {compressor}: unsquashfs of RHEL 8 cannot read that; imgkit "
                "sif --compression gzip; or state system.runtime.compression: zstd, if all nodes can"
            )

    def node_check(self, job: Job) -> Argv:
        """Return the argv that checks each node before Slurm starts the container there.

        The job ends if a node cannot read the image file. If the unsquashfs of a node cannot unpack the
        image, a warning is printed, because enroot's own message ("Invalid image format") names neither the
        compression nor unsquashfs. The check is a separate step without a container, because pyxis mounts the
        image before anything in the job's step can run.

        If Slurm has requeued the job, the check also removes the containers of the earlier start. Slurm may
        kill pyxis before pyxis removes them. The container of the new start has the same name, and would fail
        with "File already exists".
        """
        image_file = job.container.image
        if not _is_file(image_file):
            return ("sh", "-c", _CHECK_NODE, "sh", "", "")
        compression_note = ""
        compression = _read_compression(Path(image_file))
        if compression:
            compression_note = f" (compressed with {compression})"
        return ("sh", "-c", _CHECK_NODE, "sh", image_file, compression_note)

    def exports(self, job: Job) -> tuple[str, ...]:
        """Return shell lines that set and unset variables before srun is called."""
        # The user's shell may set these variables for other containers. PYXIS_CONTAINER_NAME would start
        # another image, PYXIS_CONTAINER_SAVE would write a file, and PYXIS_CONTAINER_UNSHARE=net would
        # prevent the nodes from reaching each other.
        unset = 'unset "${!PYXIS_CONTAINER_@}" "${!ENROOT_UNSHARE_@}" ENROOT_REMAP_ROOT ENROOT_RESTRICT_DEV'
        lines = [unset]
        if not job.allocation.gpus:
            # A node without GPUs may not have nvidia-container-cli. If the image's ENV contains
            # NVIDIA_VISIBLE_DEVICES, enroot's hook then ends the container. The hook prefers the value of the
            # job, and does nothing for "void".
            lines.append("export NVIDIA_VISIBLE_DEVICES=void")
        return (*lines, *super().exports(job))

    def _start(self, job: Job, command: Argv, forward: Argv) -> Argv:
        """Return the options of srun for pyxis, and then the shell that runs `command` in the container.

        pyxis is a plug-in of srun, so the caller puts ``srun`` before the result.
        """
        container = job.container
        options = self.options(job)
        mounts = ",".join(dict.fromkeys(with_targets(self.mounts(job))))  # each once, in order
        pyxis_options = [
            f"--container-image={container.image}",
            quoting.quote_with_site_variables(f"--container-mounts={mounts}"),
            f"--container-workdir={container.workdir or job.directory}",
        ]
        if "--container-mount-home" not in options:
            # A recipe that says nothing about the home folder must not depend on the site's default.
            pyxis_options.append("--no-container-mount-home")
        if container.names:
            # srun passes on the values in its environment, so no argument contains them. Without this option,
            # pyxis would use the image's own values of these variables.
            pyxis_options.append(f"--container-env={','.join(container.names)}")
        return (*pyxis_options, *options, "sh", "-c", self._start_script(job), "sh", *command)

    def _start_script(self, job: Job) -> str:
        """Return the script that sets the search paths in the container and then runs its arguments."""
        script = _SET_IMAGE_PATH
        if not _is_file(job.container.image) and job.runs_entry_point:
            script += _REQUIRE_ENTRY_POINTS
        libraries = self.listed_libraries(job)
        if libraries:
            script += f"{quoting.export_library_path(libraries)}; "
        return f'{script}exec "$@"'

    def probe_argv(self, job: Job, probe: Argv) -> Argv:
        """Return the argv that runs `probe` in the .sqsh on this machine, with the image's variables.

        The probe is a short program that reports what the image contains. pyxis cannot start it, because that
        needs srun and a node. So apptainer, singularity or enroot starts it.

        Raises
        ------
        ToolMissing : no program on this machine can start a .sqsh.
        """
        programs = [program for program in _STARTERS if shutil.which(program)]
        if not programs:
            raise ToolMissing(
                "imgkit has to look into this image, which it did not build, and nothing here starts a .sqsh",
                where=job.container.image,
                hint=f"one of {', '.join(_STARTERS)} on PATH; or submit where there is one",
            )
        program = programs[0]  # `_STARTERS` lists the preferred program first
        # The options in the recipe are for pyxis, so the usual options of Singularity are used here.
        singularity_argv = Singularity().argv(job, probe)
        if program == "enroot":
            image_index = singularity_argv.index(job.container.image)  # the probe follows the image
            return ("enroot", "start", *_enroot_options(job), *singularity_argv[image_index:])
        # The first argument is the program of Singularity, which is replaced by the one on PATH.
        return (program, *singularity_argv[1:])

    def probe_program(self, job: Job) -> str:
        """Return an empty text, because `probe_argv` itself looks for a program on PATH."""
        return ""

    def typed_shell(self, job: Job) -> str:
        """Return the command that a user can type to open a shell in the image."""
        return f"srun --container-image={shlex.quote(job.container.image)} --pty bash"


def _refuse_misread_registry(text: str) -> None:
    """Raise UsageError if pyxis would not recognize the registry in `text`, the name of an image.

    enroot separates the registry from the image by "#". It would look for ``nvcr.io/nvidia/pytorch:24.05`` or
    ``docker://...`` on Docker Hub.
    """
    scheme, _, reference = text.rpartition("://")  # `scheme` is "" if there is none
    first_part, slash, name = reference.partition("/")
    has_registry_before_slash = slash != "" and _is_registry(first_part) and "#" not in text
    if not scheme and not has_registry_before_slash:
        return
    hint = "--image REGISTRY#NAME:TAG, or a .sqsh"
    if name:
        hint = f"--image {first_part}#{name}"
    message = f"pyxis would look for {text!r} at Docker Hub: it separates the registry by #"
    raise UsageError(message, where="--image", hint=hint)


def _is_registry(first_part: str) -> bool:
    """Return whether the part of an image's name before the first slash is a registry, such as ``nvcr.io``.

    The rule is that of Docker: a registry contains a dot or a port, or is ``localhost``.
    """
    return re.search(r"[.:]|^localhost$", first_part) is not None


def _refuse_pyxis_variables() -> None:
    """Raise UsageError if a variable of this shell would start the job's script itself in a container.

    sbatch passes on the variables to the job. pyxis reads them when the script starts, before the script can
    unset them. The script would then run in a container in which srun is missing.
    """
    for name in ("PYXIS_CONTAINER_IMAGE", "PYXIS_CONTAINER_NAME"):
        if name in os.environ:
            message = f"{name} is set here: pyxis would start the job's script itself in a container"
            raise UsageError(message, where=name, hint=f"unset {name}; the image is --image PATH")


def _is_file(text: str) -> bool:
    """Return whether `text` is the path of an image file.

    If not, it is the name of an image in a registry.
    """
    return text.endswith(SQSH_SUFFIXES) or text.startswith(("/", "./", "../"))


def _read_compression(path: Path) -> str:
    """Return the compression of a .sqsh, such as "zstd", or "" if `path` is not a .sqsh on this machine."""
    if not sqsh.is_sqsh(path):
        return ""
    superblock = image.read_superblock(path)
    if superblock is None:
        return ""
    return superblock.compressor


def _enroot_options(job: Job) -> tuple[str, ...]:
    """Return the options of ``enroot start`` with the mounts that Singularity would get for the job."""
    mounts = []
    for mount in with_targets(Singularity().mounts(job)):
        source, target = mount.split(":")[:2]
        # x-create=auto lets enroot create the mount point in the container.
        mounts.append(f"{source}:{target}:x-create=auto,bind")
    # Without this value, enroot's hook for GPUs would end the container on a machine without GPUs.
    return ("--env", "NVIDIA_VISIBLE_DEVICES=void", *quoting.repeat_option("--mount", mounts))
