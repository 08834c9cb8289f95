"""What a dry run of a job prints, byte by byte, and that shellcheck has nothing to say about it.

A case is two files in ``jobs/``: ``CASE.args`` and ``CASE.txt``, what is printed. The first has the arguments
of ``imgkit run`` as a shell reads them, or those of another verb behind its name; RECIPES is the folder
``recipes``. After a wanted change: ``IMGKIT_UPDATE_GOLDEN=1 pytest tests/golden``.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
from pathlib import Path

import pytest

from imgkit_builder.cli.app import build_app

JOBS = Path(__file__).parent / "jobs"
CASES = sorted(path.stem for path in JOBS.glob("*.args"))


def printed(case: str) -> str:
    """Return the output of a dry run, in a folder with a blank if the case names none."""
    from typer.testing import CliRunner

    text = (JOBS / f"{case}.args").read_text(encoding="utf-8")
    arguments = shlex.split(text.replace("RECIPES/", f"{JOBS.parent / 'recipes'}/"))
    verb = arguments.pop(0) if arguments[0] in ("sif", "build") else "run"
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = arguments[:end], arguments[end:]
    if "--directory" not in options:
        options += ["--directory", "/home/me/my run"]
    argv = [verb, "--dry-run", *options, *command]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "randbelow", lambda _: 5000)  # a run by hand has a random port
        result = CliRunner().invoke(build_app(), argv, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    text = re.sub(r'"git": "[^"]*", "uncommitted": \w+', '"git": "v1", "uncommitted": false', result.stdout)
    return re.sub(r"(/runs/\w+)-[0-9]{8}-[0-9]{6}-[0-9a-f]{4}\b", r"\1-TIME", text)


@pytest.mark.parametrize("case", CASES)
def test_job_is_as_recorded(case):
    file, text = JOBS / f"{case}.txt", printed(case)
    if os.environ.get("IMGKIT_UPDATE_GOLDEN") == "1":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "wanted? IMGKIT_UPDATE_GOLDEN=1 pytest tests/golden"


@pytest.mark.parametrize("case", CASES)
def test_job_passes_shellcheck(case, find_linter):
    text = printed(case)
    if text.startswith(("apiVersion", "---")):
        return  # YAML: test_kubeflow_job compares it with Kubeflow's models
    # SC2016 doubts that a `$` in single quotes is meant as it stands; it is.
    argv = [find_linter("shellcheck"), "--shell=bash", "--severity=style", "--exclude=SC2016", "-"]
    result = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, f"{text}\n{result.stdout}"


USUAL = ("mn5", "leonardo", "karolina", "meluxina", "juwels-booster", "jupiter", "snellius-a100", "mn5-cpu")
"""Cases of Slurm without further options."""
LINES = {**dict.fromkeys(USUAL, 28), "olivia": 42}
"""Most lines without directives; Olivia's jobs mount libraries of modules, and name their memory."""


@pytest.mark.parametrize("case", LINES)
def test_usual_script_of_slurm_can_be_read_at_once(case):
    lines = (JOBS / f"{case}.txt").read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 110
    assert sum(not line.startswith("#SBATCH") for line in lines) <= LINES[case]
    assert [
        line for line in lines if re.search(r"\b(source|sh -c)\b", line) and "/etc/profile" not in line
    ] == []


def test_no_record_without_case():
    assert {path.stem for path in JOBS.glob("*.txt")} == set(CASES)
