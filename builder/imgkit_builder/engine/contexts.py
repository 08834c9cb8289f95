"""Docker's contexts: the named engines that ``docker context use`` chooses between. Standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import UsageError

DEFAULT = "default"
"""The context that stands for the variables and the usual sockets; it has no files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates for an engine behind TLS; None where there is no such file."""

    ca: Path | None
    cert: Path | None
    key: Path | None
    verify: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of an engine, and what named it."""

    host: str
    """``unix:///var/run/docker.sock``, ``tcp://HOST:PORT``, ``ssh://USER@HOST``."""
    source: str = ""
    """``DOCKER_HOST``, ``DOCKER_CONTEXT`` or the path of config.json; empty for a usual socket."""
    context: str = ""
    """Name of the context; empty without one."""
    tls: Tls | None = None


def folder() -> Path:
    """The folder of Docker's settings: ``DOCKER_CONFIG``, else ``~/.docker``."""
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")


def chosen() -> tuple[str, str]:
    """Name and source of the chosen context; its name is empty where nothing chooses one.

    Raises
    ------
    UsageError : config.json is not JSON.
    """
    if name := os.environ.get("DOCKER_CONTEXT", ""):
        return ("" if name == DEFAULT else name), "DOCKER_CONTEXT"
    path = folder() / "config.json"
    try:
        settings = _json(path)
    except OSError:
        return "", ""
    name = str(settings.get("currentContext") or "")
    return ("" if name == DEFAULT else name), str(path)


def endpoint(name: str, source: str) -> Endpoint:
    """The engine of the context `name`, which `source` chooses.

    Raises
    ------
    UsageError : there is no such context, its file is damaged, or it names no Docker engine.
    """
    key = hashlib.sha256(name.encode()).hexdigest()
    path = folder() / "contexts/meta" / key / "meta.json"
    try:
        about = _json(path).get("Endpoints") or {}
    except OSError as error:
        raise UsageError(
            f"there is no Docker context {name!r}",
            where=source,
            hint="list them: docker context ls; return to the default: "
            + ("unset DOCKER_CONTEXT" if source == "DOCKER_CONTEXT" else "docker context use default"),
        ) from error
    engine = about.get("docker") if isinstance(about, dict) else None
    host = str(engine.get("Host") or "") if isinstance(engine, dict) else ""
    if not host or not isinstance(engine, dict):
        raise UsageError(
            f"the Docker context {name!r} names no engine",
            where=str(path),
            hint=f"docker context inspect {name}",
        )
    return Endpoint(
        host=host,
        source=source,
        context=name,
        tls=_context_tls(folder() / "contexts/tls" / key / "docker", verify=not engine.get("SkipTLSVerify")),
    )


def readable() -> tuple[Endpoint, ...]:
    """The engines of all contexts whose files can be read, in the order of their names."""
    found = []
    for path in folder().glob("contexts/meta/*/meta.json"):
        with contextlib.suppress(OSError, UsageError):
            name = str(_json(path).get("Name") or "")
            found.append(endpoint(name, str(path)))
    return tuple(sorted(found, key=lambda place: place.context))


def stated_tls() -> Tls | None:
    """The certificates that ``DOCKER_TLS_VERIFY`` and ``DOCKER_CERT_PATH`` ask for; None without them."""
    place, verify = os.environ.get("DOCKER_CERT_PATH", ""), bool(os.environ.get("DOCKER_TLS_VERIFY"))
    if not place and not verify:
        return None
    return _tls(Path(place) if place else folder(), verify=verify)


def _context_tls(place: Path, *, verify: bool) -> Tls | None:
    found = _tls(place, verify=verify)
    return None if verify and found.ca is None and found.cert is None else found


def _tls(place: Path, *, verify: bool) -> Tls:
    ca, cert, key = (path if path.is_file() else None for path in (place / f"{name}.pem" for name in _PEM))
    return Tls(ca=ca, cert=cert, key=key, verify=verify)


_PEM = ("ca", "cert", "key")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json_text.load(path)
    except ValueError as error:
        raise UsageError(
            f"this file is not JSON: {error}", where=str(path), hint="correct or remove it"
        ) from error
    if not isinstance(found, dict):
        raise UsageError("this file is not a JSON object", where=str(path), hint="correct or remove it")
    return found
