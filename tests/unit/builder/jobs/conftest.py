"""Job scripts, run by a real bash with STUBS of the programs around them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from file_tree import write_program
from typer.testing import CliRunner

from imgkit_builder.cli.app import build_app


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``start_script(ARGS, STUBS, NAME=VALUE)``: start the script that ``imgkit run --dry-run`` prints.

    It runs in `tmp_path`, in a process group of its own, and finds the programs of STUBS first.
    """
    scripts: list[subprocess.Popen[str]] = []

    def start(args: Sequence[str], stubs: Mapping[str, str], **env: str) -> subprocess.Popen[str]:
        argv = ["run", "--dry-run", *args, "--directory", str(tmp_path), "--", "dist-hello"]
        result = CliRunner().invoke(build_app(), argv, catch_exceptions=False)
        (tmp_path / "job.text").write_text(result.stdout)
        (tmp_path / "job").write_text('module() { :; }\nexport -f module\n. "$0.text"\n')
        for name, text in stubs.items():
            write_program(tmp_path / name, text, "bash")
        script = subprocess.Popen(
            ["bash", str(tmp_path / "job")],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        scripts.append(script)
        return script

    yield start
    for script in scripts:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.communicate()
