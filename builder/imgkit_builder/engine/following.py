"""Follow the output of a build: the current step, its last lines, and an error with the recipe's line.

There are two formats. The classic builder and podman print ``Step 2/9 : RUN`` or ``STEP 2/9: RUN``. BuildKit
prints ``#5 [2/4] RUN``, and does not count instructions that make no layer.
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

DOCKERFILE_NAME = "Dockerfile.imgkit"
"""The name of the Dockerfile with the labels. The context also contains the Dockerfile without them."""

# "Step 2/9 : RUN make", "STEP 2/9: RUN make"
_STEP = re.compile(r"^(?:Step|STEP) (?P<number>\d+)/(?P<total>\d+) ?: (?P<instruction>.*)$")
_RUNNING = re.compile(r"^ ---> Running in ([0-9a-f]+)$")
_PARSE_ERROR = re.compile(r"(?:dockerfile parse error line|parse error on line) (\d+)", re.IGNORECASE)
# Podman repeats the instruction before the message.
_REPEATED_INSTRUCTION = re.compile(r'^building at STEP ".*": ', re.DOTALL)
# The largest number of characters that a message shows of an instruction.
_STEP_WIDTH = 72


class BuildFollower:
    """Follows a build with the classic builder or podman.

    It writes the output to the log, reports progress, and keeps the last lines of the current step for an
    error.
    """

    _counted_instructions: tuple[str, ...] = ()
    """The kinds of instructions that the builder counts as steps. Empty if it counts all of them."""

    def __init__(
        self,
        log: TextIO,
        dockerfile: str,
        *,
        base: str,
        log_path: Path,
        report: Reporter,
        mask: Callable[[str], str] = secret_patterns.mask_secrets,
    ) -> None:
        self.log_path = log_path
        self.report = report
        self._log = log
        self._mask = mask
        self._dockerfile = dockerfile
        self._base = base
        self._step_output: collections.deque[str] = collections.deque(maxlen=process.KEPT_LINES)
        self._pending = ""  # an incomplete line, whose end has not been received yet
        self._step = 0
        self._step_count = 0
        self._instruction = ""
        self.container = ""
        self.image_id = ""

    def add_event(self, event: Event) -> None:
        """Process an event of the engine's API.

        Raises
        ------
        ImgkitError : the event reports that a step has failed.
        """
        message = self._mask(event_error(event))
        # An event without an error gives an empty text.
        if message:
            # The last line of the output may have no line break, but it belongs to the error.
            self._flush()
            self._log.write(message + "\n")
            raise self._make_step_error(message)
        aux: dict[str, Any] = event.get("aux") or {}
        self.image_id = str(aux.get("ID") or self.image_id)
        self.add_text(str(event.get("stream") or ""))

    def add_text(self, text: str) -> None:
        """Process a part of the output. It may begin and end in the middle of a line.

        An incomplete last line is stored until its end arrives, or until `_flush` is called.
        """
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            self._add_line(line)

    def exit_error(self, code: int) -> ImgkitError:
        """Return the error for a builder that ended with the exit code `code`."""
        # Process the last line first, because it may be the error message.
        self._flush()
        return self._make_step_error(self._pop_error_message() or f"the builder ended with exit code {code}")

    def add_location(self, error: ImgkitError) -> ImgkitError:
        """Return `error` with the path of the log, and with the line of the recipe if it is known."""
        # An error of `_make_step_error` already has the path of the log.
        hint = error.hint or ""
        if str(self.log_path) not in hint:
            hint = self._add_log_path(hint)
        return type(error)(error.what, where=error.where or self._locate_in_recipe(error.what), hint=hint)

    def _make_step_error(self, message: str) -> ImgkitError:
        """Return the error for a `message` of the builder about the current step.

        The error has the line of the recipe. Its hint contains the last lines of the step's output.
        """
        doing = "build"
        if self._step:
            doing = f"step {self._step}/{self._step_count} ({self._shorten_instruction()})"
        # Podman repeats the instruction before its message.
        error = explain_message(_REPEATED_INSTRUCTION.sub("", message), doing=doing, name=self._base)
        output = "\n".join(process.last_lines("\n".join(self._step_output)))
        advice = error.hint
        # The message of the engine is often only "returned a non-zero code". So look for a known problem in
        # the output of the step, too. Output with "imgkit: " comes from imgkit's own scripts, which print a
        # hint themselves.
        if not advice and "imgkit: " not in output:
            advice = find_hint(output)
        hint_parts = []
        if output:
            hint_parts += ["its last lines:", output]
        if advice:
            hint_parts.append(advice)
        hint = self._add_log_path("\n".join(hint_parts))
        # Keep the class of the error, because it determines the exit code of imgkit.
        return type(error)(error.what, where=self._locate_in_recipe(message), hint=hint)

    def _add_line(self, line: str) -> None:
        """Process a complete line of output."""
        # A progress bar overwrites its line with carriage returns. Keep only the last text.
        _, _, last_text = strip_styles(line).rstrip("\r").rpartition("\r")
        text = self._mask(last_text)
        self._log.write(text + "\n")
        self._log.flush()
        self._update_state(text)
        self.report.line(text)

    def _update_state(self, text: str) -> None:
        """Begin the step that a line of output announces. Otherwise, keep the line for an error message.

        Also note the running container in `container`, so that an interrupted build can remove it.
        """
        step = _STEP.match(text)
        running = _RUNNING.match(text)
        if step is not None:
            self._start_step(step)
        elif running is not None:
            self.container = running[1]
        elif text.startswith("Removing intermediate container "):
            self.container = ""
        # Lines such as " ---> 1a2b3c" name layers, which does not explain an error.
        elif text.strip() and not text.startswith((" ---> ", "--> ")):
            self._step_output.append(text)

    def _pop_error_message(self) -> str:
        """Remove podman's last line, ``Error: ...``, from the kept output, and return its message or ""."""
        if not self._step_output or not self._step_output[-1].startswith("Error: "):
            return ""
        return self._step_output.pop().removeprefix("Error: ")

    def _start_step(self, header: re.Match[str]) -> None:
        """Begin the step with the number and the instruction in the line `header`."""
        self._step = int(header["number"])
        self._step_count = int(header["total"])
        self._instruction = header["instruction"]
        self.container = ""
        # An error shows only the lines of its own step.
        self._step_output.clear()
        self.report.stage(f"step {self._step}/{self._step_count}: {self._shorten_instruction()}")

    def _flush(self) -> None:
        """Process an incomplete last line as if it were complete."""
        if self._pending:
            self._add_line(self._pending)
            self._pending = ""

    def _shorten_instruction(self) -> str:
        """Return the instruction of the current step on one line, cut to `_STEP_WIDTH` characters."""
        one_line = " ".join(self._instruction.split())
        if len(one_line) <= _STEP_WIDTH:
            return one_line
        return one_line[: _STEP_WIDTH - 3] + "..."

    def _add_log_path(self, hint: str) -> str:
        """Return `hint` with the path of the log."""
        return f"{hint}\nfull log: {self.log_path}, with the Dockerfile in the same folder".strip()

    def _find_line_of_step(self) -> int | None:
        """Return the line of the Dockerfile at which the current step begins, or None if it is unknown."""
        lines = instruction_lines(self._dockerfile, only=self._counted_instructions)
        if not 0 < self._step <= len(lines):
            return None
        return lines[self._step - 1]

    def _locate_in_recipe(self, message: str) -> str | None:
        """Return the line of the recipe to which `message` refers, such as ``mn5.yaml:12``.

        It is found through the line of the Dockerfile in the message, or else through the current step.
        """
        match = _PARSE_ERROR.search(message)
        line = int(match[1]) if match else self._find_line_of_step()
        if line is None:
            return None
        return find_origin(self._dockerfile, line) or f"Dockerfile:{line}"


# "#5 [2/4] RUN make"
_VERTEX = re.compile(r"^#\d+ \[ *(?P<number>\d+)/(?P<total>\d+)\] (?P<instruction>.*)$")
# "#5 0.213 cc -o a a.c"
_OUTPUT = re.compile(r"^#\d+ \d+\.\d+ ?(.*)$")
_SOLVE_ERROR = re.compile(r"^ERROR: (?:failed to solve: |failed to build: )*(.*)$")
_SOURCE_LINE = re.compile(rf"^{re.escape(DOCKERFILE_NAME)}:(\d+)$")


class BuildKitFollower(BuildFollower):
    """Follows a build with ``docker buildx build --progress plain``."""

    _counted_instructions = ("FROM", "RUN", "COPY", "ADD", "WORKDIR")
    _source_line: int | None = None
    _error = ""

    def _update_state(self, text: str) -> None:
        """Begin the step that a line of BuildKit's output announces.

        Otherwise, keep what an error message needs: output of the step, the failed line of the Dockerfile, or
        the error itself.
        """
        step = _VERTEX.match(text)
        output = _OUTPUT.match(text)
        source = _SOURCE_LINE.match(text)
        error = _SOLVE_ERROR.match(text)
        if step is not None:
            # BuildKit runs steps in parallel, and repeats the header when it returns to an earlier step.
            if int(step["number"]) > self._step:
                self._start_step(step)
        elif output is not None:
            self._step_output.append(output[1])
        elif source is not None:
            self._source_line = int(source[1])
        elif error is not None:
            self._error = error[1]

    def _pop_error_message(self) -> str:
        return self._error

    def _find_line_of_step(self) -> int | None:
        return self._source_line or super()._find_line_of_step()


def instruction_lines(text: str, *, only: Collection[str] = ()) -> tuple[int, ...]:
    """Return the line number, from 1, at which each instruction of the Dockerfile `text` begins.

    The engine numbers its steps from 1 in the same order. Here-documents are not supported, because the
    classic builder does not support them either.

    Parameters
    ----------
    only : the kinds of instructions to include, such as ``("RUN", "COPY")``. If it is empty, all kinds are
        included.
    """
    line_numbers = []
    is_continued = False
    for line_number, line in enumerate(text.splitlines(), start=1):
        instruction = line.strip()
        # Comments and empty lines are ignored, even inside an instruction that continues on the next line.
        if not instruction or instruction.startswith("#"):
            continue
        keyword = instruction.split()[0].upper()
        is_counted = not only or keyword in only
        if is_counted and not is_continued:
            line_numbers.append(line_number)
        is_continued = instruction.endswith("\\")
    return tuple(line_numbers)
