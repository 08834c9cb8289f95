"""The run's own copy of its code: the lines of a Slurm script, run by a real bash with a STUB of srun."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from file_tree import write_files

from imgkit_builder.base.progress import Silent
from imgkit_builder.jobs import code
from imgkit_builder.jobs.code_tree import CodeTree
from imgkit_builder.jobs.request import JobRequest

SITE = ("mn5", "-A", "a", "--qos", "q", "--time", "10m")
SALLOC = 'exec bash -c "${@: -1}"'
PROGRAM = """\
cd "$IMGKIT_RUN_DIR/workspace"
echo more >> "it's a/b c.txt"
echo edited > train.py
mkdir -p out
echo 1 >> out/result
"""
Start = Callable[..., "subprocess.Popen[str]"]


def read(folder: Path) -> CodeTree:
    return code.read_code_folder(JobRequest.of(code=folder), large=False, report=Silent()).tree


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of code with names that a shell would take apart."""
    root = write_files(tmp_path / "my code", {"train.py": "print(1)", "it's a/b c.txt": "text", "run": ""})
    (root / "run").chmod(0o755)
    (root / "away").symlink_to("/nowhere")
    return root


@pytest.fixture
def store(tmp_path: Path, folder: Path) -> Path:
    """The folder of the code in the store of the job's folder."""
    tree = read(folder)
    target = tmp_path / ".imgkit-code" / tree.sha256
    tree.write(target)
    return target


@pytest.fixture
def start(folder: Path, start_script: Start) -> Start:
    """``start(PROGRAM, STUBS, OPTIONS)``: start the job whose program is a script of bash."""

    def run(
        program: str, stubs: Mapping[str, str] = MappingProxyType({}), options: Sequence[str] = (), **env: str
    ) -> subprocess.Popen[str]:
        stubs = {"srun": f"set -e\n{program}", **stubs}
        return start_script((*SITE, "--code", str(folder), *options), stubs, **{"SLURM_JOB_ID": "7", **env})

    return run


def end(script: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = script.communicate(timeout=60)
    return script.returncode, stderr


def digest(store: Path) -> str:
    """Return the digest of what the store has now."""
    return read(store / "workspace").sha256


@pytest.mark.usefixtures("store")
def test_program_writes_into_a_copy_of_its_own(start, store, tmp_path):
    assert end(start(PROGRAM)) == (0, "")
    workspace = tmp_path / "runs/mn5-7/workspace"
    assert (workspace / "train.py").read_text() == "edited\n"
    assert (workspace / "it's a/b c.txt").read_text() == "text\nmore\n"
    assert (workspace / "out/result").read_text() == "1\n"
    assert os.access(workspace / "run", os.X_OK)
    assert (workspace / "away").readlink() == Path("/nowhere")
    assert digest(store) == store.name
    for path in (store / "workspace").rglob("*"):
        copied = workspace / path.relative_to(store / "workspace")
        assert copied.lstat().st_ino != path.lstat().st_ino
        assert copied.lstat().st_mode & 0o200
    # Equal size and time mean equal content, for what is fetched and for what a resumed run replaces.
    assert (workspace / "run").stat().st_mtime_ns == (store / "workspace/run").stat().st_mtime_ns


def test_requeue_goes_on_in_the_copy(start, store, tmp_path):
    assert end(start(f"{PROGRAM}rm run\n")) == (0, "")
    shutil.rmtree(store)  # a run needs it for its first start alone
    assert end(start(f"{PROGRAM}test ! -e run\n")) == (0, "")
    assert (tmp_path / "runs/mn5-7/workspace/out/result").read_text() == "1\n1\n"


@pytest.mark.usefixtures("store")
def test_each_task_of_an_array_has_a_copy(start, tmp_path):
    for task in ("0", "1"):
        env = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": task}
        assert end(start(PROGRAM, options=["--option=--array=0-1"], **env)) == (0, "")
    results = tmp_path.glob("runs/mn5-7_*/workspace/out/result")
    assert [result.read_text() for result in results] == ["1\n", "1\n"]


@pytest.mark.usefixtures("store")
def test_interactive_job_works_in_a_copy(start, tmp_path):
    assert end(start(PROGRAM, {"salloc": SALLOC}, ["--interactive"])) == (0, "")
    assert (tmp_path / "runs/mn5-7/workspace/out/result").read_text() == "1\n"


WAIT_FOR_OTHER = """\
if [[ $1 != -p ]]; then
    touch "$0.$$"
    until [[ $(ls "$0".* | wc -l) == 2 ]]; do sleep 0.02; done
fi
exec {program} "$@"
"""


@pytest.mark.usefixtures("store")
def test_two_starts_at_once_work_in_one_copy(start, tmp_path):
    append = 'cd "$IMGKIT_RUN_DIR/workspace"; cat train.py; echo "$BASHPID" >> starts\n'
    stubs = {name: WAIT_FOR_OTHER.format(program=shutil.which(name)) for name in ("mkdir", "cp")}
    scripts = [start(append, stubs) for _ in range(2)]
    assert [end(script)[0] for script in scripts] == [0, 0]
    run_folder = tmp_path / "runs/mn5-7"
    assert run_folder.stat().st_mode & 0o777 == 0o700
    assert len((run_folder / "workspace/starts").read_text().splitlines()) == 2
    assert list(run_folder.rglob(".imgkit-workspace.*")) == []


@pytest.mark.usefixtures("store")
def test_start_that_was_killed_while_it_copied_is_repeated(start, tmp_path):
    half = 'echo half > "${@: -1}/train.py"; kill -9 $PPID'
    assert end(start(PROGRAM, {"cp": half}))[0] == -9
    (tmp_path / "cp").unlink()
    assert end(start('cd "$IMGKIT_RUN_DIR/workspace"; [[ $(< train.py) == "print(1)" ]]\n')) == (0, "")
    assert list((tmp_path / "runs/mn5-7").glob(".imgkit-workspace.*")) == []


@pytest.mark.parametrize("options", [(), ("--interactive",)])
def test_job_whose_code_is_gone_does_not_start(start, tmp_path, options):
    status, stderr = end(start("touch $IMGKIT_RUN_DIR/started\n", {"salloc": SALLOC}, options))
    assert (status, (tmp_path / "runs/mn5-7/started").exists()) == (1, False)
    assert "/.imgkit-code/" in stderr
    assert "No such file or directory" in stderr
