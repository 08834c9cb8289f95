"""A terminal in which a person types, for programs that need one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Terminal:
    """A program at a new terminal; a ``with`` statement hangs up, which ends the program.

    Parameters
    ----------
    env : variables that are added to this process's.
    """

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self.text = ""
        """What the program has shown."""
        self._child, self._descriptor = pty.fork()
        if self._child == 0:
            os.chdir(folder or Path())
            os.execvpe(argv[0], list(argv), {**os.environ, **(env or {})})  # noqa: S606 - an argv list

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def type(self, text: str) -> None:
        """Type `text`, for example ``exit\\n``."""
        os.write(self._descriptor, text.encode())

    def resize(self, rows: int, columns: int) -> None:
        """Give the window another size, which the program learns by SIGWINCH."""
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, expected: str, *, within_s: float = 240) -> None:
        """Read until the program has shown `expected` after what was read before; fail without it."""
        start = len(self.text)
        end_s = time.monotonic() + within_s
        while expected not in self.text[start:]:
            assert self._read(end_s), self.text

    def wait(self, *, within_s: float = 240) -> int:
        """Read until the program ends, and return its exit code."""
        end_s = time.monotonic() + within_s
        while self._read(end_s):
            pass
        assert time.monotonic() < end_s, self.text
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])

    def _read(self, end_s: float) -> bool:
        """Read what the program shows next; return False at its end, or at the time `end_s`."""
        readable, _, _ = select.select([self._descriptor], [], [], max(0.0, end_s - time.monotonic()))
        data = b""
        if readable:
            with contextlib.suppress(OSError):  # the end of a terminal
                data = os.read(self._descriptor, 4096)
        self.text += data.decode(errors="replace")
        return bool(data)
