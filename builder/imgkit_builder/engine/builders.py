"""Choose the builder: the classic builder behind the engine's API, ``docker buildx``, or ``podman``.

Podman can also build through its API. But there, an interrupted build continues (podman 4.3), and build
secrets are not supported. So if the engine is Podman on this machine, the program podman builds.
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
"""The value of the option ``--builder``. ``classic`` is the builder behind the engine's API. With ``auto``,
`choose` decides."""

PODMAN = ("podman", "--remote=false")
"""The command of podman. It uses the user's own storage, without a connection to a service."""

BUILDX_PACKAGE = "sudo apt-get install docker-buildx-plugin (or docker-buildx)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBuilder:
    """The builder to use."""

    name: Literal["classic", "buildx", "podman"]
    note: str = ""
    """If a better builder is missing, a sentence for the user about the disadvantages of this one.

    Otherwise empty.
    """
    containers: Path | None = None
    """The folder in which podman keeps its containers. None for other builders."""
    options: tuple[str, ...] = ()
    """Further arguments for the program that builds."""
    may_change: bool = False
    """Whether buildx may be used instead if the engine refuses the classic builder."""


CLASSIC = ChosenBuilder(name="classic")


def choose(facts: EngineFacts, requested: Builder = "auto", *, secrets_at: str = "") -> ChosenBuilder:
    """Return the builder to use: the `requested` one, or by default the best one for this engine.

    The default for Podman is podman. The default for Docker is the classic builder. But if the build needs
    secrets, the default for Docker is buildx, because the classic builder would leave the secrets in the
    image.

    Parameters
    ----------
    facts : facts about the engine.
    requested : the value of ``--builder``.
    secrets_at : the line of the recipe with the secrets that the build needs. Empty if it needs none.

    Raises
    ------
    UsageError : the engine does not support the requested builder, or the builder does not support secrets.
    ToolMissing : the program of the builder is missing.
    """
    # This also checks that the requested builder can be used.
    choice = _choose_without_secrets(facts, requested)
    # Only the classic builder lacks secrets, so any other choice is final.
    if not secrets_at or choice.name != "classic":
        return choice
    if requested == "auto" and not facts.is_podman:
        try:
            _require_buildx()
        except ToolMissing as error:
            reason = "the build needs secrets, which Docker keeps out of an image only with buildx"
            raise ToolMissing(f"{reason}: {error.what}", where=secrets_at, hint=BUILDX_PACKAGE) from error
        return ChosenBuilder(name="buildx")
    builder = "podman" if facts.is_podman else "buildx"
    raise UsageError(
        "the classic builder has no build secrets: they would stay in the image",
        where=secrets_at,
        hint=f"use --builder {builder}",
    )


def _choose_without_secrets(facts: EngineFacts, requested: Builder) -> ChosenBuilder:
    """Return the builder for a build without secrets: the requested one, or the best for this engine.

    If the requested builder cannot be used, raise UsageError or ToolMissing.
    """
    if requested == "classic":
        return CLASSIC
    if requested == "buildx":
        if facts.is_podman:
            raise UsageError(
                "Podman has no BuildKit, which buildx needs", where="--builder", hint="use --builder podman"
            )
        _require_buildx()
        return ChosenBuilder(name="buildx")
    if requested == "auto" and not facts.is_podman:
        # A future engine may no longer have the classic builder. `choose_fallback` then selects buildx.
        return ChosenBuilder(name="classic", may_change=True)
    # Only two cases are left: podman was requested, or the engine is Podman and nothing was requested.
    try:
        return ChosenBuilder(name="podman", containers=_find_podman_containers(facts))
    except ImgkitError as error:
        # The program podman cannot be used. Its API can, unless the user has requested the program.
        if requested == "podman":
            raise
        problem = "an interrupted build continues in Podman, and its cache is not used"
        return ChosenBuilder(name="classic", note=f"Podman builds through its API ({error.what}): {problem}")


# Possible error messages of an engine without the classic builder. No such engine exists yet, so these are
# guesses.
_REFUSAL = re.compile(
    r"page not found|\bbuilder\b.*(?:not (?:available|implemented|supported)|no longer|unsupported|removed)",
    re.IGNORECASE,
)
# "method not allowed", "gone" and "not implemented"
_REFUSAL_HTTP_STATUSES = (405, 410, 501)


def choose_fallback(choice: ChosenBuilder, error: ImgkitError) -> ChosenBuilder | None:
    """Return buildx if `error` says that the engine no longer has the classic builder, otherwise None.

    Notes
    -----
    Docker has called the classic builder deprecated since release 23. It has not announced which release will
    remove it, so the text of the error is not known yet.

    Raises
    ------
    ToolMissing : buildx is missing, too.
    """
    # A builder that the user has requested is never replaced.
    if not choice.may_change or not _refuses_classic_builder(error):
        return None
    try:
        _require_buildx()
    except ToolMissing as missing:
        message = f"the engine refuses its classic builder ({error.what}), and {missing.what}"
        raise ToolMissing(message, hint=BUILDX_PACKAGE) from error
    return dataclasses.replace(choice, name="buildx", may_change=False)


def _refuses_classic_builder(error: ImgkitError) -> bool:
    """Return whether `error` is the response of an engine that has no classic builder."""
    status = _find_http_status(error)
    if status is None:
        return False  # not a response of the engine, but a failed step, for example
    return status in _REFUSAL_HTTP_STATUSES or _REFUSAL.search(error.what) is not None


def _find_http_status(error: BaseException) -> int | None:
    """Return the HTTP status of the engine's response that caused `error`.

    If the error has another cause, such as a failed build step, return None.
    """
    cause: BaseException | None = error
    while cause is not None:
        status = getattr(cause, "status_code", None)
        if isinstance(status, int):
            return status
        cause = cause.__cause__
    return None


def buildx_version() -> str:
    """Return the version of ``docker buildx``, or an empty text if it is not installed."""
    if shutil.which("docker") is None:
        return ""
    finished = process.run(["docker", "buildx", "version"], check=False)
    if finished.returncode:
        return ""
    match = re.match(r"\S+ v?(\S+)", finished.output)  # "github.com/docker/buildx v0.29.1 COMMIT"
    if match is None:
        return "unknown"
    return match[1]


def _require_buildx() -> None:
    """Raise ToolMissing if ``docker buildx`` is not installed."""
    install = f"{BUILDX_PACKAGE}; or use --builder classic"
    process.require_program("docker", install)
    if not buildx_version():
        raise ToolMissing("the docker program has no buildx", where="--builder", hint=install)


def _find_podman_containers(facts: EngineFacts) -> Path:
    """Return the folder in which podman keeps the containers of a build.

    The program podman must store images in the same folder as the engine. Otherwise it would not find the
    base.

    Raises
    ------
    UsageError : the engine is not Podman, is on another machine, or stores images in another folder.
    ToolMissing : the program podman is missing, or it fails.
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
    # The final dot marks the end of the driver's name. Warnings may follow on other lines.
    layout = "store={{.Store.GraphRoot}} driver={{.Store.GraphDriverName}}."
    # The program and the service may run as different users or with different configurations. Then each has
    # its own images.
    finished = process.run([*PODMAN, "info", "--format", layout], env=local_podman_env(), check=False)
    match = re.search(r"^store=(?P<root>.+) driver=(?P<driver>\S+)\.$", finished.output, re.MULTILINE)
    if match is None:
        problem = finished.tail().strip()[-200:]
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
    """Return the environment of this process without the variables that connect podman to another machine."""
    remote = ("CONTAINER_HOST", "CONTAINER_CONNECTION")
    return {name: value for name, value in os.environ.items() if name not in remote}
