"""Which program builds: the engine's own API, ``docker buildx``, or ``podman``. Standard library only."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imgkit_builder.base import process
from imgkit_builder.engine.connection import EngineFacts
from imgkit_entrypoints.errors import ImgkitError, ToolMissing, UsageError

Builder = Literal["auto", "classic", "buildx", "podman"]
"""``classic`` is the builder behind the engine's API; ``auto`` lets `choose` decide."""

PODMAN = ("podman", "--remote=false")
"""The program on the user's own storage, without a connection to a service."""

BUILDX_PACKAGE = "sudo apt-get install docker-buildx-plugin (or docker-buildx)"

_STORE = "store={{.Store.GraphRoot}} driver={{.Store.GraphDriverName}}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The builder to use."""

    name: Literal["classic", "buildx", "podman"]
    note: str = ""
    """What this builder lacks, where there would be a better one."""
    containers: Path | None = None
    """The folder in which podman keeps its containers."""
    options: tuple[str, ...] = ()
    """Further words for its program."""
    may_change: bool = False
    """Whether buildx builds instead where the engine refuses the classic builder."""


def choose(facts: EngineFacts, wanted: Builder = "auto", *, secrets_at: str = "") -> Choice:
    """The builder for the engine: what `wanted` names, else podman for Podman and the classic one for Docker.

    `secrets_at` is the recipe's line with the secrets that the build needs: Docker then builds with buildx.

    Raises
    ------
    UsageError : `wanted` is not a builder of this engine, or cannot keep secrets.
    ToolMissing : its program is missing.
    """
    choice = _choose(facts, wanted)
    if not secrets_at or choice.name != "classic":
        return choice
    if wanted == "auto" and not facts.is_podman:
        try:
            _need_buildx()
        except ToolMissing as error:
            what = (
                f"the build needs secrets, which Docker keeps out of an image only with buildx: {error.what}"
            )
            raise ToolMissing(what, where=secrets_at, hint=BUILDX_PACKAGE) from error
        return Choice(name="buildx")
    raise UsageError(
        "the classic builder has no build secrets: they would stay in the image",
        where=secrets_at,
        hint=f"use --builder {'podman' if facts.is_podman else 'buildx'}",
    )


def _choose(facts: EngineFacts, wanted: Builder) -> Choice:
    if wanted == "classic":
        return Choice(name="classic")
    if wanted == "buildx":
        if facts.is_podman:
            raise UsageError(
                "Podman has no BuildKit, which buildx needs", where="--builder", hint="use --builder podman"
            )
        _need_buildx()
        return Choice(name="buildx")
    if wanted == "podman" or facts.is_podman:
        try:
            return Choice(name="podman", containers=_podman_containers(facts))
        except ImgkitError as error:
            if wanted == "podman":
                raise
            lacks = "an interrupted build continues in Podman, and its cache is not used"
            return Choice(name="classic", note=f"Podman builds through its API ({error.what}): {lacks}")
    return Choice(name="classic", may_change=True)


_REFUSED = re.compile(
    r"page not found|\bbuilder\b.*(?:not (?:available|implemented|supported)|no longer|unsupported|removed)",
    re.IGNORECASE,
)
_REFUSED_STATUS = (405, 410, 501)


def after_refusal(choice: Choice, error: ImgkitError) -> Choice | None:
    """Buildx, where `error` says that the engine of `choice` has no classic builder; else None.

    Notes
    -----
    Docker calls the classic builder deprecated since release 23 and names no release without it, so its words
    will be new.

    Raises
    ------
    ToolMissing : there is no buildx either.
    """
    status = _status(error)
    if not choice.may_change or status is None:
        return None
    if status not in _REFUSED_STATUS and not _REFUSED.search(error.what):
        return None
    try:
        _need_buildx()
    except ToolMissing as missing:
        what = f"the engine refuses its classic builder ({error.what}), and {missing.what}"
        raise ToolMissing(what, hint=BUILDX_PACKAGE) from error
    return dataclasses.replace(choice, name="buildx", may_change=False)


def _status(error: BaseException | None) -> int | None:
    """The status of the engine's answer that `error` comes from; None for an error inside a build."""
    while error is not None:
        status = getattr(error, "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def buildx_version() -> str:
    """The version of ``docker buildx``; empty where there is none."""
    if shutil.which("docker") is None:
        return ""
    done = process.run(["docker", "buildx", "version"], check=False)
    # "github.com/docker/buildx v0.29.1 COMMIT"
    words = done.output.split()
    return "" if done.returncode else words[1].removeprefix("v") if len(words) > 1 else "unknown"


def _need_buildx() -> None:
    install = f"{BUILDX_PACKAGE}; or use --builder classic"
    process.need("docker", install)
    if not buildx_version():
        raise ToolMissing("the docker program has no buildx", where="--builder", hint=install)


def _podman_containers(facts: EngineFacts) -> Path:
    """The folder of working containers, where the program podman uses the same storage as the engine."""
    use_classic = "or use --builder classic"
    if not facts.is_podman:
        raise UsageError(
            f"the engine at {facts.endpoint.host} is {facts.product}",
            where="--builder",
            hint="use --builder auto, or start Podman's socket: systemctl --user start podman.socket",
        )
    if not facts.is_here:
        raise UsageError("Podman is on another machine", where=facts.endpoint.host, hint=use_classic)
    if shutil.which(PODMAN[0]) is None:
        raise ToolMissing(
            "the program 'podman' is not on PATH", hint=f"sudo apt-get install podman, {use_classic}"
        )
    asked = process.run([*PODMAN, "info", "--format", _STORE], env=own_storage(), check=False)
    found = re.search(r"^store=(.+) driver=(\S+)\.$", asked.output, re.MULTILINE)
    if found is None:
        raise ToolMissing(
            f"podman info fails: {asked.tail().strip()[-200:]}", hint=f"podman info; {use_classic}"
        )
    if os.path.realpath(found[1]) != os.path.realpath(facts.root):
        raise UsageError(
            f"the program podman stores images in {found[1]}, the engine in {facts.root}",
            where=facts.endpoint.host,
            hint=f"run imgkit as the user who owns the engine, {use_classic}",
        )
    return Path(found[1]) / f"{found[2]}-containers"


def own_storage() -> dict[str, str]:
    """This process's variables without those that send podman to another machine."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("CONTAINER_HOST", "CONTAINER_CONNECTION")
    }
