"""Connect to the Docker engine with the SDK, the package docker.

It is imported late, because that takes long.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from imgkit_builder.engine import address
from imgkit_builder.engine.address import Endpoint, explain_unreachable
from imgkit_builder.engine.errors import translate_errors
from imgkit_entrypoints.errors import ToolFailed, ToolMissing

if TYPE_CHECKING:
    import docker
    from requests.adapters import HTTPAdapter

ANSWER_TIMEOUT_S = 120
"""The limit for short requests. An engine that writes a layer to a slow disk responds late. A dead engine
never does."""
FACTS_TIMEOUT_S = 10.0
"""The limit for `query_facts`. It is shorter, because a person waits for the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts about an engine."""

    endpoint: Endpoint
    product: str
    """``Docker`` or ``Podman``."""
    version: str
    api: str
    arch: str
    """The architecture, such as ``amd64`` or ``arm64``."""
    store: str
    """The image store, such as ``overlay2`` (a graph driver) or ``containerd (overlayfs)``.

    The second is containerd's store, with the name of its snapshotter.
    """
    root: str
    """The folder in which the engine keeps images."""

    @property
    def is_podman(self) -> bool:
        """Whether the engine is Podman, which provides Docker's API."""
        return self.product == "Podman"

    @property
    def is_here(self) -> bool:
        """Whether containers run on the kernel of this machine, so that its /proc describes them."""
        return self.endpoint.host.startswith("unix://") and sys.platform == "linux"

    @property
    def free_bytes(self) -> int | None:
        """The free space on the disk with the images.

        None if it is unknown, as on another machine or in a VM.
        """
        if not self.is_here:
            return None
        with contextlib.suppress(OSError):
            return shutil.disk_usage(self.root).free
        return None


class Engine:
    """A connection to an engine with Docker's API. Use it as a context manager.

    Attributes
    ----------
    api : the low-level client of the SDK. Only modules of this package use it.
    endpoint : the address of the engine.
    """

    def __init__(self, api: docker.APIClient, endpoint: Endpoint) -> None:
        self.api = api
        self.endpoint = endpoint

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.api.close()

    @cached_property
    def version(self) -> dict[str, Any]:
        """The engine's response to ``/version``. Only modules of this package use it."""
        # This sends no request: the client has stored the response when it connected.
        with translate_errors("query the engine's version"):
            return dict(self.api.version())

    @cached_property
    def info(self) -> dict[str, Any]:
        """The engine's response to ``/info``. Only modules of this package use it."""
        with translate_errors("query the engine"):
            return dict(self.api.info())

    @property
    def platform(self) -> str:
        """The platform that runs without an emulator, such as ``linux/amd64``."""
        return f"{self.version.get('Os', 'linux')}/{self.version.get('Arch', 'amd64')}"

    @property
    def has_nvidia(self) -> bool:
        """Whether the engine has NVIDIA's runtime, so that containers can use GPUs."""
        return "nvidia" in (self.info.get("Runtimes") or {})

    @property
    def has_containerd_store(self) -> bool:
        """Whether the engine stores images with containerd, and so identifies them by their manifests."""
        return _has_containerd_store(self.info)

    def facts(self) -> EngineFacts:
        """Return facts about the engine, such as its version and how it stores images."""
        return engine_facts(self.endpoint, version=self.version, info=self.info)

    @contextlib.contextmanager
    def without_timeout(self) -> Iterator[docker.APIClient]:
        """Yield the SDK's client without a timeout, for calls that may take an hour: save, export and push.

        Notes
        -----
        By default, the SDK waits 60 s for a response in all calls except build. To save an image of 20 GB,
        the engine copies the image before it sends the first byte (docker/docker-py issues 1070, 2097, 2119).
        """
        # The client reads its timeout at each request, so no request of the block has one.
        usual_timeout_s = self.api.timeout
        self.api.timeout = None  # type: ignore[assignment]  # requests waits forever with None
        try:
            yield self.api
        finally:
            self.api.timeout = usual_timeout_s


def connect(endpoint: Endpoint | None = None, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Engine:
    """Connect to the engine at `endpoint`. By default, `find_endpoint` chooses the engine.

    Raises
    ------
    ToolMissing : no engine responds, this user may not use its socket, or the SDK is not installed.
    ToolFailed : a program responds, but it is not an engine.
    UsageError : ``DOCKER_HOST`` is not an address, or the chosen context does not exist.
    """
    try:
        import docker.errors
    except ImportError as error:
        raise ToolMissing(
            f"the Python package docker cannot be imported: {error}", hint="pip install docker"
        ) from error
    endpoint = endpoint or address.find_endpoint()
    # The client asks for the engine's version at once, so an engine that does not respond is noticed here.
    try:
        return Engine(make_client(endpoint, timeout_s=timeout_s), endpoint)
    except (docker.errors.DockerException, ValueError, OSError) as error:
        raise explain_unreachable(endpoint, error) from error


_SSH_URL = "http://engine-by-ssh:80"
"""An invented address for an engine behind ssh. It makes the SDK use our adapter."""


def make_client(endpoint: Endpoint, *, timeout_s: float = ANSWER_TIMEOUT_S) -> docker.APIClient:
    """Return a client of the SDK that is connected to the engine at `endpoint`.

    It differs from the SDK's own client in three ways. It asks for the version only once. The variable
    REQUESTS_CA_BUNDLE, which a site may set, does not replace the engine's certificate authority. For
    ``ssh://``, it starts the program ssh.
    """
    import docker
    from docker.constants import MINIMUM_DOCKER_API_VERSION

    is_ssh = endpoint.host.startswith("ssh://")

    class EngineClient(docker.APIClient):
        def __init__(self, version: str) -> None:
            self.version_answer: dict[str, Any] = {}
            options = sdk_options(endpoint)
            super().__init__(**options, version=version, timeout=timeout_s)  # type: ignore[arg-type]
            if is_ssh:
                # Ignore proxies that are set by variables such as HTTP_PROXY.
                self.trust_env = False
                self.mount(_SSH_URL, _make_ssh_adapter(endpoint.host))

        def version(self, api_version: bool = True) -> dict[str, Any]:
            # Keep the response, because Podman takes 0.2 to 0.9 s for each.
            if not self.version_answer:
                self.version_answer = super().version(api_version)
            return self.version_answer

        def merge_environment_settings(
            self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any
        ) -> Any:
            # If `verify` is None, requests uses REQUESTS_CA_BUNDLE, which a site may set for its proxy.
            if verify is None:
                verify = self.verify
            return super().merge_environment_settings(url, proxies, stream, verify, cert)

    if is_ssh:
        # With the version "auto", the constructor would send a request before the adapter for ssh is mounted.
        # So a first client asks for the engine's version.
        with contextlib.closing(EngineClient(MINIMUM_DOCKER_API_VERSION)) as version_client:
            return EngineClient(version_client.version(api_version=False)["ApiVersion"])
    return EngineClient("auto")


def _make_ssh_adapter(host: str) -> HTTPAdapter:
    """Return an adapter that makes requests talk to an engine through the program ssh.

    Notes
    -----
    The SDK's own adapter needs paramiko, and ignores the port in ``~/.ssh/config``. It also cannot close only
    one direction of the connection.
    """
    import requests.adapters
    import urllib3.connection
    import urllib3.connectionpool

    # requests has an adapter, the adapter has pools, and a pool has connections. Only the connection does
    # something new, in `connect`. The pool and the adapter are replaced only to use that connection.
    class SshConnection(urllib3.connection.HTTPConnection):
        def connect(self) -> None:
            timeout_s = None
            if isinstance(self.timeout, float | int):  # else None or an object, the default
                timeout_s = self.timeout
            self.sock = address.open_ssh_socket(host, timeout_s)

    class SshPool(urllib3.connectionpool.HTTPConnectionPool):
        ConnectionCls = SshConnection

    class SshAdapter(requests.adapters.HTTPAdapter):
        def init_poolmanager(self, *args: Any, **options: Any) -> None:
            super().init_poolmanager(*args, **options)
            self.poolmanager.pool_classes_by_scheme = {"http": SshPool}

    return SshAdapter()


def sdk_options(endpoint: Endpoint) -> dict[str, Any]:
    """Return the arguments for the SDK's client: the address of an engine, and its certificates for TLS."""
    import docker.tls

    if endpoint.host.startswith("ssh://"):
        return {"base_url": _SSH_URL}
    tls = endpoint.tls
    if tls is None or not endpoint.host.startswith(("tcp://", "http://", "https://")):
        return {"base_url": endpoint.host}
    # The SDK refuses a certificate without a key, so pass both or none.
    cert_and_key = None
    if tls.cert and tls.key:
        cert_and_key = (str(tls.cert), str(tls.key))
    ca = str(tls.ca) if tls.ca else None
    tls_config = docker.tls.TLSConfig(client_cert=cert_and_key, ca_cert=ca, verify=tls.verify)
    return {"base_url": endpoint.host, "tls": tls_config}


def engine_facts(endpoint: Endpoint, *, version: Mapping[str, Any], info: Mapping[str, Any]) -> EngineFacts:
    """Return the facts in the engine's responses to ``/version`` and ``/info``.

    Raises
    ------
    ToolFailed : the responses lack values that every engine sends, so another program uses the address.
    """
    try:
        # Podman has Docker's API. It is recognized by the name of one of its components.
        component_names = [component.get("Name") for component in version.get("Components") or ()]
        product = "Podman" if "Podman Engine" in component_names else "Docker"
        store = str(info.get("Driver") or "unknown")
        if _has_containerd_store(info):
            store = f"containerd ({store})"
        return EngineFacts(
            endpoint=endpoint,
            product=product,
            version=str(version["Version"]),
            api=str(version["ApiVersion"]),
            arch=str(version["Arch"]),
            store=store,
            root=str(info.get("DockerRootDir") or ""),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ToolFailed(
            f"{endpoint.host} does not answer like a Docker engine: {error!r}",
            where=endpoint.source or None,
            hint="correct the address; see what answers: docker version",
        ) from error


def _has_containerd_store(info: Mapping[str, Any]) -> bool:
    """Return whether the engine stores images with containerd. `info` is its response to ``/info``.

    Otherwise it uses one of Docker's own drivers, such as overlay2.
    """
    pairs = [pair for pair in info.get("DriverStatus") or () if len(pair) == 2]
    driver_type = str(dict(pairs).get("driver-type") or "")
    return driver_type.startswith("io.containerd.snapshotter")


def query_facts(endpoint: Endpoint | None = None) -> EngineFacts:
    """Return facts about the engine at `endpoint`. By default, this is the engine that every command uses.

    Raises
    ------
    ToolMissing : no engine responds in time, or this user may not use it.
    ToolFailed : a program responds, but it is not an engine.
    UsageError : ``DOCKER_HOST`` is not an address, or the chosen context does not exist.
    """
    with connect(endpoint, timeout_s=FACTS_TIMEOUT_S) as engine:
        return engine.facts()
