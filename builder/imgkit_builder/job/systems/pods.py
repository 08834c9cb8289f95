"""What a job in pods is, whichever way it is written: its name, its volumes, its variables, its doubts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from imgkit_builder.job.request import Job, Request
from imgkit_builder.job.words import quote
from imgkit_entrypoints.errors import UsageError

ASLEEP = ("sleep", "infinity")
"""What the pods of an interactive job run."""
_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
NAME_LIMIT = 50
"""Operators append ``-worker-123`` and the like, and the whole may have 63 letters (RFC 1123)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A persistent volume claim, and where the pods see it."""

    name: str
    path: PurePosixPath
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.path}{':ro' if self.read_only else ''}"


def check_name(job: Job) -> str:
    """The job's name where Kubernetes takes it: it is the job's id, and part of its pods' host names.

    Raises
    ------
    UsageError : it does not.
    """
    name = job.name
    if not re.fullmatch(_LABEL, name) or len(name) > NAME_LIMIT:
        better = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:NAME_LIMIT].rstrip("-")
        raise UsageError(
            f"{name!r} cannot name pods: up to {NAME_LIMIT} of a-z, 0-9 and - inside, no _, no capital",
            where="--name",
            hint=f"--name {better or 'run1'}",
        )
    return name


def claims(job: Job) -> tuple[Claim, ...]:
    """The volumes of ``--pvc``.

    Raises
    ------
    UsageError : one is no ``CLAIM:/PATH[:ro]``, or two are at one place.
    """
    found: list[Claim] = []
    for text in job.request.pvcs:
        match = re.fullmatch(rf"({_LABEL}(?:\.{_LABEL})*):(/[A-Za-z0-9._/-]+)(:ro)?", text)
        if match is None:
            raise UsageError(f"{text!r} is no volume", where="--pvc", hint="CLAIM:/PATH, or CLAIM:/PATH:ro")
        claim = Claim(name=match[1], path=PurePosixPath(match[2]), read_only=bool(match[3]))
        if claim.path in (other.path for other in found):
            raise UsageError(f"two volumes at {claim.path}", where="--pvc", hint="each at a path of its own")
        found.append(claim)
    return tuple(found)


def directory(job: Job) -> PurePosixPath | None:
    """Where the pods work: ``--directory``, which must be on a volume; None is the image's own choice.

    Raises
    ------
    UsageError : no volume holds it.
    """
    if job.request.directory == Request().directory:
        return None
    path = PurePosixPath(job.request.directory)
    if not any(path.is_relative_to(claim.path) for claim in claims(job)):
        raise UsageError(
            f"{path} is on no volume of the pods",
            where="--directory",
            hint=f"--pvc CLAIM:{path}, or a folder below one of the volumes",
        )
    return path


def variables(job: Job) -> Mapping[str, str]:
    """Of each pod: where output and state are kept, the launcher's settings, the user's own; these win.

    The job's name is its id here, so the folder is found again without asking anything of the cluster.
    """
    kept: dict[str, str] = {}
    folder, writable = directory(job), [claim.path for claim in claims(job) if not claim.read_only]
    if writable:
        here = folder is not None and any(folder.is_relative_to(path) for path in writable)
        run = (folder if folder is not None and here else writable[0]) / "runs" / check_name(job)
        kept = {"IMGKIT_RUN_DIR": str(run), "IMGKIT_LOG_DIR": str(run / "logs")}
    return {**kept, **job.settings, **job.env}


def literal(text: str) -> str:
    """`text` so that Kubernetes hands it on as it is: it replaces ``$(NAME)``, and ``$$`` is its ``$``."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def entered(job: Job, ways: Sequence[str], end: str) -> tuple[str, ...]:
    """Comment lines on an interactive job: how to get into each pod, what to do there, how to `end` it."""
    typed = " ".join(map(quote, job.command)) or "dist-hello"
    several = job.nodes > 1
    return (
        f"# Enter {f'each of the {job.nodes} pods, a terminal for each' if several else 'the pod'}:",
        *(f"#   {way}" for way in ways),
        f"# and there{', the same in each of them' if several else ''}:",
        "#   tmux new -A -s run      what runs in it outlives the connection; the same line comes back to it",
        f"#   {typed}",
        f"# The pods sleep, and keep their GPUs, until: {end}",
    )


def refuse_conversion(job: Job) -> None:
    """Raise UsageError for ``--sif``: pods pull images."""
    if job.request.archive is not None:
        raise UsageError(
            "pods pull their image from a registry, there is no .sif to make",
            where="--sif",
            hint=f"imgkit push {job.recipe.name} REGISTRY/{job.recipe.name}:1",
        )


def doubts(request: Request, command: Sequence[str]) -> list[str]:
    """What may be meant otherwise, a warning each."""
    found = []
    if request.binds:
        found.append("--bind is not used: the folders of pods come from volumes, --pvc CLAIM:/PATH")
    if all(text.endswith(":ro") for text in request.pvcs) and not request.interactive:
        found.append("no --pvc to write to: output and checkpoints go when the pods go, and their logs too")
    if request.format == "runai":
        odd = [word for word in (*command, *request.env, str(request.directory)) if quote(word) != word]
        if odd:
            # The RCP tutorial needs '"..."' around a word with blanks, later pages of epfml/getting-started
            # do not: it depends on the client's version whether words are split once more.
            found.append(f"{odd[0]!r}: older runai clients split and expand words once more")
    return found
