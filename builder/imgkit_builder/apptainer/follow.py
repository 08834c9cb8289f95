"""Follows the output of the runtime's build: the step, the last lines, and an error at the recipe's line."""

from __future__ import annotations

import collections
import re

from imgkit_builder.apptainer.definition import MARK
from imgkit_builder.base.process import TAIL_LINES
from imgkit_builder.base.progress import Reporter
from imgkit_builder.image import inside
from imgkit_builder.image.instructions import Definition
from imgkit_builder.oci.manifest import Probe
from imgkit_entrypoints import secret_patterns
from imgkit_entrypoints.errors import ToolFailed
from imgkit_entrypoints.terminal import unstyled

_BEGIN = re.compile(rf"{MARK} (\d+)/\d+")
_TRACE = re.compile(r"\++ ")
"""The shell's own trace of what it runs."""
_RUNTIME = re.compile(r"(?:INFO|WARNING|FATAL|ERROR|DEBUG|VERBOSE):\s+(.*)")
_STEPS, _SQUASH = "Running post scriptlet", "Creating SIF file"
_WIDTH = 72


class Follower:
    """Follows one build."""

    def __init__(self, made: Definition, *, base_at: str, report: Reporter) -> None:
        self._made, self._base_at, self._report = made, base_at, report
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._step = 0
        self._doing, self._squashing = "the base cannot be had", False
        self.probe = Probe(skipped="the base has no python3")

    def line(self, raw: str) -> None:
        """Process one line of output."""
        # A progress bar rewrites its line; only the last text counts.
        text = unstyled(raw).rstrip("\r").rpartition("\r")[2]
        shown = secret_patterns.masked(text)
        begun, said = _BEGIN.fullmatch(text), _RUNTIME.match(text)
        seen = inside.parse(text)
        if begun and int(begun[1]) == self._step + 1:
            self._begin()
        elif seen is not None and self._step == 1:
            self.probe = Probe(
                python=seen.python,
                torch=seen.torch,
                cuda=seen.cuda,
                nccl=seen.nccl,
                pip_conflicts=seen.pip_conflicts or (),
            )
        elif said and said[1].startswith(_STEPS):
            self._doing = "the steps cannot begin"
        elif said and said[1].startswith(_SQUASH):
            self._doing, self._squashing = "the files cannot be squashed", True
            self._tail.clear()
            self._report.stage("squash")
        elif text.strip() and not _TRACE.match(text):
            self._tail.append(shown)
        self._report.line(shown)

    def failed(self, error: ToolFailed) -> ToolFailed:
        """The error of a build whose program ended with `error`: the step, its last lines, its place."""
        lines = "\n".join(self._tail) or "(it said nothing)"
        log = (error.hint or "").rpartition("the full log: ")[2]
        hint = f"its last lines:\n{lines}\nfull log: {log}, with the definition in it"
        if not self._step or self._squashing:
            where = self._base_at if not self._step else None
            return ToolFailed(f"{self._doing}: {error.what}", where=where, hint=hint)
        step = self._made.steps[self._step - 1]
        codes = re.findall(r"exit status (\d+)", lines)
        how = f"failed with exit code {codes[-1]}" if codes else "failed"
        what = f"step {self._step}/{len(self._made.steps)} ({_short(step.text)}) {how}"
        return ToolFailed(what, where=step.origin, hint=hint)

    def _begin(self) -> None:
        self._step += 1
        self._tail.clear()
        step = self._made.steps[self._step - 1]
        self._report.stage(f"step {self._step}/{len(self._made.steps)}: {_short(step.text)}")


def _short(text: str) -> str:
    text = secret_patterns.masked(text)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
