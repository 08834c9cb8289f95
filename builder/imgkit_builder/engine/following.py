"""Follow the output of a build: the step, the last lines, and an error that names the recipe's line.

The classic builder and podman write one dialect (``Step 2/9 : RUN``, ``STEP 2/9: RUN``), BuildKit another
(``#5 [2/4] RUN``), and its numbers leave out the instructions that make no layer.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TextIO

from imgkit_builder.base import process
from imgkit_builder.base.progress import Reporter
from imgkit_builder.engine.errors import Event, event_error, explain_message, find_hint
from imgkit_builder.image.render import find_origin
from imgkit_entrypoints import secret_patterns
from imgkit_entrypoints.errors import ImgkitError
from imgkit_entrypoints.terminal import strip_styles

DOCKERFILE = "Dockerfile.imgkit"
"""Name of the Dockerfile with the labels; the context keeps its own next to it."""

# "Step 2/9 : RUN make", "STEP 2/9: RUN make"
_STEP = re.compile(r"^(?:Step|STEP) (?P<number>\d+)/(?P<total>\d+) ?: (?P<instruction>.*)$")
_RUNNING = re.compile(r"^ ---> Running in ([0-9a-f]+)$")
_PARSE_ERROR = re.compile(r"(?:dockerfile parse error line|parse error on line) (\d+)", re.IGNORECASE)
# Podman repeats the instruction before the message.
_REPEATED_INSTRUCTION = re.compile(r'^building at STEP ".*": ', re.DOTALL)
# How many characters of an instruction a message shows.
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
        hide: Callable[[str], str] = secret_patterns.mask_secrets,
    ) -> None:
        self.log_path = log_path
        self.report = report
        self._log = log
        self._hide = hide
        self._dockerfile = dockerfile
        self._base = base
        self._tail: collections.deque[str] = collections.deque(maxlen=process.KEPT_LINES)
        self._pending = ""  # the beginning of a line, whose end has not come yet
        self._step = 0
        self._step_count = 0
        self._instruction = ""
        self.container = ""
        self.image_id = ""

    def add_event(self, event: Event) -> None:
        """Process one event of the engine's API.

        Raises
        ------
        ImgkitError : the event reports that a step has failed.
        """
        message = self._hide(event_error(event))
        if message:
            self._flush()
            self._log.write(message + "\n")
            raise self._step_error(message)
        aux: dict[str, Any] = event.get("aux") or {}
        self.image_id = str(aux.get("ID") or self.image_id)
        self.add_text(str(event.get("stream") or ""))

    def add_text(self, text: str) -> None:
        """Process a piece of output."""
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            self._add_line(line)

    def exit_error(self, code: int) -> ImgkitError:
        """Return the error of a program that ended with the exit code `code`."""
        self._flush()
        return self._step_error(self._pop_error_message() or f"the builder ended with exit code {code}")

    def add_location(self, error: ImgkitError) -> ImgkitError:
        """Return `error` with the path of the log, and with the recipe's line if that is known."""
        hint = error.hint or ""
        if str(self.log_path) not in hint:
            hint = self._add_log(hint)
        return type(error)(error.what, where=error.where or self._origin(error.what), hint=hint)

    def _step_error(self, message: str) -> ImgkitError:
        """Return the error for the builder's `message` about the current step.

        It names the recipe's line, and its hint has the last lines of the step's output.
        """
        doing = "build"
        if self._step:
            doing = f"step {self._step}/{self._step_count} ({self._short_instruction()})"
        error = explain_message(_REPEATED_INSTRUCTION.sub("", message), doing=doing, name=self._base)
        hint = error.hint
        output = "\n".join(process.last_lines("\n".join(self._tail)))
        # The engine often says only "returned a non-zero code", so look for a known problem in the output of
        # the step, too. Scripts of imgkit itself ("imgkit: ...") have printed what helps.
        if not hint and "imgkit: " not in output:
            hint = find_hint(output)
        hints = []
        if output:
            hints += ["its last lines:", output]
        if hint:
            hints.append(hint)
        return type(error)(error.what, where=self._origin(message), hint=self._add_log("\n".join(hints)))

    def _add_line(self, line: str) -> None:
        """Process a whole line of output."""
        # A progress bar rewrites its line; only the last text counts.
        _, _, last_text = strip_styles(line).rstrip("\r").rpartition("\r")
        text = self._hide(last_text)
        self._log.write(text + "\n")
        self._log.flush()
        self._update_state(text)
        self.report.line(text)

    def _update_state(self, text: str) -> None:
        """Begin the step that a line of output announces, or keep the line for an error message."""
        step = _STEP.match(text)
        running = _RUNNING.match(text)
        if step is not None:
            self._start_step(step)
        elif running is not None:
            self.container = running[1]
        elif text.startswith("Removing intermediate container "):
            self.container = ""
        elif text.strip() and not text.startswith((" ---> ", "--> ")):
            self._tail.append(text)

    def _pop_error_message(self) -> str:
        """Remove podman's last line, ``Error: ...``, from the output and return its message, or ``""``."""
        if not self._tail or not self._tail[-1].startswith("Error: "):
            return ""
        return self._tail.pop().removeprefix("Error: ")

    def _start_step(self, header: re.Match[str]) -> None:
        """Begin the step whose number and instruction the line `header` states."""
        self._step = int(header["number"])
        self._step_count = int(header["total"])
        self._instruction = header["instruction"]
        self.container = ""
        self._tail.clear()  # an error shows the lines of its own step
        self.report.stage(f"step {self._step}/{self._step_count}: {self._short_instruction()}")

    def _flush(self) -> None:
        if self._pending:
            self._add_line(self._pending)
            self._pending = ""

    def _short_instruction(self) -> str:
        text = " ".join(self._instruction.split())
        if len(text) <= _STEP_WIDTH:
            return text
        return text[: _STEP_WIDTH - 3] + "..."

    def _add_log(self, hint: str) -> str:
        return f"{hint}\nfull log: {self.log_path}, with the Dockerfile in the same folder".strip()

    def _line_of_step(self, *, only: Collection[str] = ()) -> int | None:
        """Return the line of the Dockerfile at which the current step begins, or None if it is unknown.

        `only` are the kinds of instructions that the builder counts as steps; empty: all.
        """
        lines = instruction_lines(self._dockerfile, only=only)
        if not 0 < self._step <= len(lines):
            return None
        return lines[self._step - 1]

    def _origin(self, message: str) -> str | None:
        """Return the recipe's line for `message`: ``mn5.yaml:12``.

        It belongs to the line of the Dockerfile that the message names, or else to the current step.
        """
        match = _PARSE_ERROR.search(message)
        line = int(match[1]) if match else self._line_of_step()
        if line is None:
            return None
        return find_origin(self._dockerfile, line) or f"Dockerfile:{line}"


# "#5 [2/4] RUN make"
_VERTEX = re.compile(r"^#\d+ \[ *(?P<number>\d+)/(?P<total>\d+)\] (?P<instruction>.*)$")
# "#5 0.213 cc -o a a.c"
_OUTPUT = re.compile(r"^#\d+ \d+\.\d+ ?(.*)$")
_SOLVE_ERROR = re.compile(r"^ERROR: (?:failed to solve: |failed to build: )*(.*)$")
_SOURCE_LINE = re.compile(rf"^{re.escape(DOCKERFILE)}:(\d+)$")
_LAYER_INSTRUCTIONS = ("FROM", "RUN", "COPY", "ADD", "WORKDIR")
"""The instructions that BuildKit counts."""


class BuildKitFollower(BuildFollower):
    """Follows ``docker buildx build --progress plain``."""

    _source_line: int | None = None
    _error = ""

    def _update_state(self, text: str) -> None:
        """Begin the step that a line of BuildKit's output announces, or keep the line for an error."""
        step = _VERTEX.match(text)
        output = _OUTPUT.match(text)
        source = _SOURCE_LINE.match(text)
        error = _SOLVE_ERROR.match(text)
        if step is not None:
            # BuildKit repeats the header when it returns to a step.
            if int(step["number"]) > self._step:
                self._start_step(step)
        elif output is not None:
            self._tail.append(output[1])
        elif source is not None:
            self._source_line = int(source[1])
        elif error is not None:
            self._error = error[1]

    def _pop_error_message(self) -> str:
        return self._error

    def _line_of_step(self, *, only: Collection[str] = _LAYER_INSTRUCTIONS) -> int | None:
        return self._source_line or super()._line_of_step(only=only)


def instruction_lines(text: str, *, only: Collection[str] = ()) -> tuple[int, ...]:
    """Return the first line, from 1, of each instruction of the Dockerfile `text`.

    With `only`, such as ``("RUN", "COPY")``, other kinds of instructions are left out. The engine numbers its
    steps in the same order, from 1. Here-documents are not supported: the classic builder does not know them
    either.
    """
    numbers = []
    is_continued = False
    for number, line in enumerate(text.splitlines(), start=1):
        instruction = line.strip()
        # A continued instruction may contain comments and empty lines.
        if not instruction or instruction.startswith("#"):
            continue
        keyword = instruction.split()[0].upper()
        is_counted = not only or keyword in only
        if is_counted and not is_continued:
            numbers.append(number)
        is_continued = instruction.endswith("\\")
    return tuple(numbers)
