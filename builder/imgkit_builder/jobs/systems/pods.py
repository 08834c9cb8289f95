"""Jobs in pods, for RunAI and Kubeflow alike: flags, versions, names, volumes, variables and warnings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from imgkit_builder.base.flags import flag
from imgkit_builder.jobs.job import Job
from imgkit_builder.jobs.quoting import quote
from imgkit_builder.jobs.request import JobRequest, SystemFlags
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.systems import System, part_of_nodes, program_starts_once, runai_client
from imgkit_builder.recipe.systems import SHIPPED
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rules import site_variables

ASLEEP = ("sleep", "infinity")
"""The command of the pods of an interactive job."""
SECRET = "imgkit"  # noqa: S105 - a name
"""The user's Secret in the job's namespace: the key `secret` is for the roll call, others for ``--env``."""
_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
SAME_CONTAINER = (
    "a shell in the container of the job's first pod (--node POD: another one), next to its program"
)
NAME_LIMIT = 50
"""Operators append text like ``-worker-123``, and the whole can have 63 letters (RFC 1123)."""


KubernetesFormat = Literal["runai", "pytorchjob", "trainjob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFlags(SystemFlags):
    """Flags that only jobs in pods have."""

    format: KubernetesFormat = flag("runai", help="Kubernetes: output format.")
    pvcs: tuple[str, ...] = flag(
        (), "--pvc", metavar="CLAIM:/PATH[:ro]", help="Kubernetes: volume to mount into the pods."
    )
    client: runai_client.Client | None = flag(
        None, help="RunAI: client to write the command for (default: the one on PATH)."
    )

    @property
    def system(self) -> str:
        """Name of the system that takes manifests, if ``--format`` asks for one."""
        return "" if self.format == "runai" else "kubeflow"


class Pods(System):
    """What RunAI and Kubeflow have in common."""

    flags = PodFlags
    registration = SHIPPED["runai"]
    passes_names = True
    needs_fields_for_shells = False

    def check(self, job: Job, *, is_submitted: bool = False) -> Iterator[str]:
        """Yield warnings about requests that the user may not have meant."""
        request, output_format = job.request, format_of(job)
        yield from program_starts_once(job.command)
        yield from part_of_nodes(job, ": pods may share a node")
        if request.container.binds:
            yield "--bind is not used: pods get their folders from volumes, --pvc CLAIM:/PATH"
        if all(text.endswith(":ro") for text in job.flags(PodFlags).pvcs) and not request.launch.interactive:
            yield "no --pvc to write to: output, checkpoints and logs disappear with the pods"
        size = job.allocation.size
        if size.spares and output_format == "runai":
            yield f"--nodes {size}: RunAI decides what follows a lost pod; --format pytorchjob states it"
        if job.flags(PodFlags).client and output_format != "runai":
            yield f"--client is not used with --format {output_format}"
        if output_format != "runai":
            return
        if client_of(job) == "v1":
            odd = [
                argument
                for argument in (*job.command, *request.container.env, str(request.directory))
                if quote(argument) != argument
            ]
            if odd:
                # The RCP tutorial needs '"..."' around a word with blanks, later pages of
                # epfml/getting-started do not: whether words are split again depends on the client's version.
                yield f"{odd[0]!r}: older runai clients split and expand arguments once more"
        if not (_stated_client(job) or runai_client.on_path()):
            yield "no runai on PATH: the command is for the later client; --client v1 names the first one"


def client_of(job: Job) -> runai_client.Client:
    """Return RunAI's client that takes the job: that of the flag, the recipe or PATH, else the later one.

    Raises
    ------
    UsageError : the ``runai`` on PATH is neither client.
    """
    return _stated_client(job) or runai_client.on_path() or "v2"


def _stated_client(job: Job) -> runai_client.Client | None:
    return job.flags(PodFlags).client or job.recipe.system.queue.client or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A persistent volume claim, and its path in the pods."""

    name: str
    path: PurePosixPath
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.path}{':ro' if self.read_only else ''}"


def format_of(job: Job) -> KubernetesFormat:
    """The value of ``--format``."""
    return job.flags(PodFlags).format


def check_name(job: Job) -> str:
    """The job's name, if Kubernetes accepts it: it is the job's id, and part of its pods' host names.

    Raises
    ------
    UsageError : it does not accept the name.
    """
    name = job.name
    if not re.fullmatch(_LABEL, name) or len(name) > NAME_LIMIT:
        better = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:NAME_LIMIT].rstrip("-")
        raise UsageError(
            f"{name!r} cannot name pods: up to {NAME_LIMIT} of a-z, 0-9, and - inside; no _, no capitals",
            where="--name",
            hint=f"--name {better or 'run1'}",
        )
    return name


def claims(job: Job) -> tuple[Claim, ...]:
    """The volumes of ``--pvc``.

    Raises
    ------
    UsageError : one is not ``CLAIM:/PATH[:ro]``, or two have the same path.
    """
    parsed: list[Claim] = []
    for text in job.flags(PodFlags).pvcs:
        match = re.fullmatch(rf"({_LABEL}(?:\.{_LABEL})*):(/[A-Za-z0-9._/-]+)(:ro)?", text)
        if match is None:
            raise UsageError(
                f"{text!r} is not a volume", where="--pvc", hint="CLAIM:/PATH, or CLAIM:/PATH:ro"
            )
        claim = Claim(name=match[1], path=PurePosixPath(match[2]), read_only=bool(match[3]))
        if claim.path in (earlier.path for earlier in parsed):
            raise UsageError(f"two volumes at {claim.path}", where="--pvc", hint="give each its own path")
        parsed.append(claim)
    return tuple(parsed)


def directory(job: Job) -> PurePosixPath | None:
    """The folder in which pods work: ``--directory``, which must be on a volume; None: the image's own.

    Raises
    ------
    UsageError : it is not on a volume.
    """
    project = job.request.project
    # A folder of imgkit.toml is one of this machine, which pods do not have.
    if job.request.directory == JobRequest().directory or (project and project.sets_directory):
        return None
    path = PurePosixPath(job.request.directory)
    if not any(path.is_relative_to(claim.path) for claim in claims(job)):
        raise UsageError(
            f"{path} is not on a volume of the pods",
            where="--directory",
            hint=f"--pvc CLAIM:{path}, or a folder below one of the volumes",
        )
    return path


def workdir(job: Job) -> str:
    """The folder in which the command starts; empty: the image's own."""
    folder = directory(job)
    return job.container.workdir or (str(folder) if folder else "")


def variables(job: Job) -> Mapping[str, str]:
    """Variables of each pod: folders for output and state, those of the node agent, system and user.

    The last one wins. The job's name is its id, so the folder is known without asking the cluster.

    Raises
    ------
    UsageError : a variable of the recipe has another one in its value, which only a shell would replace.
    """
    folders: dict[str, str] = {}
    folder, writable = directory(job), [claim.path for claim in claims(job) if not claim.read_only]
    if writable:
        is_writable = folder is not None and any(folder.is_relative_to(path) for path in writable)
        run = (folder if folder is not None and is_writable else writable[0]) / "runs" / check_name(job)
        folders = {"IMGKIT_RUN_DIR": str(run), "IMGKIT_LOG_DIR": str(run / "logs")}
    shell = dataclasses.replace(job, command=())
    recipes = runtime_of(job).system_variables(shell if job.is_interactive else job)
    for name, value in recipes.items():
        if site_variables(value):
            raise UsageError(
                f"system.env sets {name}={value}, and a pod replaces no variable in it",
                where=job.recipe.where("system", "env", name),
                hint=f"--env {name}=VALUE",
            )
    return {**folders, **job.settings, **recipes, **job.container.env}


def literal(text: str) -> str:
    """`text`, escaped for Kubernetes, which replaces ``$(NAME)`` and reads ``$$`` as ``$``."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def entered(job: Job, ways: Sequence[str], end: str) -> tuple[str, ...]:
    """Comment lines for an interactive job: how to enter each pod, what to type there, how to `end` it."""
    typed = " ".join(map(quote, job.command)) or "dist-hello"
    nodes = job.allocation.nodes
    several = nodes > 1
    return (
        f"# Enter {f'each of the {nodes} pods, a terminal for each' if several else 'the pod'}:",
        *(f"#   {way}" for way in ways),
        f"# and there{', the same in each of them' if several else ''}:",
        "#   tmux new -A -s run      it survives a lost connection; the same line attaches again",
        f"#   {typed}",
        f"# The pods sleep, and keep their GPUs, until: {end}",
    )
