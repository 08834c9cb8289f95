"""Add the folders and variables of the recipe and the request to the container of a job.

Two kinds of values are refused: values that no runtime can use, and secrets. Other users could read a secret
in the job script, in records or in argument lists.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from imgkit_builder.base.flags import declared_options
from imgkit_builder.jobs import quoting
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.request import ContainerRequest, JobRequest
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.runtimes.base import with_targets
from imgkit_builder.recipe import rules
from imgkit_builder.recipe.targets import Target
from imgkit_entrypoints import secret_patterns
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rollcall.secret import VARIABLE as SECRET_FILE
from imgkit_entrypoints.system import JOB_FOLDER, WORKSPACE


def requested_image(request: JobRequest) -> str:
    """Return the value of ``--image``, or "" without this flag.

    Raises
    ------
    UsageError : the value contains a control character.
    """
    image = request.container.image
    if re.search(r"[\x00-\x1f]", image):
        raise UsageError(f"{image!r} holds a control character", where="--image")
    return image


def with_mounts_and_variables(job: Job, *, passes_names: bool) -> Job:
    """Return `job` with the mounts, variables and working directory of its container.

    Parameters
    ----------
    passes_names : whether the system can pass on a variable of ``--env NAME`` without writing its value into
        the job's script.

    Raises
    ------
    UsageError : a flag has a value that no runtime can use, or that would not stay secret.
    """
    requested = job.request.container
    _refuse_code_flags(requested)
    workdir = ""
    if runtime_of(job).has_container:
        workdir = _select_workdir(job.recipe, requested)
    secret_file = _path_on_nodes(job, "--secret-file", job.request.launch.secret_file)
    # The user's variables are in three places: `env` has those of --env NAME=VALUE, whose values may appear
    # in the script, `names` has those of --env NAME, whose values may not, and `env_file` has the others.
    job = job.with_container(
        binds=_check_and_list_mounts(job, secret_file),
        workdir=workdir,
        env=dict(split_variable(assignment) for assignment in requested.env if "=" in assignment),
        names=_secret_variable_names(requested, passes_names),
        env_file=_path_on_nodes(job, "--env-file", requested.env_file),
    )
    # `settings` has imgkit's own variables. They are for the node agent, imgkit's process on each node.
    settings = {**job.settings, **_secret_settings(job, secret_file)}
    if _starts_in_other_folder(job):
        # By default, the node agent takes its working directory for the job's folder.
        settings[JOB_FOLDER] = str(job.directory)
    return dataclasses.replace(job, settings=settings)


def _secret_settings(job: Job, secret_file: str) -> dict[str, str]:
    """Return the variables that pass the run's secret to the node agent, imgkit's process on each node.

    The nodes of a run recognize each other by the secret.

    Parameters
    ----------
    secret_file : the path of ``--secret-file`` on the nodes, or "" if the user has named no such file.
    """
    settings = {}
    if secret_file:
        settings[SECRET_FILE] = secret_file
    if job.request.launch.require_secret:
        settings["IMGKIT_REQUIRE_SECRET"] = "1"  # noqa: S105 - a switch
    return settings


def _starts_in_other_folder(job: Job) -> bool:
    """Return whether the job's command starts in another folder of the node than the job's folder.

    For a job in pods the result is false, because pods see no folder of this machine.
    """
    runtime = runtime_of(job)
    if runtime.is_isolated:  # the job runs in pods
        return False
    if not runtime.has_container:  # then a command with code starts in the run's copy of the code
        return job.request.container.code is not None
    return job.container.workdir != ""


def _refuse_code_flags(requested: ContainerRequest) -> None:
    """Raise UsageError for ``--allow`` without ``--code``, and for ``--code`` with ``--no-code``."""
    has_code = requested.code is not None
    if requested.allow and not has_code:
        raise UsageError("--allow without --code", where="--allow", hint="--code DIR")
    if requested.no_code and has_code:
        hint = "use only one of them"
        raise UsageError("--code cannot be combined with --no-code", where="--code", hint=hint)


def _select_workdir(recipe: Target, requested: ContainerRequest) -> str:
    """Return the folder of the container in which the command starts, or "" for the job's folder.

    ``--workdir`` chooses the folder. Without this flag, the command starts in the run's copy of its code.
    Without code, it starts in the folder that the recipe sets.

    Raises
    ------
    UsageError : the value of ``--workdir`` cannot be a folder in a container.
    """
    if requested.workdir == ".":  # the job's folder, even if the recipe sets another one
        return ""
    faults = list(rules.find_image_path_faults(requested.workdir)) if requested.workdir else []
    if faults:
        message, hint = faults[0]
        raise UsageError(message, where="--workdir", hint=f"{hint}; .: the job's folder")
    default = recipe.workdir if requested.code is None else f"/{WORKSPACE}"
    return requested.workdir or default


def refuse_secrets(recipe: Target, request: JobRequest) -> None:
    """Raise UsageError for a secret, such as a token, in the command, the recipe's options or a flag.

    Other users could read it in the job script, in records and in argument lists. The value of ``--env`` is
    not checked here, because `split_variable` checks it.
    """
    system_facts = recipe.system
    _refuse_secret(request.launch.command, where="COMMAND")
    _refuse_secret(system_facts.runtime.options, where=recipe.where("system", "runtime", "options"))
    _refuse_secret(system_facts.queue.options, where=recipe.where("system", "queue", "options"))
    for flags in (request, *request.system_flags):
        for flag in declared_options(type(flags)):
            if flag.field == "env":
                continue
            value = flag.value(flags)
            # A flag that can be given several times has a tuple as its value.
            values = value if isinstance(value, tuple) else (value,)
            _refuse_secret(tuple(map(str, values)), where=flag.names[0])


def _refuse_secret(arguments: Sequence[str], *, where: str) -> None:
    """Raise UsageError if one of `arguments` is a secret, such as a token.

    Parameters
    ----------
    where : the flag or the line of the recipe that contains the arguments, for the error.
    """
    kind = secret_patterns.find_secret_argument(arguments)
    if kind:
        raise UsageError(
            f"it holds {kind}: others could read it in the job script, in records and argument lists",
            where=where,
            hint="let the program read a variable: export NAME=..., then --env NAME alone; or "
            "--env-file FILE, a file of mode 600",
        )


def _secret_variable_names(requested: ContainerRequest, passes_names: bool) -> tuple[str, ...]:
    """Return the names of ``--env NAME``, whose values must not appear in a script or an argument list.

    Parameters
    ----------
    passes_names : whether the system can pass on a variable without showing its value.

    Raises
    ------
    UsageError : a name is not valid, or the system cannot pass on a variable without showing its value.
    """
    names = [variable for variable in requested.env if "=" not in variable]
    for name in names:
        _check_name(name, name)
    if names and not passes_names:
        raise UsageError(
            f"this system cannot pass {names[0]} on without showing its value",
            where="--env",
            hint=f"a file of mode 600 with a line {names[0]}=VALUE, and --env-file FILE",
        )
    return tuple(dict.fromkeys(names))  # each name once, in the order of the flags


def split_variable(text: str) -> tuple[str, str]:
    """Return the name and the value of a variable of ``--env``: ``NAME=VALUE`` or ``NAME``.

    The value of ``NAME`` alone is empty. A value that looks like a secret is refused, because it becomes an
    argument of a command, which all users of a node can read.

    Raises
    ------
    UsageError : the name is not valid, or the value looks like a secret or contains control characters.
    """
    name, equals_sign, value = text.partition("=")
    _check_name(name, text)
    if not equals_sign:
        return name, ""
    secret_kind = secret_patterns.find_secret(value)
    if not secret_kind and secret_patterns.is_secret(name, value):
        secret_kind = "a secret (by its name)"  # noqa: S105 - a text for the message
    if secret_kind:
        raise UsageError(
            f"{name} holds {secret_kind}: every user could read it in argument lists",
            where="--env",
            hint=f"export {name}, then --env {name} alone; or --env-file FILE, a file of mode 600",
        )
    if re.search(r"[\x00-\x08\x0a-\x1f]", value):  # a tab is allowed
        raise UsageError(f"{name} holds a line break or control character", where="--env")
    return name, value


def _check_name(name: str, text: str) -> None:
    """Raise UsageError if `name` is not a valid name of a variable.

    Parameters
    ----------
    text : the complete value of ``--env``. The message shows it with secrets masked.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        masked = secret_patterns.mask_secrets(text)
        raise UsageError(f"{masked!r} is not a variable", where="--env", hint="NAME=VALUE, or NAME")


def _path_on_nodes(job: Job, flag: str, file: Path | None) -> str:
    """Return the path of `file` on the nodes, or "" if the flag is not given.

    A relative path is relative to the job's folder.

    Parameters
    ----------
    flag : the flag whose value is `file`, for error messages.

    Raises
    ------
    UsageError : the path contains a character that is not allowed in a job script.
    """
    if file is None:
        return ""
    return quoting.check_flag_value(flag, str(job.directory / file))


def _check_and_list_mounts(job: Job, secret_file: str) -> tuple[str, ...]:
    """Return the mounts of the recipe, of ``--bind`` and of the secret's file, in this order.

    The secret is a text by which the nodes of the run recognize each other. Each container mounts the job's
    folder anyway. So the secret's file is mounted only if it is outside of that folder.

    Raises
    ------
    UsageError : a value of ``--bind`` is not ``SRC[:DEST[:ro]]``, or a mount would hide the run's code.
    """
    requested_binds = job.request.container.binds
    _refuse_invalid_binds(requested_binds)  # the binds of the recipe were checked when it was loaded
    binds = (*job.recipe.system.runtime.binds, *requested_binds)
    if job.request.container.code is not None:
        _refuse_hidden_code(binds)
    if not secret_file or runtime_of(job).is_isolated:  # pods get the secret from Kubernetes
        return binds
    if Path(secret_file).is_relative_to(job.directory):
        return binds
    return (*binds, f"{secret_file}:{secret_file}:ro")


def _refuse_invalid_binds(binds: Iterable[str]) -> None:
    """Raise UsageError for a value of ``--bind`` that is not ``SRC[:DEST[:ro]]``."""
    for bind in binds:
        faults = [*rules.printable_text(bind), *rules.bind_mount(bind)]
        if faults:
            message, hint = faults[0]
            raise UsageError(message, where="--bind", hint=hint)


def _refuse_hidden_code(binds: Sequence[str]) -> None:
    """Raise UsageError if a mount at ``/workspace`` would hide the run's copy of its code.

    The job would then run other code than the user has sent.
    """
    for bind in with_targets(binds):
        target = bind.split(":")[1]
        if posixpath.normpath(target) == f"/{WORKSPACE}":
            raise UsageError(
                f"{bind} would hide the run's copy of the code",
                where="--bind",
                hint=f"mount it below /{WORKSPACE} or elsewhere, or leave the code out: --no-code",
            )
