"""Where the engine listens (a variable, a context, a usual socket, ssh), and why nothing answers there.

Standard library only. By ssh the program reads ``~/.ssh/config``, as for Docker's own command. Its ends are
one socket, so that a direction can be closed and a full one waited for, as with an engine of this machine.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shlex
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from imgkit_builder.base import process
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, ToolMissing, UsageError

DEFAULT_HOST = "unix:///var/run/docker.sock"


ANSWER_S = 1.0
"""Limit for a socket to accept a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualSocket:
    """A place where engines listen by default."""

    path: Path
    start: str
    """The command that starts the engine there."""


def endpoint() -> Endpoint:
    """The engine to use: ``DOCKER_HOST``, the chosen context, else the first usual socket that answers.

    Raises
    ------
    UsageError : the chosen context does not exist or is damaged.
    """
    if host := os.environ.get("DOCKER_HOST"):
        return Endpoint(host=host, source="DOCKER_HOST", tls=_stated_tls())
    name, source = _chosen_context()
    if name:
        return _context_endpoint(name, source)
    return next(_answering(), Endpoint(host=DEFAULT_HOST, tls=_stated_tls()))


def others(used: Endpoint) -> tuple[Endpoint, ...]:
    """Engines other than `used` that one could choose: contexts, then sockets that answer."""
    found = {place.host: place for place in (*_answering(), *_context_endpoints())}
    found.pop(used.host, None)
    return tuple(found.values())


def _answering() -> Iterator[Endpoint]:
    places = (usual.path for usual in _usual_sockets() if _accepts(usual.path))
    return (Endpoint(host=f"unix://{path}", tls=_stated_tls()) for path in places)


def _usual_sockets() -> Iterator[UsualSocket]:
    """Sockets of the whole machine and of this user."""
    own = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    home = Path.home()
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    colima = Path(os.environ.get("COLIMA_HOME") or home / ".colima")
    docker = "systemctl start docker"
    for path, start in (
        (Path(DEFAULT_HOST.removeprefix("unix://")), f"sudo {docker}"),
        (own / "docker.sock", docker.replace(" ", " --user ", 1)),
        (own / "podman/podman.sock", "systemctl --user start podman.socket"),
        *([(Path("/run/podman/podman.sock"), "systemctl start podman.socket")] if os.getuid() == 0 else []),
        # Docker Desktop on macOS and on Linux
        (home / ".docker/run/docker.sock", "docker desktop start"),
        (home / ".docker/desktop/docker.sock", "docker desktop start"),
        (colima / "default/docker.sock", "colima start"),
        (settings / "colima/default/docker.sock", "colima start"),
        (home / ".rd/docker.sock", "rdctl start"),
    ):
        yield UsualSocket(path=path, start=start)


def _accepts(path: Path) -> bool:
    """Whether an engine listens at `path` and this user may speak to it; a stopped one leaves its file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(ANSWER_S)
        try:
            client.connect(str(path))
        except BlockingIOError:
            return True  # more clients wait than it has taken so far
        except OSError:
            return False
    return True


def unreachable(place: Endpoint, error: Exception) -> ImgkitError:
    """Turn `error`, raised while connecting to `place`, into what the user can do about it."""
    host, stated = place.host, place.source or None
    cause = _cause(error)
    number, text = cause.errno if cause else None, str(error)
    if isinstance(cause, ssl.SSLError):
        return _untrusted(place, cause)
    if number in (errno.EACCES, errno.EPERM):
        return _denied(place)
    if number in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return ToolMissing(f"no Docker engine answers at {host}", where=stated, hint=_start_hint(place))
    if host.startswith("ssh://"):
        return ToolFailed(
            f"{host} cannot be reached over SSH: {text or type(error).__name__}",
            where=stated,
            hint=f"try: {shlex.join(_ssh_argv(host))}",
        )
    if "timed out" in text.lower():
        return ToolFailed(
            f"the Docker engine at {host} accepted the connection and did not answer",
            where=stated,
            hint="it hangs: journalctl -u docker -n 50; sudo systemctl restart docker",
        )
    if "Invalid bind address" in text or "Invalid host" in text or "protocol" in text.lower():
        return UsageError(
            f"not an engine's address: {host!r}",
            where=stated,
            hint="write unix:///path/docker.sock or tcp://host:2375",
        )
    if "NameResolutionError" in text or "Name or service not known" in text:
        return ToolMissing(f"unknown host in {host}", where=stated, hint=f"correct it, or {_leave(place)}")
    return ToolFailed(f"no usable Docker engine at {host}: {text}", where=stated, hint=_start_hint(place))


def _denied(place: Endpoint) -> ToolMissing:
    path = place.host.removeprefix("unix://")
    if os.geteuid() == 0:
        # The group and sudo do not help root: the refusal comes from the kernel's policy or from a namespace.
        hint = f"root is refused by a security policy or a user namespace: ls -lZ {path}; journalctl -k -n 20"
    elif "podman" in path:
        hint = "use your own: systemctl --user start podman.socket; unset DOCKER_HOST"
    else:
        hint = (
            "join its group: sudo usermod -aG docker $USER, then log in again (or: newgrp docker); "
            "or run the command with sudo"
        )
    return ToolMissing(f"no permission for the Docker engine's socket {path}", hint=hint)


def _untrusted(place: Endpoint, error: ssl.SSLError) -> ToolFailed:
    """TLS does not come about. The number of such an error is TLS's own, and no system error."""
    tls = place.tls
    named = ", ".join(str(one) for one in (tls.ca, tls.cert, tls.key) if one) if tls else ""
    hint = "ca.pem must be the CA of the engine's certificate, and the certificate must name this address"
    return ToolFailed(
        f"no TLS with the engine at {place.host}: {error.reason or error}",
        where=place.source or None,
        hint=f"{hint}; cert.pem and key.pem identify you. Present: {named or 'none (see DOCKER_CERT_PATH)'}",
    )


def _leave(place: Endpoint) -> str:
    """The command that stops using `place`."""
    if place.source == "DOCKER_HOST":
        return "unset DOCKER_HOST"
    return "unset DOCKER_CONTEXT" if place.source == "DOCKER_CONTEXT" else "docker context use default"


def _start_hint(place: Endpoint) -> str:
    if place.source:
        other = next((one.host for one in _answering() if one.host != place.host), "")
        leads = f", which leads to {other.removeprefix('unix://')}" if other else ""
        return f"start the engine there, or: {_leave(place)}{leads}"
    # A stopped engine leaves its socket, and that tells which one this machine has.
    stopped = (usual for usual in _usual_sockets() if usual.path.exists() and not _accepts(usual.path))
    known = dict.fromkeys(usual.start for usual in stopped)
    if known:
        return f"start it: {'; or: '.join(known)}"
    return (
        "start it: sudo systemctl start docker (or systemctl --user start podman.socket); "
        "or install it: sudo apt-get install docker.io"
    )


def _cause(error: BaseException | None) -> OSError | None:
    """The OSError at the bottom: SDK, requests and urllib3 each wrap it once more."""
    seen: set[int] = set()
    todo: list[object] = [error]
    while todo:
        one = todo.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        # requests' own exceptions are OSErrors without a number.
        if isinstance(one, OSError) and one.errno is not None:
            return one
        todo += [one.__cause__, one.__context__, getattr(one, "reason", None), *one.args]
    return None


_DEFAULT_CONTEXT = "default"
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


def _settings_folder() -> Path:
    """The folder of Docker's settings: ``DOCKER_CONFIG``, else ``~/.docker``."""
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")


def _chosen_context() -> tuple[str, str]:
    """Name and source of the chosen context; its name is empty where nothing chooses one.

    Raises
    ------
    UsageError : config.json is not JSON.
    """
    if name := os.environ.get("DOCKER_CONTEXT", ""):
        return ("" if name == _DEFAULT_CONTEXT else name), "DOCKER_CONTEXT"
    path = _settings_folder() / "config.json"
    try:
        settings = _json(path)
    except OSError:
        return "", ""
    name = str(settings.get("currentContext") or "")
    return ("" if name == _DEFAULT_CONTEXT else name), str(path)


def _context_endpoint(name: str, source: str) -> Endpoint:
    """The engine of the context `name`, which `source` chooses.

    Raises
    ------
    UsageError : there is no such context, its file is damaged, or it names no Docker engine.
    """
    key = hashlib.sha256(name.encode()).hexdigest()
    path = _settings_folder() / "contexts/meta" / key / "meta.json"
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
        tls=_context_tls(
            _settings_folder() / "contexts/tls" / key / "docker", verify=not engine.get("SkipTLSVerify")
        ),
    )


def _context_endpoints() -> tuple[Endpoint, ...]:
    """The engines of all contexts whose files can be read, in the order of their names."""
    found = []
    for path in _settings_folder().glob("contexts/meta/*/meta.json"):
        with contextlib.suppress(OSError, UsageError):
            name = str(_json(path).get("Name") or "")
            found.append(_context_endpoint(name, str(path)))
    return tuple(sorted(found, key=lambda place: place.context))


def _stated_tls() -> Tls | None:
    """The certificates that ``DOCKER_TLS_VERIFY`` and ``DOCKER_CERT_PATH`` ask for; None without them."""
    place, verify = os.environ.get("DOCKER_CERT_PATH", ""), bool(os.environ.get("DOCKER_TLS_VERIFY"))
    if not place and not verify:
        return None
    return _tls_files(Path(place) if place else _settings_folder(), verify=verify)


def _context_tls(place: Path, *, verify: bool) -> Tls | None:
    found = _tls_files(place, verify=verify)
    return None if verify and found.ca is None and found.cert is None else found


def _tls_files(place: Path, *, verify: bool) -> Tls:
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


_REMOTE = ("docker", "system", "dial-stdio")
# Ctrl-C reaches all processes of the terminal, and imgkit still has to clean up on the engine.
_UNINTERRUPTED = ("/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh")


def _ssh_argv(host: str) -> list[str]:
    """The command that connects to ``ssh://[USER@]HOST[:PORT]``."""
    parts = urlsplit(host)
    user = ["-l", parts.username] if parts.username else []
    port = ["-p", str(parts.port)] if parts.port else []
    return ["ssh", *user, *port, "-T", "--", parts.hostname or "", *_REMOTE]


def dial(host: str, timeout_s: float | None) -> socket.socket:
    """Start ssh to `host`, and return a socket that leads to the engine there.

    What ssh says goes to this program's standard error. An engine that cannot be reached ends the connection.

    Raises
    ------
    ToolMissing : there is no program ssh.
    """
    process.need("ssh", "sudo apt-get install openssh-client")
    ours, theirs = socket.socketpair()
    with theirs:
        # It ends when the socket is closed.
        subprocess.Popen([*_UNINTERRUPTED, *_ssh_argv(host)], stdin=theirs.fileno(), stdout=theirs.fileno())
    ours.settimeout(timeout_s)
    return ours
