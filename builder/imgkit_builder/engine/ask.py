"""Ask the Docker engine over its socket, without the docker SDK: the one-file tool has none."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from imgkit_entrypoints.errors import ImgkitError, ToolFailed, ToolMissing

DEFAULT_HOST = "unix:///var/run/docker.sock"
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """What an engine says of itself."""

    address: str
    version: str
    api: str
    arch: str
    """``amd64``, ``arm64``."""
    free_bytes: int | None
    """Free space where images are kept; None for an engine on another machine."""


def ask(host: str | None = None) -> EngineAnswer:
    """Ask the engine at `host` (default: ``DOCKER_HOST``, else the default socket) for its version.

    Raises
    ------
    ToolMissing : nothing answers there, or this user may not ask.
    ToolFailed : something answers that is no engine, or the address is of a kind not known here.
    """
    address = host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    try:
        version = _get(address, "/version")
        free_bytes = _free(_get(address, "/info")) if address.startswith("unix://") else None
        return EngineAnswer(
            address=address,
            version=str(version["Version"]),
            api=str(version["ApiVersion"]),
            arch=str(version["Arch"]),
            free_bytes=free_bytes,
        )
    except (OSError, http.client.HTTPException) as error:
        raise _why(address, error) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ToolFailed(
            f"what answers at {address} is no Docker engine: {error!r}", hint="correct DOCKER_HOST"
        ) from error


def _free(info: Any) -> int | None:
    folder = str(info["DockerRootDir"])
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None  # Docker Desktop keeps it inside a virtual machine; or not ours to look into


def _get(address: str, path: str) -> Any:
    connection = _connection(address)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != http.client.OK:
            raise ToolFailed(f"the engine at {address} answers {answer.status} to {path}: {text[:200]!r}")
        return json.loads(text)
    finally:
        connection.close()


def _connection(address: str) -> http.client.HTTPConnection:
    parts = urlsplit(address)
    if parts.scheme == "unix":
        return _UnixConnection(parts.path)
    if parts.scheme in ("tcp", "http", "https") and parts.hostname:
        if parts.scheme == "https" or os.environ.get("DOCKER_TLS_VERIFY"):
            return http.client.HTTPSConnection(
                parts.hostname, parts.port or 2376, timeout=TIMEOUT_S, context=_tls()
            )
        return http.client.HTTPConnection(parts.hostname, parts.port or 2375, timeout=TIMEOUT_S)
    raise ToolFailed(
        f"the address {address} cannot be asked here",
        hint="it looks like unix:///path/docker.sock or tcp://host:2375; for ssh:// run: docker version",
    )


def _tls() -> ssl.SSLContext:
    folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _why(address: str, error: Exception) -> ImgkitError:
    if isinstance(error, PermissionError):
        return ToolMissing(
            f"no permission for the engine's socket {address.removeprefix('unix://')}",
            hint="sudo usermod -aG docker $USER, then log in again (or: newgrp docker)",
        )
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        installed = shutil.which("dockerd") or shutil.which("docker")
        start = "sudo systemctl start docker" if installed else "sudo apt-get install docker.io"
        stated = address == os.environ.get("DOCKER_HOST")
        hint = "start the engine there, or: unset DOCKER_HOST" if stated else start
        return ToolMissing(f"no Docker engine answers at {address}", hint=hint)
    if isinstance(error, TimeoutError):
        return ToolFailed(f"the engine at {address} does not answer", hint="sudo systemctl restart docker")
    return ToolMissing(f"no Docker engine answers at {address}: {error}", hint="correct or unset DOCKER_HOST")
