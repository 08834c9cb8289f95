"""The last words of a rank that is ended from outside.

Where one rank is lost, the launcher ends those that are left by HUP, often before their collective fails and
always if it hangs; no handler would run in a collective. So a thread waits for the signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from imgkit_entrypoints.errors import EXIT_NO


class Ending:
    """Made before any other thread, which then leaves HUP to this one."""

    def __init__(self) -> None:
        self.tell: Callable[[], object] | None = None
        """Called once, by whoever is first."""
        self._telling = threading.Lock()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        threading.Thread(target=self._wait, daemon=True).start()

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """The rank ends by itself: what comes from outside meanwhile has to wait, and is not told."""
        with self._telling:
            yield
            self.tell = None

    def _wait(self) -> None:
        signal.sigwait({signal.SIGHUP})
        with self._telling:
            try:
                if self.tell:
                    self.tell()
                sys.stdout.flush()
            finally:
                os._exit(EXIT_NO)
