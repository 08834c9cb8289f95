"""The command lines of the scripts in ``ci``: help, refusals, and that they say what is missing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from file_tree import write_program

import imgkit_entrypoints

CI = Path(__file__).resolve().parents[3] / "ci"
SCRIPTS = sorted(
    str(path.relative_to(CI))
    for path in (*CI.iterdir(), *CI.glob("lab/*"))
    if path.is_file() and os.access(path, os.X_OK)
)


def run(script, *args, **env):
    return subprocess.run(
        [str(CI / script), *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )


def test_scripts_are_found():
    assert {"check", "quickstart", "lab/base-image", "lab/engine", "lab/cluster"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_how_to_use_it(script):
    result = run(script, "--help")
    assert result.returncode == 0
    assert Path(script).name in result.stdout
    assert {"Changes:", "Undo:"} <= set(result.stdout.split()), "what it does to the machine"
    assert "set -e" not in result.stdout


OPTIONS = ("check", "gpu", "quickstart", "release", "lab/base-image", "lab/install-singularity")
NAMES = ("nvcr.io/nvidia/pytorch:24.03-py3", "imgkit.local/standin", "imgkit.local/other:24.03")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((f"{script} --no-such-option", "") for script in OPTIONS),
        *(
            (script, "")
            for script in ("lab/engine explode", "lab/engine", "lab/binfmt explode", "lab/binfmt")
        ),
        # The stand-in never bears another name.
        *((f"lab/base-image {name}", "imgkit.local/standin:TAG") for name in NAMES),
        ("lab/base-image imgkit.local/standin:", "imgkit.local/standin:TAG"),
        ("lab/base-image --arch s390x", "amd64, arm64"),
        (f"lab/engine status --private /tmp/{'x' * 100}", "too long"),
    ],
)
def test_wrong_command_line_is_refused(line, message):
    result = run(*line.split())
    assert result.returncode == 2
    assert message in result.stderr


def test_no_gpu_is_a_reason_to_skip(tmp_path):
    write_program(tmp_path / "python3", '[ "$2" != "import torch" ]')
    result = run("gpu", str(tmp_path / "gpu.json"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (result.returncode, result.stdout) == (0, "gpu: skipped: python3 has no torch\n")
    assert not (tmp_path / "gpu.json").exists()


def test_release_names_all_that_is_missing(tmp_path):
    copy = tmp_path / "copy"
    if subprocess.run(["git", "clone", "-q", CI.parent, copy], check=False).returncode != 0:
        pytest.skip("not a checkout of git")
    for name in ("release", "release_problems.py"):
        (copy / "ci" / name).write_bytes((CI / name).read_bytes())
    (copy / "pyproject.toml").write_text("[project]\n")
    (copy / "CHANGELOG.md").write_text(f"\n## [{imgkit_entrypoints.__version__}] - unreleased\n")
    result = subprocess.run(["bash", copy / "ci/release"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    stderr = result.stderr
    assert "pyproject.toml: no address; write, under [project.urls]: Homepage = " in stderr
    assert f"CHANGELOG.md:2: no date after the heading of {imgkit_entrypoints.__version__}" in stderr
    assert "git status: uncommitted files" in stderr
    assert not (copy / "build").exists()


def test_installed_programs_need_no_apt():
    result = run("lab/apt-install", "sh:dash", "ls:coreutils")
    assert result.returncode == 0
    assert result.stderr == ""


def test_missing_package_without_apt_is_named(tmp_path):
    # Only the programs that the script itself starts: no apt-get, as on another distribution.
    for name in ("bash", "id", "env"):
        (tmp_path / name).symlink_to(subprocess.check_output(["which", name], text=True).strip())
    script = (CI / "lab/apt-install").read_text().replace("PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin\n", "")
    copy = tmp_path / "apt-install"
    copy.write_text(script)
    result = subprocess.run(
        ["bash", str(copy), "dockerd:docker-cli|docker.io", "bash:bash"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
    )
    assert result.returncode == 3
    assert "apt-get install docker-cli" in result.stderr
    assert "bash" not in result.stderr
