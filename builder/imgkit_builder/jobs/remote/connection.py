"""One script on a remote by the system's own ssh: ssh_config, agents, jumps and host keys are the user's.

The script and its data go through standard input, so no argument list on the remote holds a value, and the
login shell, which may be csh, reads one fixed line. What that shell prints first (a banner) is skipped: the
script's own output begins behind a line with a random token.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shlex
import stat
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_builder.base import files, process
from imgkit_builder.base.process import ErrorsTooLong, Exited
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.systems import fanout
from imgkit_builder.jobs.systems.fanout import SSH_FAILED
from imgkit_entrypoints.errors import ToolFailed

_MAX_SOCKET_BYTES = 103
"""Longest path of a socket on macOS; Linux takes four more."""
_SOCKET_NAME_BYTES = 1 + 40 + 17
"""The slash, a digest of host, port and user, and what ssh appends while it makes the socket."""
_MAX_BANNER_BYTES = 1 << 20
_SHOWN_LINES = 5
_NONE: Mapping[str, str] = {}

# dd reads exactly the script and leaves the data behind it, which a shell that reads ahead would not. 255 is
# ssh's own failure, but sbatch also ends with it.
LOGIN_SHELL_LINE = (
    "exec /bin/sh -c "
    """'(eval "$(dd bs=1 count={count} 2>/dev/null)"); code=$?; [ $code = 255 ] && code=254; exit $code'"""
)
"""What the login shell reads."""

FIND_PROGRAM = """\
if ! command -v "$program" > /dev/null 2>&1; then
    for shell in bash sh; do
        more=$("$shell" -lc 'echo && echo "$PATH"' < /dev/null 2> /dev/null | tail -n 1)
        if [ -n "$more" ]; then break; fi
    done
    PATH=${more:-$PATH}:/usr/local/bin:/usr/sbin
fi
"""
"""Some sites put the scheduler on the PATH of login shells only, by /etc/profile or the user's own file."""


class Cut(ToolFailed):
    """ssh could not connect, or the connection was lost."""


class ScriptFailed(ToolFailed):
    """The script ran on the remote and ended with another code than 0."""

    def __init__(self, message: str, *, where: str, code: int, output: str) -> None:
        super().__init__(message, where=where, hint=f"its last lines:\n{output}" if output else None)
        self.code = code
        self.output = output


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How to reach a remote."""

    remote: Remote
    socket_folder: Path | None
    """Folder of the sockets of shared connections; None: every command opens its own connection."""
    unshared_reason: str
    """Why there is no such folder; empty if the user wants it so."""
    ask: bool
    """Whether ssh may ask for a password or a second factor on the terminal."""
    max_bytes_per_s: float | None = None
    """Limit for what is sent."""

    def run(self, script: str, values: Mapping[str, str] = _NONE, *, by_transfer: bool = False) -> bytes:
        """Return the output of `script`; the parameters are those of `stream`.

        Raises
        ------
        Cut : ssh could not connect, or lost the connection.
        ScriptFailed : the script failed.
        TooLong : it printed more than an answer can have; the connection has been ended.
        ToolFailed : it printed errors without end; the connection has been ended.
        """
        return self.answer(self.stream(script, values, by_transfer=by_transfer))

    def answer(self, output: Generator[bytes, None, None]) -> bytes:
        """Return all of `output`, which `stream` yields. Raises as `run` does."""
        return process.answer(output, f"a command on {self.remote.name}")

    def stream(
        self,
        script: str,
        values: Mapping[str, str],
        *,
        args: Iterable[str] = (),
        data: Iterable[bytes] = (),
        hold: bool = False,
        by_transfer: bool = False,
    ) -> Generator[bytes, None, None]:
        """Yield the output of `script` as it comes.

        Parameters
        ----------
        values : variables of the script.
        args : its arguments.
        data : what it reads from its standard input.
        hold : leave that open until the script ends; when this side ends, the script reads its end.
        by_transfer : go through the remote's host for files, if it has one.

        Raises
        ------
        As `run`.
        """
        token, host = secrets.token_hex(16), self.host(by_transfer=by_transfer)
        text = f"{self.prelude(token, values)}\nset -- {shlex.join(args)}\n{script}".encode()
        source = process.through(
            (*self.ssh_argv(host), LOGIN_SHELL_LINE.format(count=len(text))),
            itertools.chain([text], data),
            hold=hold,
            hint="apt-get install openssh-client",
        )
        try:
            yield from _behind(source, f"{token}\n".encode(), host)
        except Exited as error:
            raise self.explained(error.code, error.errors, host) from error
        except ErrorsTooLong as error:
            raise self.flooded(error, host) from error
        finally:
            source.close()

    def host(self, *, by_transfer: bool = False) -> str:
        """Return the address that ssh gets: the login host's, or that of the host for files."""
        return (self.remote.transfer if by_transfer else "") or self.remote.address

    def prelude(self, token: str, values: Mapping[str, str]) -> str:
        """Return the first lines of a script: they print `token`, and set the variables `values`."""
        assignments = (f"{name}={shlex.quote(value)}" for name, value in values.items())
        return "\n".join((f"echo {token}", "unset CDPATH", *assignments))

    def ssh_argv(self, host: str) -> tuple[str, ...]:
        """Return the start of an argv that runs a command on `host` over the shared connection."""
        return (*self._options(), "--", host)

    def interactive(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Return the argv that runs a program there with this terminal, in a login shell's environment."""
        # The account's own shell may be csh, which reads this line too.
        line = shlex.join(("exec", "bash", "-lc", f"exec {shlex.join(argv)}"))
        return (*self._options("-tt"), "--", self.remote.address, line)

    def login(self) -> None:
        """Connect now where ssh may ask something, so that its question does not meet a progress bar."""
        for host in self._hosts() if self.ask else ():
            if not self._ask_master("check", host):
                self.run(":", by_transfer=host == self.remote.transfer)

    def close(self) -> bool:
        """End the shared connections; False if there was none."""
        answers = [self._ask_master("exit", host) for host in self._hosts()]
        return any(answers)

    def _hosts(self) -> tuple[str, ...]:
        return (self.remote.address, *filter(None, [self.remote.transfer]))

    def _ask_master(self, command: str, host: str) -> bool:
        if self.socket_folder is None:
            return False
        return process.run((*self._options(), "-O", command, "--", host), check=False).returncode == 0

    def _options(self, terminal: str = "-T") -> tuple[str, ...]:
        options = {
            "BatchMode": "no" if self.ask else "yes",
            "ConnectTimeout": "20",
            "ServerAliveInterval": "15",  # a lost host is noticed within a minute
            "ServerAliveCountMax": "3",
            "LogLevel": "ERROR",
            # The user's other forwardings and commands belong to their own sessions.
            "ClearAllForwardings": "yes",
            "RemoteCommand": "none",
            "ControlPath": "none",
        }
        if self.socket_folder is not None:
            options["ControlMaster"] = "auto"
            options["ControlPath"] = f"{self.socket_folder}/%C"
            options["ControlPersist"] = str(self.remote.keep_s)
        return ("ssh", terminal, "-x", *(f"-o{name}={value}" for name, value in options.items()))

    def explained(self, code: int, errors: str, host: str) -> ToolFailed:
        """Return the error for ssh to `host` that ended with `code` and printed `errors`."""
        output = "\n".join(process.last_lines(errors, _SHOWN_LINES))
        name = self.remote.name
        if code != SSH_FAILED and code > 0:
            message = f"a command on {name} failed with exit code {code}"
            return ScriptFailed(message, where=name, code=code, output=output)
        hint = fanout.after(errors, host)
        if "Permission denied" in errors and not self.ask:
            check = f"in a terminal, where ssh can ask: imgkit remote check {name}"
            again = fanout.SECOND_FACTOR in errors and self.socket_folder
            hint = f"{check}; then this command again" if again else f"{check}; or without questions: {hint}"
        message, hint = process.quoted(f"ssh to {host} failed", output or "the connection was lost", hint)
        return Cut(message, where=name, hint=hint)

    def flooded(self, error: ErrorsTooLong, host: str) -> ToolFailed:
        """Return the error for a command on `host` that printed errors without end."""
        message = ErrorsTooLong(f"a command on {host}", error.start).what
        return ToolFailed(message, where=self.remote.name, hint=_startup_hint(host))


def _startup_hint(host: str) -> str:
    """Return the hint where more than imgkit's script runs on a host."""
    return f"look at the start-up files of that account: ssh {shlex.quote(host)} echo works"


def unreadable(remote: str, output: bytes) -> ToolFailed:
    """Return the error for an answer of `remote` that is cut short, or that imgkit's script did not print."""
    return ToolFailed(
        f"the answer cannot be read, or is cut short; its first line: {process.first_line(output)}",
        where=remote,
        hint="run the same command again; if it fails again, check what programs of that account print",
    )


def connect(remote: Remote, *, ask: bool = False, max_bytes_per_s: float | None = None) -> Connection:
    """Return how to reach `remote`; nothing is started. The parameters are those of `Connection`."""
    folder, reason = (None, "") if remote.keep_s == 0 else _socket_folder()
    return Connection(
        remote=remote, socket_folder=folder, unshared_reason=reason, ask=ask, max_bytes_per_s=max_bytes_per_s
    )


def _socket_folder() -> tuple[Path | None, str]:
    """Return a short and private folder for sockets, or why there is none."""
    run_time = os.environ.get("XDG_RUNTIME_DIR", "")
    candidates = [f"{run_time}/imgkit"] if run_time.startswith("/") else []
    reason = ""
    for path in (*candidates, f"/tmp/imgkit-{os.geteuid()}"):  # noqa: S108 - it is checked to be this user's
        folder = Path(path)
        is_long = len(os.fsencode(folder)) + _SOCKET_NAME_BYTES > _MAX_SOCKET_BYTES
        if is_long or set(path) & set(" %\"'\\"):
            reason = reason or f"{folder} is too long for a socket, or has a blank or quote"
            continue
        try:
            files.make_own_folder(folder)
            if stat.S_IMODE(folder.stat().st_mode) & 0o077:
                raise PermissionError(0, "other users can enter it", str(folder))
        except OSError as error:
            reason = reason or f"{folder}: {error.strerror}"
            continue
        return folder, ""
    return None, reason


def _behind(source: Iterable[bytes], token: bytes, host: str) -> Generator[bytes, None, None]:
    """Yield what comes behind the line `token`."""
    banner, is_behind = b"", False
    for chunk in source:
        if is_behind:
            yield chunk
            continue
        banner += chunk
        _, separator, rest = banner.partition(token)
        if separator:
            is_behind = True
            if rest:
                yield rest
        elif len(banner) > _MAX_BANNER_BYTES:
            break
    if not is_behind:
        text = banner[-200:].decode(errors="replace").strip()
        message = f"the login shell of {host} runs no command" + ("; it printed" if text else "")
        message, hint = process.quoted(message, text, _startup_hint(host))
        raise ToolFailed(message, hint=hint)
