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

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Job
from imgkit_builder.sif import image, sqsh
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import SITE_VARIABLE

_START = (
    'if [ -r /etc/environment ]; then while IFS= read -r line || [ "$line" ]; do '
    'case $line in PATH=/*) export "$line" ;; esac; done < /etc/environment; fi; '
)
"""Sets PATH to that of the image's ENV, which enroot and imgkit write without quotes."""
NEEDS_FILE = (
    "imgkit binds its entry points only into a file: "
    "enroot import -o NAME.sqsh docker://REGISTRY#NAME:TAG, then --image NAME.sqsh"
)
_HAS_ENTRY_POINTS = (
    "command -v dist-run > /dev/null || "
    f'{{ echo "imgkit: the image has no dist-run, so imgkit did not build it; {NEEDS_FILE}" >&2; exit 2; }}; '
)
SUFFIXES = (".sqsh", ".squashfs")
_MOUNT = re.compile(r"[^\s,$\\\"'#:]+(:[^\s,$\\\"'#:]+){0,2}")


def is_file(text: str) -> bool:
    """Whether an image is a file's path, and not a name of a registry."""
    return text.endswith(SUFFIXES) or text.startswith(("/", "./", "../"))


def named(text: str, recipe: str, directory: Path) -> str:
    """The image as pyxis takes it: the path of a .sqsh, or ``[REGISTRY#]NAME[:TAG]``.

    Raises
    ------
    UsageError : pyxis would start another image, or none.
    """
    if text.endswith(".sif"):
        raise UsageError(
            "pyxis does not start a .sif", where=f"--image {text}", hint="imgkit sif IMAGE -o NAME.sqsh"
        )
    if not text or is_file(text):
        return str(directory / (text or f"{recipe}.sqsh"))
    registry, slash, name = text.rpartition("://")[2].partition("/")
    if "://" in text or (slash and "#" not in text and re.search(r"[.:]|^localhost$", registry)):
        raise UsageError(
            f"pyxis would look for {text!r} at Docker Hub: it separates the registry by #",
            where="--image",
            hint=f"--image {registry}#{name}" if name else "--image REGISTRY#NAME:TAG, or a .sqsh",
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@:/#+-]*", text):
        raise UsageError(f"{text!r} is not an image", where="--image", hint="REGISTRY#NAME:TAG, or a .sqsh")
    return text


def start(
    job: Job,
    command: Sequence[str],
    *,
    options: Sequence[str],
    mounts: Iterable[str],
    libraries: Sequence[str],
) -> tuple[str, ...]:
    """Options of srun, and the command that it starts in the container.

    Parameters
    ----------
    options : of the recipe.
    mounts : ``SRC:DEST[:ro]`` of the host's folders.
    libraries : folders of the container that are searched for libraries before those of the image.
    """
    text = _START
    if not is_file(job.container.image) and job.runs_entry_point:
        text += _HAS_ENTRY_POINTS
    if libraries:
        text += f"{quoting.search_first(libraries)}; "
    home = () if "--container-mount-home" in options else ("--no-container-mount-home",)
    return (
        f"--container-image={job.container.image}",
        quoting.expanding(f"--container-mounts={','.join(dict.fromkeys(mounts))}"),
        f"--container-workdir={job.container.workdir or job.directory}",
        *home,
        # The value stays in the environment alone, and the image's own value does not win.
        *((f"--container-env={','.join(job.container.names)}",) if job.container.names else ()),
        *options,
        *("sh", "-c", f'{text}exec "$@"', "sh", *command),
    )


def exports(job: Job) -> tuple[str, ...]:
    """Shell lines before srun: what the user's shell sets for other containers does not change this one.

    PYXIS_CONTAINER_NAME would start another image, _SAVE write a file, and _UNSHARE=net cut the nodes off
    from each other. A node without GPUs may lack nvidia-container-cli, and then enroot's hook ends a
    container whose ENV has NVIDIA_VISIBLE_DEVICES. The hook takes the job's value before the image's.
    """
    lines = ('unset "${!PYXIS_CONTAINER_@}" "${!ENROOT_UNSHARE_@}" ENROOT_REMAP_ROOT ENROOT_RESTRICT_DEV',)
    return lines if job.allocation.gpus else (*lines, "export NVIDIA_VISIBLE_DEVICES=void")


def check_environment(variables: Mapping[str, str]) -> None:
    """Raise UsageError for variables by which pyxis would start the job's script itself in a container.

    sbatch hands them on, and pyxis reads them before the script can unset them. There is no srun in there.
    """
    for name in ("PYXIS_CONTAINER_IMAGE", "PYXIS_CONTAINER_NAME"):
        if variables.get(name) is not None:
            message = f"{name} is set here: pyxis would start the job's script itself in a container"
            raise UsageError(message, where=name, hint=f"unset {name}; the image is --image PATH")


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


def look(job: Job) -> tuple[str, ...]:
    """Words that look at the image where they run: a node without the file ends the job.

    They run without a container, in a step of their own: pyxis mounts before anything of the job's step runs,
    and enroot names neither the compression nor unsquashfs ("Invalid image format"). They also remove what an
    earlier start of the job has left: Slurm can kill pyxis' clean-up, and a requeued job, whose container has
    the same name, would end with "File already exists".
    """
    file = job.container.image if is_file(job.container.image) else ""
    compressor = _compressor(Path(file)) if file else ""
    return ("sh", "-c", _LOOK, "sh", file, f" (compressed with {compressor})" if compressor else "")


def refuse(job: Job) -> None:
    """Raise UsageError for what pyxis cannot do, or would do differently."""
    if job.outlives_nodes:
        raise UsageError(
            f"--nodes {job.allocation.size}: with pyxis the whole step is in the container, where no node "
            "can ask Slurm which nodes are left",
            where="--nodes",
            hint=f"--nodes {job.allocation.size.training}",
        )
    for text in (*job.container.binds, str(job.directory)):
        if not mounts(text):
            raise UsageError(
                f"pyxis cannot mount {text!r}",
                where="--directory" if text == str(job.directory) else "--bind, or system.runtime.binds",
                hint="a path without blanks, quotes and \\ $ # ,",
            )


def mounts(text: str) -> bool:
    """Whether pyxis can mount `text`, ``SRC[:DEST[:ro]]``: what it writes into a line of fstab."""
    return _MOUNT.fullmatch(SITE_VARIABLE.sub("x", text)) is not None


def doubts(job: Job) -> Iterator[str]:
    """Warnings: an image that only some nodes can start."""
    compressor = _compressor(Path(job.container.image))
    if compressor and compressor not in ("gzip", "xz", "lzo", job.recipe.system.runtime.compression):
        yield (
            f"{Path(job.container.image).name} is compressed with {compressor}: unsquashfs of RHEL 8 cannot "
            "read that; imgkit sif --compression gzip; or state system.runtime.compression: zstd, if all "
            "nodes can"
        )


def _compressor(path: Path) -> str:
    """The compression of a .sqsh; empty if there is none here."""
    superblock = image.superblock(path) if sqsh.is_sqsh(path) else None
    return superblock.compressor if superblock is not None else ""
