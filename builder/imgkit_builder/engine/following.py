"""Follows the output of a build: the step, the last lines, and an error that names the recipe's line.

The classic builder and podman write one dialect (``Step 2/9 : RUN``, ``STEP 2/9: RUN``), BuildKit another
(``#5 [2/4] RUN``), and its numbers leave out the instructions that make no layer.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TextIO

from imgkit_builder.base.process import TAIL_LINES
from imgkit_builder.base.progress import Reporter
from imgkit_builder.engine.errors import Event, error_of, explain, hint_for
from imgkit_entrypoints import secret_patterns
from imgkit_entrypoints.errors import ImgkitError
from imgkit_entrypoints.terminal import unstyled

DOCKERFILE = "Dockerfile.imgkit"
"""Name of the Dockerfile with the labels; the context keeps its own next to it."""

_STEP = re.compile(r"^(?:Step|STEP) (\d+)/(\d+) ?: (.*)$")
_RUNNING = re.compile(r"^ ---> Running in ([0-9a-f]+)$")
_PARSE_ERROR = re.compile(r"dockerfile parse error line (\d+)|parse error on line (\d+)", re.IGNORECASE)
_REPEATED = re.compile(r'^building at STEP ".*": ', re.DOTALL)
_STEP_WIDTH = 72


class BuildFollower:
    """Follows one build of the classic builder or podman."""

    def __init__(
        self,
        log: TextIO,
        dockerfile: str,
        *,
        base: str,
        log_path: Path,
        report: Reporter,
        hide: Callable[[str], str] = secret_patterns.masked,
    ) -> None:
        self._log, self.log_path, self._hide = log, log_path, hide
        self._dockerfile, self._base, self.report = dockerfile, base, report
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._pending = ""
        self._step, self._steps, self._text = 0, 0, ""
        self.container = ""
        self.image_id = ""

    def take(self, event: Event) -> None:
        """Process one event of the engine's API; raises the error that it reports."""
        message = self._hide(error_of(event))
        if message:
            self._flush()
            self._log.write(message + "\n")
            raise self.failure(message)
        aux: dict[str, Any] = event.get("aux") or {}
        self.image_id = str(aux.get("ID") or self.image_id)
        self.text(str(event.get("stream") or ""))

    def text(self, text: str) -> None:
        """Process a piece of output."""
        self._pending += text
        *lines, self._pending = self._pending.split("\n")
        for line in lines:
            self._line(line)

    def failed(self, code: int) -> ImgkitError:
        """The error of a program that ended with the exit code `code`."""
        self._flush()
        return self.failure(self._verdict() or f"the builder ended with exit code {code}")

    def located(self, error: ImgkitError) -> ImgkitError:
        """Add the log's path to `error`, and the recipe's line where the engine names a line."""
        hint = error.hint or ""
        if str(self.log_path) not in hint:
            hint = f"{hint}\n{self._where_to_look()}".strip()
        line = _parse_error(error.what) or self._line_of_step()
        return type(error)(error.what, where=error.where or self._origin(line), hint=hint)

    def failure(self, message: str) -> ImgkitError:
        """The error for the builder's `message` about the current step."""
        doing = f"step {self._step}/{self._steps} ({self._short()})" if self._step else "build"
        # Podman repeats the instruction.
        error = explain(_REPEATED.sub("", message), doing=doing, name=self._base)
        # The engine only reports "returned a non-zero code": the reason is in the step's output.
        # A script of imgkit's own has said what helps.
        said = any("imgkit: " in line for line in self._tail)
        hint = error.hint or ("" if said else hint_for("\n".join(self._tail))) or ""
        if self._tail:
            hint = "its last lines:\n" + "\n".join(self._tail) + (f"\n{hint}" if hint else "")
        hint = f"{hint}\n{self._where_to_look()}".strip()
        line = _parse_error(message) or self._line_of_step()
        return type(error)(error.what, where=self._origin(line), hint=hint)

    def _line(self, line: str) -> None:
        # A progress bar rewrites its line; only the last text counts.
        text = self._hide(unstyled(line).rstrip("\r").rpartition("\r")[2])
        self._log.write(text + "\n")
        self._log.flush()
        self._understand(text)
        self.report.line(text)

    def _understand(self, text: str) -> None:
        step, running = _STEP.match(text), _RUNNING.match(text)
        if step:
            self._begin(int(step[1]), int(step[2]), step[3])
        elif running:
            self.container = running[1]
        elif text.startswith("Removing intermediate container "):
            self.container = ""
        elif text.strip() and not text.startswith((" ---> ", "--> ")):
            self._tail.append(text)

    def _verdict(self) -> str:
        """What podman reports in its last line."""
        if not self._tail or not self._tail[-1].startswith("Error: "):
            return ""
        return self._tail.pop().removeprefix("Error: ")

    def _begin(self, number: int, of: int, text: str) -> None:
        self._step, self._steps, self._text = number, of, text
        self.container = ""
        self._tail.clear()
        self.report.stage(f"step {number}/{of}: {self._short()}")

    def _flush(self) -> None:
        if self._pending:
            self._line(self._pending)
            self._pending = ""

    def _short(self) -> str:
        text = " ".join(self._text.split())
        return text if len(text) <= _STEP_WIDTH else text[: _STEP_WIDTH - 3] + "..."

    def _where_to_look(self) -> str:
        return f"full log: {self.log_path}, with the Dockerfile in the same folder"

    def _line_of_step(self) -> int | None:
        lines = instruction_lines(self._dockerfile)
        return lines[self._step - 1] if 0 < self._step <= len(lines) else None

    def _origin(self, line: int | None) -> str | None:
        if line is None:
            return None
        from imgkit_builder.image.render import origin

        return origin(self._dockerfile, line) or f"Dockerfile:{line}"


def _parse_error(message: str) -> int | None:
    found = _PARSE_ERROR.search(message)
    return int(found[1] or found[2]) if found else None


_VERTEX = re.compile(r"^#(\d+) \[ *(\d+)/(\d+)\] (.*)$")
_OUTPUT = re.compile(r"^#\d+ \d+\.\d+ ?(.*)$")
_SOLVE = re.compile(r"^ERROR: (?:failed to solve: |failed to build: )*(.*)$")
_PLACE = re.compile(rf"^{re.escape(DOCKERFILE)}:(\d+)$")
_LAYERED = ("FROM", "RUN", "COPY", "ADD", "WORKDIR")
"""The instructions that BuildKit counts."""


class BuildKitFollower(BuildFollower):
    """Follows ``docker buildx build --progress plain``."""

    _place: int | None = None
    _said = ""

    def _understand(self, text: str) -> None:
        if step := _VERTEX.match(text):
            number, of = int(step[2]), int(step[3])
            # BuildKit repeats the header when it returns to a step.
            if number > self._step:
                self._begin(number, of, step[4])
        elif said := _OUTPUT.match(text):
            self._tail.append(said[1])
        elif place := _PLACE.match(text):
            self._place = int(place[1])
        elif end := _SOLVE.match(text):
            self._said = end[1]

    def _verdict(self) -> str:
        return self._said

    def _line_of_step(self) -> int | None:
        lines = instruction_lines(self._dockerfile, only=_LAYERED)
        counted = lines[self._step - 1] if 0 < self._step <= len(lines) else None
        return self._place or counted


def instruction_lines(text: str, *, only: Collection[str] = ()) -> tuple[int, ...]:
    """First line, from 1, of each instruction of the Dockerfile `text`; `only` of these kinds.

    The engine numbers its steps in the same order, from 1. Here-documents are not supported: the classic
    builder does not know them either.
    """
    found: list[int] = []
    continued = False
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.strip()
        # A continued instruction may contain comments and empty lines.
        if not word or word.startswith("#"):
            continue
        if not continued and (not only or word.split()[0].upper() in only):
            found.append(number)
        continued = word.endswith("\\")
    return tuple(found)
