"""The measuring process of this node, below a guard of its own: it hangs or dies without the launcher."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping

from imgkit_entrypoints.launch.guarded import GuardedCommand
from imgkit_entrypoints.rollcall import reader, session
from imgkit_entrypoints.rollcall.link import Link
from imgkit_entrypoints.rollcall.messages import FromNode, Measure, Measured
from imgkit_entrypoints.rollcall.session import Readable

STORE = "store"
"""The word for a process that serves the store in which the others meet, and the figure of its port."""


class MeasuringProcess:
    """One process that measures stage after stage. One that hangs is ended, and the next stage has a new one.

    Parameters
    ----------
    words : arguments of the process after its socket.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        say: Callable[[str], None],
        *,
        open_files: int,
        words: tuple[str, ...] = (),
    ) -> None:
        self._env, self._say, self._open_files, self._words = env, say, open_files, words
        self._child: GuardedCommand | None = None
        self._link: Link[FromNode] | None = None
        self._ended: list[GuardedCommand] = []
        self._order: Measure | None = None
        self._deadline = 0.0

    @property
    def sources(self) -> list[Readable]:
        """Descriptors to wait for."""
        return [one for one in (self._child, self._link) if one is not None]

    def start(self) -> None:
        """Start the process if there is none."""
        if self._child is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            words = (str(theirs.fileno()), *self._words)
            self._child = GuardedCommand(
                (sys.executable or "python3", "-I", "-m", "imgkit_entrypoints.apps.preflight", *words),
                self._env,
                self._say,
                speaks_for_all=False,
                open_files=self._open_files,
                inherited=(theirs.fileno(),),
            )
        self._child.__enter__()
        self._link = Link(ours, reader.from_node)

    def begin(self, order: Measure) -> None:
        """Have the process measure; `answer` has the result later."""
        self.start()
        assert self._link is not None  # noqa: S101 - start has made it
        self._order, self._deadline = order, time.monotonic() + order.limit_s
        self._link.send(order)

    def answer(self) -> Measured | None:
        """Return what the process has measured, or why it has not; None: nothing yet."""
        if self._child is None or self._link is None:
            return None
        for message in self._link.receive():
            if isinstance(message, Measured) and (self._order is None or message.stage == self._order.stage):
                return self._done(message)
        running = self._child.read()
        if self._order is None:
            return None
        stage = self._order.stage
        if not running or self._child.code is not None or self._link.why:
            code = self._child.code
            why = "its measuring process ended" + ("" if code is None else f" with exit code {code}")
            self._end()
            return self._done(Measured(stage=stage, error=why))
        if time.monotonic() >= self._deadline:
            why = f"its measuring process hangs: no answer within {self._order.limit_s} s"
            self._end()
            return self._done(Measured(stage=stage, error=why, mute=True))
        return None

    def close(self) -> None:
        """End the process, and wait until nothing of it is left."""
        self._end()
        for child in self._ended:
            while child.read():
                session.wait([child], 1.0)
            child.__exit__(None, None, None)
            child.wait()
        self._ended.clear()

    def _done(self, found: Measured) -> Measured:
        self._order = None
        if found.error:
            self._end()  # after an error it may hold a broken process group
        return found

    def _end(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._child is not None:
            self._child.send("kill")
            self._ended.append(self._child)
        self._child = self._link = None
