"""What a rank still prints and saves when its node agent ends it.

When one rank is lost, the node agent ends the others with SIGHUP. That often comes before their collective
fails, and always if it hangs. No signal handler runs inside a collective, so a thread waits for the signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from imgkit_entrypoints.errors import EXIT_NO


class HangupThread:
    """Waits for SIGHUP. Create it before any other thread, so that all others inherit the blocked signal."""

    def __init__(self) -> None:
        self.last_words: Callable[[], object] | None = None
        """Called once, when SIGHUP comes before the rank ends by itself."""
        self._ending = threading.Lock()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        threading.Thread(target=self._wait, daemon=True).start()

    @contextlib.contextmanager
    def held_off(self) -> Iterator[None]:
        """Let the rank end by itself: a SIGHUP that comes meanwhile waits, and `last_words` is not called."""
        with self._ending:
            yield
            self.last_words = None

    def _wait(self) -> None:
        signal.sigwait({signal.SIGHUP})
        with self._ending:
            try:
                if self.last_words:
                    self.last_words()
                sys.stdout.flush()
            finally:
                os._exit(EXIT_NO)
