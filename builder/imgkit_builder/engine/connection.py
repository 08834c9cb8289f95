"""Connections to the Docker engine."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from imgkit_builder.engine import dial
from imgkit_builder.engine.address import endpoint, unreachable
from imgkit_builder.engine.contexts import Endpoint
from imgkit_builder.engine.facts import EngineFacts, engine_facts, has_containerd_store
from imgkit_entrypoints.errors import ToolMissing

if TYPE_CHECKING:
    import docker
    from requests.adapters import HTTPAdapter

ANSWER_TIMEOUT_S = 120
"""Limit for short requests: an engine that writes a layer to a slow disk answers late, a dead one never."""


class Engine:
    """A connection to a Docker-compatible engine; use it as a context manager.

    Attributes
    ----------
    api : the SDK's low-level client; only modules of this room use it.
    endpoint : its address, and what named it.
    """

    def __init__(self, api: docker.APIClient, endpoint: Endpoint) -> None:
        self.api = api
        self.endpoint = endpoint
        self._version: dict[str, Any] | None = None
        self._about: dict[str, Any] | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.api.close()

    @property
    def platform(self) -> str:
        """The platform that runs without an emulator, for example ``linux/amd64``."""
        return f"{self.version.get('Os', 'linux')}/{self.version.get('Arch', 'amd64')}"

    def facts(self) -> EngineFacts:
        """Ask what the engine is, and how it stores images."""
        return engine_facts(self.endpoint, version=self.version, info=self.about)

    @property
    def version(self) -> dict[str, Any]:
        """The engine's answer to ``/version``; only modules of this room use it."""
        if self._version is None:
            from imgkit_builder.engine.errors import translated

            with translated("ask the engine's version"):
                self._version = self.api.version()
        return self._version

    @property
    def about(self) -> dict[str, Any]:
        """What the engine tells about itself; only modules of this room use it."""
        if self._about is None:
            from imgkit_builder.engine.errors import translated

            with translated("ask the engine about itself"):
                self._about = self.api.info()
        return self._about

    @property
    def has_nvidia(self) -> bool:
        """Whether containers can use GPUs."""
        return "nvidia" in (self.about.get("Runtimes") or {})

    @property
    def root(self) -> str:
        """The engine's own folder, on the engine's machine."""
        return str(self.about.get("DockerRootDir") or "/var/lib/docker")

    @property
    def names_manifests(self) -> bool:
        """Whether the engine names images by their manifests, as it does with containerd's store."""
        return has_containerd_store(self.about)

    @property
    def is_here(self) -> bool:
        """Whether containers run on this machine's kernel, so that its /proc describes them."""
        return self.endpoint.host.startswith("unix://") and sys.platform == "linux"

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
    """Connect to the engine of ``DOCKER_HOST``, the chosen context or the first usual socket.

    Raises
    ------
    ToolMissing : no engine, no permission for its socket, or no SDK.
    ToolFailed : something answers, but not as an engine.
    UsageError : ``DOCKER_HOST`` is not an address, or the chosen context does not exist.
    """
    try:
        import docker.errors
    except ImportError as error:
        raise ToolMissing(
            f"the Python package docker cannot be imported: {error}", hint="pip install docker"
        ) from error
    place = endpoint()
    try:
        return Engine(client(place, timeout_s=timeout_s), place)
    except (docker.errors.DockerException, ValueError, OSError) as error:
        raise unreachable(place, error) from error


_BY_SSH = "http://engine-by-ssh:80"
"""The address that the SDK sees of an engine behind ssh."""


def client(place: Endpoint, *, timeout_s: float = ANSWER_TIMEOUT_S) -> docker.APIClient:
    """The SDK's client of the engine at `place`, which has answered."""
    import docker
    from docker.constants import MINIMUM_DOCKER_API_VERSION

    class EngineClient(docker.APIClient):
        def __init__(self, version: str) -> None:
            options = client_options(place)
            super().__init__(**options, version=version, timeout=timeout_s)  # type: ignore[arg-type]
            if place.host.startswith("ssh://"):
                # A proxy of the variables is none for it.
                self.trust_env = False
                self.mount(_BY_SSH, _ssh_adapter(place.host))

        def merge_environment_settings(
            self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any
        ) -> Any:
            # REQUESTS_CA_BUNDLE, which a site sets for its proxy, would replace the authority of the engine.
            verify = self.verify if verify is None else verify
            return super().merge_environment_settings(url, proxies, stream, verify, cert)

    if place.host.startswith("ssh://"):
        with contextlib.closing(EngineClient(MINIMUM_DOCKER_API_VERSION)) as asking:
            return EngineClient(asking.version(api_version=False)["ApiVersion"])
    return EngineClient("auto")


def _ssh_adapter(host: str) -> HTTPAdapter:
    """What makes requests talk through ssh.

    Notes
    -----
    The SDK's own way needs paramiko, passes over the port of ``~/.ssh/config``, and its end cannot be closed.
    """
    import requests.adapters
    import urllib3.connection
    import urllib3.connectionpool

    class DialedConnection(urllib3.connection.HTTPConnection):
        def connect(self) -> None:
            self.sock = dial.dial(host, self.timeout if isinstance(self.timeout, float | int) else None)

    class DialedPool(urllib3.connectionpool.HTTPConnectionPool):
        ConnectionCls = DialedConnection

    class DialedAdapter(requests.adapters.HTTPAdapter):
        def init_poolmanager(self, *words: Any, **options: Any) -> None:
            super().init_poolmanager(*words, **options)
            self.poolmanager.pool_classes_by_scheme = {"http": DialedPool}

    return DialedAdapter()


def client_options(place: Endpoint) -> dict[str, Any]:
    """The SDK's arguments for `place`."""
    import docker.tls

    if place.host.startswith("ssh://"):
        return {"base_url": _BY_SSH}
    options: dict[str, Any] = {"base_url": place.host}
    tls = place.tls
    if tls and place.host.startswith(("tcp://", "http://", "https://")):
        pair = (str(tls.cert), str(tls.key)) if tls.cert and tls.key else None
        ca = str(tls.ca) if tls.ca else None
        options["tls"] = docker.tls.TLSConfig(client_cert=pair, ca_cert=ca, verify=tls.verify)
    return options
