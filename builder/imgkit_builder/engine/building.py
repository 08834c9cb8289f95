"""Builds an image: the engine's events become progress, a log, and an error that names the recipe's line."""

from __future__ import annotations

import collections
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from imgkit_builder.base import files
from imgkit_builder.base.process import TAIL_LINES
from imgkit_builder.base.progress import Reporter
from imgkit_builder.engine import containers
from imgkit_builder.engine import labels as marks
from imgkit_builder.engine.connection import Engine
from imgkit_builder.engine.dockerfile import instruction_lines
from imgkit_builder.engine.errors import broken, clean, explain, hint_for, translated
from imgkit_builder.engine.events import Event, error_of
from imgkit_builder.engine.images import ImageInfo, check_name, inspect
from imgkit_builder.engine.transfer import add_tag
from imgkit_entrypoints.errors import ImgkitError, ToolFailed, UsageError

if TYPE_CHECKING:
    from imgkit_builder.image.context import BuildContext
    from imgkit_builder.recipe import Recipe
    from imgkit_builder.recipe.targets import Target

_STEP = re.compile(r"^Step (\d+)/(\d+) : (.*)$")
_RUNNING = re.compile(r"^ ---> Running in ([0-9a-f]+)$")
_PARSE_ERROR = re.compile(r"dockerfile parse error line (\d+)|parse error on line (\d+)", re.IGNORECASE)
_STEP_WIDTH = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A finished build."""

    image: ImageInfo
    tag: str
    log: Path
    """The engine's whole output; the Dockerfile is in the same folder."""


def default_tag(recipe: Recipe | Target) -> str:
    """The default of ``--tag``: ``mn5:latest``."""
    return f"{recipe.name}:latest"


def build(
    engine: Engine,
    context: BuildContext,
    *,
    tag: str,
    report: Reporter,
    no_cache: bool = False,
    accept: Callable[[ImageInfo], None] | None = None,
) -> Built:
    """Build `context` and name the result `tag`.

    The tag moves last, after the architecture has been checked and `accept` has returned. A build that
    fails, is interrupted or is not accepted leaves the old image under its name.

    Raises
    ------
    ToolFailed : a step failed (with the recipe's line and the last output), or the engine went away.
    UsageError : the engine cannot read the Dockerfile or find the base.
    """
    check_name(tag)
    folder = _run_folder(context.manifest.recipe)
    created = marks.created(engine, context, tag=tag, fresh=no_cache)
    values = marks.labels(context, created=created)
    dockerfile = context.dockerfile.rstrip("\n") + "\n" + marks.instruction(values)
    files.write_text(folder / "Dockerfile", dockerfile)
    log = folder / "build.log"
    with log.open("w", encoding="utf-8") as stream:
        watch = _BuildFollower(
            stream, dockerfile, base=context.manifest.base.name, log_path=log, report=report
        )
        image_id = _run(engine, context, dockerfile, watch, no_cache=no_cache)
    image = inspect(engine, image_id)
    if image.platform != context.manifest.platform:
        raise ToolFailed(
            f"the engine built {image.platform} instead of {context.manifest.platform}",
            hint=f"the base {context.manifest.base.name} has that architecture; log: {log}",
        )
    if accept:
        accept(image)
    add_tag(engine, image_id, tag)
    return Built(image=inspect(engine, tag), tag=tag, log=log)


def _run(
    engine: Engine, context: BuildContext, dockerfile: str, watch: _BuildFollower, *, no_cache: bool
) -> str:
    """Let the engine build, and return the image id.

    Notes
    -----
    When the connection closes (Ctrl-C, kill -9), the engine cancels the step and, because of ``forcerm``,
    removes its container within a second (docker 20.10). If imgkit is still running, it removes it as well.
    """
    with _no_container_left(engine, watch), context.open() as tar:
        try:
            with translated("build"):
                events = engine.api.build(
                    fileobj=marks.with_dockerfile(tar, dockerfile),
                    custom_context=True,
                    dockerfile=marks.DOCKERFILE,
                    decode=True,
                    rm=True,
                    forcerm=True,
                    pull=False,
                    nocache=no_cache,
                    platform=context.manifest.platform,
                    timeout=None,
                )
                with contextlib.closing(events):
                    for event in events:
                        watch.take(event)
        except ImgkitError as error:
            raise watch.located(error) from error
        if not watch.image_id:
            # A dying engine may close the stream cleanly.
            raise watch.located(broken("build", "it ended before the image was finished"))
    return watch.image_id


@contextlib.contextmanager
def _no_container_left(engine: Engine, watch: _BuildFollower) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if watch.container:
            # The engine may be the one that died.
            with contextlib.suppress(ImgkitError):
                containers.remove(engine, watch.container)
        raise


class _BuildFollower:
    """Follows the events of one build: the step, the running container and the last lines."""

    def __init__(self, log: TextIO, dockerfile: str, *, base: str, log_path: Path, report: Reporter) -> None:
        self._log, self._log_path = log, log_path
        self._dockerfile, self._base, self._report = dockerfile, base, report
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._pending = ""
        self._step, self._steps, self._text = 0, 0, ""
        self.container = ""
        self.image_id = ""

    def take(self, event: Event) -> None:
        """Process one event; raises the error that it reports."""
        message = error_of(event)
        if message:
            self._flush()
            raise self._failure(message)
        aux: dict[str, Any] = event.get("aux") or {}
        self.image_id = str(aux.get("ID") or self.image_id)
        self._pending += str(event.get("stream") or "")
        *lines, self._pending = self._pending.split("\n")
        for line in lines:
            self._line(line)

    def located(self, error: ImgkitError) -> ImgkitError:
        """Add the log's path to `error`, and the recipe's line where the engine names a line."""
        parse = _PARSE_ERROR.search(error.what)
        line = int(parse.group(1) or parse.group(2)) if parse else self._line_of_step()
        hint = error.hint or ""
        if str(self._log_path) not in hint:
            hint = f"{hint}\n{self._where_to_look()}".strip()
        return type(error)(error.what, where=error.where or self._origin(line), hint=hint)

    def _line(self, line: str) -> None:
        # A progress bar rewrites its line; only the last text counts.
        text = clean(line).rstrip("\r").rpartition("\r")[2]
        self._log.write(text + "\n")
        self._log.flush()
        step, running = _STEP.match(text), _RUNNING.match(text)
        if step:
            self._step, self._steps, self._text = int(step[1]), int(step[2]), step[3]
            self.container = ""
            self._tail.clear()
            self._report.stage(f"step {self._step}/{self._steps}: {self._short()}")
        elif running:
            self.container = running[1]
        elif text.startswith("Removing intermediate container "):
            self.container = ""
        elif text.strip() and not text.startswith(" ---> "):
            self._tail.append(text)
        self._report.line(text)

    def _flush(self) -> None:
        if self._pending:
            self._line(self._pending)
            self._pending = ""

    def _short(self) -> str:
        text = " ".join(self._text.split())
        return text if len(text) <= _STEP_WIDTH else text[: _STEP_WIDTH - 3] + "..."

    def _failure(self, message: str) -> ImgkitError:
        self._log.write(message + "\n")
        doing = f"step {self._step}/{self._steps} ({self._short()})"
        error = explain(message, doing=doing, name=self._base)
        # The engine only reports "returned a non-zero code": the reason is in the step's output.
        hint = error.hint or hint_for("\n".join(self._tail)) or ""
        if self._tail:
            hint = "its last lines:\n" + "\n".join(self._tail) + (f"\n{hint}" if hint else "")
        hint = f"{hint}\n{self._where_to_look()}".strip()
        return type(error)(error.what, where=self._origin(self._line_of_step()), hint=hint)

    def _where_to_look(self) -> str:
        return f"full log: {self._log_path}, with the Dockerfile in the same folder"

    def _line_of_step(self) -> int | None:
        lines = instruction_lines(self._dockerfile)
        return lines[self._step - 1] if 0 < self._step <= len(lines) else None

    def _origin(self, line: int | None) -> str | None:
        if line is None:
            return None
        from imgkit_builder.image.render import origin

        return origin(self._dockerfile, line) or f"Dockerfile:{line}"


def _run_folder(name: str) -> Path:
    """A new folder for the log of this build, unique even within one second."""
    parent = files.state_dir() / "builds"
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot create the folder for the build's log: {error.strerror}",
            where=str(parent),
            hint="set XDG_STATE_HOME",
        ) from error
    stamp = time.strftime("%Y%m%dT%H%M%S")
    number = 0
    while True:
        folder = parent / (f"{stamp}-{name}" + (f"-{number}" if number else ""))
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder
