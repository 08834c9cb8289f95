"""Choose the program that builds: the engine's own API, ``docker buildx``, or ``podman``.

Podman builds through its API as well, but there an interrupted build goes on (podman 4.3), and there are no
build secrets. So its program builds where it is on this machine.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The builder to use."""

    name: Literal["classic", "buildx", "podman"]
    note: str = ""
    """A sentence for the user on what this builder lacks, if a better one is missing; else empty."""
    containers: Path | None = None
    """The folder in which podman keeps its containers."""
    options: tuple[str, ...] = ()
    """Further arguments for its program."""
    may_change: bool = False
    """Whether buildx may build instead if the engine refuses the classic builder."""


CLASSIC = Choice(name="classic")


def choose(facts: EngineFacts, requested: Builder = "auto", *, secrets_at: str = "") -> Choice:
    """Return the builder to use: the `requested` one, or by default the best for this engine.

    The default is podman for Podman, the classic builder for Docker, and buildx for Docker if the build needs
    secrets, since the classic builder would leave them in the image.

    Parameters
    ----------
    secrets_at : the recipe's line with the secrets that the build needs; empty if it needs none.

    Raises
    ------
    UsageError : the engine does not have the requested builder, or the builder cannot keep secrets.
    ToolMissing : the program of the builder is missing.
    """
    choice = _choose_without_secrets(facts, requested)
    if not secrets_at or choice.name != "classic":
        return choice
    if requested == "auto" and not facts.is_podman:
        try:
            _require_buildx()
        except ToolMissing as error:
            reason = "the build needs secrets, which Docker keeps out of an image only with buildx"
            raise ToolMissing(f"{reason}: {error.what}", where=secrets_at, hint=BUILDX_PACKAGE) from error
        return Choice(name="buildx")
    builder = "podman" if facts.is_podman else "buildx"
    raise UsageError(
        "the classic builder has no build secrets: they would stay in the image",
        where=secrets_at,
        hint=f"use --builder {builder}",
    )


def _choose_without_secrets(facts: EngineFacts, requested: Builder) -> Choice:
    """Return the requested builder, or by default the best for this engine, for a build without secrets.

    Raises
    ------
    UsageError : the engine does not have the requested builder.
    ToolMissing : the program of the builder is missing.
    """
    if requested == "classic":
        return CLASSIC
    if requested == "buildx":
        if facts.is_podman:
            raise UsageError(
                "Podman has no BuildKit, which buildx needs", where="--builder", hint="use --builder podman"
            )
        _require_buildx()
        return Choice(name="buildx")
    if requested == "auto" and not facts.is_podman:
        return Choice(name="classic", may_change=True)
    try:
        return Choice(name="podman", containers=_find_podman_containers(facts))
    except ImgkitError as error:
        if requested == "podman":
            raise
        problem = "an interrupted build continues in Podman, and its cache is not used"
        return Choice(name="classic", note=f"Podman builds through its API ({error.what}): {problem}")


# What an engine without the classic builder may answer. No such engine exists yet, so these are guesses.
_REFUSAL = re.compile(
    r"page not found|\bbuilder\b.*(?:not (?:available|implemented|supported)|no longer|unsupported|removed)",
    re.IGNORECASE,
)
# The statuses for: method not allowed, gone, not implemented.
_REFUSAL_STATUS = (405, 410, 501)


def choose_fallback(choice: Choice, error: ImgkitError) -> Choice | None:
    """Return buildx if `error` says that the engine no longer has the classic builder, else None.

    Notes
    -----
    Docker calls the classic builder deprecated since release 23. It has not said which release will lack it,
    so nobody knows the words of the error yet.

    Raises
    ------
    ToolMissing : there is no buildx either.
    """
    status = _find_status(error)
    if not choice.may_change or status is None:
        return None
    if status not in _REFUSAL_STATUS and not _REFUSAL.search(error.what):
        return None
    try:
        _require_buildx()
    except ToolMissing as missing:
        message = f"the engine refuses its classic builder ({error.what}), and {missing.what}"
        raise ToolMissing(message, hint=BUILDX_PACKAGE) from error
    return dataclasses.replace(choice, name="buildx", may_change=False)


def _find_status(error: BaseException) -> int | None:
    """Return the HTTP status of the engine's answer that caused `error`.

    Return None if the error has another cause, such as a failed step of a build.
    """
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(cause, "status_code", None)
        if isinstance(status, int):
            return status
        cause = cause.__cause__
    return None


def buildx_version() -> str:
    """Return the version of ``docker buildx``, or an empty text where there is none."""
    if shutil.which("docker") is None:
        return ""
    result = process.run(["docker", "buildx", "version"], check=False)
    if result.returncode:
        return ""
    match = re.match(r"\S+ v?(\S+)", result.output)  # "github.com/docker/buildx v0.29.1 COMMIT"
    if match is None:
        return "unknown"
    return match[1]


def _require_buildx() -> None:
    """Raise ToolMissing if there is no ``docker buildx``."""
    install = f"{BUILDX_PACKAGE}; or use --builder classic"
    process.require_program("docker", install)
    if not buildx_version():
        raise ToolMissing("the docker program has no buildx", where="--builder", hint=install)


def _find_podman_containers(facts: EngineFacts) -> Path:
    """Return the folder in which podman keeps the containers of a build.

    The program podman must store images in the same folder as the engine, or it would not find the base.

    Raises
    ------
    UsageError : the engine is not Podman, is on another machine, or stores images elsewhere.
    ToolMissing : there is no program podman, or it fails.
    """
    use_classic = "or use --builder classic"
    if not facts.is_podman:
        raise UsageError(
            f"the engine at {facts.endpoint.host} is {facts.product}",
            where="--builder",
            hint="use --builder auto, or start Podman's socket: systemctl --user start podman.socket",
        )
    if not facts.is_here:
        raise UsageError("Podman is on another machine", where=facts.endpoint.host, hint=use_classic)
    process.require_program(PODMAN[0], f"sudo apt-get install podman, {use_classic}")
    layout = "store={{.Store.GraphRoot}} driver={{.Store.GraphDriverName}}."
    # The program and the service may have different users or configurations, hence different images.
    result = process.run([*PODMAN, "info", "--format", layout], env=local_podman_env(), check=False)
    match = re.search(r"^store=(?P<root>.+) driver=(?P<driver>\S+)\.$", result.output, re.MULTILINE)
    if match is None:
        problem = result.tail().strip()[-200:]
        raise ToolMissing(f"podman info fails: {problem}", hint=f"podman info; {use_classic}")
    root = Path(match["root"])
    if root.resolve() != Path(facts.root).resolve():
        raise UsageError(
            f"the program podman stores images in {root}, the engine in {facts.root}",
            where=facts.endpoint.host,
            hint=f"run imgkit as the user who owns the engine, {use_classic}",
        )
    return root / f"{match['driver']}-containers"


def local_podman_env() -> dict[str, str]:
    """Return this process's variables without those that send podman to another machine."""
    remote = ("CONTAINER_HOST", "CONTAINER_CONNECTION")
    return {name: value for name, value in os.environ.items() if name not in remote}
