"""pyxis: options of srun by which it starts the job's step in a container of enroot.

Notes
-----
Seen with pyxis 0.24 and enroot 4.1, or read in pyxis' args.c:

* The image's variables win over the job's, and LANG, LANGUAGE and LC_ALL of the job are dropped, unless
  --container-env (from 0.15) names them. PATH is that of a login shell of the image, /etc/profile, and not
  that of its ENV. So the container starts with a line of shell that reads PATH from enroot's
  /etc/environment, and env sets the job's variables.
* A mount becomes a line of fstab with three words: no name in it can have a blank.
* The whole step is in the container: nothing of it can ask Slurm.
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

_START = (
    'if [ -r /etc/environment ]; then while IFS= read -r line || [ "$line" ]; do '
    'case $line in PATH=/*) export "$line" ;; esac; done < /etc/environment; fi; '
)
"""Sets PATH to that of the image's ENV, which enroot and imgkit write without quotes."""
_NEEDS_FILE = (
    "imgkit binds its entry points only into a file: "
    "enroot import -o NAME.sqsh docker://REGISTRY#NAME:TAG, then --image NAME.sqsh"
)
_HAS_ENTRY_POINTS = (
    "command -v dist-run > /dev/null || "
    '{ echo "imgkit: the image has no dist-run, so imgkit did not build it; '
    f'{_NEEDS_FILE}" >&2; exit 2; }}; '
)
_MOUNT = re.compile(r"[^\s,$\\\"'#:]+(:[^\s,$\\\"'#:]+){0,2}")

_LOOK = (
    'if [ "${SLURM_RESTART_COUNT-}" ]; then (unset ENROOT_DATA_PATH; '
    "for old in $(enroot list 2> /dev/null); do "
    'case $old in "pyxis_$SLURM_JOB_ID"[._]*) enroot remove -f "$old" ;; esac; done); fi; '
    '[ "$1" ] || exit 0; '
    '[ -r "$1" ] || { echo "imgkit: node $(uname -n) has no $1, or may not read it" >&2; exit 2; }; '
    "PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin; command -v unsquashfs > /dev/null || exit 0; "
    'said=$(unsquashfs -l "$1" etc/environment 2>&1) || echo "imgkit: unsquashfs of node $(uname -n) cannot '
    'read $1$2: $(printf %s "$said" | head -n 1); it starts only where pyxis mounts it by squashfuse" >&2'
)
"""squashfuse may read more than unsquashfs: only pyxis knows that the second alone is an error."""

_STARTERS = ("apptainer", "singularity", "enroot")
"""Programs that start a .sqsh where srun cannot: the first of them on PATH looks into it."""


class Pyxis(Runtime):
    """pyxis and enroot, under Slurm."""

    kind = "pyxis"
    image_suffix = ".sqsh"

    def image(self, text: str, recipe: str, directory: Path) -> str:
        """Return the image as pyxis takes it: the path of a .sqsh, or ``[REGISTRY#]NAME[:TAG]``.

        Raises
        ------
        UsageError : pyxis would start another image, or none.
        """
        if text.endswith(".sif"):
            hint = "imgkit sif IMAGE -o NAME.sqsh"
            raise UsageError("pyxis does not start a .sif", where=f"--image {text}", hint=hint)
        if not text or _is_file(text):
            return str(directory / (text or f"{recipe}.sqsh"))
        registry, slash, name = text.rpartition("://")[2].partition("/")
        if "://" in text or (slash and "#" not in text and re.search(r"[.:]|^localhost$", registry)):
            raise UsageError(
                f"pyxis would look for {text!r} at Docker Hub: it separates the registry by #",
                where="--image",
                hint=f"--image {registry}#{name}" if name else "--image REGISTRY#NAME:TAG, or a .sqsh",
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@:/#+-]*", text):
            hint = "REGISTRY#NAME:TAG, or a .sqsh"
            raise UsageError(f"{text!r} is not an image", where="--image", hint=hint)
        return text

    def check(self, job: Job) -> None:
        """Raise UsageError for what pyxis cannot do, or would do differently."""
        if job.outlives_nodes:
            raise UsageError(
                f"--nodes {job.allocation.size}: with pyxis the whole step is in the container, where no "
                "node can ask Slurm which nodes are left",
                where="--nodes",
                hint=f"--nodes {job.allocation.size.training}",
            )
        for text in (*job.container.binds, str(job.directory)):
            if not self.can_mount(text):
                raise UsageError(
                    f"pyxis cannot mount {text!r}",
                    where="--directory" if text == str(job.directory) else "--bind, or system.runtime.binds",
                    hint="a path without blanks, quotes and \\ $ # ,",
                )

    def check_submission(self, job: Job) -> None:
        """Check the image and the variables of this machine before the job waits in a queue.

        Raises
        ------
        UsageError : the image does not exist or is for other nodes, or a variable would change the start.
        CheckFailed : the image is cut short.
        """
        # sbatch hands variables on. By these, pyxis would start the script itself in a container, before the
        # script can unset them; that container has no srun.
        for name in ("PYXIS_CONTAINER_IMAGE", "PYXIS_CONTAINER_NAME"):
            if name in os.environ:
                message = f"{name} is set here: pyxis would start the job's script itself in a container"
                raise UsageError(message, where=name, hint=f"unset {name}; the image is --image PATH")
        path = Path(job.container.image)
        if not _is_file(job.container.image):
            return
        if not sqsh.is_sqsh(path):
            problem = "is not a .sqsh" if path.exists() else "does not exist"
            hint = f"imgkit sif {job.recipe.name} -o {job.recipe.name}.sqsh, or --image PATH"
            raise UsageError(f"the image {problem}", where=job.container.image, hint=hint)
        sqsh.structure(path)
        super().check_submission(job)

    def refuse_python(self, job: Job, flag: str) -> None:
        """Raise UsageError for an image of a registry, whose Python `flag` chooses."""
        if not _is_file(job.container.image):
            message = f"imgkit does not look into {job.container.image}, an image of a registry"
            raise UsageError(message, where=flag, hint=_NEEDS_FILE)

    def can_mount(self, path: str) -> bool:
        """Return whether pyxis can mount `path`, ``SRC[:DEST[:ro]]``: what it writes into a line of fstab."""
        return _MOUNT.fullmatch(SITE_VARIABLE.sub("x", path)) is not None

    def warnings(self, job: Job) -> Iterator[str]:
        """Yield a warning about an image that only some nodes can start."""
        path = Path(job.container.image)
        compressor = _compressor(path)
        if compressor and compressor not in ("gzip", "xz", "lzo", job.recipe.system.runtime.compression):
            yield (
                f"{path.name} is compressed with {compressor}: unsquashfs of RHEL 8 cannot read that; imgkit "
                "sif --compression gzip; or state system.runtime.compression: zstd, if all nodes can"
            )

    def node_check(self, job: Job) -> Argv:
        """Return the argv that looks at the image on each node: a node without the file ends the job.

        It runs without a container, in a step of its own: pyxis mounts before anything of the job's step
        runs, and enroot names neither the compression nor unsquashfs ("Invalid image format"). It also
        removes what an earlier start of the job has left: Slurm can kill pyxis' clean-up, and a requeued job,
        whose container has the same name, would end with "File already exists".
        """
        file = job.container.image if _is_file(job.container.image) else ""
        compressor = _compressor(Path(file)) if file else ""
        return ("sh", "-c", _LOOK, "sh", file, f" (compressed with {compressor})" if compressor else "")

    def exports(self, job: Job) -> tuple[str, ...]:
        """Return shell lines before srun, the first against what the user's shell sets for other containers.

        PYXIS_CONTAINER_NAME would start another image, _SAVE write a file, and _UNSHARE=net cut the nodes off
        from each other. A node without GPUs may lack nvidia-container-cli, and then enroot's hook ends a
        container whose ENV has NVIDIA_VISIBLE_DEVICES. The hook takes the job's value before the image's.
        """
        unset = 'unset "${!PYXIS_CONTAINER_@}" "${!ENROOT_UNSHARE_@}" ENROOT_REMAP_ROOT ENROOT_RESTRICT_DEV'
        no_gpus = () if job.allocation.gpus else ("export NVIDIA_VISIBLE_DEVICES=void",)
        return (unset, *no_gpus, *super().exports(job))

    def _start(self, job: Job, command: Argv, forward: Argv) -> Argv:
        container, options = job.container, self.options(job)
        libraries = self.listed_libraries(job)
        text = _START
        if not _is_file(container.image) and job.runs_entry_point:
            text += _HAS_ENTRY_POINTS
        if libraries:
            text += f"{quoting.search_first(libraries)}; "
        mounts = dict.fromkeys(with_targets(self.mounts(job)))
        home = () if "--container-mount-home" in options else ("--no-container-mount-home",)
        return (
            f"--container-image={container.image}",
            quoting.expanding(f"--container-mounts={','.join(mounts)}"),
            f"--container-workdir={container.workdir or job.directory}",
            *home,
            # The value stays in the environment alone, and the image's own value does not win.
            *((f"--container-env={','.join(container.names)}",) if container.names else ()),
            *options,
            *("sh", "-c", f'{text}exec "$@"', "sh", *command),
        )

    def probe_argv(self, job: Job, probe: Argv) -> Argv:
        """Return the argv that runs `probe` in the .sqsh on this machine, with the image's variables.

        Raises
        ------
        ToolMissing : nothing on this machine starts a .sqsh.
        """
        program = next(filter(shutil.which, _STARTERS), "")
        if not program:
            raise ToolMissing(
                "imgkit has to look into this image, which it did not build, and nothing here starts a .sqsh",
                where=job.container.image,
                hint=f"one of {', '.join(_STARTERS)} on PATH; or submit where there is one",
            )
        # The options in the recipe are those of pyxis: Singularity starts it with its usual ones.
        singularity = Singularity()
        argv = (program, *singularity.argv(job, probe)[1:])
        if program != "enroot":
            return argv
        mounts: list[str] = []
        for mount in with_targets(singularity.mounts(job)):
            source, target = mount.split(":")[:2]
            mounts += ("--mount", f"{source}:{target}:x-create=auto,bind")
        # enroot's hook for GPUs ends the container where there are none.
        no_gpus = ("--env", "NVIDIA_VISIBLE_DEVICES=void")
        return (program, "start", *no_gpus, *mounts, *argv[argv.index(job.container.image) :])

    def probe_program(self, job: Job) -> str:
        """Return no program: `probe_argv` has found one on PATH."""
        return ""

    def typed_shell(self, job: Job) -> str:
        """Return the command that people type for a shell in the image."""
        return f"srun --container-image={shlex.quote(job.container.image)} --pty bash"


def _is_file(text: str) -> bool:
    """Return whether an image is a file's path, and not a name of a registry."""
    return text.endswith(SQSH_SUFFIXES) or text.startswith(("/", "./", "../"))


def _compressor(path: Path) -> str:
    """Return the compression of a .sqsh; empty if there is none here."""
    superblock = image.superblock(path) if sqsh.is_sqsh(path) else None
    return superblock.compressor if superblock is not None else ""
