"""One command a host by ssh, all at once: output by host, one exit code, and nothing left on the hosts.

ssh does not end what it has started: without a terminal the far end never hears of a lost connection. So a
guard runs there, between the connection and the command, and reads what comes from here: a line asks the
command to end, the end of the input, which also comes when this process is killed, makes it end.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    # A connection of its own: one shared with other uses lives on after the end of this one.
    *("-o", "ControlPath=none"),
    # A host that is gone is noticed within a minute.
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"),
)
"""Nothing is ever asked for: no password, no unknown host's key."""
SSH_FAILED = 255
PEERS_S = 20.0
"""After a command has failed, for the others to end with their own message."""
KILL_S = 5
"""Between TERM and KILL, after the input of a guard has ended."""
END_S = KILL_S + 3.0
"""For all guards to be done then."""
LINE_BYTES = 1 << 16
"""Longer lines are shown in parts."""

Show = Callable[[str, bytes, bool], None]
"""Called with host, line and whether it is from standard error."""

# KILL goes to the whole group, also after the end of the command: whatever it left would hold the connection.
# The shell's own output goes nowhere: it tells of every process that a signal has ended.
_GUARD = """\
exec 3<&0 </dev/null
setsid "$@" 3<&- &
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


def guarded(command: Sequence[str]) -> tuple[str, ...]:
    """`command` such that it ends when its standard input does; any POSIX shell with ``setsid`` will do."""
    return ("sh", "-c", _GUARD.format(kill_s=KILL_S), "imgkit", *command)


@dataclass(slots=True, kw_only=True)
class _Node:
    host: str
    process: subprocess.Popen[bytes]
    parts: dict[int, bytes] = field(default_factory=dict)
    """Beginning of a line by the file descriptor that it came from; gone with the stream's end."""
    code: int | None = None


def run(remote: Sequence[tuple[str, str]], *, show: Show, say: Callable[[str], None]) -> int:
    """Run each host's line in its shell; the exit code that was the first not to be 0.

    A first Ctrl-C or TERM asks all commands to end; a second one makes them, and waits some seconds for that.
    """
    with _signals() as (got, wake), _started(remote) as nodes:
        return _Watch(nodes, got, wake, show, say).run()


class _Watch:
    """The loop over what the hosts say, signals and time."""

    def __init__(
        self, nodes: Sequence[_Node], got: list[int], wake: int, show: Show, say: Callable[[str], None]
    ) -> None:
        self.nodes, self.got, self.show, self.say = nodes, got, show, say
        self.wake = wake
        self.first = 0
        self.asked = 0
        """Signals acted on."""
        self.deadline: float | None = None
        self.over: float | None = None
        """When to leave whatever is still open: a host that is cut off answers to nothing."""

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

    def _read(self, node: _Node, descriptor: int) -> bool:
        """Show the whole lines of what has come; False at its end."""
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
            if node.code == 0:
                continue
            if not self.got:
                what = "could not be reached, or ssh" if node.code == SSH_FAILED else "its command"
                self.say(f"{node.host}: {what} ended with exit code {node.code}")
            if self.first == 0:
                self.first = node.code
                self.deadline = time.monotonic() + PEERS_S

    def _act(self) -> None:
        if len(self.got) > self.asked:
            self.asked = len(self.got)
            if self.asked == 1:
                self.say("asking all hosts to end; once more makes them")
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


def _ask(nodes: Sequence[_Node]) -> None:
    for node in nodes:
        stream = node.process.stdin
        if stream is not None and not stream.closed:
            with contextlib.suppress(OSError):
                stream.write(b"end\n")


def _end(nodes: Sequence[_Node]) -> None:
    for node in nodes:
        if node.process.stdin is not None:
            with contextlib.suppress(OSError):
                node.process.stdin.close()


@contextlib.contextmanager
def _started(remote: Sequence[tuple[str, str]]) -> Iterator[list[_Node]]:
    """The running ssh of each host; ended, with what they have started, on the way out."""
    nodes: list[_Node] = []
    try:
        for host, text in remote:
            process = subprocess.Popen(
                [*SSH, host, text],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # Not to be ended by the terminal's Ctrl-C: that is passed on in good order.
                start_new_session=True,
            )
            nodes.append(_Node(host=host, process=process))
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
    """The stop signals that have come, and a descriptor that can be read when one does."""
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
