"""Run one ssh command on each host, all at the same time, and leave no process behind on the hosts.

ssh does not end the command that it has started. Without a terminal, the other host never notices that the
connection is lost. So a guard, which is a small shell script, runs on the host between ssh and the command.
It reads its standard input. If it reads a line, it asks the command to end. At the end of the input, it
forces the command to end. The input also ends when this process is killed.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import math
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from imgkit_builder.jobs.job import NO_INPUT, Argv, HostCommand, HostInput
from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rollcall.secret import VARIABLE

SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    # Open a new connection. A shared connection would outlive this process.
    *("-o", "ControlPath=none"),
    # With these options, a lost host is noticed within a minute.
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"),
)
"""The start of each ssh command.

ssh never asks a question, neither for a password nor about an unknown host key.
"""
SSH_FAILED = 255
"""Exit code of ssh if it could not connect, or if it lost the connection (ssh(1))."""
PEERS_S = 20.0
"""Seconds after a failed command in which the other hosts can end with an error message of their own."""
KILL_S = 5
"""Seconds between TERM and KILL, after the input of a guard has ended."""
END_S = KILL_S + 3.0
"""Seconds after the end of their input until all guards should have ended. KILL itself needs some time."""
LINE_BYTES = 1 << 16
"""Bytes of the longest line that is shown in one piece. Longer lines are shown in several pieces."""

POLL_S = 0.1
"""Seconds between two checks whether the ssh processes have ended."""

Show = Callable[[str, bytes, bool], None]
"""A function that shows output.

Its arguments are the host, a line, and whether the line is from standard error.
"""

# The guard, a shell script that ends the command on a host. `{start}` starts the command in the background,
# in a process group of its own. KILL is sent to the whole group, even after the command has ended. Otherwise,
# a process that the command left behind would keep the connection open. A trapped signal ends `wait` before
# the command has ended, so the loop waits again. The shell's own output is dropped, because it reports every
# process that a signal has ended.
_GUARD = """\
exec 3<&0 </dev/null
{start}
run=$!
exec >/dev/null 2>&1
end() {{ kill "-$1" "-$run"; }}
trap "end TERM" TERM INT HUP
( while read -r word <&3; do end TERM; done; end TERM; sleep {kill_s}; end KILL ) &
watch=$!
wait "$run"
code=$?
while [ "$code" -gt 128 ] && kill -0 "$run"; do wait "$run"; code=$?; done
kill "$watch"
end KILL
exit "$code"
"""


def _input_lines(host_input: HostInput) -> bytes:
    """Return the lines that each guard (the shell script on a host) first reads from its standard input.

    The lines are the secret, one line ``NAME=VALUE`` for each variable, and an empty line as the end. If only
    variables are sent, the line of the secret is empty. If nothing is sent, there are no lines.
    """
    if host_input == NO_INPUT:
        return b""
    secret = secrets.token_hex(32) if host_input.secret else ""
    variables = [f"{name}={os.environ[name]}" for name in host_input.names]
    return os.fsencode("\n".join((secret, *variables, "", "")))


# setsid starts the command in a process group of its own, which the guard can end. Descriptor 3 is the input
# of the guard, which the command must not read.
_START_COMMAND = 'setsid "$@" 3<&- &'
# Shell text that reads the lines of `_input_lines`. `unset` is needed because a variable of that name may be
# exported. The secret is in no argument and in no variable of the command. The command reads it from its
# standard input (`_START_WITH_INPUT`).
_READ_INPUT_LINES = """\
unset imgkit_secret
IFS= read -r imgkit_secret <&3
while IFS= read -r text <&3 && [ "$text" ]; do export "$text"; done
"""
_START_WITH_INPUT = """\
{variable}=- setsid "$@" 3<&- <<END &
$imgkit_secret
END"""


def guard_command(command: Argv, host_input: HostInput = NO_INPUT) -> Argv:
    """Return an argv that runs `command` under a guard, a shell script that ends it when its input ends.

    The input ends when imgkit ends, even if imgkit is killed. So no command is left behind on a host. The
    host needs a POSIX shell and ``setsid``.

    Parameters
    ----------
    host_input : what the guard reads first from its input and passes on to the command.
    """
    start_text = _START_COMMAND
    if host_input.secret:
        start_text = _START_WITH_INPUT.format(variable=VARIABLE)
    # If `_input_lines` sends no lines, the guard must not wait for them.
    if host_input != NO_INPUT:
        start_text = _READ_INPUT_LINES + start_text
    guard_script = _GUARD.format(kill_s=KILL_S, start=start_text)
    # "imgkit" becomes $0 of the script, and `command` its arguments.
    return ("sh", "-c", guard_script, "imgkit", *command)


class _Host:
    """The ssh process for one host, and the threads that show its output.

    Parameters
    ----------
    line : the command line for the host's shell. It starts a guard (`guard_command`), which ends the command
        when its input ends.
    data : the first bytes of the guard's input, from `_input_lines`.
    show : is called with each line of the output, by two threads.
    """

    def __init__(self, name: str, line: str, data: bytes, show: Show) -> None:
        self.name = name
        # ssh runs in a session of its own, so that Ctrl-C in the terminal does not end it. Instead,
        # `run_on_hosts` asks the guard to end the command.
        self.process = subprocess.Popen(
            [*SSH, name, line],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.readers = []  # one thread for the output, and one for the errors
        for stream, is_error in ((self.process.stdout, False), (self.process.stderr, True)):
            reader = threading.Thread(target=self._show_lines, args=(stream, is_error, show), daemon=True)
            reader.start()
            self.readers.append(reader)
        self.send(data)

    def _show_lines(self, stream: BinaryIO, is_error: bool, show: Show) -> None:
        """Call `show` with each line of `stream` until the stream ends. This runs in a thread of its own."""
        for line in iter(functools.partial(stream.readline, LINE_BYTES), b""):
            show(self.name, line.removesuffix(b"\n"), is_error)

    def send(self, data: bytes) -> None:
        """Write `data` to the input of the guard, the script on the host that controls the command.

        An error is ignored. It means that ssh has ended, and ssh itself prints the reason.
        """
        assert self.process.stdin is not None  # noqa: S101 - for the type checker: it is a pipe
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def end(self) -> None:
        """End the input of the guard. The guard then ends the command on the host."""
        assert self.process.stdin is not None  # noqa: S101 - as above
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def exit_code(self) -> int | None:
        """Return the exit code of ssh, or None if ssh is still running or its output is not completely shown.

        ssh exits with the code of the command on the host.

        If a signal N ended ssh, the code is 128 + N, as in a shell.
        """
        code = self.process.poll()
        # ssh can have ended while its last output is still in the pipes.
        for reader in self.readers:
            if reader.is_alive():  # some output is not shown yet
                return None
        if code is not None and code < 0:  # subprocess returns -N after signal N
            return 128 - code
        return code


def run_on_hosts(
    commands: Sequence[HostCommand],
    *,
    show: Show,
    say: Callable[[str], None],
    host_input: HostInput = NO_INPUT,
    head_decides: bool = False,
) -> int:
    """Run a command on each host, and return the first exit code that is not 0, or 0.

    If the command of one host fails, the other hosts have `PEERS_S` seconds to end by themselves. The first
    Ctrl-C or TERM signal asks all commands to end, and the second one forces them to end within seconds. If
    no command failed before signal N, the result is 128 + N.

    Parameters
    ----------
    commands : the command line for the shell of each host. It starts a guard, a script on the host that ends
        the command when imgkit asks it to or ends.
    show : is called with each line of the output. Several threads call it, but only one at a time.
    say : is called with messages for the user.
    host_input : what the guards first read from their input, such as the values of variables.
    head_decides : whether only the exit code of the first host, the head, counts. The other hosts then go on
        when one of them fails.
    """
    lock = threading.Lock()

    def show_line(host: str, text: bytes, is_error: bool) -> None:
        with lock:  # two threads of each host call this function
            show(host, text, is_error)

    guard_input = _input_lines(host_input)
    # The order matters: when this ends, the commands on the hosts are ended first. Until then, a signal must
    # not end this process.
    with _collect_stop_signals() as signals, _end_hosts_at_exit() as hosts:
        # If ssh cannot be started for one host, `_end_hosts_at_exit` ends the commands on the hosts before
        # it.
        for command in commands:
            hosts.append(_Host(command.host, command.line, guard_input, show_line))
        return _wait_for_hosts(hosts, signals, say, head_decides=head_decides)


def _wait_for_hosts(
    hosts: Sequence[_Host], signals: list[int], say: Callable[[str], None], *, head_decides: bool
) -> int:
    """Wait until the commands on all hosts have ended, and return the exit code of the run.

    If a command fails, the other hosts first have `PEERS_S` seconds to end with a message of their own. Then
    they are asked to end. The first signal asks all hosts to end, and the second one forces them to end.

    Parameters
    ----------
    signals : the numbers of the signals that have arrived. A signal handler appends to this list at any time.
    head_decides : whether only the exit code of the first host, the head, counts. The other hosts then go on
        when one of them fails, because a spare node can replace it.
    """
    running = list(hosts)
    first_code = handled_signals = 0
    # Times of the monotonic clock. The first failure sets the time at which the other hosts are asked to end.
    # The second signal sets the time at which this function stops waiting.
    peers_end_s = give_up_s = math.inf
    # A host whose connection is cut never ends by itself, so the wait after a second signal is limited.
    while running and time.monotonic() < give_up_s:
        time.sleep(POLL_S)
        for host, code in _list_ended_hosts(running):
            running.remove(host)
            if code and not signals:  # after a signal, the hosts end because they are asked to
                say(_failure_message(host, code))
            # If the head decides, the run is over when its command ends, even without an error.
            ends_run = host is hosts[0] if head_decides else code != 0
            # Only the first failure counts. Later ones usually follow from it.
            if ends_run and first_code == 0:
                first_code = code
                peers_end_s = time.monotonic() + PEERS_S
        # A signal has arrived since the last poll.
        if len(signals) > handled_signals:
            if handled_signals == 0:
                say("asking all hosts to end; Ctrl-C again forces them to")
                _ask_to_end(hosts)
            else:
                _force_to_end(hosts)
                give_up_s = min(give_up_s, time.monotonic() + END_S)
            handled_signals = len(signals)
        if running and time.monotonic() > peers_end_s:
            peers_end_s = math.inf  # ask only once
            say(f"asking {', '.join(host.name for host in running)} to end as well")
            _ask_to_end(hosts)
    if first_code == 0 and signals:
        return 128 + signals[0]
    return first_code


def _list_ended_hosts(running: Iterable[_Host]) -> list[tuple[_Host, int]]:
    """Return the hosts of `running` whose command has ended by now, each with the exit code of its ssh."""
    ended = []
    for host in running:
        code = host.exit_code()
        if code is not None:
            ended.append((host, code))
    return ended


def _failure_message(host: _Host, code: int) -> str:
    """Return the message about a host whose ssh has ended with a non-zero exit code."""
    subject = "its command"
    if code == SSH_FAILED:
        subject = "could not be reached, or ssh"
    return f"{host.name}: {subject} ended with exit code {code}"


def _ask_to_end(hosts: Sequence[_Host]) -> None:
    """Send a line to the guard, the script on each host that then sends TERM to its command."""
    for host in hosts:
        host.send(b"end\n")


def _force_to_end(hosts: Sequence[_Host]) -> None:
    """End the input of the guard, the script on each host. It sends TERM to its command, and KILL later."""
    for host in hosts:
        host.end()


@contextlib.contextmanager
def _end_hosts_at_exit() -> Iterator[list[_Host]]:
    """Yield an empty list for the caller's hosts. On exit, end the commands on these hosts.

    After `END_S` seconds, each ssh that is still running is killed.
    """
    hosts: list[_Host] = []
    try:
        yield hosts
    finally:
        _force_to_end(hosts)  # all of them first, so that they end at the same time
        end_s = time.monotonic() + END_S
        for host in hosts:
            _wait_and_kill(host, end_s)  # one limit for all hosts together


def _wait_and_kill(host: _Host, end_s: float) -> None:
    """Wait until the ssh for `host` has ended. Kill it at `end_s`, a time of the monotonic clock."""
    remaining_s = max(0.0, end_s - time.monotonic())
    with contextlib.suppress(subprocess.TimeoutExpired):
        host.process.wait(remaining_s)
    host.process.kill()  # has no effect if ssh has already ended
    host.process.wait()


@contextlib.contextmanager
def _collect_stop_signals() -> Iterator[list[int]]:
    """Collect INT, TERM and HUP signals in the yielded list, so that they do not end this process.

    The list grows at any time, whenever a signal arrives. On exit, the previous signal handlers are restored.
    """
    received: list[int] = []

    def on_signal(number: int, _: object) -> None:
        received.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


SECOND_FACTOR = "Permission denied (keyboard-interactive)"
"""ssh's message if the key was accepted, and only the answer to a question is missing or wrong."""


def ssh_remedy(message: str, host: str) -> str:
    """Return advice, with a command to type, for an ssh to `host` that failed.

    ``"Permission denied (publickey)"`` -> ``"ssh-keygen -t ed25519 (once), then ssh-copy-id HOST"``

    Parameters
    ----------
    message : the error message of ssh.
    """
    quoted_host = shlex.quote(host)
    if "IDENTIFICATION HAS CHANGED" in message:
        address = shlex.quote(host.rpartition("@")[2])  # without the user
        return (
            "its key is not the one that this machine knows: ask the site whether it has changed, and only "
            f"then: ssh-keygen -R {address}"
        )
    if "Host key verification failed" in message:
        return f"ssh {quoted_host} true, and check the key that it shows before you accept it"
    if SECOND_FACTOR in message:
        return f"the key was accepted, the second factor was not: ssh {quoted_host} true"
    if "Permission denied" in message:
        return f"ssh-keygen -t ed25519 (once), then ssh-copy-id {quoted_host}"
    if "resolve hostname" in message:
        return f"correct the name, or add a Host block for {quoted_host} to ~/.ssh/config"
    return f"ssh -v {quoted_host} true"


# Neither part may begin with "-", because ssh and mpirun would take it for an option.
_USER = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


_MOST_BYTES = 4 << 20
"""Largest size of a file of hosts that is read. It is room for about 100,000 hosts."""


def parse_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts that `text` lists, in order: ``"node1,me@node2"`` -> ``("node1", "me@node2")``.

    If `text` contains a slash (``./hosts``), it is the path of a file with one host on each line. In the
    file, ``#`` begins a comment. The first host is the head, to which all others connect.

    Raises
    ------
    UsageError : the file cannot be read, a host has a wrong form, or a host occurs twice.
    """
    if not text:
        return ()
    if "/" in text:
        hosts_with_lines = _read_hosts_file(Path(text))
    else:
        hosts_with_lines = [("--hosts", host.strip()) for host in text.split(",")]
    hosts: list[str] = []
    for where, host in hosts_with_lines:
        if not is_host(host):
            raise UsageError(
                f"{host!r} is not a host",
                where=where,
                hint="a name or an address, for ssh also USER@HOST; or a file: ./FILE",
            )
        if host in hosts:
            raise UsageError(f"{host} occurs twice", where=where, hint="name each node once")
        hosts.append(host)
    return tuple(hosts)


def is_this_machine(host: str) -> bool:
    """Return whether `host` is a name or an address of this machine.

    The function tries to bind a socket to the address. Only an address of this machine allows that.
    """
    try:
        addresses = socket.getaddrinfo(host.rpartition("@")[2], 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _read_hosts_file(file: Path) -> list[tuple[str, str]]:
    """Return the hosts in a file, each after the line that an error names: ``("./FILE:3", "node2")``.

    Raises
    ------
    UsageError : the file cannot be read, or contains no hosts.
    """
    try:
        lines = files.read_text(file, most_bytes=_MOST_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot be read: {error}", where=str(file), hint="name a file with one host per line"
        ) from None
    hosts = []
    for line_number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()  # without the comment
        if fields:
            host = fields[0]  # in files for Open MPI, "slots=N" follows
            hosts.append((f"{file}:{line_number}", host))
    if not hosts:
        raise UsageError("the file has no hosts", where=str(file), hint="write one host per line")
    return hosts


def is_host(text: str) -> bool:
    """Return whether `text` is ``HOST`` or ``USER@HOST``.

    HOST is a name or an address. An IPv6 address is written without brackets.
    """
    user, at_sign, name = text.rpartition("@")
    if at_sign and not re.fullmatch(_USER, user):
        return False
    if ":" not in name:
        return re.fullmatch(_NAME, name) is not None
    try:
        ipaddress.IPv6Address(name)
    except ValueError:
        return False
    return True
