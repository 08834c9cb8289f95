"""The Docker engine over plain HTTP: the one-file tool has no docker SDK."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from imgkit_builder.engine.address import address as engine_address
from imgkit_builder.engine.address import unreachable
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ToolFailed

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine reports about itself."""

    address: str
    version: str
    api: str
    arch: str
    """``amd64``, ``arm64``."""
    free_bytes: int | None
    """Free space where images are kept; None for an engine on another machine."""


def query(host: str | None = None) -> EngineFacts:
    """Ask the engine at `host` (default: ``DOCKER_HOST``, else the default socket) for its version.

    Raises
    ------
    ToolMissing : nothing answers there, or this user has no permission.
    ToolFailed : the answer is not that of an engine, or the address is of an unsupported kind.
    """
    address = host or engine_address()
    try:
        version = _get(address, "/version")
        free_bytes = _free(_get(address, "/info")) if address.startswith("unix://") else None
        return EngineFacts(
            address=address,
            version=str(version["Version"]),
            api=str(version["ApiVersion"]),
            arch=str(version["Arch"]),
            free_bytes=free_bytes,
        )
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(address, error) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ToolFailed(
            f"{address} does not answer like a Docker engine: {error!r}", hint="correct DOCKER_HOST"
        ) from error


def _free(info: Any) -> int | None:
    folder = str(info["DockerRootDir"])
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None  # Docker Desktop keeps it inside a virtual machine; or this user may not read it


def _get(address: str, path: str) -> Any:
    connection = _connection(address)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != http.client.OK:
            raise ToolFailed(f"the engine at {address} answers {answer.status} to {path}: {text[:200]!r}")
        return json_text.parse(text)
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
        f"imgkit cannot ask an engine at {address}",
        hint="write unix:///path/docker.sock or tcp://host:2375; for ssh:// try: docker version",
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
