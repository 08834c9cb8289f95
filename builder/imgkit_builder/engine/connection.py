"""Connections to the Docker engine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from imgkit_builder.engine.address import address, unreachable
from imgkit_entrypoints.errors import ToolMissing

if TYPE_CHECKING:
    import docker

ANSWER_TIMEOUT_S = 120
"""Limit for short requests: an engine that writes a layer to a slow disk answers late, a dead one never."""


class Engine:
    """A connection to a Docker-compatible engine; use it as a context manager.

    Attributes
    ----------
    api : the SDK's low-level client; only modules of this room use it.
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
        """The platform that runs without an emulator, for example ``linux/amd64``."""
        if not self._platform:
            from imgkit_builder.engine.errors import translated

            with translated("ask the engine's version"):
                about = self.api.version()
            self._platform = f"{about.get('Os', 'linux')}/{about.get('Arch', 'amd64')}"
        return self._platform

    @property
    def has_nvidia(self) -> bool:
        """Whether containers can use GPUs."""
        from imgkit_builder.engine.errors import translated

        with translated("ask the engine's runtimes"):
            return "nvidia" in (self.api.info().get("Runtimes") or {})

    @property
    def is_here(self) -> bool:
        """Whether containers run on this machine's kernel, so that its /proc describes them."""
        return self.host.startswith("unix://") and sys.platform == "linux"

    @contextlib.contextmanager
    def patient(self) -> Iterator[docker.APIClient]:
        """The client without a read timeout, for calls that may take an hour: save, load, export, push, pull.

        Notes
        -----
        The SDK's default of 60 s applies to all calls but build; saving an image of 20 GB stages it before
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
    UsageError : ``DOCKER_HOST`` is not an address.
    """
    try:
        import docker
        import docker.errors
        import docker.utils
    except ImportError as error:
        raise ToolMissing(
            f"the Python package docker cannot be imported: {error}", hint="pip install docker"
        ) from error
    host = address()
    try:
        options = docker.utils.kwargs_from_env()
        options.setdefault("base_url", host)
        return Engine(docker.APIClient(**options, version="auto", timeout=timeout_s), host)  # type: ignore[arg-type]
    except (docker.errors.DockerException, ValueError) as error:
        raise unreachable(host, error) from error
