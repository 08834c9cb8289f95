"""Interactive jobs of a remote, with a fake ``ssh`` that runs them on this machine, and fake schedulers."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from file_tree import FakeProgram
from job_builder import make_job
from terminals import Terminal

from imgkit_builder.jobs.remote import connection
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.systems import get_system
from imgkit_builder.jobs.transport import Ssh

TOKEN = "a 'token' $(date)"  # noqa: S105
SALLOC = 'pwd; echo "$TOKEN"; ls -A . images/x; exit 7'
PBS = """\
image: {base: "example.org/base:1"}
system:
  scheduler: pbs
  runtime: {kind: singularity, command: singularity, modules: [singularity]}
  node: {gpus: 0, cpus: 2}
"""


@pytest.fixture
def folder(home: Path, ssh: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """imgkit's folder on the remote, with an image."""
    # A login shell sets PATH anew.
    monkeypatch.setenv("HOME", str(home))
    path = f"{home}/bin:{os.environ['PATH']}"
    (home / ".bash_profile").write_text(f"PATH={shlex.quote(path)}\n")
    folder = home / "my store"
    (folder / "images/x").mkdir(parents=True)
    (folder / "images/x/image.sif").touch()
    return folder


@pytest.fixture
def shell_argv(folder: Path, fake_program: FakeProgram, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """What opens a shell of Slurm on the remote."""
    fake_program("salloc", SALLOC)
    monkeypatch.setenv("TOKEN", TOKEN)
    job = make_job(
        interactive=True,
        command=(),
        env=("TOKEN",),
        directory=folder,
        image=f"{folder}/images/x/image.sif",
    )
    transport = Ssh(connection.connect(Remote(name="far", address="me@far", folder=str(folder), keep_s=0)))
    return transport.foreground_argv(job, get_system("slurm").script(job))


def test_shell_gets_values_that_no_argument_shows(shell_argv, folder):
    assert "token" not in shlex.join(shell_argv)
    [script] = folder.glob(".interactive.*")
    assert script.stat().st_mode & 0o777 == 0o600
    result = subprocess.run(shell_argv, capture_output=True, text=True, check=False)
    assert result.returncode == 7, result.stderr
    place, token, *names = result.stdout.splitlines()
    assert (place, token) == (str(folder), TOKEN)
    assert names[:4] == [".:", "images", "", "images/x:"]  # the script is removed at its start
    # A link keeps the image while the job waits and runs.
    assert names[4].startswith(".interactive.")
    assert [path.name for path in (folder / "images/x").iterdir()] == ["image.sif"]


def test_shell_in_a_removed_image_is_refused(shell_argv, folder):
    (folder / "images/x/image.sif").unlink()
    result = subprocess.run(shell_argv, capture_output=True, text=True, check=False)
    message = "images/x/image.sif has been removed meanwhile; run the command again to send it\n"
    assert (result.returncode, result.stdout, result.stderr) == (1, "", message)


def test_pbs_says_what_to_type_in_its_shell(folder, fake_program, call):
    fake_program("qsub", 'echo "shell of $*"; exit 5')
    Path("mine.yaml").write_text(PBS)
    assert call("remote", "add", "far", f"far:{folder}", "--recipe", "./mine.yaml")[0] == 0
    image = str(folder / "images/x/image.sif")
    argv = ("run", "./mine.yaml", "--on", "far", "--image", image, "--interactive")
    with Terminal((sys.executable, "-m", "imgkit_builder", *argv)) as terminal:
        assert terminal.wait() == 5
    shown = terminal.text.replace("\r\n", "\n")
    assert "# In the shell that it gives, on one of the nodes:\n" in shown
    assert f"#   cd '{folder}'\n#   module load singularity\n" in shown
    assert "imgkit: on far: qsub -I -N mine " in shown
    assert "shell of -I -N mine " in shown


def test_dry_run_shows_the_command_for_a_shell(folder, call):
    assert call("remote", "add", "far", f"far:{folder}", "--recipe", "mn5")[0] == 0
    options = ("--on", "far", "-A", "a", "--qos", "acc_debug", "--time", "10m", "--interactive", "--dry-run")
    code, out, err = call("run", "mn5", *options)
    assert (code, out.startswith("salloc ")) == (0, True), err
    assert "imgkit: /imgkit stands for the folder on far\n" in err
