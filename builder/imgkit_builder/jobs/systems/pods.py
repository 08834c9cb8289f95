"""Common parts of jobs in pods, for RunAI and Kubeflow: flags, names, volumes, variables and warnings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from imgkit_builder.base.flags import option_field
from imgkit_builder.jobs.job import Argv, Job
from imgkit_builder.jobs.memory import size_text
from imgkit_builder.jobs.quoting import quote
from imgkit_builder.jobs.request import SystemFlags
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.systems import (
    Abilities,
    System,
    partial_node_warnings,
    runai_client,
    single_process_warnings,
)
from imgkit_builder.jobs.templates import render_template
from imgkit_builder.recipe.systems import SHIPPED
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import site_variables
from imgkit_entrypoints.schedulers import kubernetes
from imgkit_entrypoints.system import WORKSPACE

SLEEP_COMMAND: Argv = ("sleep", "infinity")
"""The command of the pods in an interactive job. They sleep until the user enters them."""
SECRET_NAME = "imgkit"  # noqa: S105 - a name
"""Name of the user's Secret in the job's namespace.

Its key ``secret`` is the secret by which the nodes of a run recognize each other. Its other keys are the
values of ``--env NAME``.
"""
# A label of a host name (RFC 1123). Kubernetes requires this form for many names.
_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
START_SCRIPT = "start.sh"
"""The script in the run folder that copies the code and starts the command."""
# The description of a shell in the job's own container: see `JobShell.description`.
SAME_CONTAINER = (
    "a shell in the container of the job's first pod (--node POD: another one), next to its program"
)
NAME_LIMIT = 50
"""Longest name of a job.

Operators append a text such as ``-worker-123``, and the result may have at most 63 characters (RFC 1123).
"""


# What ``imgkit run`` writes for a job: a command of RunAI's client, whose version is detected or named, a
# PyTorchJob of Kubeflow's Training Operator, or a TrainJob of Kubeflow Trainer.
KubernetesFormat = Literal["runai", "runai-v1", "runai-v2", "pytorchjob", "trainjob"]
_CLIENTS: Mapping[str, runai_client.Client] = {"runai-v1": "v1", "runai-v2": "v2"}
"""The version of RunAI's client, by the value of ``--format`` that selects it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFlags(SystemFlags):
    """Flags that only jobs in pods have."""

    format: KubernetesFormat = option_field(
        "runai",
        help="Kubernetes: output format. runai: a command for the client on PATH, or for the client of this "
        "version.",
    )
    pvcs: tuple[str, ...] = option_field(
        (), "--pvc", metavar="CLAIM:/PATH", help="Kubernetes: volume to mount into the pods (:ro: read-only)."
    )
    run_as: str = ""
    """``UID:GID`` of the user on a remote that stores the job's files. It is empty without such a remote."""

    @property
    def system(self) -> str:
        """The system that takes the job for this ``--format``: ``kubeflow``, or "" for RunAI."""
        return "" if self.format.startswith("runai") else "kubeflow"


class Pods(System):
    """Base class of RunAI and Kubeflow, the systems whose jobs run in pods."""

    flags = PodFlags
    registration = SHIPPED["runai"]
    abilities = Abilities(passes_names=True)
    needs_fields_for_shells = False
    code_copier = "script"

    def check(self, job: Job, *, is_submitted: bool = False) -> Iterator[str]:
        """Yield warnings about requests that the user may not have intended.

        Raises
        ------
        UsageError : the job has code that the pods cannot get, or its command names a file in the image
            instead of the code.
        """
        request = job.request
        if request.container.code is not None:
            _check_code(job)
        yield from single_process_warnings(job.command)
        yield from partial_node_warnings(job, ": pods may share a node")
        if request.container.binds:
            yield "--bind is not used: pods get their folders from volumes, --pvc CLAIM:/PATH"
        has_writable_volume = any(not claim_text.endswith(":ro") for claim_text in job.flags(PodFlags).pvcs)
        if not has_writable_volume and not request.launch.interactive:
            yield "no --pvc to write to: output, checkpoints and logs disappear with the pods"
        if output_format(job).startswith("runai"):
            yield from _runai_warnings(job)


def _check_code(job: Job) -> None:
    """Raise UsageError if the pods cannot get the job's code, or if the command names a file in the image.

    The code must be on a remote that shares a volume with the pods. The run's copy of the code is then in its
    run folder. A command such as ``/workspace/train.py`` would run the older code in the image.
    """
    if not _has_files_on_remote(job):
        raise UsageError(
            f"pods of {job.recipe.title} have the code of their image only",
            where="--code",
            hint="a host that ssh reaches and that has a volume of the pods: imgkit remote add NAME "
            f"USER@HOST:/DIR --recipe {job.recipe.name} --pvc CLAIM:/PATH, then --on NAME; or code in the "
            "image (image.copy), and --no-code",
        )
    for argument in job.command:
        if argument.startswith(f"/{WORKSPACE}/"):
            raise UsageError(
                f"{argument} is a file of the image; the run's copy of the code is in its run folder",
                where="COMMAND",
                hint=f"the path in the folder of --code: {argument.removeprefix(f'/{WORKSPACE}/')}",
            )


def _has_files_on_remote(job: Job) -> bool:
    """Return whether a remote stores the job's files on a volume that it shares with the pods.

    Only then must the pods have the ids of the user on that remote.
    """
    return job.flags(PodFlags).run_as != ""


def _runai_warnings(job: Job) -> Iterator[str]:
    """Yield warnings about a job that RunAI's own client submits instead of kubectl.

    They are about spare nodes, about arguments that older clients change, and about a missing client.
    """
    size = job.allocation.size
    if size.spares:
        yield f"--nodes {size}: RunAI decides what follows a lost pod; --format pytorchjob states it"
    if client_version(job) == "v1":
        # Some versions of the client split arguments again. The RCP tutorial puts '"..."' around an argument
        # with blanks, and later pages of epfml/getting-started do not.
        arguments = (*job.command, *job.request.container.env, str(job.request.directory))
        special_arguments = [argument for argument in arguments if quote(argument) != argument]
        if special_arguments:
            yield f"{special_arguments[0]!r}: older runai clients split and expand arguments once more"
    # Neither --format nor the recipe names a version, and no client is there that would show it.
    if _requested_version(job) is None and runai_client.find_client_version() is None:
        yield "no runai on PATH: the command is for the later client; --format runai-v1 names the first one"


def client_version(job: Job) -> runai_client.Client:
    """Return the version of RunAI's client for which the job's command is written.

    ``--format`` selects it, or otherwise the recipe. If neither does, the version of the client on PATH is
    used, and ``v2`` if there is no client.

    Raises
    ------
    UsageError : the ``runai`` on PATH is neither of RunAI's two clients.
    """
    return _requested_version(job) or runai_client.find_client_version() or "v2"


def _requested_version(job: Job) -> runai_client.Client | None:
    """Return the client version that ``--format`` or the recipe selects, or None if neither selects one."""
    return _CLIENTS.get(output_format(job)) or job.recipe.system.queue.client or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A persistent volume claim, and the path at which pods mount the volume."""

    name: str
    path: PurePosixPath
    read_only: bool = False

    def __str__(self) -> str:
        text = f"{self.name}:{self.path}"
        return f"{text}:ro" if self.read_only else text


def output_format(job: Job) -> KubernetesFormat:
    """Return the value of ``--format``."""
    return job.flags(PodFlags).format


def pod_name(job: Job) -> str:
    """Return the job's name if Kubernetes accepts it as the name of pods.

    The name is also the id of the job, and a part of the host names of its pods.

    Raises
    ------
    UsageError : Kubernetes does not accept the job's name.
    """
    name = job.name
    if re.fullmatch(_LABEL, name) and len(name) <= NAME_LIMIT:
        return name
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")  # "My_Run.2" -> "my-run-2"
    similar_name = label[:NAME_LIMIT].rstrip("-")
    raise UsageError(
        f"{name!r} cannot name pods: up to {NAME_LIMIT} of a-z, 0-9, and - inside; no _, no capitals",
        where="--name",
        hint=f"--name {similar_name or 'run1'}",
    )


def parse_claim(text: str, *, where: str = "--pvc") -> Claim:
    """Parse the name of a volume: ``CLAIM:/PATH[:ro]``.

    CLAIM is the name by which pods request the volume from Kubernetes. PATH is where the pods mount it, and
    ``:ro`` makes it read-only.

    Raises
    ------
    UsageError : `text` has another form. The error names `where`.
    """
    match = re.fullmatch(rf"({_LABEL}(?:\.{_LABEL})*):(/[A-Za-z0-9._/-]+)(:ro)?", text)
    if match is None:
        raise UsageError(f"{text!r} is not a volume", where=where, hint="CLAIM:/PATH, or CLAIM:/PATH:ro")
    return Claim(name=match[1], path=PurePosixPath(match[2]), read_only=bool(match[3]))


def volume_claims(job: Job) -> tuple[Claim, ...]:
    """Return the volumes of ``--pvc``.

    Raises
    ------
    UsageError : a value is not ``CLAIM:/PATH[:ro]``, or two volumes have the same path.
    """
    claims: dict[PurePosixPath, Claim] = {}
    for claim_text in job.flags(PodFlags).pvcs:
        claim = parse_claim(claim_text)
        if claim.path in claims:
            raise UsageError(f"two volumes at {claim.path}", where="--pvc", hint="give each its own path")
        claims[claim.path] = claim
    return tuple(claims.values())


def pod_directory(job: Job) -> PurePosixPath | None:
    """Return the job's folder in the pods, or None if the pods work in the folder that the image sets.

    If a remote stores the job's files, the folder is the remote's folder as the pods see it. Otherwise it is
    the folder of ``--directory``. A folder that is set in imgkit.toml does not count, because it is on this
    machine and not in the pods.

    Raises
    ------
    UsageError : the folder is not on a volume of ``--pvc``, so the pods do not have it.
    """
    if _has_files_on_remote(job):
        return PurePosixPath(job.directory)
    if not job.request.names_directory:
        return None
    path = PurePosixPath(job.request.directory)
    is_on_volume = any(path.is_relative_to(claim.path) for claim in volume_claims(job))
    if not is_on_volume:
        raise UsageError(
            f"{path} is not on a volume of the pods",
            where="--directory",
            hint=f"--pvc CLAIM:{path}, or a folder below one of the volumes",
        )
    return path


def pod_workdir(job: Job) -> str:
    """Return the folder in which the pods start, or "" for the folder that the image sets.

    A job with code starts in its run folder, and its command later changes to the copy of the code. The pods
    cannot start in that copy: it does not exist until the start script makes it, and Kubernetes would create
    the missing folder as root.

    Raises
    ------
    UsageError : ``--directory`` is not on a volume of the pods.
    """
    if job.container.code is not None:
        return job.run_folder  # the start script later changes to the folder of --workdir
    folder = pod_directory(job)  # also raises the error for a folder that the pods do not have
    return job.container.workdir or str(folder or "")


def start_script(job: Job) -> str:
    """Return the text of the file `START_SCRIPT`, which copies the code and starts the command in a pod.

    The text is in a file instead of an argument, because older runai clients split and expand arguments
    again.
    """
    # Pods mount nothing at /workspace, which is a folder of the image for them. So a working directory below
    # /workspace is replaced by the same folder in the run's copy of the code.
    folder = PurePosixPath(job.container.workdir or job.directory)
    if folder.is_relative_to(f"/{WORKSPACE}"):
        folder = PurePosixPath(job.workspace) / folder.relative_to(f"/{WORKSPACE}")
    return render_template(job, "pod.sh.j2", folder=str(folder))


def pod_command(job: Job) -> Argv:
    """Return the command of each pod. In an interactive job, the pods sleep until the user enters them."""
    argv = SLEEP_COMMAND if job.is_interactive else kubernetes.start_argv(job.command)
    if job.container.code is not None:
        argv = ("bash", f"{job.run_folder}/{START_SCRIPT}", *argv)
    return tuple(map(escape_for_kubernetes, argv))


def user_ids(job: Job) -> tuple[str, str] | None:
    """Return the user id and the group id of the pods, or None if the image or the cluster sets them.

    If a remote stores the job's files, the ids are those of the user on the remote. Only that user can enter
    the folder of the job.
    """
    uid, _, gid = job.flags(PodFlags).run_as.partition(":")
    if not uid:
        return None
    return uid, gid


def pod_variables(job: Job) -> Mapping[str, str]:
    """Return the variables of each pod.

    If a variable is set several times, the user's value takes precedence over the recipe's value, and the
    recipe's over imgkit's own.

    Raises
    ------
    UsageError : a value in the recipe contains another variable, such as ``$SCRATCH``. Only a shell would
        replace it, and pods are started without a shell.
    """
    # In an interactive job, the user can run any command. So the pods get the variables that a shell would
    # get.
    program_job = dataclasses.replace(job, command=()) if job.is_interactive else job
    system_variables = runtime_of(job).system_variables(program_job)
    for name, value in system_variables.items():
        if site_variables(value):
            raise UsageError(
                f"system.env sets {name}={value}, and a pod replaces no variable in it",
                where=job.recipe.where("system", "env", name),
                hint=f"--env {name}=VALUE",
            )
    # The last value of a variable counts.
    return {**_output_folders(job), **job.settings, **system_variables, **job.container.env}


def _output_folders(job: Job) -> dict[str, str]:
    """Return the variables with the paths of the run folder and its logs.

    If the pods have no writable volume, the result is empty.
    """
    run_folder = job.run_folder  # it is known already if a remote stores the job's files
    if not run_folder:
        parent = _find_writable_folder(job)
        if parent is None:
            return {}
        # The folder is named by the job's name, which is also its id. So imgkit knows the folder without
        # asking the cluster.
        run_folder = str(parent / "runs" / pod_name(job))
    return {"IMGKIT_RUN_DIR": run_folder, "IMGKIT_LOG_DIR": f"{run_folder}/logs"}


def _find_writable_folder(job: Job) -> PurePosixPath | None:
    """Return a folder on a writable volume of the job, or None if no volume is writable.

    It is the job's folder if that is on a writable volume, and otherwise the path of the first writable
    volume.
    """
    folder = pod_directory(job)
    volume_paths = [claim.path for claim in volume_claims(job) if not claim.read_only]
    if not volume_paths:
        return None
    if folder is not None and any(folder.is_relative_to(path) for path in volume_paths):
        return folder
    return volume_paths[0]


def memory_quantity(job: Job) -> str:
    """Return the memory of each pod in the notation of Kubernetes, ``440Gi``, or "" if none is requested."""
    memory = job.allocation.memory
    if memory is None:
        return ""
    return f"{size_text(memory.node_MiB)}i"


def escape_for_kubernetes(text: str) -> str:
    """Return `text` with ``$(`` and ``$$`` escaped: ``$(date)`` becomes ``$$(date)``.

    Kubernetes would replace ``$(NAME)`` by the value of a variable, and ``$$`` by ``$``.
    """
    return re.sub(r"\$(?=[$(])", "$$", text)


def interactive_comments(job: Job, enter_commands: Sequence[str], delete_command: str) -> tuple[str, ...]:
    """Return comment lines that explain how to enter the pods of an interactive job and how to end it.

    The pods of such a job sleep. The user starts the program in a shell in each of them.

    Parameters
    ----------
    enter_commands : the commands that open a shell in a pod.
    delete_command : the command that deletes the job.
    """
    nodes = job.allocation.nodes
    if nodes > 1:
        enter_title = f"# Enter each of the {nodes} pods, a terminal for each:"
        type_title = "# and there, the same in each of them:"
    else:
        enter_title, type_title = "# Enter the pod:", "# and there:"
    program = " ".join(map(quote, job.command)) or "dist-hello"
    return (
        enter_title,
        *(f"#   {command}" for command in enter_commands),
        type_title,
        "#   tmux new -A -s run      it survives a lost connection; the same line attaches again",
        f"#   {program}",
        f"# The pods sleep, and keep their GPUs, until: {delete_command}",
    )
