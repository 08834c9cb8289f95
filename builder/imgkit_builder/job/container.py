"""The container of a job: its image, the delta over it, mounts and variables; the argv that starts it,
and the job templates that hold it.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from imgkit_builder.delta import descriptor
from imgkit_builder.delta.descriptor import CODE_PLACE, Delta
from imgkit_builder.image.wheel import PACKAGE
from imgkit_builder.job import pyxis, quoting
from imgkit_builder.job.request import (
    Allocation,
    AnyJob,
    BoundEntryPoints,
    BuildJobRequest,
    CodeRecord,
    ConversionJobRequest,
    ImageJob,
    Job,
    Request,
    RunBy,
    declared,
)
from imgkit_builder.recipe.targets import Target
from imgkit_builder.sif import sqsh
from imgkit_entrypoints import secret_patterns
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import delta_check
from imgkit_entrypoints.rollcall.secret import VARIABLE
from imgkit_entrypoints.rules import SITE_VARIABLE, site_variables
from imgkit_entrypoints.system import HOST, HOST_FOLDERS, JOB_FOLDER, SYSTEM_JSON

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
    if job.bound is not None:
        command = _with_python(job.bound, command)
    activate = _activation(job)
    if job.run_by == "pyxis":
        mounts = (*code_mounts(job), *_libraries(job), *job.binds, *_bound(job))
        libraries = _listed_libraries(job)
        return pyxis.start(
            job, command, options=options(job), mounts=mounts, libraries=libraries, activate=activate
        )
    if job.run_by == "docker":
        argv = (program(job), "run", "--rm", *options(job), *_docker_mounts(job, forward))
        return (*argv, job.image, *activate, *command)
    # By env inside the container: apptainer and older versions of singularity execute $(...) in the values of
    # --env and SINGULARITYENV_*, and a variable that the image sets overrides an exported one.
    with_env = ("env", *(f"{name}={value}" for name, value in job.env.items())) if job.env else ()
    if job.run_by == "singularity":
        argv = (program(job), QUIET, "exec", *options(job), *_mounts(job), *_pwd(job))
        listed = _listed_libraries(job)
        first = quoting.search_first(listed) if listed else ""
        set_env = sqsh.environment_words(first) if is_sqsh(job) else ()
        return (*argv, job.image, *set_env, *activate, *with_env, *command)
    if command and command[0].startswith("dist-"):
        # Only images have dist-* programs; the installed package does not.
        python = f"{job.image}/bin/python3" if job.image else "python3"
        command = (python, "-I", "-m", "imgkit_entrypoints", *command)
    return (*with_env, *command)


def _with_python(bound: BoundEntryPoints, command: Sequence[str]) -> tuple[str, ...]:
    """`command`, where a ``dist-*`` program of the image is one of the bound entry points."""
    if not command or not command[0].startswith("dist-"):
        return tuple(command)
    # Not by PYTHONPATH: the workers start with -I, too.
    return (bound.python, "-I", "-m", PACKAGE, *command)


_ACTIVATE = """\
eval "$1" >&2 || { echo "imgkit: the command of --activate failed with exit code $?: $1" >&2; exit 3; }
shift
exec "$@"
"""


def _activation(job: Job) -> tuple[str, ...]:
    """Words that activate an environment of the image, before the words that run in it."""
    command = job.request.activate
    if re.fullmatch(r"\$\w+|\$\{\w+\}", command):
        command = f'eval "{command}"'  # the command in a variable, which may have several parts
    return ("bash", "-c", _ACTIVATE, "bash", command) if command else ()


def is_sqsh(job: Job) -> bool:
    """Whether Singularity starts a plain squashfs; by its name where the file is not here."""
    return job.run_by == "singularity" and (
        job.image.endswith(pyxis.SUFFIXES) or sqsh.is_sqsh(Path(job.image))
    )


def shell(job: Job) -> tuple[str, ...]:
    """A shell in the job's image."""
    plain = not (job.env or job.request.activate or is_sqsh(job))
    if job.run_by == "singularity" and plain:
        return (program(job), QUIET, "shell", *options(job), *_mounts(job), *_pwd(job), job.image)
    return start(job, ("bash",))


def shell_line(job: Job) -> str:
    """The line that opens a shell in the job's image, with its mounts and variables; for a login shell."""
    load = [f"module load {shlex.quote(name)}" for name in modules(job)]
    return " && ".join((*load, *exports(job), f"exec {' '.join(map(quoting.quote, shell(job)))}"))


def program(job: AnyJob) -> str:
    """The runtime's command: the recipe's, unless the request names another runtime."""
    runtime = job.recipe.system.runtime
    return runtime.command if runtime.kind == job.run_by else job.run_by


def options(job: Job) -> tuple[str, ...]:
    """Options of the runtime at every start."""
    runtime = job.recipe.system.runtime
    usual = {"singularity": ("--nv",), "docker": DOCKER_OPTIONS}.get(job.run_by, ())
    chosen = runtime.options if runtime.kind == job.run_by else usual
    if job.run_by == "docker" and job.system == "slurm":
        names = {option.partition("=")[0] for option in chosen}
        chosen = (*chosen, *(option for option in PODMAN_OPTIONS if option.partition("=")[0] not in names))
    elif job.run_by == "docker" and not any("nofile" in option for option in (*chosen, *job.request.options)):
        chosen = (*chosen, OPEN_FILES)
    return chosen if job.gpus else tuple(option for option in chosen if option not in GPU_OPTIONS)


def modules(job: AnyJob) -> tuple[str, ...]:
    """Environment modules that the start needs, in load order."""
    runtime = job.recipe.system.runtime
    if job.run_by == "host":
        return runtime.host_modules
    return runtime.modules if runtime.kind == job.run_by else ()


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
    if job.run_by != "docker":
        command, digest = EDGES.format(bytes=EDGE_BYTES, image='"$image"'), f"{digest}  -"
    else:
        command = f"{shlex.quote(program(job))} image inspect --format '{{{{.Id}}}}' \"$image\""
    return f"""\
image={shlex.quote(job.image)}
if [ "$({command})" != "{digest}" ]; then
    echo "imgkit: $image has changed since its job was submitted, or this node lacks it: submit again" >&2
    exit 2
fi"""


_NOT_SET = "the job needs it, and no module has set it on this node (system.runtime.modules)"


def exports(job: Job) -> tuple[str, ...]:
    """Shell lines that set variables of the runtime and of the node agent."""
    runtime, lines = job.recipe.system.runtime, [_UNCLEAN] if job.run_by == "singularity" else []
    lines += pyxis.exports(job) if job.run_by == "pyxis" else ()
    texts = (*runtime.host_libs, *(job.recipe.system.env.values() if job.run_by == "host" else job.binds))
    needed = (name for name in site_variables(*texts) if name != JOB_FOLDER)
    lines += [f': "${{{name}:?imgkit: {_NOT_SET}}}"' for name in needed]
    lines += quoting.exports(job.settings)
    lines += [_READ_ENV.format(file=shlex.quote(job.env_file))] if job.env_file else []
    if job.bound is not None and job.bound.digest:
        lines.append(_unchanged(job, job.bound.digest))
    libraries = _listed_libraries(job)
    if job.run_by == "host":
        # There is no image, so the node agent has no system.json to read.
        env = job.recipe.system.env
        if JOB_FOLDER in site_variables(*env.values()):
            env = {JOB_FOLDER: str(job.directory), **env}
        lines += quoting.exports(env)
        lines += [quoting.search_first(libraries)] if libraries else []
    elif job.run_by == "singularity" and libraries and not is_sqsh(job):
        prefix = "APPTAINERENV" if PurePath(program(job)).name == "apptainer" else "SINGULARITYENV"
        # This shell replaces the variables of the site, and the container LD_LIBRARY_PATH.
        folders = SITE_VARIABLE.sub(r"""'"\g<0>"'""", ":".join(libraries))
        lines.append(f"export {prefix}_LD_LIBRARY_PATH='{folders}{quoting.INHERITED}'")
    return tuple(lines)


def _listed_libraries(job: Job) -> tuple[str, ...]:
    """The recipe's folders of libraries, where they are searched as they stand and not by the node agent."""
    by_rule = job.recipe.system.fabric.host_libs == "auto" and job.run_by != "host"
    return () if by_rule else job.recipe.system.runtime.host_libs


def _mounts(job: Job) -> tuple[str, ...]:
    """Options that mount the delta, the code, the libraries and the folders."""
    overlay = ("--overlay", f"{job.overlay}:ro") if job.overlay else ()
    folders = (*code_mounts(job), *_libraries(job), *job.binds, *_bound(job), str(job.directory))
    return (*overlay, *(argument for bind in folders for argument in ("--bind", quoting.expanding(bind))))


def code_mounts(job: Job) -> tuple[str, ...]:
    """Return the mounts of the code, which hide what the image has in its folder."""
    if job.code is None:
        return ()
    return tuple(f"{job.code_folder}{path}:{path}:ro" for path in (f"/{CODE_PLACE}", delta_check.CODE_JSON))


def _libraries(job: Job) -> tuple[str, ...]:
    """Mounts of the host's libraries: at their own path, or for the node agent, which chooses among them."""
    system = job.recipe.system
    if system.fabric.host_libs != "auto":
        return tuple(f"{folder}:{folder}:ro" for folder in system.runtime.host_libs)
    listed = (folder for folder in system.runtime.host_libs if not folder.startswith(_BELOW))
    return tuple(f"{folder}:{HOST}{folder}:ro" for folder in (*HOST_FOLDERS, *listed))


_BELOW = tuple(f"{folder}/" for folder in HOST_FOLDERS)


def _bound(job: Job) -> tuple[str, ...]:
    """The mounts of the entry points, and of the system that they are for."""
    if job.bound is None:
        return ()
    folder, site = job.bound.folder, job.bound.site
    return (f"{folder}/{PACKAGE}:{site}/{PACKAGE}:ro", f"{folder}/{SYSTEM_JSON.name}:{SYSTEM_JSON}:ro")


def _pwd(job: Job) -> tuple[str, ...]:
    """The option that starts the command elsewhere than in the job's folder, where the runtime starts it."""
    return ("--pwd", job.workdir) if job.workdir else ()  # apptainer's --cwd is newer


def _docker_mounts(job: Job, forward: Sequence[str]) -> tuple[str, ...]:
    by_rule = _libraries(job) if job.recipe.system.fabric.host_libs == "auto" else ()
    binds = (*by_rule, *job.binds, *_bound(job), f"{job.directory}:{job.directory}")
    variables = {**job.settings, **job.env}
    return (
        *(
            argument
            for bind in binds
            for argument in ("--volume", quoting.expanding(bind if ":" in bind else f"{bind}:{bind}"))
        ),
        *("--workdir", job.workdir or str(job.directory)),
        *(argument for name, value in variables.items() for argument in ("--env", f"{name}={value}")),
        *(("--env-file", job.env_file) if job.env_file else ()),
        *(argument for name in (*job.names, *forward) for argument in ("--env", name)),
    )


_RECIPE_FILES = (".yaml", ".yml")


def image(recipe: Target, request: Request, run_by: RunBy, directory: Path) -> str:
    """Path of a .sif, an image reference, or the virtual environment of a run without a container."""
    image = _printable_image(request)
    if run_by == "pyxis":
        return pyxis.named(image, recipe.name, directory)
    if run_by == "singularity":
        return str(directory / (image or f"{recipe.name}.sif"))
    if run_by == "kubernetes" and not image:
        raise UsageError(
            "pods pull their image from a registry, but no image is given",
            where="--image",
            hint=f"imgkit push {recipe.name} REGISTRY/{recipe.name}:1, then --image REGISTRY/{recipe.name}:1",
        )
    if run_by == "host":
        return str(directory / image) if image else ""
    if image.startswith("-"):
        raise UsageError(f"{image!r} is not an image", where="--image")
    return image or f"{recipe.name}:latest"


def _printable_image(request: Allocation) -> str:
    if any(ord(letter) < 32 for letter in request.image):
        raise UsageError(f"{request.image!r} holds a control character", where="--image")
    return request.image


def image_to_make(recipe: Target, request: ConversionJobRequest | BuildJobRequest, directory: Path) -> str:
    """Path of the .sif or .sqsh that a job makes."""
    name = Path(request.build).stem if isinstance(request, BuildJobRequest) else recipe.name
    suffix = ".sqsh" if recipe.system.runtime.kind == "pyxis" else ".sif"
    return str(directory / (_printable_image(request) or f"{name}{suffix}"))


def making(job: ImageJob) -> tuple[str, ...]:
    """The argv that makes the image of `job`."""
    request = job.request
    if isinstance(request, ConversionJobRequest):
        compression = job.recipe.system.runtime.compression
        packed = ("--compression", compression) if compression != "auto" else ()
        return ("imgkit", "sif", str(request.archive.absolute()), "-o", job.image, *packed)
    file = Path(request.build)
    built = str(file.absolute()) if file.suffix in _RECIPE_FILES else request.build
    base = ("--base-from", str(request.base_from.absolute())) if request.base_from is not None else ()
    return ("imgkit", "build", built, "--with", "apptainer", *base, "-o", job.image)


def overlay(request: Request, run_by: RunBy, directory: Path) -> tuple[str, Delta | None]:
    """Path of the delta and its descriptor, which is read here or in the folder of the job."""
    if request.delta is None:
        return "", None
    delta = descriptor.read(request.delta if request.delta.exists() else directory / request.delta)
    if run_by != "singularity":
        raise UsageError(
            f"a delta is mounted over a .sif, but {run_by} does not run a .sif",
            where="--delta",
            hint="leave it out",
        )
    return quoting.check("--delta", str(directory / request.delta)), delta


def laid_over(job: Job, overlay: str, delta: Delta) -> Job:
    """`job`, which was resolved with its .sif alone, with `delta` over it, at the nodes' path `overlay`."""
    env = {delta_check.VARIABLE: delta.image_id, **job.env}
    return dataclasses.replace(job, overlay=quoting.check("--delta", overlay), delta=delta, env=env)


def refuse_code(request: Request, run_by: RunBy) -> None:
    """Raise UsageError for flags of code that mean nothing in this job."""
    if request.code is not None and request.no_code:
        raise UsageError(
            "--code cannot be combined with --no-code", where="--code", hint="use only one of them"
        )
    if request.code is None:
        if request.allow:
            raise UsageError("--allow without --code", where="--allow", hint="--code DIR")
    elif run_by not in ("singularity", "pyxis"):
        raise UsageError(
            f"the code is mounted over a .sif, but {run_by} does not run one",
            where="--code",
            hint=f"leave it out; a folder that all nodes see: --bind DIR:/{descriptor.CODE_PLACE}",
        )


def workdir(recipe: Target, request: Request, run_by: RunBy) -> str:
    """The folder of the container in which the command starts; empty: the job's folder.

    Raises
    ------
    UsageError : ``--workdir`` is no folder of a container.
    """
    from imgkit_builder.recipe import rules

    if request.workdir:
        if run_by == "host":
            hint = "--directory DIR: the job's folder, in which the command starts"
            raise UsageError("--runtime host has no container", where="--workdir", hint=hint)
        for message, hint in () if request.workdir == "." else rules.image_path(request.workdir):
            raise UsageError(message, where="--workdir", hint=f"{hint}; .: the job's folder")
        return "" if request.workdir == "." else request.workdir
    if run_by == "host":
        return ""
    return recipe.workdir or (f"/{CODE_PLACE}" if request.code is not None else "")


def doubts(job: Job) -> Iterator[str]:
    """Warnings: requests that the user may not have meant."""
    if job.run_by == "docker" and job.workdir and not job.request.workdir:
        yield (
            f"the command starts in {job.workdir} of the image; files that it writes there are lost with the "
            "container: write below $IMGKIT_JOB_DIR, or start in the job's folder: --workdir ."
        )
    if job.run_by == "pyxis":
        yield from pyxis.doubts(job)


def with_code(job: Job, code: CodeRecord, folder: str) -> Job:
    """Return `job` with the code over its image; `folder` is its path on the nodes."""
    env = {delta_check.CODE_VARIABLE: code.sha256, **job.env}
    return dataclasses.replace(job, code=code, code_folder=quoting.check("--code", folder), env=env)


def environment(request: Request, run_by: RunBy, image: str, delta: Delta | None) -> Mapping[str, str]:
    """Variables that are set inside the container; the user's own win."""
    pairs = (variable(text) for text in request.env if "=" in text)
    return {**_delta_id(run_by, Path(image), delta), **dict(pairs)}


def refuse_secrets(recipe: Target, request: Allocation) -> None:
    """Raise UsageError for a secret in what becomes part of the script, the record and argument lists.

    ``--env`` has a check of its own, `variable`.
    """
    system = recipe.system
    texts: list[tuple[str, tuple[str, ...]]] = [
        ("COMMAND", request.command if isinstance(request, Request) else ()),
        (recipe.where("system", "runtime", "options"), system.runtime.options),
        (recipe.where("system", "queue", "options"), system.queue.options),
    ]
    for flags in (request, *request.system_flags):
        for flag in declared(type(flags)):
            value = getattr(flags, flag.field)
            texts.append((flag.names[0], tuple(map(str, value if isinstance(value, tuple) else (value,)))))
    for where, arguments in texts:
        if where == "--env":
            continue
        if kind := secret_patterns.in_arguments(arguments):
            raise UsageError(
                f"it holds {kind}: others could read it in the job script, in records and argument lists",
                where=where,
                hint="let the program read a variable: export NAME=..., then --env NAME alone; or "
                "--env-file FILE, a file of mode 600",
            )


def names(request: Request) -> tuple[str, ...]:
    """Variables of ``--env NAME``, whose values no text may hold."""
    return tuple(dict.fromkeys(_name(text, text) for text in request.env if "=" not in text))


def env_file(request: Request, run_by: RunBy, directory: Path) -> str:
    """Path of ``--env-file`` on the nodes; empty if there is none."""
    if request.env_file is None:
        return ""
    if run_by == "kubernetes":
        raise UsageError(
            "pods cannot read a file from here",
            where="--env-file",
            hint=f"kubectl create secret generic imgkit --from-env-file={request.env_file}, and "
            "--env NAME for each variable",
        )
    return quoting.check("--env-file", str(directory / request.env_file))


def _delta_id(run_by: RunBy, image: Path, delta: Delta | None) -> Mapping[str, str]:
    """The image id that the container's commands must find, if there is a delta: given, or in the local .sif.

    It is set inside the container, because ``--cleanenv`` of a runtime must not switch the check off.
    """
    from imgkit_builder.sif import image as sif

    if delta is not None:
        return {delta_check.VARIABLE: delta.image_id}
    if run_by != "singularity" or not sif.is_sif(image):
        return {}
    found = sif.read(image)
    delta = descriptor.applied(found) if found.record and found.record.delta_sha256 else None
    return {delta_check.VARIABLE: delta.image_id} if delta else {}


def variable(text: str) -> tuple[str, str]:
    """Name and value of ``NAME=VALUE``; ``NAME`` alone has no value.

    Raises
    ------
    UsageError : it is no variable, or its value looks like a secret.
    """
    name, between, value = text.partition("=")
    _name(name, text)
    if not between:
        return name, ""
    kind = secret_patterns.in_value(value)
    if kind or secret_patterns.in_name(name, value):
        raise UsageError(
            f"{name} holds {kind or 'a secret (by its name)'}: every user could read it in argument lists",
            where="--env",
            hint=f"export {name}, then --env {name} alone; or --env-file FILE, a file of mode 600",
        )
    if any(ord(letter) < 32 and letter != "\t" for letter in value):
        raise UsageError(f"{name} holds a line break or control character", where="--env")
    return name, value


def _name(name: str, text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        masked = secret_patterns.masked(text)
        raise UsageError(f"{masked!r} is not a variable", where="--env", hint="NAME=VALUE, or NAME")
    return name


def secret(request: Request, directory: Path) -> Mapping[str, str]:
    """Variables of the node agent that say where the run's secret is, and whether there must be one."""
    variables = {}
    if file := _secret_file(request, directory):
        variables[VARIABLE] = str(file)
    if request.require_secret:
        variables["IMGKIT_REQUIRE_SECRET"] = "1"  # noqa: S105 - a switch
    return variables


def _secret_file(request: Request, directory: Path) -> Path | None:
    if request.secret_file is None:
        return None
    return Path(quoting.check("--secret-file", str(directory / request.secret_file)))


def binds(recipe: Target, request: Request, run_by: RunBy, directory: Path) -> tuple[str, ...]:
    """The recipe's mounts, then the user's, then the file of the secret where the job's folder has none."""
    from imgkit_builder.recipe import rules

    for text in request.binds:
        for message, hint in (*rules.printable(text), *rules.bind(text)):
            raise UsageError(message, where="--bind", hint=hint)
    file = _secret_file(request, directory)
    outside = file is not None and run_by != "kubernetes" and not file.is_relative_to(directory)
    secret_mount = (f"{file}:{file}:ro",) if outside else ()
    return (*recipe.system.runtime.binds, *request.binds, *secret_mount)


def fill(job: AnyJob, name: str, **values: Any) -> str:
    """The text of template `name`, which sees `job` and `values`.

    Raises
    ------
    UsageError : the user's own template is faulty; names its file and line.
    """
    import jinja2

    from imgkit_builder.image.render import environment

    if isinstance(job, Job):
        values["exports"] = exports(job)
    folder = job.request.templates
    if folder is not None and not folder.is_dir():
        raise UsageError(f"no folder {folder}", where="--templates")
    try:
        return (
            environment("templates/job", folder)
            .get_template(name)
            .render(job=job, modules=modules(job), **values)
        )
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(
            error.message or "a faulty template", where=f"{error.filename}:{error.lineno}"
        ) from None
    except jinja2.TemplateError as error:
        raise UsageError(error.message or "a faulty template", where=f"{folder or ''}/{name}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"a faulty template: {error}", where=f"{folder or ''}/{name}") from error
