"""Where the engine listens, and why nothing usable answers there. Standard library only."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.engine import contexts, dial
from imgkit_builder.engine.contexts import Endpoint
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
        return Endpoint(host=host, source="DOCKER_HOST", tls=contexts.stated_tls())
    name, source = contexts.chosen()
    if name:
        return contexts.endpoint(name, source)
    return next(_answering(), Endpoint(host=DEFAULT_HOST, tls=contexts.stated_tls()))


def others(used: Endpoint) -> tuple[Endpoint, ...]:
    """Engines beside `used` that a variable or a context could choose: contexts, then sockets that answer."""
    found = {place.host: place for place in (*_answering(), *contexts.readable())}
    found.pop(used.host, None)
    return tuple(found.values())


def _answering() -> Iterator[Endpoint]:
    places = (usual.path for usual in _usual_sockets() if _accepts(usual.path))
    return (Endpoint(host=f"unix://{path}", tls=contexts.stated_tls()) for path in places)


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
            hint=f"try: {shlex.join(dial.words(host))}",
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
    hint = "ca.pem has to be of the authority that signed the engine's certificate, and to name this address"
    return ToolFailed(
        f"no TLS with the engine at {place.host}: {error.reason or error}",
        where=place.source or None,
        hint=f"{hint}; cert.pem and key.pem are yours. Now: {named or 'none (see DOCKER_CERT_PATH)'}",
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
