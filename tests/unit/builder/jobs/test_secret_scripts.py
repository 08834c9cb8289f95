"""The secret that job scripts make, run by a real bash with STUBS of the programs that start the nodes."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from labkit import until

JOBS = {
    "slurm": ("srun", ("mn5", "-A", "a", "--qos", "q", "--time", "5m"), {"SLURM_JOB_ID": "7"}),
    "pbs": ("mpiexec", ("olivia-eap", "--time", "5m"), {"PBS_JOBID": "7.server"}),
}
STUB = """\
[[ $1 == --help ]] && exit
trap 'echo saved; exit 85' TERM
stat -c '%a %s' "$IMGKIT_SECRET_FILE"
echo "$IMGKIT_SECRET_FILE" | tee names
base64 -w 0 "$IMGKIT_SECRET_FILE"; echo
env > variables
tr '\\0' '\\n' < "/proc/$PPID/cmdline" > arguments
while [[ -e hold ]]; do sleep 0.02; done
exit 3
"""

Start = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture(params=JOBS)
def start(request: pytest.FixtureRequest, tmp_path: Path, start_script: Callable[..., Any]) -> Start:
    """Start the script of a job on two nodes."""
    launcher, args, env = JOBS[request.param]
    (tmp_path / "hosts").write_text("a\nb\n")
    env = {"PBS_NODEFILE": str(tmp_path / "hosts"), **env}
    return lambda: start_script((*args, "--nodes", "2"), {launcher: STUB}, **env)


def secret_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/*/.imgkit-secret*"))


def test_each_start_has_a_private_secret_of_its_own(start, tmp_path):
    seen = []
    for _ in range(2):
        script = start()
        mode, name, value = str(script.communicate(timeout=20)[0]).splitlines()
        assert (script.returncode, mode) == (3, "600 32")
        assert not Path(name).exists()
        assert value not in (tmp_path / "variables").read_text() + (tmp_path / "arguments").read_text()
        seen.append((name, value))
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]


def test_default_acl_of_the_folder_opens_no_secret(start, tmp_path):
    """It gives the group everything, whatever the umask says."""
    entries = ((0x01, 7), (0x04, 7), (0x20, 5))  # user, group, other
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", tag, bits, -1) for tag, bits in entries)
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", acl)
    except OSError:
        pytest.skip("this file system has no ACLs")
    (tmp_path / "plain").touch()
    assert (tmp_path / "plain").stat().st_mode & 0o060 == 0o060
    assert str(start().communicate(timeout=20)[0]).startswith("600 32\n")


def test_file_of_a_killed_start_is_removed_by_the_next(start, tmp_path):
    (tmp_path / "hold").touch()
    script = start()
    until((tmp_path / "arguments").exists)
    os.killpg(script.pid, signal.SIGKILL)
    script.wait(20)
    assert len(secret_files(tmp_path)) == 1
    notes = secret_files(tmp_path)[0].with_name(".imgkit-secret-notes.txt")
    notes.touch()
    (tmp_path / "hold").unlink()
    start().communicate(timeout=20)
    assert secret_files(tmp_path) == [notes], "a file of the user stays"


def test_signal_to_the_job_leaves_no_file(start, tmp_path):
    (tmp_path / "hold").touch()
    script = start()
    until((tmp_path / "arguments").exists)
    os.killpg(script.pid, signal.SIGTERM)
    assert "saved" in str(script.communicate(timeout=20)[0])
    assert secret_files(tmp_path) == []


@pytest.mark.parametrize("start", ["pbs"], indirect=True)
def test_script_for_pbs_ends_after_the_launchers(start, tmp_path):
    """PBS kills what is left when the script ends: the launchers could not save."""
    (tmp_path / "hold").touch()
    script = start()
    until((tmp_path / "arguments").exists)
    os.killpg(script.pid, signal.SIGTERM)
    script.communicate(timeout=20)
    assert script.returncode == 85
