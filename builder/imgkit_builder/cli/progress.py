"""Print progress on stderr.

On a terminal, progress is a live display. Elsewhere it is plain lines. With ``--json`` it is JSON lines, for
scripts.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from imgkit_builder.base.progress import Reporter
from imgkit_entrypoints import terminal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# Seconds between two reports about bytes, in plain lines and in JSON.
PLAIN_EVERY_S = 5.0
JSON_EVERY_S = 1.0


@contextlib.contextmanager
def reporter(*, as_json: bool = False, verbose: bool = False) -> Iterator[Reporter]:
    """Yield a reporter that shows the progress of a verb as JSON, as plain lines, or as a live display.

    The live display needs a terminal. With ``--verbose``, plain lines are used, because only they show the
    output of other programs.
    """
    if as_json:
        yield JsonReporter()
    elif verbose or not sys.stderr.isatty():
        yield PlainReporter(verbose=verbose)
    else:
        live = LiveReporter()
        try:
            yield live
        finally:
            # The terminal must be restored even if the verb fails.
            live.close()


class PlainReporter(Reporter):
    """Prints a line for each stage, and a line about its bytes at most every five seconds.

    The output of tools is printed only with ``-v``.
    """

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self._stage = ""
        self._printed_s = self._start_s = time.monotonic()

    def stage(self, text: str) -> None:
        """Begin a stage, and print its name."""
        self._stage, self._start_s = text, time.monotonic()
        self._printed_s = self._start_s
        self._print(text)

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        """Print the bytes that are done, the speed and the remaining time: ``send: 512 MB of 2048 MB``.

        If the last line was printed less than `PLAIN_EVERY_S` seconds ago, nothing is printed.
        """
        now = time.monotonic()
        if now - self._printed_s < PLAIN_EVERY_S:
            return
        self._printed_s = now
        bytes_per_s = done_bytes / (now - self._start_s)  # at least `PLAIN_EVERY_S` after the start
        self._print(f"{self._stage}: {_format_bytes(done_bytes, total_bytes, bytes_per_s)}")

    def line(self, text: str) -> None:
        if self._verbose:
            terminal.print_messages(text.expandtabs())

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        terminal.print_messages(f"imgkit: {text}")


def _format_bytes(done_bytes: int, total_bytes: int | None, bytes_per_s: float) -> str:
    """Return the progress of a stage as text: ``512 MB of 2048 MB, 64 MB/s, 24 s left``.

    The total and the remaining time are left out if `total_bytes` is None or 0.
    """
    text = f"{done_bytes / 1e6:.0f} MB"
    if total_bytes:
        text += f" of {total_bytes / 1e6:.0f} MB"
    if bytes_per_s <= 1e6:  # the engine is still preparing its stream
        return text
    text += f", {bytes_per_s / 1e6:.0f} MB/s"
    if total_bytes:
        remaining_bytes = max(total_bytes - done_bytes, 0)
        text += f", {remaining_bytes / bytes_per_s:.0f} s left"
    return text


class JsonReporter(Reporter):
    """Prints a JSON object on stderr for each event, but at most one per second about bytes.

    stdout is reserved for the result.
    """

    _next_bytes = 0.0
    """The value of ``time.monotonic()`` before which no further event about bytes is printed."""

    def stage(self, text: str) -> None:
        # The first bytes of a stage are reported at once.
        self._next_bytes = 0.0
        self._print_event(event="stage", text=text)

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        now = time.monotonic()
        if now >= self._next_bytes:
            self._next_bytes = now + JSON_EVERY_S
            self._print_event(event="bytes", done=done_bytes, total=total_bytes)

    def line(self, text: str) -> None:
        self._print_event(event="line", text=text)

    def note(self, text: str) -> None:
        self._print_event(event="note", text=text)

    def _print_event(self, **event: Any) -> None:
        terminal.print_messages(json.dumps(event))


class LiveReporter(Reporter):
    """Shows a progress bar or a spinner for each stage.

    The library rich draws it. It loads slowly, so it is imported only at the first stage.
    """

    _progress: Progress | None = None
    _task: TaskID | None = None

    def close(self) -> None:
        """Finish the last stage and stop the display. Its last state stays on the terminal."""
        if self._progress is not None:
            self._finish(self._progress)
            self._progress.stop()

    def stage(self, text: str) -> None:
        if self._progress is None:
            self._progress = _progress_bar()
            self._progress.start()
        self._finish(self._progress)
        self._task = self._progress.add_task(terminal.escape_controls(text), total=None)

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done_bytes, total=total_bytes)

    def line(self, text: str) -> None:
        """Ignore the line. It is in the log, and ``-v`` shows it."""

    def note(self, text: str) -> None:
        if self._progress is None:
            terminal.print_messages(f"imgkit: {text}")
        else:
            self._progress.console.print(terminal.escape_controls(text), markup=False, highlight=False)

    def _finish(self, progress: Progress) -> None:
        """Show the current stage as complete. If no stage has begun, do nothing."""
        if self._task is None:
            return
        task = progress.tasks[progress.task_ids.index(self._task)]
        # A stage of unknown size would end with a frozen spinner. With a total, it ends with a full bar.
        total = task.total or max(task.completed, 1)
        progress.update(self._task, total=total, completed=total)


def _progress_bar() -> Progress:
    """Return the live display of rich on stderr. Markup in the names of stages is not interpreted."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    return Progress(
        SpinnerColumn(), text, DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    )
