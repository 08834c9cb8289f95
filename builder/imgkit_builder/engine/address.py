"""Where the Docker engine listens, and why nothing usable answers there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from imgkit_entrypoints.errors import ImgkitError, ToolFailed, ToolMissing, UsageError

DEFAULT_HOST = "unix:///var/run/docker.sock"


def address() -> str:
    """``DOCKER_HOST``, else the default socket."""
    return os.environ.get("DOCKER_HOST") or DEFAULT_HOST


def unreachable(host: str, error: Exception) -> ImgkitError:
    """Turn `error`, raised while connecting to `host`, into what the user can do about it."""
    stated = "DOCKER_HOST" if os.environ.get("DOCKER_HOST") else None
    number, text = _errno(error), str(error)
    if number in (errno.EACCES, errno.EPERM):
        return ToolMissing(
            f"no permission for the Docker engine's socket {host.removeprefix('unix://')}",
            hint="join its group: sudo usermod -aG docker $USER, then log in again (or: newgrp docker); "
            "or run the command with sudo",
        )
    if number in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return ToolMissing(f"no Docker engine answers at {host}", where=stated, hint=_start_hint(host))
    if "paramiko" in text:
        return ToolMissing(
            f"{host} needs the SSH part of the docker package", where=stated, hint="pip install paramiko"
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
        return ToolMissing(f"unknown host in {host}", where=stated, hint="unset or correct DOCKER_HOST")
    return ToolFailed(f"no usable Docker engine at {host}: {text}", where=stated, hint=_start_hint(host))


def _start_hint(host: str) -> str:
    rootless = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}") / "docker.sock"
    if rootless.exists() and host != f"unix://{rootless}":
        return f"a rootless engine has a socket: export DOCKER_HOST=unix://{rootless}"
    if os.environ.get("DOCKER_HOST"):
        return "start the engine there, or: unset DOCKER_HOST"
    return "start it: sudo systemctl start docker; or install it: sudo apt-get install docker.io"


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
