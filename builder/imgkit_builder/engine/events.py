"""The engine's in-band events: raises errors and adds up progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from imgkit_builder.base.progress import Reporter
from imgkit_builder.engine.errors import explain, translated

Event = dict[str, Any]
"""One decoded JSON event; never leaves this package."""


def checked(events: Iterable[Event], *, doing: str, name: str = "") -> Iterator[Event]:
    """Yield `events`, and raise those that report an error; the SDK yields them like any other.

    Raises
    ------
    ToolFailed, UsageError : the engine reported an error in band, or the connection broke.
    """
    with translated(doing, name=name):
        for event in events:
            message = error_of(event)
            if message:
                raise explain(message, doing=doing, name=name)
            yield event


def error_of(event: Event) -> str:
    """The error message inside `event`; empty where there is none."""
    detail = event.get("errorDetail")
    said = event.get("error") or (detail.get("message") if isinstance(detail, dict) else "")
    return str(said or "")


class LayerProgress:
    """Bytes of a push or pull over all of its layers."""

    def __init__(self, report: Reporter) -> None:
        self._report = report
        self._layers: dict[str, tuple[int, int]] = {}

    def take(self, event: Event) -> None:
        """Count `event` and report the sum; extraction does not count as a transfer."""
        detail = event.get("progressDetail") or {}
        layer, status = str(event.get("id", "")), str(event.get("status", ""))
        if not detail:
            if status and not layer:
                self._report.line(status)
            elif layer:
                self._report.line(f"{layer}: {status}")
        if status in ("Downloading", "Pushing") and "current" in detail:
            # While compressing, the engine may send more than it announced.
            current = int(detail["current"])
            self._layers[layer] = (current, max(int(detail.get("total") or 0), current))
            done = sum(one for one, _ in self._layers.values())
            self._report.advance(done, sum(total for _, total in self._layers.values()))
