"""Where the engine listens, and why nothing usable answers there. Standard library only."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from imgkit_builder.engine import contexts
from imgkit_builder.engine.contexts import Endpoint
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, ToolMissing, UsageError

DEFAULT_HOST = "unix:///var/run/docker.sock"


def endpoint() -> Endpoint:
    """The engine to use: ``DOCKER_HOST``, the chosen context, else the first usual socket that can be opened.

    Raises
    ------
    UsageError : the chosen context does not exist or is damaged.
    """
    if host := os.environ.get("DOCKER_HOST"):
        return Endpoint(host=host, source="DOCKER_HOST", tls=contexts.stated_tls())
    name, source = contexts.chosen()
    if name:
        return contexts.endpoint(name, source)
    usable = (path for path in _usual_sockets() if os.access(path, os.R_OK | os.W_OK))
    path = next(usable, None)
    return Endpoint(host=f"unix://{path}" if path else DEFAULT_HOST, tls=contexts.stated_tls())


def _usual_sockets() -> Iterator[Path]:
    """Sockets of Docker and Podman, of the whole machine and of this user."""
    own = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    yield Path(DEFAULT_HOST.removeprefix("unix://"))
    yield own / "docker.sock"
    yield own / "podman/podman.sock"
    if os.getuid() == 0:
        yield Path("/run/podman/podman.sock")


def unreachable(place: Endpoint, error: Exception) -> ImgkitError:
    """Turn `error`, raised while connecting to `place`, into what the user can do about it."""
    host, stated = place.host, place.source or None
    number, text = _errno(error), str(error)
    if number in (errno.EACCES, errno.EPERM):
        return _denied(place)
    if number in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return ToolMissing(f"no Docker engine answers at {host}", where=stated, hint=_start_hint(place))
    if "paramiko" in text:
        return ToolMissing(
            f"{host} needs the SSH part of the docker package", where=stated, hint="pip install paramiko"
        )
    if host.startswith("ssh://"):
        return ToolFailed(
            f"{host} cannot be reached over SSH: {text or type(error).__name__}",
            where=stated,
            hint=f"try: ssh {host.removeprefix('ssh://').partition('/')[0]} docker system dial-stdio",
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


def _leave(place: Endpoint) -> str:
    """The command that stops using `place`."""
    if place.source == "DOCKER_HOST":
        return "unset DOCKER_HOST"
    return "unset DOCKER_CONTEXT" if place.source == "DOCKER_CONTEXT" else "docker context use default"


def _start_hint(place: Endpoint) -> str:
    if place.source:
        others = (path for path in _usual_sockets() if os.access(path, os.R_OK | os.W_OK))
        other = next((path for path in others if place.host != f"unix://{path}"), None)
        leads = f", which leads to {other}" if other else ""
        return f"start the engine there, or: {_leave(place)}{leads}"
    return (
        "start it: sudo systemctl start docker (or systemctl --user start podman.socket); "
        "or install it: sudo apt-get install docker.io"
    )


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
