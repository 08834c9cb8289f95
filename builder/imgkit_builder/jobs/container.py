"""The argv that starts a job's command in its container, and the job templates that hold it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from imgkit_builder.base import files
from imgkit_builder.image.wheel import PACKAGE
from imgkit_builder.jobs import pyxis, quoting
from imgkit_builder.jobs.code_tree import CODE_PLACE
from imgkit_builder.jobs.job import CodeRecord, Job
from imgkit_builder.sif import sqsh
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import mounted_code
from imgkit_entrypoints.rules import SITE_VARIABLE, site_variables
from imgkit_entrypoints.system import HOST, HOST_FOLDERS, JOB_FOLDER, SYSTEM_JSON, Partition

GPU_OPTIONS = ("--nv", "--nvccli", "--rocm", "--gpus=all", "--gpu", "--device=nvidia.com/gpu=all")
"""Options that a job without GPUs leaves out."""

QUIET = "--quiet"
"""Option of singularity and apptainer that leaves out INFO lines, on every node; warnings and errors stay."""

DOCKER_OPTIONS = (
    *("--gpus=all", "--ipc=host", "--ulimit=memlock=-1", "--ulimit=stack=67108864"),
    "--network=host",  # NCCL and the rendezvous choose their own ports between the nodes
)
"""Docker's options if the recipe's runtime is another: NVIDIA's page of the image asks for them."""

OPEN_FILES = "--ulimit=nofile=16384"
"""Docker's option for every job: Docker 29 lowers the limit to 1,024, too few for data workers and a head.

A larger one would keep a container from starting where the engine's own limit is lower (rootless, sandboxes).
"""

PODMAN_OPTIONS = ("--network=host", "--ipc=host", "--cgroups=disabled", "--pull=never")
"""Options of Podman under Slurm that the recipe does not set.

The nodes meet on the host's network, and the workers of a node in its shared memory. The processes stay in
the cgroup of the step, so that Slurm counts and ends them. A thousand nodes do not ask a registry at once.
"""

_READ_ENV = (
    'while IFS= read -r text || [ "$text" ]; do case ${{text%%=*}} in "" | [0-9]* | *[!A-Za-z0-9_]*) ;; '
    '*) export "${{text?}}" ;; esac; done < {file}'
)
"""Reads lines NAME=VALUE without executing them, and skips all others."""


def start(job: Job, command: Sequence[str], *, forward: Sequence[str] = ()) -> tuple[str, ...]:
    """`command` in the job's image, with the user's variables set.

    Parameters
    ----------
    forward : variables that docker copies from its own environment; other runtimes copy all.
    """
    is_entry_point = bool(command) and command[0].startswith("dist-")
    if is_entry_point and (job.container.bound is not None or job.container.runtime == "host"):
        # Only images of imgkit have dist-* programs; the installed package does not.
        python = (
            job.container.bound.python
            if job.container.bound
            else f"{job.container.image}/bin/python3"
            if job.container.image
            else "python3"
        )
        # Not by PYTHONPATH: the workers start with -I, too.
        command = (python, "-I", "-m", PACKAGE, *command)
    if job.container.runtime == "docker":
        argv = (program(job), "run", "--rm", *options(job), *_docker_options(job, forward))
        return (*argv, job.container.image, *_activation(job), *command)
    # By env inside the container: apptainer and older versions of singularity execute $(...) in the values of
    # --env and SINGULARITYENV_*, and a variable that the image sets overrides an exported one.
    variables = [f"{name}={value}" for name, value in job.container.env.items()]
    if job.container.runtime != "host":
        variables += [quoting.Shell(f'"{name}=${name}"') for name in system_variables(job)]
    command = (*_activation(job), *(("env", *variables) if variables else ()), *command)
    if job.container.runtime == "host":
        return command
    libraries = _listed_libraries(job)
    if job.container.runtime == "pyxis":
        return pyxis.start(
            job, command, options=options(job), mounts=with_targets(_mounts(job)), libraries=libraries
        )
    set_path = quoting.search_first(libraries) if libraries else ""
    set_env = sqsh.environment_words(set_path) if is_sqsh(job) else ()
    return (*_singularity(job, "exec"), *set_env, *command)


def _singularity(job: Job, verb: str) -> tuple[str, ...]:
    """The command of singularity up to the image."""
    binds = (argument for bind in _mounts(job) for argument in ("--bind", quoting.expanding(bind)))
    pwd = ("--pwd", job.container.workdir) if job.container.workdir else ()  # apptainer's --cwd is newer
    return (program(job), QUIET, verb, *options(job), *binds, *pwd, job.container.image)


_ACTIVATE = """\
eval "$1" >&2 || { echo "imgkit: the command of --activate failed with exit code $?: $1" >&2; exit 3; }
shift
exec "$@"
"""


def _activation(job: Job) -> tuple[str, ...]:
    """Words that activate an environment of the image, before the words that run in it."""
    command = job.request.container.activate
    if re.fullmatch(r"\$\w+|\$\{\w+\}", command):
        command = f'eval "{command}"'  # the command in a variable, which may have several parts
    return ("bash", "-c", _ACTIVATE, "bash", command) if command else ()


def is_sqsh(job: Job) -> bool:
    """Whether Singularity starts a plain squashfs; by its name where the file is not here."""
    return job.container.runtime == "singularity" and (
        job.container.image.endswith(pyxis.SUFFIXES) or sqsh.is_sqsh(Path(job.container.image))
    )


def system_variables(job: Job) -> Mapping[str, str]:
    """Return the variables of ``system.env`` for the job's command, without those that the user sets.

    ``dist-*`` get none: they read them in the image, and leave out what does not fit the node. Without an
    image, they get all of them, too.
    """
    if job.container.runtime != "host" and job.runs_entry_point:
        return {}
    system = job.recipe.system
    users = {*job.container.env, *job.container.names}
    if system.partitions.get(job.allocation.queue, Partition()).interfaces:
        users.update(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"))  # the system's are those of other nodes
    if job.container.env_file:
        # Its values must stand in no argument list, and Docker would prefer the system's. The file may be on
        # the nodes alone.
        with contextlib.suppress(OSError):
            rows = files.read_text(Path(job.container.env_file), errors="replace").splitlines()
            users.update(row.partition("=")[0] for row in rows)
    return {name: value for name, value in system.env.items() if name not in users}


def shell(job: Job) -> tuple[str, ...]:
    """A shell in the job's image."""
    job = dataclasses.replace(job, command=())
    plain = not (job.container.env or system_variables(job) or job.request.container.activate or is_sqsh(job))
    if job.container.runtime == "singularity" and plain:
        return _singularity(job, "shell")
    return start(job, ("bash",))


def shell_line(job: Job) -> str:
    """The line that opens a shell in the job's image, with its mounts and variables; for a login shell."""
    job = dataclasses.replace(job, command=())
    load = [f"module load {shlex.quote(name)}" for name in modules(job)]
    return " && ".join((*load, *exports(job), f"exec {' '.join(map(quoting.quote, shell(job)))}"))


def program(job: Job) -> str:
    """The runtime's command: the recipe's, unless the request names another runtime."""
    runtime = job.recipe.system.runtime
    return runtime.command if runtime.kind == job.container.runtime else job.container.runtime


def options(job: Job) -> tuple[str, ...]:
    """Options of the runtime at every start."""
    runtime = job.recipe.system.runtime
    usual = {"singularity": ("--nv",), "docker": DOCKER_OPTIONS}.get(job.container.runtime, ())
    chosen = runtime.options if runtime.kind == job.container.runtime else usual
    if job.container.runtime == "docker" and job.system == "slurm":
        names = {option.partition("=")[0] for option in chosen}
        chosen = (*chosen, *(option for option in PODMAN_OPTIONS if option.partition("=")[0] not in names))
    elif job.container.runtime == "docker" and not any(
        "nofile" in option for option in (*chosen, *job.request.allocation.options)
    ):
        chosen = (*chosen, OPEN_FILES)
    return chosen if job.allocation.gpus else tuple(option for option in chosen if option not in GPU_OPTIONS)


def modules(job: Job) -> tuple[str, ...]:
    """Environment modules that the start needs, in load order."""
    runtime = job.recipe.system.runtime
    if job.container.runtime == "host":
        return runtime.host_modules
    return runtime.modules if runtime.kind == job.container.runtime else ()


EDGES = """{{ head -c {bytes} {image}; tail -c {bytes} {image}; stat -L -c %s {image}; }} | sha256sum"""
"""Shell words that print the digest of both ends of a file and of its size.

Its bounds: a .sif begins with its table and its superblock, and ends with the tables of its squashfs, which
hold the place, size and time of every file. To read all of it would take a minute on each node.
"""
EDGE_BYTES = 65536
_CLEANING = [
    f"{runtime}_{option}" for option in ("CLEANENV", "CONTAINALL") for runtime in ("APPTAINER", "SINGULARITY")
]
_UNCLEAN = f"unset {' '.join(_CLEANING)}"
"""A user's shell may set them: without the node's variables in the container, each node would run alone."""


def _unchanged(job: Job, digest: str) -> str:
    """Shell lines that end the job where its image is not the one that imgkit looked into, or is missing."""
    if job.container.runtime != "docker":
        command, digest = EDGES.format(bytes=EDGE_BYTES, image='"$image"'), f"{digest}  -"
    else:
        command = f"{shlex.quote(program(job))} image inspect --format '{{{{.Id}}}}' \"$image\""
    return f"""\
image={shlex.quote(job.container.image)}
if [ "$({command})" != "{digest}" ]; then
    echo "imgkit: $image has changed since its job was submitted, or this node lacks it: submit again" >&2
    exit 2
fi"""


_NOT_SET = "the job needs it, and no module has set it on this node (system.runtime.modules)"


def exports(job: Job) -> tuple[str, ...]:
    """Shell lines that set variables of the runtime and of the node agent."""
    runtime, lines = job.recipe.system.runtime, [_UNCLEAN] if job.container.runtime == "singularity" else []
    lines += pyxis.exports(job) if job.container.runtime == "pyxis" else ()
    variables = system_variables(job)
    texts = (
        *runtime.host_libs,
        *variables.values(),
        *(job.container.binds if job.container.runtime != "host" else ()),
    )
    needed = (name for name in site_variables(*texts) if name != JOB_FOLDER)
    lines += [f': "${{{name}:?imgkit: {_NOT_SET}}}"' for name in needed]
    lines += quoting.exports(job.settings)
    lines += [_READ_ENV.format(file=shlex.quote(job.container.env_file))] if job.container.env_file else []
    if job.container.bound is not None and job.container.bound.digest:
        lines.append(_unchanged(job, job.container.bound.digest))
    libraries = _listed_libraries(job)
    if JOB_FOLDER in site_variables(*variables.values()):
        lines += quoting.exports({JOB_FOLDER: str(job.directory)})
    if job.container.runtime != "docker":
        lines += quoting.default_exports(variables)
    if job.container.runtime == "host":
        lines += [quoting.search_first(libraries)] if libraries else []
    elif job.container.runtime == "singularity" and libraries and not is_sqsh(job):
        prefix = "APPTAINERENV" if PurePath(program(job)).name == "apptainer" else "SINGULARITYENV"
        # This shell replaces the variables of the site, and the container LD_LIBRARY_PATH.
        folders = SITE_VARIABLE.sub(r"""'"\g<0>"'""", ":".join(libraries))
        lines.append(f"export {prefix}_LD_LIBRARY_PATH='{folders}{quoting.INHERITED}'")
    return tuple(lines)


def _listed_libraries(job: Job) -> tuple[str, ...]:
    """The recipe's folders of libraries, where they are searched as they stand and not by the node agent."""
    by_rule = job.recipe.system.fabric.host_libs == "auto" and job.container.runtime != "host"
    return () if by_rule else job.recipe.system.runtime.host_libs


def _mounts(job: Job) -> tuple[str, ...]:
    """What the container mounts of the host, ``SRC[:DEST[:ro]]``: code, libraries, folders, entry points."""
    code = (f"/{CODE_PLACE}", mounted_code.CODE_JSON) if job.container.code else ()
    entry_points: tuple[str, ...] = ()
    if job.container.bound:
        folder, site = job.container.bound.folder, job.container.bound.site
        system_json = f"{folder}/{SYSTEM_JSON.name}:{SYSTEM_JSON}:ro"
        entry_points = (f"{folder}/{PACKAGE}:{site}/{PACKAGE}:ro", system_json)
    return (
        *(f"{job.container.code_folder}{path}:{path}:ro" for path in code),
        *_libraries(job),
        *job.container.binds,
        *entry_points,
        str(job.directory),
    )


def _libraries(job: Job) -> tuple[str, ...]:
    """Mounts of the host's libraries: at their own path, or for the node agent, which chooses among them."""
    system = job.recipe.system
    if system.fabric.host_libs != "auto":
        folders = () if job.container.runtime == "docker" else system.runtime.host_libs
        return tuple(f"{folder}:{folder}:ro" for folder in folders)
    listed = (folder for folder in system.runtime.host_libs if not folder.startswith(_BELOW))
    return tuple(f"{folder}:{HOST}{folder}:ro" for folder in (*HOST_FOLDERS, *listed))


_BELOW = tuple(f"{folder}/" for folder in HOST_FOLDERS)


def with_targets(mounts: Iterable[str]) -> Iterator[str]:
    """Yield `mounts` as ``SRC:DEST[:ro]``, for runtimes that take no shorter form."""
    return (mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)


def _docker_options(job: Job, forward: Sequence[str]) -> tuple[str, ...]:
    # A value of the user's own is never expanded.
    settings = {name: value for name, value in job.settings.items() if name not in job.container.env}
    settings |= system_variables(job)
    pairs = [quoting.expanding(f"{name}={value}") for name, value in settings.items()]
    pairs += [f"{name}={value}" for name, value in job.container.env.items()]
    return (
        *(
            argument
            for mount in with_targets(_mounts(job))
            for argument in ("--volume", quoting.expanding(mount))
        ),
        *("--workdir", job.container.workdir or str(job.directory)),
        *(argument for pair in pairs for argument in ("--env", pair)),
        *(("--env-file", job.container.env_file) if job.container.env_file else ()),
        *(argument for name in (*job.container.names, *forward) for argument in ("--env", name)),
    )


def with_code(job: Job, code: CodeRecord, folder: str) -> Job:
    """Return `job` with the code over its image; `folder` is its path on the nodes."""
    env = {mounted_code.CODE_VARIABLE: code.sha256, **job.container.env}
    return job.with_container(code=code, code_folder=quoting.check("--code", folder), env=env)


def fill(job: Job, name: str, **values: Any) -> str:
    """The text of template `name`, which sees `job` and `values`.

    Raises
    ------
    UsageError : the user's own template is faulty; names its file and line.
    """
    import jinja2

    from imgkit_builder.image.render import environment

    if not job.makes_image:
        values["exports"] = exports(job)
    folder = job.request.templates
    if folder is not None and not folder.is_dir():
        raise UsageError(f"no folder {folder}", where="--templates")
    try:
        template = environment("templates/job", folder).get_template(name)
        return template.render(job=job, modules=modules(job), **values)
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        where = f"{folder or ''}/{name}"
        if isinstance(error, jinja2.TemplateSyntaxError):
            where = f"{error.filename}:{error.lineno}"
        raise UsageError(f"a faulty template: {error}", where=where) from error
