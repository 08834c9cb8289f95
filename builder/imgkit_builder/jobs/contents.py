"""What a job's container holds: the image, folders and variables, as the recipe and the request say. A value
that its runtime cannot use, or that others could read, is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from imgkit_builder.base.flags import declared
from imgkit_builder.jobs import pyxis, quoting
from imgkit_builder.jobs.code_tree import CODE_PLACE
from imgkit_builder.jobs.job import Job, RuntimeKind
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints import secret_patterns
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rollcall.secret import VARIABLE


def image(recipe: Target, request: JobRequest, run_by: RuntimeKind, directory: Path) -> str:
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


def _printable_image(request: JobRequest) -> str:
    if any(ord(letter) < 32 for letter in request.container.image):
        raise UsageError(f"{request.container.image!r} holds a control character", where="--image")
    return request.container.image


def image_to_make(recipe: Target, request: JobRequest, directory: Path) -> tuple[str, tuple[str, ...]]:
    """Path of the .sif or .sqsh that a job makes, and the argv that makes it."""
    runtime, name = recipe.system.runtime, recipe.name
    if request.archive is None:
        if runtime.kind == "pyxis":
            hint = "build it with an engine elsewhere, and here: imgkit run --sif ARCHIVE"
            raise UsageError("the job builds a .sif, and pyxis starts none", where="--build", hint=hint)
        name = Path(request.build).stem
    suffix = ".sqsh" if runtime.kind == "pyxis" else ".sif"
    image = str(directory / (_printable_image(request) or f"{name}{suffix}"))
    if request.archive is not None:
        compression = ("--compression", runtime.compression) if runtime.compression != "auto" else ()
        return image, ("imgkit", "sif", str(request.archive.absolute()), "-o", image, *compression)
    file = Path(request.build)
    source = str(file.absolute()) if file.suffix in (".yaml", ".yml") else request.build
    base = ("--base-from", str(request.base_from.absolute())) if request.base_from is not None else ()
    return image, ("imgkit", "build", source, "--with", "apptainer", *base, "-o", image)


def filled(job: Job, *, passes_names: bool) -> Job:
    """Return `job` with what its container holds beside the image.

    Parameters
    ----------
    passes_names : whether its system passes on variables without showing their values.

    Raises
    ------
    UsageError : a value that its runtime cannot use.
    """
    request, run_by, directory = job.request, job.container.runtime, job.directory
    _refuse_code(request, run_by)
    folder = _workdir(job.recipe, request, run_by)
    secret_file = _secret_file(request, directory)
    settings = {
        VARIABLE: secret_file,
        "IMGKIT_REQUIRE_SECRET": "1" if request.launch.require_secret else "",
        "IMGKIT_JOB_DIR": str(directory) if folder and run_by != "kubernetes" else "",
    }
    filled_job = job.with_container(
        binds=_binds(job.recipe, request, run_by, directory),
        workdir=folder,
        env=_environment(request),
        names=_names(request, passes_names),
        env_file=_env_file(request, run_by, directory),
    )
    stated = {name: value for name, value in settings.items() if value}
    return dataclasses.replace(filled_job, settings={**job.settings, **stated})


def _refuse_code(request: JobRequest, run_by: RuntimeKind) -> None:
    """Raise UsageError for flags of code that mean nothing in this job."""
    if request.container.code is not None and request.container.no_code:
        raise UsageError(
            "--code cannot be combined with --no-code", where="--code", hint="use only one of them"
        )
    if request.container.code is None:
        if request.container.allow:
            raise UsageError("--allow without --code", where="--allow", hint="--code DIR")
    elif run_by not in ("singularity", "pyxis"):
        raise UsageError(
            f"the code is mounted over a .sif, but {run_by} does not run one",
            where="--code",
            hint=f"leave it out; a folder that all nodes see: --bind DIR:/{CODE_PLACE}",
        )


def _workdir(recipe: Target, request: JobRequest, run_by: RuntimeKind) -> str:
    """The folder of the container in which the command starts; empty: the job's folder.

    Raises
    ------
    UsageError : ``--workdir`` is no folder of a container.
    """
    from imgkit_builder.recipe import rules

    if request.container.workdir:
        if run_by == "host":
            hint = "--directory DIR: the job's folder, in which the command starts"
            raise UsageError("--runtime host has no container", where="--workdir", hint=hint)
        for message, hint in (
            () if request.container.workdir == "." else rules.image_path(request.container.workdir)
        ):
            raise UsageError(message, where="--workdir", hint=f"{hint}; .: the job's folder")
        return "" if request.container.workdir == "." else request.container.workdir
    if run_by == "host":
        return ""
    return recipe.workdir or (f"/{CODE_PLACE}" if request.container.code is not None else "")


def doubts(job: Job) -> Iterator[str]:
    """Warnings: requests that the user may not have meant."""
    if job.container.runtime == "docker" and job.container.workdir and not job.request.container.workdir:
        yield (
            f"the command starts in {job.container.workdir} of the image; files that it writes there are "
            "lost with the container: write below $IMGKIT_JOB_DIR, or start in the job's folder: --workdir ."
        )
    if job.container.runtime == "pyxis":
        yield from pyxis.doubts(job)


def _environment(request: JobRequest) -> Mapping[str, str]:
    """Return the variables that the user sets inside the container by ``--env NAME=VALUE``."""
    return dict(variable(text) for text in request.container.env if "=" in text)


def refuse_secrets(recipe: Target, request: JobRequest) -> None:
    """Raise UsageError for a secret in what becomes part of the script, the record and argument lists.

    ``--env`` has a check of its own, `variable`.
    """
    system = recipe.system
    texts: list[tuple[str, tuple[str, ...]]] = [
        ("COMMAND", request.launch.command),
        (recipe.where("system", "runtime", "options"), system.runtime.options),
        (recipe.where("system", "queue", "options"), system.queue.options),
    ]
    for flags in (request, *request.system_flags):
        for flag in declared(type(flags)):
            value = flag.value(flags)
            if flag.field != "env":
                texts.append(
                    (flag.names[0], tuple(map(str, value if isinstance(value, tuple) else (value,))))
                )
    for where, arguments in texts:
        if kind := secret_patterns.in_arguments(arguments):
            raise UsageError(
                f"it holds {kind}: others could read it in the job script, in records and argument lists",
                where=where,
                hint="let the program read a variable: export NAME=..., then --env NAME alone; or "
                "--env-file FILE, a file of mode 600",
            )


def _names(request: JobRequest, passes_names: bool) -> tuple[str, ...]:
    """Variables of ``--env NAME``, whose values no text may hold."""
    names = tuple(dict.fromkeys(_name(text, text) for text in request.container.env if "=" not in text))
    if names and not passes_names:
        raise UsageError(
            f"this system cannot pass {names[0]} on without showing its value",
            where="--env",
            hint=f"a file of mode 600 with a line {names[0]}=VALUE, and --env-file FILE",
        )
    return names


def _env_file(request: JobRequest, run_by: RuntimeKind, directory: Path) -> str:
    """Path of ``--env-file`` on the nodes; empty if there is none."""
    if request.container.env_file is None:
        return ""
    if run_by == "kubernetes":
        raise UsageError(
            "pods cannot read a file from here",
            where="--env-file",
            hint=f"kubectl create secret generic imgkit --from-env-file={request.container.env_file}, and "
            "--env NAME for each variable",
        )
    return quoting.check("--env-file", str(directory / request.container.env_file))


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


def _secret_file(request: JobRequest, directory: Path) -> str:
    """Path of ``--secret-file`` on the nodes; empty if there is none."""
    if request.launch.secret_file is None:
        return ""
    return quoting.check("--secret-file", str(directory / request.launch.secret_file))


def _binds(recipe: Target, request: JobRequest, run_by: RuntimeKind, directory: Path) -> tuple[str, ...]:
    """The recipe's mounts, then the user's, then the file of the secret where the job's folder has none."""
    from imgkit_builder.recipe import rules

    for text in request.container.binds:
        for message, hint in (*rules.printable(text), *rules.bind(text)):
            raise UsageError(message, where="--bind", hint=hint)
    file = _secret_file(request, directory)
    is_outside = file and run_by != "kubernetes" and not Path(file).is_relative_to(directory)
    secret_mount = (f"{file}:{file}:ro",) if is_outside else ()
    return (*recipe.system.runtime.binds, *request.container.binds, *secret_mount)
