"""One conversion while it runs: everything that its steps need, as one value."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from imgkit_builder.base.progress import Reporter
from imgkit_builder.sif.compression import Compression
from imgkit_builder.sif.options import Options, Stage
from imgkit_builder.sif.runtime import RuntimeTool, find_runtime, run, scratch_env
from imgkit_builder.sif.squasher import Squasher
from imgkit_builder.sif.workspace import Workspace


@dataclass(slots=True)
class Clock:
    """A reporter that passes everything on and records the seconds of each stage."""

    report: Reporter
    stages: list[Stage] = field(default_factory=list)
    _name: str = ""
    _began: float = 0.0

    def stage(self, text: str) -> None:
        """A new stage begins; the one before is over."""
        self.finish()
        self._name, self._began = text, time.monotonic()
        self.report.stage(text)

    def finish(self) -> None:
        """The last stage is over."""
        if self._name:
            self.stages.append(Stage(name=self._name, seconds=time.monotonic() - self._began))
        self._name = ""

    def advance(self, done_bytes: int, total_bytes: int | None = None) -> None:
        """Pass on."""
        self.report.advance(done_bytes, total_bytes)

    def line(self, text: str) -> None:
        """Pass on."""
        self.report.line(text)

    def note(self, text: str) -> None:
        """Pass on."""
        self.report.note(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionJob:
    """One conversion."""

    tool: RuntimeTool | None
    """None: there is no runtime here, and nothing so far needs one."""
    options: Options
    compression: Compression
    work: Workspace
    clock: Clock
    log: TextIO
    squasher: Squasher | None = None
    """None: the first of `squash_ways` that works here."""

    def run(
        self,
        *arguments: str | Path,
        folder: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        namespace: bool = False,
    ) -> str:
        """Run the runtime in the workspace; returns its output. `namespace` is as in `runtime.run`."""
        tool = self.tool or find_runtime(self.options.runtime, module_hint=self.options.module_hint)
        self.log.write(f"$ {tool.path} {' '.join(map(str, arguments))}\n")
        return run(
            tool,
            [str(one) for one in arguments],
            folder=folder or self.work.folder,
            env=scratch_env(self.work.folder),
            on_line=on_line or self.clock.line,
            log=self.log,
            namespace=namespace,
        ).output


def cache_flags(tool: RuntimeTool) -> tuple[str, ...]:
    """Flags that switch the runtime's cache off: it would keep a second copy of every layer."""
    return ("--disable-cache",) if tool.capabilities.disable_cache else ()


def folder_name(image: str) -> str:
    """A folder name for `image`; the runtime writes it into the label that names the source of the .sif."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", image).strip("._-")[:100] or "image"
