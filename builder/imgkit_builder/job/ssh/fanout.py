"""One ssh command per host, all at once: output by host, one exit code, and nothing left on the hosts.

ssh does not end what it started: without a terminal, the other host never notices a lost connection. So a
guard runs there, between the connection and the command, and reads its standard input. A line asks the
command to end. The end of the input forces it to end; that also happens when this process is killed.
"""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import os
import re
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.rollcall.secret import VARIABLE

SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    # A separate connection: a shared one would outlive this process.
    *("-o", "ControlPath=none"),
    # A lost host is noticed within a minute.
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"),
)
"""ssh never asks for anything, neither a password nor about an unknown host key."""
SSH_FAILED = 255
PEERS_S = 20.0
"""Time for the other hosts to end with their own message after a command has failed."""
KILL_S = 5
"""Time from TERM to KILL after the input of a guard has ended."""
END_S = KILL_S + 3.0
"""Time for all guards to finish then."""
LINE_BYTES = 1 << 16
"""Longer lines are shown in parts."""

Show = Callable[[str, bytes, bool], None]
"""A function of the host, a line of its output, and whether that came from standard error."""

# KILL goes to the whole group, even after the command has ended: a process that it left would hold the
# connection.
# The shell's own output is dropped: it reports every process that a signal ended.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a guard reads from its standard input before anything else, because no text may hold it."""

    secret: bool = False
    """A new secret of the run, which the command reads from its own standard input: it is a node agent."""
    names: tuple[str, ...] = ()
    """Variables for the command, with their values here."""

    def data(self) -> bytes:
        """The lines, the same for every host: the secret, the variables and an empty line."""
        if self == NOTHING:
            return b""
        lines = [
            secrets.token_hex(32) if self.secret else "",
            *(f"{name}={os.environ[name]}" for name in self.names),
        ]
        return b"".join(os.fsencode(text) + b"\n" for text in (*lines, ""))


NOTHING = Sent()
_START = 'setsid "$@" 3<&- &'
# `unset`, because a variable of that name may be exported. The value is in no argument and no variable of the
# command, which reads it from its input.
_READ = """\
unset imgkit_secret
IFS= read -r imgkit_secret <&3
while IFS= read -r text <&3 && [ "$text" ]; do export "$text"; done
"""
_START_FED = """\
{variable}=- setsid "$@" 3<&- <<END &
$imgkit_secret
END"""


def guarded(command: Sequence[str], sent: Sent = NOTHING) -> tuple[str, ...]:
    """`command` under a guard that ends it when standard input ends; needs a POSIX shell and ``setsid``."""
    start = _START_FED.format(variable=VARIABLE) if sent.secret else _START
    start = start if sent == NOTHING else _READ + start
    return ("sh", "-c", _GUARD.format(kill_s=KILL_S, start=start), "imgkit", *command)


@dataclass(slots=True, kw_only=True)
class _Host:
    host: str
    process: subprocess.Popen[bytes]
    parts: dict[int, bytes] = field(default_factory=dict)
    """File descriptor -> the unfinished line that it sent; removed when the stream ends."""
    code: int | None = None


def run(
    remote: Sequence[tuple[str, str]],
    *,
    show: Show,
    say: Callable[[str], None],
    sent: Sent = NOTHING,
    head_decides: bool = False,
) -> int:
    """Run each host's line in its shell; returns the first exit code that was not 0.

    When one host has failed, the others have `PEERS_S` to end.

    The first Ctrl-C or TERM asks all commands to end. The second one forces them to, within seconds.

    Parameters
    ----------
    sent : what the guards of the lines read first.
    head_decides : only the first host counts. The others go on without a host that has failed.
    """
    with _signals() as (got, wake), _started(remote, sent.data()) as nodes:
        return _FanOutLoop(nodes, got, wake, show, say, head_decides).run()


class _FanOutLoop:
    """The loop over output of the hosts, signals and time limits."""

    def __init__(
        self,
        nodes: Sequence[_Host],
        got: list[int],
        wake: int,
        show: Show,
        say: Callable[[str], None],
        head_decides: bool,
    ) -> None:
        self.nodes, self.got, self.show, self.say = nodes, got, show, say
        self.head_decides = head_decides
        self.wake = wake
        self.first = 0
        self.handled = 0
        """Number of signals that were acted on."""
        self.deadline: float | None = None
        self.over: float | None = None
        """When to give up on hosts that are still open: one that is cut off never answers."""

    def run(self) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(self.wake, selectors.EVENT_READ)
            for node in self.nodes:
                for stream in (node.process.stdout, node.process.stderr):
                    assert stream is not None  # noqa: S101 - for the type checker: both are pipes
                    node.parts[stream.fileno()] = b""
                    selector.register(stream.fileno(), selectors.EVENT_READ, node)
            while any(node.code is None for node in self.nodes):
                if self.over is not None and time.monotonic() > self.over:
                    break
                for key, _ in selector.select(0.2):
                    if key.data is None:
                        os.read(self.wake, 64)
                    elif not self._read(key.data, key.fd):
                        selector.unregister(key.fd)
                self._reap()
                self._act()
        return self.first or (128 + self.got[0] if self.got else 0)

    def _read(self, node: _Host, descriptor: int) -> bool:
        """Show the complete lines that arrived; False at the end of the stream."""
        chunk = os.read(descriptor, 1 << 16)
        error = node.process.stderr is not None and descriptor == node.process.stderr.fileno()
        *lines, rest = (node.parts[descriptor] + chunk).split(b"\n")
        if rest and (not chunk or len(rest) > LINE_BYTES):
            lines, rest = [*lines, rest], b""
        for text in lines:
            self.show(node.host, text, error)
        node.parts[descriptor] = rest
        if not chunk:
            del node.parts[descriptor]
        return bool(chunk)

    def _reap(self) -> None:
        for node in self.nodes:
            if node.code is not None or node.parts or node.process.poll() is None:
                continue
            code = node.process.returncode
            node.code = code if code >= 0 else 128 - code
            if node.code != 0 and not self.got:
                subject = "could not be reached, or ssh" if node.code == SSH_FAILED else "its command"
                self.say(f"{node.host}: {subject} ended with exit code {node.code}")
            decides = node is self.nodes[0] if self.head_decides else node.code != 0
            if decides and self.first == 0:
                self.first = node.code
                self.deadline = time.monotonic() + PEERS_S

    def _act(self) -> None:
        if len(self.got) > self.handled:
            self.handled = len(self.got)
            if self.handled == 1:
                self.say("asking all hosts to end; Ctrl-C again forces them to")
                _ask(self.nodes)
            else:
                _end(self.nodes)
                self.over = self.over or time.monotonic() + END_S
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.deadline = None
            waiting = [node.host for node in self.nodes if node.code is None]
            if waiting:
                self.say(f"asking {', '.join(waiting)} to end as well")
                _ask(self.nodes)


def _ask(nodes: Sequence[_Host]) -> None:
    for node in nodes:
        stream = node.process.stdin
        if stream is not None and not stream.closed:
            with contextlib.suppress(OSError):
                stream.write(b"end\n")


def _end(nodes: Sequence[_Host]) -> None:
    for node in nodes:
        if node.process.stdin is not None:
            with contextlib.suppress(OSError):
                node.process.stdin.close()


@contextlib.contextmanager
def _started(remote: Sequence[tuple[str, str]], first: bytes) -> Iterator[list[_Host]]:
    """The running ssh of each host; on exit, they and everything that they started end."""
    nodes: list[_Host] = []
    try:
        for host, text in remote:
            process = subprocess.Popen(
                [*SSH, host, text],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # The terminal's Ctrl-C must not end it; `_FanOutLoop` passes it on.
                start_new_session=True,
            )
            nodes.append(_Host(host=host, process=process))
            if first and process.stdin is not None:
                with contextlib.suppress(OSError):  # its ssh has ended, and says why
                    process.stdin.write(first)
        yield nodes
    finally:
        _end(nodes)
        end = time.monotonic() + END_S
        for node in nodes:
            try:
                node.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()
            for stream in (node.process.stdout, node.process.stderr):
                if stream is not None:
                    stream.close()


@contextlib.contextmanager
def _signals() -> Iterator[tuple[list[int], int]]:
    """The stop signals that arrived, and a descriptor that becomes readable with each."""
    got: list[int] = []
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)
    before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: got.append(number)) for number in numbers}
    try:
        yield got, reader
    finally:
        signal.set_wakeup_fd(before_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


SECOND_FACTOR = "Permission denied (keyboard-interactive)"
"""What ssh says where the key was accepted, and only the answer to a question is missing or wrong."""


def after(message: str, host: str) -> str:
    """Return the command that helps where ssh to `host` has ended with `message`."""
    name = shlex.quote(host)
    if "IDENTIFICATION HAS CHANGED" in message:
        bare = shlex.quote(host.rpartition("@")[2])
        return (
            "its key is not the one that this machine knows: ask the site whether it has changed, and only "
            f"then: ssh-keygen -R {bare}"
        )
    if "Host key verification failed" in message:
        return f"ssh {name} true, and check the key that it shows before you accept it"
    if SECOND_FACTOR in message:
        return f"the key was accepted, the second factor was not: ssh {name} true"
    if "Permission denied" in message:
        return f"ssh-keygen -t ed25519 (once), then ssh-copy-id {name}"
    if "resolve hostname" in message:
        return f"correct the name, or add a Host block for {name} to ~/.ssh/config"
    return f"ssh -v {name} true"


# No word can begin with "-": ssh and mpirun would read it as an option.
_USER = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


_MOST_BYTES = 4 << 20


def read(text: str) -> tuple[str, ...]:
    """Return the hosts in order, the head first.

    `text` is ``a,b``, or the path of a file with one host per line (``#`` begins a comment). A path has a
    slash, a host has none.

    Raises
    ------
    UsageError : the file cannot be read, or a word is not a host or occurs twice.
    """
    if "/" in text:
        sources = _in_file(Path(text))
    else:
        sources = [("--hosts", part.strip()) for part in text.split(",")] if text else []
    hosts = tuple(host for _, host in sources)
    counts = collections.Counter(hosts)
    for where, host in sources:
        if not is_host(host):
            raise UsageError(
                f"{host!r} is not a host",
                where=where,
                hint="a name or an address, for ssh also USER@HOST; or a file: ./FILE",
            )
        if counts[host] > 1:
            raise UsageError(f"{host} occurs twice", where=where, hint="name each node once")
    return hosts


def is_here(host: str) -> bool:
    """Whether `host` is this machine: one of its addresses can be bound here."""
    try:
        addresses = socket.getaddrinfo(host.rpartition("@")[2], 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


def _in_file(file: Path) -> list[tuple[str, str]]:
    try:
        lines = files.read_text(file, most_bytes=_MOST_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot be read: {error}", where=str(file), hint="name a file with one host per line"
        ) from None
    # Files for Open MPI have "slots=N" after the name.
    rows = ((number, text.partition("#")[0].split()) for number, text in enumerate(lines, 1))
    sources = [(f"{file}:{number}", row[0]) for number, row in rows if row]
    if not sources:
        raise UsageError("the file has no hosts", where=str(file), hint="write one host per line")
    return sources


def is_host(text: str) -> bool:
    """Whether `text` is a name or an address, also with ``USER@``, that no program takes for an option."""
    user, at, name = text.rpartition("@")
    if at and not re.fullmatch(_USER, user):
        return False
    if ":" not in name:
        return re.fullmatch(_NAME, name) is not None
    try:
        ipaddress.IPv6Address(name)
    except ValueError:
        return False
    return True
