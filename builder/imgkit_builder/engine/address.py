"""Find the address of the engine, and explain why no engine responds there.

The address comes from a variable, a Docker context or a usual socket. This module uses only the standard
library.

To reach an engine behind ssh, it starts the program ssh, which uses ``~/.ssh/config``, as Docker's own
command does. The input and output of ssh are a single socket. So one direction of the connection can be
closed, and a full buffer can be waited for, as with a local engine.
"""

from __future__ import annotations

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
ACCEPT_TIMEOUT_S = 1.0
"""The limit for a socket to accept a connection. A running engine needs milliseconds."""

_DEFAULT_CONTEXT = "default"
"""The name of Docker's built-in context. It has no file, and means the variables and the usual sockets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The certificates for an engine behind TLS. A path is None if the file does not exist."""

    ca: Path | None
    cert: Path | None
    key: Path | None
    verify: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of an engine, and the variable or file from which it was read."""

    host: str
    """``unix:///var/run/docker.sock``, ``tcp://HOST:PORT``, ``ssh://USER@HOST``."""
    source: str = ""
    """``DOCKER_HOST``, ``DOCKER_CONTEXT`` or the path of config.json. Empty for a usual socket."""
    context: str = ""
    """The name of the Docker context. Empty without a context."""
    tls: Tls | None = None

    @property
    def leave_command(self) -> str:
        """The command that makes imgkit use another engine, such as ``unset DOCKER_HOST``."""
        if self.source in ("DOCKER_HOST", "DOCKER_CONTEXT"):
            return f"unset {self.source}"
        return "docker context use default"


def find_endpoint() -> Endpoint:
    """Return the address of the engine to use.

    The first of these that is set determines the address: ``DOCKER_HOST``, the context in ``DOCKER_CONTEXT``,
    the context chosen by ``docker context use``. If none is set, the first usual socket at which an engine
    listens is used.

    Raises
    ------
    UsageError : the chosen context does not exist or is damaged.
    """
    host = os.environ.get("DOCKER_HOST")
    if host:
        return Endpoint(host=host, source="DOCKER_HOST", tls=_read_tls_from_environment())
    context = os.environ.get("DOCKER_CONTEXT", "")
    source = "DOCKER_CONTEXT"
    if not context:
        config_path = _settings_folder() / "config.json"
        context = _read_current_context(config_path)
        source = str(config_path)
    # The context "default" has no stored address. It means the usual sockets.
    if context not in ("", _DEFAULT_CONTEXT):
        return _read_context(context, source)
    # If no engine listens anywhere, return the default address: the error then names it.
    default_endpoint = Endpoint(host=DEFAULT_HOST, tls=_read_tls_from_environment())
    return next(_find_listening(), default_endpoint)


def _read_current_context(config_path: Path) -> str:
    """Return the context that ``docker context use`` has stored in Docker's config.json.

    The result is empty if there is none, or if the file is missing or cannot be read.

    Raises
    ------
    UsageError : the content is not a JSON object.
    """
    try:
        return str(_read_json(config_path).get("currentContext") or "")
    except OSError:
        return ""


def _list_usual_sockets() -> dict[Path, str]:
    """Return the sockets at which engines usually listen, each with the command that starts that engine."""
    # After a login over ssh or with su, the variable may be missing although the folder exists.
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    home = Path.home()
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    colima = Path(os.environ.get("COLIMA_HOME") or home / ".colima")
    sockets = {
        Path(DEFAULT_HOST.removeprefix("unix://")): "sudo systemctl start docker",
        runtime / "docker.sock": "systemctl --user start docker",
        runtime / "podman/podman.sock": "systemctl --user start podman.socket",
    }
    if os.getuid() == 0:
        sockets[Path("/run/podman/podman.sock")] = "systemctl start podman.socket"
    return sockets | {
        # Docker Desktop on macOS, and then on Linux
        home / ".docker/run/docker.sock": "docker desktop start",
        home / ".docker/desktop/docker.sock": "docker desktop start",
        colima / "default/docker.sock": "colima start",
        settings / "colima/default/docker.sock": "colima start",
        home / ".rd/docker.sock": "rdctl start",
    }


def _find_listening() -> Iterator[Endpoint]:
    """Yield the address of each usual socket at which an engine listens."""
    for path in _list_usual_sockets():
        if _accepts_connections(path):
            yield Endpoint(host=f"unix://{path}", tls=_read_tls_from_environment())


def _accepts_connections(path: Path) -> bool:
    """Return whether an engine listens at the socket `path` and this user may use it.

    The existence of the file is not enough, because a stopped engine leaves its socket behind.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(ACCEPT_TIMEOUT_S)
        try:
            client.connect(str(path))
        except BlockingIOError:
            return True  # the engine listens, but its queue of waiting clients is full
        except OSError:
            return False
    return True


def _settings_folder() -> Path:
    """Return the folder with Docker's settings: ``DOCKER_CONFIG`` or ``~/.docker``."""
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")


def _read_context(name: str, source: str) -> Endpoint:
    """Return the address of the engine in the Docker context `name`, a stored address with its certificates.

    `source` is the variable or file that selects the context, for messages.

    Raises
    ------
    UsageError : the context does not exist, its file is damaged, or it contains no address of an engine.
    """
    # The folder of a context is named after the sha256 of the context's name (docker/cli, cli/context/store).
    contexts = _settings_folder() / "contexts"
    folder_name = hashlib.sha256(name.encode()).hexdigest()
    engine = _read_context_engine(contexts / "meta" / folder_name / "meta.json", name, source)
    tls = _find_tls_files(contexts / "tls" / folder_name / "docker", verify=not engine.get("SkipTLSVerify"))
    # `SkipTLSVerify` alone also asks for TLS, without a check of the engine's certificate.
    has_tls = bool(tls.ca or tls.cert) or not tls.verify
    return Endpoint(host=str(engine["Host"]), source=source, context=name, tls=tls if has_tls else None)


def _read_context_engine(path: Path, name: str, source: str) -> dict[str, Any]:
    """Return the entry for the engine, with the key ``Host``, in the file `path` of a Docker context.

    If there is none, raise UsageError. `name` is the name of the context, and `source` is the variable or
    file that selects it.
    """
    try:
        engines = _read_json(path).get("Endpoints")
    except OSError as error:
        leave_command = Endpoint(host="", source=source).leave_command
        raise UsageError(
            f"there is no Docker context {name!r}",
            where=source,
            hint=f"list them: docker context ls; return to the default: {leave_command}",
        ) from error
    engine = None
    if isinstance(engines, dict):
        engine = engines.get("docker")
    if not isinstance(engine, dict) or not engine.get("Host"):
        raise UsageError(
            f"the Docker context {name!r} names no engine",
            where=str(path),
            hint=f"docker context inspect {name}",
        )
    return engine


def _read_tls_from_environment() -> Tls | None:
    """Return the certificates that ``DOCKER_TLS_VERIFY`` and ``DOCKER_CERT_PATH`` select.

    If neither variable is set, return None.
    """
    folder = os.environ.get("DOCKER_CERT_PATH")
    verify = bool(os.environ.get("DOCKER_TLS_VERIFY"))
    if not folder and not verify:
        return None  # no TLS at all, not only TLS without a check
    return _find_tls_files(Path(folder or _settings_folder()), verify=verify)


def _find_tls_files(folder: Path, *, verify: bool) -> Tls:
    """Return the certificates in `folder`. Docker determines the names of the files."""
    files = {path.name: path for path in folder.glob("*.pem") if path.is_file()}
    return Tls(ca=files.get("ca.pem"), cert=files.get("cert.pem"), key=files.get("key.pem"), verify=verify)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`.

    Raises
    ------
    OSError : the file cannot be read.
    UsageError : the content is not a JSON object.
    """
    hint = "correct or remove it"
    try:
        data = json_text.load(path)
    except ValueError as error:
        raise UsageError(f"this file is not JSON: {error}", where=str(path), hint=hint) from error
    if not isinstance(data, dict):
        raise UsageError("this file is not a JSON object", where=str(path), hint=hint)
    return data


def explain_unreachable(engine: Endpoint, error: Exception) -> ImgkitError:
    """Return the error for a failed connection to `engine`, with a hint for the user.

    `error` is an exception of the SDK, requests or ssh. It may wrap the OSError that is the real cause.
    """
    host = engine.host
    where = engine.source or None
    cause = _find_system_error(error)
    if isinstance(cause, ssl.SSLError):
        # Check this first. The number of an SSLError is an error code of TLS and not an errno.
        return _explain_tls_error(engine, cause)
    error_number = cause.errno if cause else None
    if error_number in (errno.EACCES, errno.EPERM):
        return _explain_denied_socket(host.removeprefix("unix://"))
    if error_number in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR):
        return ToolMissing(f"no Docker engine answers at {host}", where=where, hint=_suggest_start(engine))
    # If ssh fails, it only closes its socket. So the numbers above never describe a failure of ssh.
    if host.startswith("ssh://"):
        message = f"{host} cannot be reached over SSH: {str(error) or type(error).__name__}"
        return ToolFailed(message, where=where, hint=f"try: {shlex.join(_ssh_argv(host))}")
    # Any other number, or none: only the text of the error from requests or the SDK tells the cause.
    return _explain_text(engine, str(error))


def _explain_text(engine: Endpoint, text: str) -> ImgkitError:
    """Return the error for a failed connection of which only the text is known.

    `text` is the message of requests or the SDK.
    """
    host = engine.host
    where = engine.source or None
    if "timed out" in text.lower():
        message = f"the Docker engine at {host} accepted the connection and did not answer"
        hint = "it may be stuck, see: journalctl -u docker -n 50; sudo systemctl restart docker"
        return ToolFailed(message, where=where, hint=hint)
    # The SDK and requests use these words for an address that they cannot parse.
    if any(part in text for part in ("Invalid bind address", "Invalid host", "protocol", "Protocol")):
        hint = "write unix:///path/docker.sock, tcp://host:2375 or ssh://user@host"
        return UsageError(f"not an engine's address: {host!r}", where=where, hint=hint)
    if "NameResolutionError" in text or "Name or service not known" in text:
        hint = f"correct it, or {engine.leave_command}"
        return ToolMissing(f"unknown host in {host}", where=where, hint=hint)
    return ToolFailed(f"no usable Docker engine at {host}: {text}", where=where, hint=_suggest_start(engine))


def _explain_denied_socket(path: str) -> ToolMissing:
    """Return the error for a socket that this user may not use. The hint says how to get access."""
    if os.geteuid() == 0:
        # A group or sudo does not help root. A security policy or a user namespace has refused the access.
        hint = f"root is refused by a security policy or a user namespace: ls -lZ {path}; journalctl -k -n 20"
    elif "podman" in path:
        hint = "use your own: systemctl --user start podman.socket; unset DOCKER_HOST"
    else:
        hint = (
            "join its group: sudo usermod -aG docker $USER, then log in again (or: newgrp docker); "
            "or run the command with sudo"
        )
    return ToolMissing(f"no permission for the Docker engine's socket {path}", hint=hint)


def _explain_tls_error(engine: Endpoint, error: ssl.SSLError) -> ToolFailed:
    """Return the error for a connection on which TLS failed. The hint lists the certificates in use."""
    # List the files that exist, because a missing or misplaced file is a common cause.
    tls_files: list[str] = []
    if engine.tls:
        paths = (engine.tls.ca, engine.tls.cert, engine.tls.key)
        tls_files = [str(path) for path in paths if path]
    present = ", ".join(tls_files) or "none (see DOCKER_CERT_PATH)"
    hint = (
        "ca.pem must be the CA of the engine's certificate, and the certificate must name this address; "
        f"cert.pem and key.pem identify you. Present: {present}"
    )
    message = f"no TLS with the engine at {engine.host}: {error.reason or error}"
    return ToolFailed(message, where=engine.source or None, hint=hint)


def _suggest_start(engine: Endpoint) -> str:
    """Return a hint for an engine that does not respond: how to start it, or how to use another engine."""
    # A variable or a Docker context has selected this engine, so suggest to leave that choice.
    if engine.source:
        return f"start the engine there, or: {engine.leave_command}{_describe_other_engine(engine)}"
    commands: list[str] = []
    for path, command in _list_usual_sockets().items():
        # A stopped engine leaves its socket behind. So the socket tells which engine is installed on this
        # machine.
        is_stopped = path.exists() and not _accepts_connections(path)
        if is_stopped and command not in commands:
            commands.append(command)
    if commands:
        return f"start it: {'; or: '.join(commands)}"
    return (
        "start it: sudo systemctl start docker (or systemctl --user start podman.socket); "
        "or install it: sudo apt-get install docker.io"
    )


def _describe_other_engine(engine: Endpoint) -> str:
    """Return the end of a hint, with the first usual socket of another engine, or "" if there is none."""
    for endpoint in _find_listening():
        if endpoint.host != engine.host:
            return f", which leads to {endpoint.host.removeprefix('unix://')}"
    return ""


def _find_system_error(error: BaseException) -> OSError | None:
    """Return the OSError that caused `error`, or None if there is none.

    The SDK, requests and urllib3 each wrap an OSError in their own exception, so all causes are searched.
    """
    visited: list[BaseException] = []
    pending: list[object] = [error]
    while pending:
        cause = pending.pop()
        if not isinstance(cause, BaseException) or cause in visited:
            continue
        visited.append(cause)
        # The exceptions of requests are also OSErrors, but without an errno. They only wrap the cause.
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause
        reason = getattr(cause, "reason", None)  # of urllib3
        pending += [cause.__cause__, cause.__context__, reason, *cause.args]
    return None


# Makes ssh ignore Ctrl-C, which the terminal sends to all its processes. imgkit still needs the connection to
# clean up on the engine.
_IGNORE_INTERRUPT = ("/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh")


def _ssh_argv(host: str) -> list[str]:
    """Return the command that connects to the engine at ``ssh://[USER@]HOST[:PORT]``.

    On the remote machine, it runs ``docker system dial-stdio``, which connects its input and output to the
    engine.
    """
    parts = urlsplit(host)
    argv = ["ssh"]
    if parts.username:
        argv += ["-l", parts.username]
    if parts.port:
        argv += ["-p", str(parts.port)]
    # -T: a terminal would change the bytes. --: a host that begins with "-" is not read as an option.
    return [*argv, "-T", "--", parts.hostname or "", "docker", "system", "dial-stdio"]


def open_ssh_socket(host: str, timeout_s: float | None) -> socket.socket:
    """Start ssh to `host`, and return a socket that is connected to the engine on that machine.

    Messages of ssh are printed to standard error. If the engine cannot be reached, ssh closes the socket.

    Raises
    ------
    ToolMissing : the program ssh is not installed.
    """
    process.require_program("ssh", "sudo apt-get install openssh-client")
    ours, theirs = socket.socketpair()
    # ssh keeps its own copy of `theirs`. This process closes it, so that it notices when ssh ends.
    with theirs:
        # The process is not waited for, because ssh ends when the socket is closed.
        argv = [*_IGNORE_INTERRUPT, *_ssh_argv(host)]
        subprocess.Popen(argv, stdin=theirs.fileno(), stdout=theirs.fileno())
    ours.settimeout(timeout_s)
    return ours
