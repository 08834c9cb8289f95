"""Run a script on a remote by the system's ssh, with the user's settings, agent, jump hosts and host keys.

The script and its data are sent through standard input. So other users of the remote cannot see any value in
an argument list. The login shell, which may be csh, reads only one fixed line. The first line that the script
prints is a random token. Everything before it is a banner that the login shell has printed, and is skipped.
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
"""The longest path of a socket on macOS. On Linux, the path can be four bytes longer."""
_SOCKET_NAME_BYTES = 1 + 40 + 17
"""The slash, the digest for ``%C``, and a random suffix that ssh appends while it creates the socket."""
# If more bytes come before the line with the token, the login shell has not run imgkit's script.
_MAX_BANNER_BYTES = 1 << 20
# How much of a banner, and how many lines of a script's errors, a message shows.
_SHOWN_BANNER_BYTES = 200
_SHOWN_LINES = 5
_NO_VALUES: Mapping[str, str] = {}

# A shell that reads a script from its standard input may read too far, into the data that follows the script.
# dd reads exactly the bytes of the script. Exit code 255 would mean that ssh failed. sbatch can also exit
# with 255, so the code 255 of the script is replaced by 254.
LOGIN_SHELL_LINE = (
    "exec /bin/sh -c "
    """'(eval "$(dd bs=1 count={count} 2>/dev/null)"); code=$?; [ $code = 255 ] && code=254; exit $code'"""
)
"""The line that the login shell runs. `count` is the size of imgkit's script in bytes."""

FIND_PROGRAM = """\
if ! command -v "$program" > /dev/null 2>&1; then
    for shell in bash sh; do
        more=$("$shell" -lc 'echo && echo "$PATH"' < /dev/null 2> /dev/null | tail -n 1)
        if [ -n "$more" ]; then break; fi
    done
    PATH=${more:-$PATH}:/usr/local/bin:/usr/sbin
fi
"""
"""Lines of a script that extend PATH by the PATH of a login shell, if ``$program`` is not on PATH.

Some sites put the scheduler only on the PATH of login shells, in /etc/profile or the user's start-up files.
"""


class Cut(ToolFailed):
    """ssh could not connect, or the connection was lost. The same command may succeed later."""


class ScriptFailed(ToolFailed):
    """A script ran on the remote and failed.

    Parameters
    ----------
    code : the exit code of the script.
    output : the end of the script's standard error.
    """

    def __init__(self, message: str, *, where: str, code: int, output: str) -> None:
        super().__init__(message, where=where, hint=f"its last lines:\n{output}" if output else None)
        self.code = code
        self.output = output


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A way to run scripts on a remote.

    It is not an open connection, because each script starts its own ssh.
    """

    remote: Remote
    socket_folder: Path | None
    """The folder with the sockets of shared connections.

    If it is None, every command opens its own connection.
    """
    unshared_reason: str
    """The reason why connections cannot be shared.

    It is "" if they can, or if the user turned sharing off.
    """
    ask: bool
    """Whether ssh may ask for a password or a second factor on the terminal."""

    def run(self, script: str, values: Mapping[str, str] = _NO_VALUES, *, by_transfer: bool = False) -> bytes:
        """Run `script` on the remote, wait for its end, and return its complete output.

        Parameters
        ----------
        values : the values of the script's variables, by name.
        by_transfer : whether to use the remote's host for transfers, if the remote has one.

        Raises
        ------
        Cut : ssh could not connect, or lost the connection.
        ScriptFailed : the script failed.
        TooLong : the script printed more than `process.MOST_BYTES`. The connection has been closed.
        ToolFailed : the login shell did not run the script, or printed error messages without end.
        """
        return self.answer(self.stream(script, values, by_transfer=by_transfer))

    def answer(self, output: Generator[bytes, None, None]) -> bytes:
        """Return all of `output`, the generator of `stream`, which runs the script only now.

        Raises
        ------
        Cut, ScriptFailed, TooLong, ToolFailed : ssh or the script failed, as `run` describes.
        """
        return process.read_answer(output, f"a command on {self.remote.name}")

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
        """Run `script` on the remote, and yield its output in chunks while it runs.

        The script is sent through the standard input of ssh, followed by `data`. It is not sent in an
        argument, which other users of the remote could see.

        Parameters
        ----------
        values : the values of the script's variables, by name.
        args : the script's arguments.
        data : the chunks of the script's standard input.
        hold : whether the standard input stays open after `data` until the script ends. If so, an earlier end
            of the input tells the script that imgkit has ended.
        by_transfer : whether to use the remote's host for transfers, if the remote has one.

        Raises
        ------
        Cut, ScriptFailed, ToolFailed : in the cases of `run`.
        """
        token = secrets.token_hex(16)
        host = self.choose_host(by_transfer=by_transfer)
        # The remote takes as many bytes of its input for the script as `text` has. The rest is the script's
        # own input.
        text = f"{self.prelude(token, values)}\nset -- {shlex.join(args)}\n{script}".encode()
        argv = (*self.ssh_argv(host), LOGIN_SHELL_LINE.format(count=len(text)))
        stdin = itertools.chain([text], data)
        stdout = process.filter_through(argv, stdin, hold=hold, hint="apt-get install openssh-client")
        try:
            yield from _skip_banner(stdout, f"{token}\n".encode(), host)
        except Exited as error:
            raise self.exit_error(error.code, error.errors, host) from error
        except ErrorsTooLong as error:
            raise self.flood_error(error, host) from error
        finally:
            stdout.close()  # ends ssh if the caller stops reading early

    def choose_host(self, *, by_transfer: bool = False) -> str:
        """Return the address of the host to which ssh connects, such as ``me@login1``.

        Parameters
        ----------
        by_transfer : whether to prefer the remote's host for transfers. Without it, or if the remote has no
            such host, the result is the address of the login node.
        """
        transfer_address = self.remote.transfer  # "" if the remote has no such host
        if by_transfer and transfer_address:
            return transfer_address
        return self.remote.address

    def prelude(self, token: str, values: Mapping[str, str]) -> str:
        """Return the first lines of a script, which print `token` and set the variables in `values`."""
        lines = [f"echo {token}", "unset CDPATH"]
        for name, value in values.items():
            lines.append(f"{name}={shlex.quote(value)}")
        return "\n".join(lines)

    def ssh_argv(self, host: str) -> tuple[str, ...]:
        """Return the start of an argv that runs a command on `host` over the shared connection."""
        return (*self._options(), "--", host)

    def interactive(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Return the argv that runs a program on the remote in this terminal.

        A login bash starts the program, so that it gets the variables of a login shell.
        """
        # The login shell of the account, which may be csh, runs this line, which starts bash.
        line = shlex.join(("exec", "bash", "-lc", f"exec {shlex.join(argv)}"))
        return (*self._options("-tt"), "--", self.remote.address, line)

    def login(self) -> None:
        """Open the shared connections now, if ssh may ask for a password.

        Later commands then ask no questions, which would otherwise appear in the middle of a progress bar.
        """
        if not self.ask:
            return
        for host in self._hosts():
            if not self._control_shared_connection("check", host):
                # Any command opens the connection, which ssh keeps open afterwards (ControlPersist).
                self.run(":", by_transfer=host == self.remote.transfer)

    def close(self) -> bool:
        """Close the shared connections, and return whether at least one was open."""
        were_open = [self._control_shared_connection("exit", host) for host in self._hosts()]
        # The list is complete before `any` looks at it, so that all connections are closed.
        return any(were_open)

    def _hosts(self) -> tuple[str, ...]:
        """Return the address of the login node, and that of the host for transfers if there is one."""
        if not self.remote.transfer:
            return (self.remote.address,)
        return self.remote.address, self.remote.transfer

    def _control_shared_connection(self, command: str, host: str) -> bool:
        """Send a command to the shared connection of `host`. Return False if no such connection is open.

        Parameters
        ----------
        command : a command for ``ssh -O``, such as ``check`` or ``exit``.
        """
        if self.socket_folder is None:  # connections are not shared
            return False
        argv = (*self._options(), "-O", command, "--", host)
        return process.run(argv, check=False).returncode == 0

    def _options(self, terminal: str = "-T") -> tuple[str, ...]:
        """Return the start of an ssh command with its options.

        Parameters
        ----------
        terminal : ``-tt`` if the program on the remote needs a terminal, or ``-T`` if not.
        """
        options = {
            "BatchMode": "no" if self.ask else "yes",
            "ConnectTimeout": "20",
            "ServerAliveInterval": "15",  # with these two options, a lost host is noticed within a minute
            "ServerAliveCountMax": "3",
            "LogLevel": "ERROR",
            # Port forwardings and a command in the user's ssh_config are meant for the user's own sessions.
            "ClearAllForwardings": "yes",
            "RemoteCommand": "none",
            "ControlPath": "none",
        }
        if self.socket_folder is not None:
            options["ControlMaster"] = "auto"
            options["ControlPath"] = f"{self.socket_folder}/%C"
            options["ControlPersist"] = str(self.remote.keep_s)
        return ("ssh", terminal, "-x", *(f"-o{name}={value}" for name, value in options.items()))

    def exit_error(self, code: int, errors: str, host: str) -> ToolFailed:
        """Return the error for an ssh to `host` that exited with `code`.

        ssh exits with the code of the script, or with `SSH_FAILED` if the connection failed. If a signal
        ended ssh, the code is negative.

        Parameters
        ----------
        errors : the end of what ssh and the script wrote to standard error.
        """
        last_lines = "\n".join(process.last_lines(errors, _SHOWN_LINES))
        name = self.remote.name
        if code != SSH_FAILED and code > 0:
            message = f"a command on {name} failed with exit code {code}"
            return ScriptFailed(message, where=name, code=code, output=last_lines)
        message, hint = process.quote_output(
            f"ssh to {host} failed",
            last_lines or "the connection was lost",
            self._connection_hint(errors, host),
        )
        return Cut(message, where=name, hint=hint)

    def _connection_hint(self, errors: str, host: str) -> str:
        """Return what the user can do after an ssh to `host` has failed.

        Parameters
        ----------
        errors : the error messages of ssh.
        """
        remedy = fanout.ssh_remedy(errors, host)
        if self.ask or "Permission denied" not in errors:
            return remedy
        login = f"in a terminal, where ssh can ask: imgkit doctor --on {self.remote.name}"
        # After one login with a second factor, this command can use the connection that the login has opened.
        if fanout.SECOND_FACTOR in errors and self.socket_folder is not None:
            return f"{login}; then this command again"
        return f"{login}; or without questions: {remedy}"

    def flood_error(self, error: ErrorsTooLong, host: str) -> ToolFailed:
        """Return the error for a command on `host` that printed error messages without end.

        Parameters
        ----------
        error : the error of the ssh on this machine. It contains the first messages, which the result quotes.
        """
        message = ErrorsTooLong(f"a command on {host}", error.start).what
        return ToolFailed(message, where=self.remote.name, hint=_startup_hint(host))


def _startup_hint(host: str) -> str:
    """Return the hint for a `host` whose start-up files print text or keep imgkit's script from running."""
    return f"look at the start-up files of that account: ssh {shlex.quote(host)} echo works"


def unreadable_answer(remote: str, output: bytes) -> ToolFailed:
    """Return the error for an answer that is cut short, or that is not from imgkit's script.

    Parameters
    ----------
    remote : the name of the remote.
    output : the answer.
    """
    return ToolFailed(
        f"the answer cannot be read, or is cut short; its first line: {process.first_line(output)}",
        where=remote,
        hint="run the same command again; if it fails again, check what programs of that account print",
    )


def connect(remote: Remote, *, ask: bool = False) -> Connection:
    """Return the connection to `remote`. ssh is not started yet, but by the first command.

    Commands share one ssh connection if `remote` allows it and if there is a private folder for the socket.

    Parameters
    ----------
    ask : whether ssh may ask for a password or a second factor on the terminal.
    """
    folder = None
    reason = ""
    if remote.keep_s > 0:
        folder, reason = _find_socket_folder()
    return Connection(remote=remote, socket_folder=folder, unshared_reason=reason, ask=ask)


def _find_socket_folder() -> tuple[Path | None, str]:
    """Return a private folder for the sockets of shared ssh connections, and an empty text.

    If no folder can be used, return None and the reason. The reason is about the first folder, which the user
    can choose (XDG_RUNTIME_DIR). Then each command opens its own connection.
    """
    candidates = []
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime_dir.startswith("/"):
        candidates.append(Path(runtime_dir, "imgkit"))
    candidates.append(Path(f"/tmp/imgkit-{os.geteuid()}"))  # noqa: S108 - it is checked to be this user's
    problems = []
    for folder in candidates:
        problem = _prepare_socket_folder(folder)
        if not problem:
            return folder, ""
        problems.append(problem)
    return None, problems[0]


def _prepare_socket_folder(folder: Path) -> str:
    """Create `folder` if it does not exist. Return why ssh cannot have its sockets there, or "" if it can.

    Anybody who can reach a socket can use the connection. So other users must not be able to enter the
    folder.
    """
    socket_bytes = len(os.fsencode(folder)) + _SOCKET_NAME_BYTES
    # ssh splits the value of ControlPath at blanks and quotes, and expands "%".
    has_special_character = not set(" %\"'\\").isdisjoint(str(folder))
    if socket_bytes > _MAX_SOCKET_BYTES or has_special_character:
        return f"{folder} is too long for a socket, or has a blank or quote"
    try:
        files.make_own_folder(folder)
        mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    # These bits are the permissions of the group and of other users.
    if mode & 0o077:
        return f"{folder}: other users can enter it"
    return ""


def _skip_banner(output: Iterable[bytes], token_line: bytes, host: str) -> Generator[bytes, None, None]:
    """Yield the part of `output` after `token_line`, which is the first line that imgkit's script prints.

    Everything before this line is a banner that the start-up files of the login shell print.

    Raises
    ------
    ToolFailed : the line is missing, or is not within the first `_MAX_BANNER_BYTES`.
    """
    chunks = iter(output)  # one iterator, so that the end of this function goes on after the first chunks
    first_bytes = b""
    for chunk in chunks:
        first_bytes += chunk
        if token_line in first_bytes or len(first_bytes) > _MAX_BANNER_BYTES:
            break
    banner, separator, script_output = first_bytes.partition(token_line)
    if not separator:  # without the token, nothing shows that the output is from imgkit's script
        raise _no_script_error(banner, host)
    if script_output:
        yield script_output
    yield from chunks


def _no_script_error(banner: bytes, host: str) -> ToolFailed:
    """Return the error for a login shell that has not run imgkit's script.

    Parameters
    ----------
    banner : what the login shell has printed. The error quotes the end of it.
    """
    message = f"the login shell of {host} runs no command"
    banner_end = banner[-_SHOWN_BANNER_BYTES:].decode(errors="replace").strip()
    if banner_end:
        message += "; it printed"
    quoted_message, hint = process.quote_output(message, banner_end, _startup_hint(host))
    return ToolFailed(quoted_message, hint=hint)
