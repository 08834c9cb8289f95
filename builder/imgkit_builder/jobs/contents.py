"""What a job's container holds beside the image: folders and variables, as the recipe and the request say. A
value that no runtime can use, or that others could read, is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from imgkit_builder.base.flags import declared
from imgkit_builder.jobs import quoting, runtimes
from imgkit_builder.jobs.code_tree import CODE_PLACE
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import ContainerRequest, JobRequest
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.recipe import rules
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints import secret_patterns
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rollcall.secret import VARIABLE


def requested_image(request: JobRequest) -> str:
    """Return the value of ``--image``; raise UsageError if it holds a control character."""
    if any(ord(letter) < 32 for letter in request.container.image):
        raise UsageError(f"{request.container.image!r} holds a control character", where="--image")
    return request.container.image


def image_to_make(recipe: Target, request: JobRequest, directory: Path) -> tuple[str, tuple[str, ...]]:
    """Return the path of the .sif or .sqsh that a job makes, and the argv that makes it."""
    runtime, name = recipe.system.runtime, recipe.name
    suffix = runtimes.named(runtime.kind).image_suffix or ".sif"
    if request.archive is None:
        if suffix != ".sif":
            hint = "build it with an engine elsewhere, and here: imgkit run --sif ARCHIVE"
            message = f"the job builds a .sif, and {runtime.kind} starts none"
            raise UsageError(message, where="--build", hint=hint)
        name = Path(request.build).stem
    image = str(directory / (requested_image(request) or f"{name}{suffix}"))
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
    UsageError : a value that no runtime can use.
    """
    request, runtime = job.request, runtime_of(job)
    requested = request.container
    _refuse_code(requested)
    workdir = _workdir(job.recipe, requested) if runtime.has_container else ""
    secret_file = _path_on_nodes(job, "--secret-file", request.launch.secret_file)
    settings = {
        VARIABLE: secret_file,
        "IMGKIT_REQUIRE_SECRET": "1" if request.launch.require_secret else "",
        "IMGKIT_JOB_DIR": str(job.directory) if workdir and not runtime.is_isolated else "",
    }
    settings = {name: value for name, value in settings.items() if value}
    job = job.with_container(
        binds=_binds(job, secret_file),
        workdir=workdir,
        env=dict(variable(text) for text in requested.env if "=" in text),
        names=_names(requested, passes_names),
        env_file=_path_on_nodes(job, "--env-file", requested.env_file),
    )
    return dataclasses.replace(job, settings={**job.settings, **settings})


def _refuse_code(requested: ContainerRequest) -> None:
    """Raise UsageError for flags of code that mean nothing in this job."""
    if requested.code is None:
        if requested.allow:
            raise UsageError("--allow without --code", where="--allow", hint="--code DIR")
    elif requested.no_code:
        hint = "use only one of them"
        raise UsageError("--code cannot be combined with --no-code", where="--code", hint=hint)


def _workdir(recipe: Target, requested: ContainerRequest) -> str:
    """Return the folder of the container in which the command starts; empty: the job's folder.

    Raises
    ------
    UsageError : ``--workdir`` is no folder of a container.
    """
    workdir = requested.workdir
    if workdir == ".":
        return ""
    if workdir:
        for message, hint in rules.image_path(workdir):
            raise UsageError(message, where="--workdir", hint=f"{hint}; .: the job's folder")
        return workdir
    return recipe.workdir or (f"/{CODE_PLACE}" if requested.code is not None else "")


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


def _names(requested: ContainerRequest, passes_names: bool) -> tuple[str, ...]:
    """Variables of ``--env NAME``, whose values no text may hold."""
    names = tuple(dict.fromkeys(_name(text, text) for text in requested.env if "=" not in text))
    if names and not passes_names:
        raise UsageError(
            f"this system cannot pass {names[0]} on without showing its value",
            where="--env",
            hint=f"a file of mode 600 with a line {names[0]}=VALUE, and --env-file FILE",
        )
    return names


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


def _path_on_nodes(job: Job, flag: str, file: Path | None) -> str:
    """Return the path on the nodes of the file that `flag` names; empty if there is none."""
    return "" if file is None else quoting.check(flag, str(job.directory / file))


def _binds(job: Job, secret_file: str) -> tuple[str, ...]:
    """Return the recipe's mounts, then the user's, then the file of the secret if it is in another folder."""
    binds = job.request.container.binds
    for text in binds:
        for message, hint in (*rules.printable(text), *rules.bind(text)):
            raise UsageError(message, where="--bind", hint=hint)
    binds = (*job.recipe.system.runtime.binds, *binds)
    is_outside = secret_file and not Path(secret_file).is_relative_to(job.directory)
    if is_outside and not runtime_of(job).is_isolated:
        return (*binds, f"{secret_file}:{secret_file}:ro")
    return binds
