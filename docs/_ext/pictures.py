"""Make the pictures of the site from real runs: `ci/docs --pictures`.

Needs a Docker engine and the stand-in image (ci/lab/base-image). Everything runs in one image, the recipe
`cpu` built on the stand-in. The image is removed at the end.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
STANDIN = "imgkit.local/standin:24.03"
IMAGE = f"imgkit-gallery-{os.getpid()}:latest"
IMGKIT = (sys.executable, "-m", "imgkit_builder")
LINES = 90
"""Longer output ends with a line that says how much is left out."""

THEME = TerminalTheme(
    (21, 32, 43),
    (226, 234, 242),
    [
        *((84, 98, 112), (255, 123, 114), (126, 211, 137), (240, 200, 110)),
        *((125, 180, 240), (210, 160, 250), (118, 214, 222), (226, 234, 242)),
    ],
)
BATCH_SHELL = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "as07r3b[13-14]",
    "SLURM_NODEID": "0",
    "SLURM_CPUS_PER_TASK": "80",
    "SLURMD_NODENAME": "as07r3b13",
}
"""What Slurm sets in the shell of a batch script on the first of two nodes."""


def main(folder: Path) -> None:
    """Write all pictures into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _run((*IMGKIT, "build", "cpu", "--base", STANDIN, "--tag", IMAGE))
    try:
        with tempfile.TemporaryDirectory() as work:
            _in_image(Path(work), folder)
    finally:
        subprocess.run(["docker", "rmi", "--force", IMAGE], capture_output=True, check=False)


def _in_image(work: Path, folder: Path) -> None:
    def start(*words: str, check: bool = True, **variables: str) -> str:
        flags = [f"--env={name}={value}" for name, value in variables.items()]
        here = (f"--volume={work}:{work}", f"--workdir={work}")
        # The name of a node instead of a container's id, and not the banner of the base's own entry point.
        own = ("--hostname=node1", f"--entrypoint={words[0]}")
        return _run(("docker", "run", "--rm", *own, *here, *flags, IMAGE, *words[1:]), check=check)

    train = ("dist-train", "--nproc", "2", "--model", "gpt", "--steps", "200", "--run-dir", "first")
    start(*train)
    _picture(work / "first/curves.svg", folder / "curves.svg")
    start("dist-bench", "all_reduce", "--nproc", "2", "--max", "4M", "--plot", "bench.svg")
    _picture(work / "bench.svg", folder / "bench.svg")
    refused = start("dist-train", check=False, **BATCH_SHELL)
    _terminal(folder / "refused.html", "dist-train   # in the batch script, without srun", refused)


def _run(words: Sequence[str], *, check: bool = True) -> str:
    print("+", *words[:6], "..." if len(words) > 6 else "", flush=True)
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    if check and done.returncode != 0:
        sys.exit(f"docs: {' '.join(words)} failed with exit code {done.returncode}:\n{done.stdout}")
    return done.stdout


def _picture(source: Path, target: Path) -> None:
    target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")


def _terminal(target: Path, command: str, output: str) -> None:
    """Write what a terminal shows of `command` and its `output`, as text in the terminal's colours."""
    # The picture is of any checkout, not of this one.
    for folder in (ROOT, Path(sys.prefix).parent):
        output = output.replace(str(folder), "~/imgkit")
    lines = output.rstrip().splitlines()
    if len(lines) > LINES:
        lines = [*lines[:LINES], f"... ({len(lines) - LINES} more lines)"]
    # Lines are not folded: the page scrolls them, on a phone too.
    console = Console(record=True, width=1000, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"), soft_wrap=True)
    console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
    page = console.export_html(
        theme=THEME, inline_styles=True, code_format='<pre class="terminal">{code}</pre>\n'
    )
    target.write_text(re.sub(r"[ \t]+$", "", page, flags=re.MULTILINE), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
