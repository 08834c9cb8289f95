"""Start the child that reads the inputs, and notice when it hangs."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
HANG_S = 60.0


class House:
    """One child that serves many inputs; it is started again after a hang."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def fault(self, target: str, data: bytes) -> str:
        """Return the fault with which `target` read `data`; empty where it accepted or refused it."""
        child = self._started()
        child.stdin.write(b"%s %d\n%s" % (target.encode(), len(data), data))
        child.stdin.flush()
        with selectors.DefaultSelector() as waiting:
            waiting.register(child.stdout, selectors.EVENT_READ)
            answered = waiting.select(HANG_S)
        answer = child.stdout.readline().decode().strip() if answered else ""
        if not answer:
            self.close()
            return f"it hangs for {HANG_S:g} s" if not answered else "the process ended"
        return "" if answer in ("ok", "refused") else answer

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, str(HERE / "child.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # One arena: others would count as memory of an input.
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
        return self._child
