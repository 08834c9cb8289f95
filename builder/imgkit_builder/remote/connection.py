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
from imgkit_builder.job.ssh import fanout
from imgkit_builder.job.ssh.fanout import SSH_FAILED
from imgkit_builder.remote.config import Remote
from imgkit_entrypoints.errors import ToolFailed

_MOST_SOCKET_BYTES = 103
"""A socket's path ends there on macOS; Linux takes four more."""
_SOCKET_NAME_BYTES = 1 + 40 + 17
"""The slash, a digest of host, port and user, and what ssh appends while it makes the socket."""
_MOST_BANNER_BYTES = 1 << 20
_SHOWN_LINES = 5

_LINE = (
    "exec /bin/sh -c "
    """'(eval "$(dd bs=1 count={count} 2>/dev/null)"); code=$?; [ $code = 255 ] && code=254; exit $code'"""
)
"""What the login shell reads. 255 is ssh's own failure, but sbatch also ends with it."""

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

    def __init__(self, what: str, *, where: str, code: int, said: str) -> None:
        super().__init__(what, where=where, hint=f"its last lines:\n{said}" if said else None)
        self.code = code
        self.said = said


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How to reach a remote."""

    remote: Remote
    control: Path | None
    """Folder of the sockets of shared connections; None: every command opens its own connection."""
    why_alone: str
    """The reason for that; empty if the user wants it so."""
    ask: bool
    """Whether ssh may ask for a password or a second factor on the terminal."""

    def run(self, script: str, *, by_transfer: bool = False, **values: str) -> bytes:
        """The output of `script`, which sees `values` as its variables; the rest is as of `stream`.

        Raises
        ------
        Cut : ssh could not connect, or lost the connection.
        ScriptFailed : the script failed.
        TooLong : it printed more than an answer can have; the connection has been ended.
        ToolFailed : it printed errors without end; the connection has been ended.
        """
        return self.answer(self.stream(script, values, by_transfer=by_transfer))

    def answer(self, output: Generator[bytes, None, None]) -> bytes:
        """All of `output`, which `stream` yields.

        Raises
        ------
        As `run`.
        """
        return process.answer(output, f"a command on {self.remote.name}")

    def stream(
        self,
        script: str,
        values: Mapping[str, str],
        *,
        words: Iterable[str] = (),
        data: Iterable[bytes] = (),
        hold: bool = False,
        by_transfer: bool = False,
    ) -> Generator[bytes, None, None]:
        """Yield the output of `script` as it comes.

        Parameters
        ----------
        values : variables of the script.
        words : its arguments.
        data : what it reads from its standard input.
        hold : leave that open until the script ends; when this side ends, the script reads its end.
        by_transfer : go through the remote's host for files, if it has one.

        Raises
        ------
        As `run`.
        """
        token = secrets.token_hex(16)
        text = "\n".join(
            (
                f"echo {token}",
                "unset CDPATH",
                *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
                f"set -- {shlex.join(words)}",
                script,
            )
        ).encode()
        # dd reads exactly the script and leaves the data behind it, which a shell that reads ahead would not.
        line = _LINE.format(count=len(text))
        host = (self.remote.transfer if by_transfer else "") or self.remote.address
        source = process.through(
            (*self._options(), "--", host, line),
            itertools.chain([text], data),
            hold=hold,
            hint="apt-get install openssh-client",
        )
        try:
            yield from _behind(source, f"{token}\n".encode(), host)
        except Exited as error:
            raise self._explained(error, host) from error
        except ErrorsTooLong as error:
            what = ErrorsTooLong(f"a command on {host}", error.start).what
            raise ToolFailed(what, where=self.remote.name, hint=_look_at(host)) from error
        finally:
            source.close()

    def interactive(self, words: Sequence[str]) -> tuple[str, ...]:
        """The words that run a program on the remote with this terminal, in a login shell's environment."""
        # The account's own shell may be csh, which reads this line too.
        line = shlex.join(("exec", "bash", "-lc", f"exec {shlex.join(words)}"))
        return (*self._options("-tt"), "--", self.remote.address, line)

    def login(self) -> None:
        """Connect now where ssh may ask something, so that its question does not meet a progress bar."""
        for host in self._hosts() if self.ask else ():
            if not self._master("check", host):
                self.run(":", by_transfer=host == self.remote.transfer)

    def close(self) -> bool:
        """End the shared connections; False if there was none."""
        ended = [self._master("exit", host) for host in self._hosts()]
        return any(ended)

    def _hosts(self) -> tuple[str, ...]:
        return (self.remote.address, *filter(None, [self.remote.transfer]))

    def _master(self, word: str, host: str) -> bool:
        if self.control is None:
            return False
        return process.run((*self._options(), "-O", word, "--", host), check=False).returncode == 0

    def _options(self, terminal: str = "-T") -> tuple[str, ...]:
        given = {
            "BatchMode": "no" if self.ask else "yes",
            "ConnectTimeout": "20",
            "ServerAliveInterval": "15",  # a lost host is noticed within a minute
            "ServerAliveCountMax": "3",
            "LogLevel": "ERROR",
            # The user's other forwardings and commands belong to their own sessions.
            "ClearAllForwardings": "yes",
            "RemoteCommand": "none",
        }
        if self.control is None:
            given["ControlPath"] = "none"
        else:
            given["ControlMaster"] = "auto"
            given["ControlPath"] = f"{self.control}/%C"
            given["ControlPersist"] = str(self.remote.keep_s)
        return (
            "ssh",
            terminal,
            "-x",
            *(word for name, value in given.items() for word in ("-o", f"{name}={value}")),
        )

    def _explained(self, error: Exited, host: str) -> ToolFailed:
        said = "\n".join(error.errors.splitlines()[-_SHOWN_LINES:])
        if error.code != SSH_FAILED and error.code > 0:
            return ScriptFailed(
                f"a command on {host} failed with exit code {error.code}",
                where=self.remote.name,
                code=error.code,
                said=said,
            )
        hint = fanout.after(error.errors, host)
        if "Permission denied" in error.errors and not self.ask:
            check = f"in a terminal, where ssh can ask: imgkit remote check {self.remote.name}"
            again = fanout.SECOND_FACTOR in error.errors and self.control
            hint = f"{check}; then this command again" if again else f"{check}; or without questions: {hint}"
        what, hint = process.quoted(f"ssh to {host} failed", said or "the connection was lost", hint)
        return Cut(what, where=self.remote.name, hint=hint)


def _look_at(host: str) -> str:
    """Return the hint where more than imgkit's script runs on a host."""
    return f"look at the start-up files of that account: ssh {shlex.quote(host)} echo works"


def odd(remote: str, output: bytes) -> ToolFailed:
    """The error for an answer of `remote` that is cut short, or that imgkit's script did not print."""
    return ToolFailed(
        f"the answer cannot be read, or is cut short; its first line: {process.first_line(output)}",
        where=remote,
        hint="run the same command again; if it fails again, check what programs of that account print",
    )


def connect(remote: Remote, *, ask: bool = False) -> Connection:
    """How to reach `remote`; nothing is started.

    Parameters
    ----------
    ask : whether ssh may ask on the terminal.
    """
    control, why = (None, "") if remote.keep_s == 0 else _control_folder()
    return Connection(remote=remote, control=control, why_alone=why, ask=ask)


def _control_folder() -> tuple[Path | None, str]:
    """A short and private folder for sockets, or why there is none."""
    run_time = os.environ.get("XDG_RUNTIME_DIR", "")
    own = [f"{run_time}/imgkit"] if run_time.startswith("/") else []
    why = ""
    for place in (*own, f"/tmp/imgkit-{os.geteuid()}"):  # noqa: S108 - it is checked to be this user's
        folder = Path(place)
        long = len(os.fsencode(folder)) + _SOCKET_NAME_BYTES > _MOST_SOCKET_BYTES
        if long or set(place) & set(" %\"'\\"):
            why = why or f"{folder} is too long for a socket, or has a blank or quote"
            continue
        try:
            files.make_own_folder(folder)
            if stat.S_IMODE(folder.stat().st_mode) & 0o077:
                raise PermissionError(0, "other users can enter it", str(folder))
        except OSError as error:
            why = why or f"{folder}: {error.strerror}"
            continue
        return folder, ""
    return None, why


def _behind(source: Iterable[bytes], token: bytes, host: str) -> Generator[bytes, None, None]:
    """Yield what comes behind the line `token`."""
    before, found = b"", False
    for chunk in source:
        if found:
            yield chunk
            continue
        before += chunk
        _, mark, rest = before.partition(token)
        if mark:
            found = True
            if rest:
                yield rest
        elif len(before) > _MOST_BANNER_BYTES:
            break
    if not found:
        shown = before[-200:].decode(errors="replace").strip()
        what, hint = process.quoted(
            f"the login shell of {host} runs no command" + ("; it printed" if shown else ""),
            shown,
            _look_at(host),
        )
        raise ToolFailed(what, hint=hint)
