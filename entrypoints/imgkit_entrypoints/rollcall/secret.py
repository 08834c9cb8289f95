"""Find the secret of a run. In the roll call, the nodes prove to each other that they know it.

Only the path of the secret is passed on. Values in arguments or variables could be read by everyone on a
node, or in the scheduler's database. The sources are, in this order:

1. ``--secret-file``, or IMGKIT_SECRET_FILE of a job script, which makes a new file for each start;
2. `MOUNTED`, a Secret of Kubernetes;
3. ``~/.config/imgkit/secret``. If this file is missing, a start on several nodes creates it. It only does so
    if the home
   folder is on a network disk that the nodes share. Otherwise each node would create its own secret.
"""

from __future__ import annotations

import os
import secrets
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError

VARIABLE = "IMGKIT_SECRET_FILE"
# The file name that stands for a line on standard input. ``imgkit run --mpi-start ssh`` sends the secret in
# this way.
STDIN = "-"
# The path at which the pods of a job mount a Secret of Kubernetes.
MOUNTED = Path("/run/secrets/imgkit/secret")
# HMAC-SHA256 needs a key of at least 32 bytes. A file of more than 4 KiB is probably not a secret.
MIN_BYTES, MAX_BYTES = 32, 4096
PURPOSE = "the run's secret"
# A shell command that creates a valid secret.
MAKE = "(umask 077; head -c 32 /dev/urandom > {file})"


def find_secret(option: str | None, env: Mapping[str, str], *, shared_home: bool) -> bytes | None:
    """Return the secret of this start, or None if there is none, so that any program may join the roll call.

    The first of these sources that exists is used: ``--secret-file``, a Secret of Kubernetes, the file in the
    home folder.

    Parameters
    ----------
    option : the value of ``--secret-file``.
    env : the environment, which contains the path of the home folder.
    shared_home : True if the home folder is on a network disk, so that a missing file may be created there.

    Raises
    ------
    UsageError : the file is missing, too short, or not protected from other users.
    """
    if option == STDIN:
        return read_stdin()
    path = _find_path(option, env, shared_home=shared_home)
    if path is None:
        return None
    if option:  # the file must exist, so `read_secret` reports its absence
        return read_secret(path)
    if path == MOUNTED:
        # Kubernetes mounts its Secret as a link into a folder that it may replace. `read_secret` refuses
        # links, but this link is safe, since only root can create it.
        return read_secret(path.resolve())
    # What remains is the file in the home folder, which may have to be created.
    exists = os.path.lexists(path) or _make_secret(path)
    return read_secret(path) if exists else None


def describe_source(option: str | None, env: Mapping[str, str], *, shared_home: bool) -> str:
    """Return the path or name of the secret that `find_secret` would use, without reading or creating it.

    The result is "" if there is no secret, so that any program may join the roll call.
    """
    if option == STDIN:
        return "standard input"
    path = _find_path(option, env, shared_home=shared_home)
    return "" if path is None else str(path)


def _find_path(option: str | None, env: Mapping[str, str], *, shared_home: bool) -> Path | None:
    """Return the path of the secret, or None if there is none.

    The sources are, in this order, `option` (the value of ``--secret-file``), a Secret that Kubernetes has
    mounted, and the file in the home folder. With `shared_home`, that file may not exist yet, because
    `find_secret` creates it. Without a shared home, each node would create another secret.
    """
    if option:
        return Path(option)
    # This follows links, because Kubernetes mounts the Secret as a link.
    if os.path.exists(MOUNTED):  # noqa: PTH110 - Path.exists raises an error if a folder cannot be entered
        return MOUNTED
    path = home_file(env)
    # A link to nowhere counts as a file here, so that `read_secret` reports it. Otherwise the run would start
    # without a secret.
    if path is not None and (shared_home or os.path.lexists(path)):
        return path
    return None


def home_file(env: Mapping[str, str]) -> Path | None:
    """Return the path of the user's secret in the home folder, or None if there is no home folder."""
    if env.get("XDG_CONFIG_HOME", "").startswith("/"):
        return Path(env["XDG_CONFIG_HOME"], "imgkit/secret")
    home = env.get("HOME", "")
    if not home.startswith("/"):
        return None
    return Path(home, ".config/imgkit/secret")


def read_secret(path: Path) -> bytes:
    """Return the secret in a private file.

    Raises
    ------
    UsageError : the file is missing, too short, or not protected from other users.
    """
    descriptor = open_private(path)
    try:
        secret = os.read(descriptor, MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    _refuse_other_length(secret, str(path))
    return secret


def open_private(path: Path, *, purpose: str = PURPOSE) -> int:
    """Open a file that only its owner can read and write, and return the descriptor.

    Raises
    ------
    UsageError : the file is missing, or other users have access to it. The message begins with `purpose`.
    """
    try:
        # O_NOFOLLOW refuses links. Without O_NONBLOCK, opening a named pipe would wait until someone writes
        # to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)  # noqa: TID251
    except OSError as error:
        problem, hint = _describe_open_error(path, error)
        raise UsageError(f"{purpose} cannot be read: {problem}", where=str(path), hint=hint) from error
    access_problem = _find_access_problem(descriptor, path)
    if access_problem is not None:
        os.close(descriptor)
        problem, hint = access_problem
        raise UsageError(f"{purpose} is not private: {problem}", where=str(path), hint=hint)
    return descriptor


def read_stdin() -> bytes:
    """Return the secret in the first line of standard input.

    Raises
    ------
    UsageError : the line is too short or too long.
    """
    try:
        # A buffer would read beyond the line, and the program would not get that data.
        with open(0, "rb", buffering=0, closefd=False) as stream:
            line = stream.readline(MAX_BYTES + 2).rstrip(b"\n")
    except OSError:  # standard input is closed
        line = b""
    _refuse_other_length(line, "standard input")
    return line


def _find_access_problem(descriptor: int, path: Path) -> tuple[str, str] | None:
    """Return why another user could read or have written the open file, and what the user can type.

    Return None if no other user could. The result is the problem and the hint of an error message. `path` is
    the path of the file.
    """
    # The open file is checked, and not the path, because another user could replace the file at the path.
    status = os.fstat(descriptor)
    user = os.geteuid()
    quoted = shlex.quote(str(path))
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file", f"name a file; to make one: {MAKE.format(file='FILE')}"
    trusted_users = {0, user}
    if user == 0:
        # In a container, root may read the file of the user who started the job. That user owns the folder of
        # the file, and could replace the file there anyway.
        trusted_users.add(path.parent.stat().st_uid)
    if status.st_uid not in trusted_users:
        problem = f"it belongs to user {status.st_uid}, not to you ({user})"
        return problem, f"sudo chown {user} {quoted}, or name another"
    mode = stat.S_IMODE(status.st_mode)
    others_have_access = bool(mode & 0o077)  # any permission of the group or of others
    if others_have_access and not _is_pod_secret(descriptor):
        return f"other users have access to it (mode {mode:04o})", f"chmod 600 {quoted}"
    return None


def _is_pod_secret(descriptor: int) -> bool:
    """Return whether the open file is a Secret that Kubernetes has mounted into this pod.

    Kubernetes mounts it read-only and as root, so no other user of the node sees it. If the pod has an
    fsGroup, Kubernetes lets the pod's group read the file, whatever mode the pod requests.
    """
    if "KUBERNETES_SERVICE_HOST" not in os.environ or os.fstat(descriptor).st_uid != 0:
        return False
    return bool(os.fstatvfs(descriptor).f_flag & os.ST_RDONLY)


def _refuse_other_length(value: bytes, name: str) -> None:
    """Raise UsageError if a secret is too short or too long."""
    if MIN_BYTES <= len(value) <= MAX_BYTES:
        return
    size = f"{len(value)} bytes" if len(value) <= MAX_BYTES else f"more than {MAX_BYTES} bytes"
    raise UsageError(
        f"{PURPOSE} has {MIN_BYTES} to {MAX_BYTES} bytes, this one {size}",
        where=name,
        hint=f"to make one: {MAKE.format(file='FILE')}",
    )


def _describe_open_error(path: Path, error: OSError) -> tuple[str, str]:
    """Return why a file could not be opened, and a hint for the user."""
    if path.is_symlink():
        return "it is a symbolic link", f"name the file itself: {os.path.realpath(path)}"
    return error.strerror or str(error), (
        "every node needs it at the same path, and a job its folder on a disk that all nodes share. "
        f"To start without one: imgkit run --env {VARIABLE}="
    )


def _make_secret(path: Path) -> bool:
    """Create a secret of random bytes, unless another node does so first. Return whether the file exists.

    The file is first written under a temporary name, so that no node reads an incomplete secret.
    """
    temporary = files.temporary_name(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.create_file(temporary, mode=0o600) as stream:
            stream.write(secrets.token_bytes(MIN_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        try:
            # If several nodes do this at the same time, only one of them creates the link, and all nodes read
            # its secret.
            os.link(temporary, path, follow_symlinks=False)
        finally:
            temporary.unlink()
    except OSError:  # another node's file, a read-only home, or a disk without hard links
        pass
    return os.path.lexists(path)
