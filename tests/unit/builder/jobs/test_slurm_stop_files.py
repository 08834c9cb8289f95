"""The stop files of the Slurm script, run by a real bash with STUBS of srun and scontrol."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from labkit import until

WORDS = ("mn5", "-A", "a", "--qos", "q", "--time", "10m")
SAVES = """
until [[ -e $IMGKIT_RUN_DIR/{file} ]]; do sleep 0.02; done
touch "$IMGKIT_RUN_DIR/seen"
until [[ ! -e $IMGKIT_RUN_DIR/wait ]]; do sleep 0.02; done
echo 7 40 > "$IMGKIT_RUN_DIR/state-saved"
exit 85
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs/mn5-7"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def start(tmp_path: Path, start_script: Start) -> Start:
    """``start(FILE)``: the script of a job whose launcher saves once FILE is there, and ends with 85."""

    def run(file: str) -> subprocess.Popen[str]:
        stubs = {"srun": SAVES.format(file=file), "scontrol": f'echo "$@" >> {tmp_path}/requeues\n'}
        return start_script(WORDS, stubs, SLURM_JOB_ID="7")

    return run


def requeues(run_dir: Path) -> int:
    file = run_dir.parents[1] / "requeues"
    return len(file.read_text().splitlines()) if file.exists() else 0


def stop_files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir() if path.name.startswith("stop"))


def started(run_dir: Path) -> bool:
    return subprocess.run(["pgrep", "-f", f"{run_dir.parents[1]}/srun"], capture_output=True).returncode == 0


def test_limit_asks_the_image_and_leaves_no_file(start: Start, run_dir: Path) -> None:
    script = start("stop-for-requeue")
    until(lambda: started(run_dir))
    script.send_signal(signal.SIGUSR1)
    stdout, _ = script.communicate(timeout=20)
    assert "state saved (7 40): requeued" in stdout
    assert requeues(run_dir) == 1
    assert stop_files(run_dir) == []


def test_file_of_a_person_is_not_requeued_and_stays(start: Start, run_dir: Path) -> None:
    script = start("stop")
    until(lambda: started(run_dir))
    (run_dir / "stop").touch()
    _, stderr = script.communicate(timeout=20)
    assert f"not requeued: {run_dir}/stop prevents the run from starting" in stderr
    assert (script.returncode, requeues(run_dir), stop_files(run_dir)) == (0, 0, ["stop"])


@pytest.mark.parametrize("first", ["person", "limit"])
def test_file_of_a_person_counts_beside_the_limit(start: Start, run_dir: Path, first: str) -> None:
    (run_dir / "wait").touch()
    script = start("stop" if first == "person" else "stop-for-requeue")
    until(lambda: started(run_dir))
    if first == "person":
        (run_dir / "stop").touch()
        until((run_dir / "seen").exists)
        script.send_signal(signal.SIGUSR1)
    else:
        script.send_signal(signal.SIGUSR1)
        until((run_dir / "seen").exists)
        (run_dir / "stop").touch()
    (run_dir / "wait").unlink()
    script.communicate(timeout=20)
    assert (script.returncode, requeues(run_dir), stop_files(run_dir)) == (0, 0, ["stop"])


def test_file_of_a_start_that_was_killed_is_removed(start: Start, run_dir: Path) -> None:
    (run_dir / "stop-for-requeue").touch()
    script = start("stop-for-requeue")
    until(lambda: started(run_dir))
    assert stop_files(run_dir) == []
    script.send_signal(signal.SIGUSR1)
    script.communicate(timeout=20)
    assert requeues(run_dir) == 1


def test_file_of_a_person_from_before_the_start_stays(start: Start, run_dir: Path) -> None:
    (run_dir / "stop-for-requeue").touch()
    (run_dir / "stop").touch()
    script = start("stop")
    script.communicate(timeout=20)
    assert (script.returncode, requeues(run_dir), stop_files(run_dir)) == (0, 0, ["stop"])


def test_planted_links_are_not_followed(start: Start, run_dir: Path, tmp_path: Path) -> None:
    victim = tmp_path / ".bashrc"
    victim.write_text("mine")
    for name in ("requeued", "stop", "stop-for-requeue"):
        (run_dir / name).symlink_to(victim if name == "requeued" else tmp_path / f"made-by-{name}")
    script = start("stop-for-requeue")
    until(lambda: started(run_dir))
    (run_dir / "stop-for-requeue").symlink_to(tmp_path / "made-by-it")  # again: the start has removed it
    script.send_signal(signal.SIGUSR1)
    script.communicate(timeout=20)
    assert requeues(run_dir) == 1
    assert (victim.read_text(), list(tmp_path.glob("made-by-*"))) == ("mine", [])
    assert ((run_dir / "requeued").read_text(), stop_files(run_dir)) == ("7 40\n", ["stop"])


@pytest.mark.parametrize(
    ("result", "code"), [("7.0 1", 1), ("7 3", 3), ("8.0 1", 143), ("7.0 0", 143), ("7.0 $(id)", 143)]
)
def test_failed_job_ends_with_the_code_of_the_program(
    start_script: Start, run_dir: Path, result: str, code: int
) -> None:
    (run_dir / "result").write_text("7.0 2\n")  # of an earlier start
    srun = f"[[ ! -e {run_dir}/result ]] || exit 9\necho '{result}' > {run_dir}/result\nexit 143\n"
    script = start_script(WORDS, {"srun": srun}, SLURM_JOB_ID="7")
    script.communicate(timeout=20)
    assert script.returncode == code


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as a second user")
def test_marks_of_a_stranger_change_nothing(start: Start, run_dir: Path) -> None:
    script = start("stop")
    until(lambda: started(run_dir))
    for name in ("stop", "requeued"):
        (run_dir / name).write_text("7 40\n")
        os.chown(run_dir / name, 12345, 12345)
    stdout, _ = script.communicate(timeout=20)
    assert "state saved (7 40): requeued" in stdout
    assert requeues(run_dir) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as a second user")
@pytest.mark.parametrize("kind", ["link", "folder"])
def test_run_folder_that_a_stranger_planted_is_refused(start: Start, run_dir: Path, kind: str) -> None:
    elsewhere = run_dir.parent / ".ssh"
    elsewhere.mkdir()
    if kind == "link":
        run_dir.rmdir()
        run_dir.symlink_to(elsewhere)
    else:
        os.chown(run_dir, 12345, 12345)
    script = start("stop")
    _, stderr = script.communicate(timeout=20)
    assert script.returncode == 2
    assert f"{run_dir} is a link or another user's folder" in stderr
    assert list(elsewhere.iterdir()) == list(run_dir.iterdir()) == []
