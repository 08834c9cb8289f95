"""A reporter that keeps what the user would always see."""

from __future__ import annotations

from imgkit_builder.base.progress import Silent


class Notes(Silent):
    """Keeps the notes, and says nothing."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)
