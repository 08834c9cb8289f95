"""The run folder and the files of the Slurm script, run by a real bash with STUBS of srun and scontrol."""

from __future__ import annotations

import os
import signal
import stat
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from labkit import until

ARGS = ("mn5", "-A", "a", "--qos", "q", "--time", "10m")
WAITS = """
touch started
until [[ -e $IMGKIT_RUN_DIR/stop-for-requeue ]]; do sleep 0.02; done
until [[ ! -e hold ]]; do sleep 0.02; done
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs/mn5-7"


@pytest.fixture
def start(tmp_path: Path, start_script: Start) -> Start:
    """``start(SRUN, *ARGS)``: the script of a job whose srun is SRUN, and whose scontrol notes its calls."""

    def run(srun: str, *args: str) -> subprocess.Popen[str]:
        stubs = {"srun": srun, "scontrol": f'echo "$@" >> {tmp_path}/requeues\n'}
        return start_script((*ARGS, *args), stubs, SLURM_JOB_ID="7")

    return run


def requeues(folder: Path) -> list[str]:
    file = folder / "requeues"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("signals", [1, 2])
def test_limit_asks_to_save_and_the_job_is_requeued(start, run_dir, tmp_path, signals):
    (tmp_path / "hold").touch()
    script = start(WAITS + 'touch "$IMGKIT_RUN_DIR/requeue"; exit 85\n')
    until((tmp_path / "started").exists)
    for _ in range(signals):
        script.send_signal(signal.SIGUSR1)
        until((run_dir / "stop-for-requeue").exists)
    (tmp_path / "hold").unlink()
    stdout, _ = script.communicate(timeout=20)
    assert stdout == "imgkit: saved, to be requeued\n"
    assert (requeues(tmp_path), script.returncode) == (["requeue 7"], 85)


def test_job_without_the_request_is_not_requeued(start, run_dir, tmp_path):
    script = start(WAITS + 'echo "7.0 85" > "$IMGKIT_RUN_DIR/result"; exit 143\n')
    until((tmp_path / "started").exists)
    script.send_signal(signal.SIGUSR1)
    script.communicate(timeout=20)
    assert (requeues(tmp_path), script.returncode) == ([], 85)


def test_files_of_an_earlier_start_are_removed(start, run_dir, tmp_path):
    run_dir.mkdir(parents=True)
    names = ("requeue", "result", "stop-for-requeue", ".imgkit-secret.0123456789", "requeued", "stop")
    for name in names:
        (run_dir / name).write_text("7.0 9\n")
    script = start('ls -A "$IMGKIT_RUN_DIR"; exit 3\n')
    stdout, _ = script.communicate(timeout=20)
    assert stdout.split() == ["requeued", "stop"]
    assert (requeues(tmp_path), script.returncode) == ([], 3)


@pytest.mark.parametrize(
    ("of_srun", "result", "code"),
    [
        (143, "7.0 1", 1),
        (143, "7 3", 3),
        (5, "7.0 0", 5),
        (0, "7.0 3", 0),
        (0, "local 85", 85),
        (143, "", 143),
    ],
)
def test_job_ends_with_the_code_of_the_program(start, of_srun, result, code):
    """A shell may start several programs, of which one has left a result: a failure is the job's."""
    script = start(f"[[ '{result}' ]] && echo '{result}' > \"$IMGKIT_RUN_DIR/result\"\nexit {of_srun}\n")
    _, stderr = script.communicate(timeout=20)
    assert (script.returncode, stderr) == (code, "")


def set_default_acl(folder: Path) -> None:
    """Have each new file of `folder` open to its group and to user 12345, whatever the umask says."""
    entries = ((0x01, 7, -1), (0x02, 7, 12345), (0x04, 7, -1), (0x10, 7, -1), (0x20, 5, -1))
    rows = b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(folder, "system.posix_acl_default", struct.pack("<I", 2) + rows)
    except OSError:
        pytest.skip("this file system has no ACLs")


@pytest.mark.parametrize("acl", [False, True])
@pytest.mark.parametrize(("args", "mode"), [((), 0o700), (("--group-readable",), 0o750)])
def test_run_folder_is_closed_and_its_parent_is_not_changed(start, run_dir, tmp_path, args, mode, *, acl):
    run_dir.parent.mkdir()
    run_dir.parent.chmod(0o2770)
    if acl:
        set_default_acl(run_dir.parent)
    parent = run_dir.parent.stat()
    start("exit 0\n", *args).communicate(timeout=20)
    assert stat.S_IMODE(run_dir.stat().st_mode) & 0o777 == mode
    assert run_dir.parent.stat().st_mode == parent.st_mode


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as a second user")
@pytest.mark.parametrize("kind", ["link", "folder"])
def test_run_folder_that_a_stranger_planted_is_refused(start, run_dir, tmp_path, kind):
    elsewhere = tmp_path / ".ssh"
    elsewhere.mkdir()
    run_dir.parent.mkdir()
    if kind == "link":
        run_dir.symlink_to(elsewhere)
    else:
        run_dir.mkdir()
        os.chown(run_dir, 12345, 12345)
    script = start("touch started\n")
    _, stderr = script.communicate(timeout=20)
    assert script.returncode == 2
    assert stderr == f"imgkit: {run_dir} is a link or another user's folder\n"
    assert list(elsewhere.iterdir()) == list(run_dir.iterdir()) == []
    assert not (tmp_path / "started").exists()
