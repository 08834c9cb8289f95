"""The Docker engine over plain HTTP: the one-file tool has no docker SDK, and loading it takes long."""

from __future__ import annotations

import http.client
import shutil
import socket
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from imgkit_builder.engine import dial
from imgkit_builder.engine.address import endpoint, unreachable
from imgkit_builder.engine.contexts import Endpoint, Tls
from imgkit_builder.engine.facts import EngineFacts, engine_facts
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ImgkitError, ToolFailed

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswer:
    """What an engine reports about itself, and the space that it has."""

    facts: EngineFacts
    free_bytes: int | None
    """Free space where images are kept; None for an engine on another machine."""


def query(place: Endpoint | None = None, *, timeout_s: float = TIMEOUT_S) -> EngineAnswer:
    """Ask the engine at `place` (default: the one that every verb uses) about itself.

    Raises
    ------
    ToolMissing : nothing answers there, or this user has no permission.
    ToolFailed : the answer is not that of an engine, or the address is of an unsupported kind.
    UsageError : the chosen context does not exist.
    """
    place = place or endpoint()
    try:
        facts = engine_facts(
            place, version=_get(place, "/version", timeout_s), info=_get(place, "/info", timeout_s)
        )
        return EngineAnswer(facts=facts, free_bytes=_free(facts) if facts.is_here else None)
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(place, error) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ToolFailed(
            f"{place.host} does not answer like a Docker engine: {error!r}",
            where=place.source or None,
            hint="correct the address; see what answers: docker version",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageState:
    """Which image an engine keeps under a name."""

    ref: str
    """The engine's own name for it, ``sha256:...``."""
    platform: str
    digests: tuple[str, ...]
    """``repo@sha256:...`` of each registry that it is known from, sorted."""


def image_state(place: Endpoint, name: str) -> ImageState | None:
    """Ask the engine at `place` what it keeps under `name`; None: nothing, or it cannot be asked."""
    try:
        data: dict[str, Any] = _get(place, f"/images/{quote(name, safe='/:@')}/json", TIMEOUT_S)
        return ImageState(
            ref=str(data["Id"]),
            platform=f"{data['Os']}/{data['Architecture']}",
            digests=tuple(sorted(map(str, data.get("RepoDigests") or ()))),
        )
    except (ImgkitError, OSError, http.client.HTTPException, KeyError, TypeError, ValueError, AttributeError):
        return None


def _free(facts: EngineFacts) -> int | None:
    try:
        return shutil.disk_usage(facts.root).free
    except OSError:
        return None  # Docker Desktop keeps it inside a virtual machine; or this user may not read it


def _get(place: Endpoint, path: str, timeout_s: float) -> Any:
    connection = _connection(place, timeout_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != http.client.OK:
            raise ToolFailed(f"the engine at {place.host} answers {answer.status} to {path}: {text[:200]!r}")
        return json_text.parse(text)
    finally:
        connection.close()


def _connection(place: Endpoint, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(place.host)
    if parts.scheme == "unix":
        return _UnixConnection(parts.path, timeout_s)
    if parts.scheme == "ssh":
        return _SshConnection(place.host, timeout_s)
    if parts.scheme in ("tcp", "http", "https") and parts.hostname:
        if parts.scheme == "https" or place.tls:
            return http.client.HTTPSConnection(
                parts.hostname, parts.port or 2376, timeout=timeout_s, context=_tls(place.tls)
            )
        return http.client.HTTPConnection(parts.hostname, parts.port or 2375, timeout=timeout_s)
    raise ToolFailed(
        f"imgkit doctor cannot ask an engine at {place.host}",
        where=place.source or None,
        hint="write unix:///path/docker.sock, tcp://host:2375 or ssh://user@host",
    )


def _tls(tls: Tls | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(tls.ca) if tls and tls.ca else None)
    if tls and not tls.verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls and tls.cert:
        context.load_cert_chain(tls.cert, tls.key)
    return context


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _SshConnection(http.client.HTTPConnection):
    def __init__(self, host: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._address = host

    def connect(self) -> None:
        self.sock = dial.dial(self._address, self.timeout)
