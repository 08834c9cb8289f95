"""The secret of a run, and where a node finds it; in the roll call the nodes prove it to each other.

Only its path travels: values in arguments or variables can be read by everybody on a node, or in the
scheduler's database. The sources, in this order:

1. ``--secret-file``, or IMGKIT_SECRET_FILE of a job script, which makes a new file for each start;
2. `MOUNTED`, a Secret of Kubernetes;
3. ``~/.config/imgkit/secret``. A start of several nodes makes it if the home folder is on a network disk,
   which the nodes share. On a disk of its own each node would make another one.
"""

from __future__ import annotations

import functools
import os
import secrets
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError

VARIABLE = "IMGKIT_SECRET_FILE"
STDIN = "-"
"""The file name that stands for a line on standard input; ``imgkit run --ssh`` sends one."""
MOUNTED = Path("/run/secrets/imgkit/secret")
LEAST_BYTES, MOST_BYTES = 32, 4096
PURPOSE = "the run's secret"
MAKE = "(umask 077; head -c 32 /dev/urandom > {file})"
"""A shell's line that makes a good file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """The bytes that all nodes of a run have in common."""

    value: bytes = field(repr=False)
    source: str
    """The place that they come from, in words or as a path."""


def find(given: str | None, env: Mapping[str, str], *, shared_home: bool) -> Secret | None:
    """The secret of this start; None if it has none, and is open.

    Parameters
    ----------
    given : value of ``--secret-file``.
    shared_home : the home folder is on a network disk, so a missing file is made there.

    Raises
    ------
    UsageError : the file of a source is missing, too short, or not safe from other users.
    """
    if given:
        return from_stdin() if given == STDIN else read(Path(given))
    if os.path.exists(MOUNTED):  # noqa: PTH110 - Path.exists raises where a folder is closed
        # Kubernetes mounts a link into a folder that it replaces; only root can have put it there.
        return read(MOUNTED.resolve(), name=str(MOUNTED))
    own = home_file(env)
    if own and (os.path.lexists(own) or (shared_home and _make(own))):
        return read(own)
    return None


def source(given: str | None, env: Mapping[str, str], *, shared_home: bool) -> str:
    """The place that `find` would use, for a plan: it reads and makes nothing. Empty: the start is open."""
    if given:
        return "standard input" if given == STDIN else given
    if os.path.exists(MOUNTED):  # noqa: PTH110
        return str(MOUNTED)
    own = home_file(env)
    return str(own) if own and (os.path.lexists(own) or shared_home) else ""


def home_file(env: Mapping[str, str]) -> Path | None:
    """The user's own file; None where there is no home folder."""
    if env.get("XDG_CONFIG_HOME", "").startswith("/"):
        return Path(env["XDG_CONFIG_HOME"], "imgkit/secret")
    home = env.get("HOME", "")
    return Path(home, ".config/imgkit/secret") if home.startswith("/") else None


def read(path: Path, *, name: str = "") -> Secret:
    """The secret in a private file.

    Parameters
    ----------
    name : how the source is called (default: the path).

    Raises
    ------
    UsageError : see `find`.
    """
    handle = open_private(path)
    try:
        value = os.read(handle, MOST_BYTES + 1)
    finally:
        os.close(handle)
    return Secret(value=_long_enough(value, str(path)), source=name or str(path))


def open_private(path: Path, *, purpose: str = PURPOSE) -> int:
    """A descriptor of a file that nobody but its owner can read, and that no other user has written.

    Raises
    ------
    UsageError : it is no such file; the text begins with `purpose`.
    """
    try:
        # A named pipe would not open before somebody writes to it.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        what, hint = _why_closed(path, error)
        raise UsageError(f"{purpose} cannot be read: {what}", where=str(path), hint=hint) from error
    if problem := _problem(handle, path):
        os.close(handle)
        raise UsageError(f"{purpose} is not private: {problem[0]}", where=str(path), hint=problem[1])
    return handle


@functools.cache
def from_stdin() -> Secret:
    """The secret on the first line of standard input, which is read once.

    Raises
    ------
    UsageError : the line is too short.
    """
    try:
        # Unbuffered: what follows the line is the program's.
        with open(0, "rb", buffering=0, closefd=False) as stream:
            line = stream.readline(MOST_BYTES + 2).rstrip(b"\n")
    except OSError:
        line = b""  # it is closed
    return Secret(value=_long_enough(line, "standard input"), source="standard input")


def _problem(handle: int, path: Path) -> tuple[str, str] | None:
    """The reason why another user could read the open file or have written it, and what to type."""
    found, me, quoted = os.fstat(handle), os.geteuid(), shlex.quote(str(path))
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file", f"name a file; to make one: {MAKE.format(file='FILE')}"
    trusted = {0, me}
    if me == 0:  # root of a container, who reads the file of the user that started the job
        trusted.add(path.parent.stat().st_uid)
    if found.st_uid not in trusted:
        return (
            f"it belongs to user {found.st_uid}, not to you ({me})",
            f"sudo chown {me} {quoted}, or name another",
        )
    bits = stat.S_IMODE(found.st_mode)
    if bits & 0o077 and not _mounted_for_this_pod(handle, found):
        return f"other users have access to it (mode {bits:04o})", f"chmod 600 {quoted}"
    return None


def _mounted_for_this_pod(handle: int, found: os.stat_result) -> bool:
    """Whether root has mounted the file read-only, as Kubernetes does: no other user of the node sees it.

    With an fsGroup Kubernetes lets the pod's group read it, whatever mode the pod asks for.
    """
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    return in_pod and found.st_uid == 0 and bool(os.fstatvfs(handle).f_flag & os.ST_RDONLY)


def _long_enough(value: bytes, name: str) -> bytes:
    if not LEAST_BYTES <= len(value) <= MOST_BYTES:
        long = f"{len(value)} bytes" if len(value) <= MOST_BYTES else f"more than {MOST_BYTES} bytes"
        raise UsageError(
            f"{PURPOSE} has {LEAST_BYTES} to {MOST_BYTES} bytes, this one {long}",
            where=name,
            hint=f"to make one: {MAKE.format(file='FILE')}",
        )
    return value


def _why_closed(path: Path, error: OSError) -> tuple[str, str]:
    if path.is_symlink():
        return "it is a symbolic link", f"name the file itself: {os.path.realpath(path)}"
    return error.strerror or str(error), (
        "every node needs it at the same path, and a job its folder on a disk that all nodes share. "
        f"To start without one: imgkit run --env {VARIABLE}="
    )


def _make(path: Path) -> bool:
    """Make `path` with random bytes, unless another node is faster; False where that cannot be done."""
    temporary = files.temporary_name(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.create(temporary, mode=0o600) as stream:
            stream.write(secrets.token_bytes(LEAST_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        try:
            # Of nodes that do this at once one makes the name, and all read its file.
            os.link(temporary, path, follow_symlinks=False)
        finally:
            temporary.unlink()
    except OSError:
        pass  # another node's file, a read-only home, or a disk without hard links
    return os.path.lexists(path)
