"""The one place that starts programs: argv lists only, both streams drained, output kept for the error."""

from __future__ import annotations

import collections
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from imgkit_entrypoints.errors import ToolFailed, ToolMissing

TAIL_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A program that ran to its end."""

    argv: tuple[str, ...]
    returncode: int
    output: str
    """Standard output and error, merged, in full."""

    def tail(self) -> str:
        """The last lines, as quoted in errors."""
        return "\n".join(self.output.splitlines()[-TAIL_LINES:])


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    check: bool = True,
    hint: str = "",
) -> Finished:
    """Run `argv` to its end; each output line goes to `on_line` as it comes.

    Raises
    ------
    ToolMissing : the program is not on PATH; `hint` says how to get it.
    ToolFailed : `check` and the exit code is not 0; quotes the last lines.
    """
    words = tuple(str(word) for word in argv)
    if shutil.which(words[0], path=env.get("PATH") if env else None) is None:
        raise ToolMissing(f"the program {words[0]!r} is not on PATH", hint=hint or None)
    lines: collections.deque[str] = collections.deque()
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=None if env is None else dict(env),
        cwd=cwd,
    ) as process:
        assert process.stdout is not None  # noqa: S101 - for the type checker: stdout=PIPE
        try:
            for line in process.stdout:
                lines.append(line)
                if on_line:
                    on_line(line.rstrip("\n"))
        except BaseException:
            process.kill()
            raise
    finished = Finished(argv=words, returncode=process.returncode, output="".join(lines))
    if check and finished.returncode != 0:
        raise ToolFailed(
            f"{words[0]} failed with exit code {finished.returncode}: {' '.join(words)}",
            hint=f"its last lines:\n{finished.tail()}" + (f"\n{hint}" if hint else ""),
        )
    return finished
