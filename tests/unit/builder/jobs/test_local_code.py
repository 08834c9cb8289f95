"""Code of a run that starts on this machine at once: imgkit makes the run folder and the copy."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from file_tree import write_files

from imgkit_builder.base.progress import Silent
from imgkit_builder.jobs import code, submit
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.systems.mpi import MpiFlags
from imgkit_builder.jobs.transport import Transport


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "my code", {"train.py": "print(1)", "a b/c": "text"})


def ready(folder: Path, recipe: str = "cpu", **options: object) -> PreparedJob:
    """Return a job of this folder's code after all that precedes its start."""
    request = JobRequest.of(code=folder, directory=folder, **{"command": ("dist-run", "train.py"), **options})
    prepared = submit.prepare(recipe, request, code.read_code_folder(request, large=False, report=Silent()))
    return submit.make_ready(prepared, Transport(), Silent())


def test_docker_mounts_a_writable_copy(folder):
    job = ready(folder, runtime="docker")
    run_folder = Path(job.job.run_folder)
    assert run_folder.parent == folder / "runs"
    assert run_folder.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in run_folder.iterdir()} == {"code.json", "workspace"}
    argv = job.script.submit
    assert f"{run_folder}/workspace:/workspace" in argv
    assert argv[argv.index("--workdir") + 1] == "/workspace"
    assert {f"IMGKIT_RUN_DIR={run_folder}", "PYTHONDONTWRITEBYTECODE=1"} <= set(argv)
    (run_folder / "workspace/a b/c").open("a").write("more")
    assert (folder / "a b/c").read_text() == "text\n"
    assert not (folder / ".imgkit-code").exists()


def test_next_run_does_not_send_earlier_runs(folder):
    first, second = ready(folder, runtime="docker"), ready(folder, runtime="docker")
    assert first.job.run_folder != second.job.run_folder
    assert first.code
    assert second.code
    assert second.code.record.sha256 == first.code.record.sha256


def test_variable_of_the_user_counts(folder):
    argv = ready(folder, runtime="docker", env=("PYTHONDONTWRITEBYTECODE=",)).script.submit
    assert [word for word in argv if word.startswith("PYTHONDONT")] == ["PYTHONDONTWRITEBYTECODE="]


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("cpu", {}), ("lambda", {"gpus": 0, "system_flags": (MpiFlags(mpi_start="ranks"),)})],
)
def test_host_starts_in_the_copy(folder, recipe, options):
    command = ("sh", "-c", 'pwd; echo "$IMGKIT_JOB_DIR"; cat "a b/c"; echo 1 > out')
    job = ready(folder, recipe, runtime="host", command=command, **options)
    argv = job.script.submit
    argv = argv[argv.index("sh") :] if recipe == "lambda" else argv  # without mpirun
    env = {"PATH": "/usr/bin:/bin", **job.job.settings}
    result = subprocess.run(argv, cwd="/", env=env, capture_output=True, text=True, check=True)
    workspace = Path(job.job.run_folder) / "workspace"
    assert result.stdout == f"{workspace}\n{folder}\ntext\n"
    assert (workspace / "out").exists()
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("runtime", "hint"), [("host", ""), ("singularity", ", or the image the code (image.copy)")]
)
def test_machine_without_the_copy_is_named(folder, runtime, hint):
    image = folder / "x.sif"
    image.touch()
    job = ready(folder, runtime=runtime, command=("true",), **({"image": "x.sif"} if hint else {}))
    shutil.rmtree(job.job.run_folder)
    result = subprocess.run(job.script.submit, capture_output=True, text=True)
    node = subprocess.run(["uname", "-n"], capture_output=True, text=True).stdout.strip()
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("imgkit:")]
    assert result.returncode == 2
    assert message == (
        f"imgkit: node {node} has no {job.job.run_folder}/workspace, the run's copy of the code: all nodes "
        f"need the job's folder (--directory){hint}"
    )
