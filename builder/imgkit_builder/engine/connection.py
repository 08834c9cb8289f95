"""Reach the Docker engine, or say exactly why not."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from imgkit_entrypoints.errors import ImgkitError, ToolFailed, ToolMissing, UsageError

if TYPE_CHECKING:
    import docker

DEFAULT_HOST = "unix:///var/run/docker.sock"
ANSWER_TIMEOUT_S = 120
"""For short questions only: an engine that writes a layer to a slow disk answers late, a dead one never."""


class Engine:
    """A connection to a Docker-compatible engine; use it as a context manager.

    Attributes
    ----------
    api : the SDK's low-level client; only modules of this package use it.
    host : the address, for example ``unix:///var/run/docker.sock``.
    """

    def __init__(self, api: docker.APIClient, host: str) -> None:
        self.api = api
        self.host = host
        self._platform = ""

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.api.close()

    @property
    def platform(self) -> str:
        """What the engine runs without an emulator, for example ``linux/amd64``."""
        if not self._platform:
            from imgkit_builder.engine.errors import translated

            with translated("ask the engine's version"):
                about = self.api.version()
            self._platform = f"{about.get('Os', 'linux')}/{about.get('Arch', 'amd64')}"
        return self._platform

    @property
    def has_nvidia(self) -> bool:
        """Whether containers can be given GPUs."""
        from imgkit_builder.engine.errors import translated

        with translated("ask the engine's runtimes"):
            return "nvidia" in (self.api.info().get("Runtimes") or {})

    @property
    def is_here(self) -> bool:
        """Whether containers run on this machine's kernel, so that its /proc speaks for them."""
        return self.host.startswith("unix://") and sys.platform == "linux"

    @contextlib.contextmanager
    def patient(self) -> Iterator[docker.APIClient]:
        """The client without a read timeout, for what may take an hour: save, load, export, push, pull.

        Notes
        -----
        The SDK's default of 60 s covers them all but build; saving an image of 20 GB stages it before
        the first byte (docker/docker-py issues 1070, 2097, 2119).
        """
        before, self.api.timeout = self.api.timeout, None  # type: ignore[assignment]  # None is requests' "never"
        try:
            yield self.api
        finally:
            self.api.timeout = before


def connect(*, timeout_s: float = ANSWER_TIMEOUT_S) -> Engine:
    """Connect to the engine of ``DOCKER_HOST``, else of the default socket.

    Raises
    ------
    ToolMissing : no engine, no permission for its socket, or no SDK.
    ToolFailed : something answers, but not as an engine.
    UsageError : ``DOCKER_HOST`` is no address.
    """
    try:
        import docker
        import docker.errors
        import docker.utils
    except ImportError as error:
        raise ToolMissing(
            f"the Python package docker cannot be imported: {error}", hint="pip install docker"
        ) from error
    host = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    try:
        options = docker.utils.kwargs_from_env()
        options.setdefault("base_url", host)
        return Engine(docker.APIClient(**options, version="auto", timeout=timeout_s), host)  # type: ignore[arg-type]
    except (docker.errors.DockerException, ValueError) as error:
        raise _why(host, error) from error


def _why(host: str, error: Exception) -> ImgkitError:
    number = _errno(error)
    if number in (errno.EACCES, errno.EPERM):
        return ToolMissing(
            f"no permission for the Docker engine's socket {host.removeprefix('unix://')}",
            hint="join its group: sudo usermod -aG docker $USER, then log in again (or: newgrp docker); "
            "or run the command with sudo",
        )
    if number in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return ToolMissing(f"no Docker engine answers at {host}", where=_stated(), hint=_start_hint(host))
    text = str(error)
    if "paramiko" in text:
        return ToolMissing(
            f"{host} needs the SSH part of the SDK", where=_stated(), hint="pip install paramiko"
        )
    if "timed out" in text.lower():
        return ToolFailed(
            f"the Docker engine at {host} took the connection and did not answer",
            where=_stated(),
            hint="it hangs: journalctl -u docker -n 50; sudo systemctl restart docker",
        )
    if "Invalid bind address" in text or "Invalid host" in text or "protocol" in text.lower():
        return UsageError(
            f"not an engine's address: {host!r}",
            where=_stated(),
            hint="it looks like unix:///path/docker.sock or tcp://host:2375",
        )
    if "NameResolutionError" in text or "Name or service not known" in text:
        return ToolMissing(
            f"the host of {host} is not known", where=_stated(), hint="unset DOCKER_HOST, or correct it"
        )
    return ToolFailed(f"no usable Docker engine at {host}: {text}", where=_stated(), hint=_start_hint(host))


def _stated() -> str | None:
    return "DOCKER_HOST" if os.environ.get("DOCKER_HOST") else None


def _start_hint(host: str) -> str:
    rootless = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}") / "docker.sock"
    if rootless.exists() and host != f"unix://{rootless}":
        return f"a rootless engine is at: export DOCKER_HOST=unix://{rootless}"
    if os.environ.get("DOCKER_HOST"):
        return "start the engine there, or: unset DOCKER_HOST"
    return "start it: sudo systemctl start docker; not installed yet: sudo apt-get install docker.io"


def _errno(error: BaseException | None) -> int | None:
    """The number of the OSError at the bottom: SDK, requests and urllib3 each wrap it once more."""
    seen: set[int] = set()
    todo: list[object] = [error]
    while todo:
        one = todo.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        # requests' own exceptions are OSErrors without a number.
        if isinstance(one, OSError) and one.errno is not None:
            return one.errno
        todo += [one.__cause__, one.__context__, getattr(one, "reason", None), *one.args]
    return None
