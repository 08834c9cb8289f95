"""A reporter that keeps what it gets."""

from __future__ import annotations

from imgkit_builder.base.progress import Silent


class Notes(Silent):
    """Keeps notes, stages, lines and byte counts, and says nothing."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.stages: list[str] = []
        self.lines: list[str] = []
        self.progress: list[tuple[int, int | None]] = []

    def note(self, text: str) -> None:
        self.texts.append(text)

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        self.progress.append((done_bytes, total_bytes))
