"""Jobs on a remote from the Python API and of ``imgkit scaling``: they are checked as all others.

The ``ssh`` here is a fake: it runs the script on this machine, which has a fake ``sbatch``.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import small_sif
from file_tree import FakeProgram, write_files
from notes import Notes

import imgkit_builder as imgkit
from imgkit_builder.jobs import image_source
from imgkit_builder.project import origins, toml_file

RECIPE = """\
image:
  base: example.org/base:1
  pip: [{project: .}]
system:
  scheduler: slurm
  runtime: {kind: singularity, command: singularity}
  node: {gpus: 0, cpus: 2}
"""
REFUSAL = "the code has the project mine in /workspace, but the image runs its copy in site-packages"


@pytest.fixture
def sbatch(home: Path, ssh: Path, fake_program: FakeProgram, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the scripts that were submitted; the current folder has a recipe and a project."""
    scripts = home / "scripts"
    scripts.mkdir()
    new_id = f"id=$(($(ls {scripts} | wc -l) + 1))"
    fake_program(
        "sbatch", f'case "$*" in *--test-only*) exit ;; esac\n{new_id}\ncat > {scripts}/$id\necho $id'
    )
    pyproject = '[project]\nname = "mine"\nversion = "1"\n'
    monkeypatch.chdir(write_files(home / "project", {"mine.yaml": RECIPE, "pyproject.toml": pyproject}))
    return scripts


@pytest.fixture
def far_image(call: Any, tmp_path: Path, sbatch: Path) -> str:
    """An image on the remote ``far``, whose folder is on this machine."""
    assert call("remote", "add", "far", f"far:{tmp_path}/store", "--recipe", "./mine.yaml")[0] == 0
    image = tmp_path / "x.sif"
    image.touch()
    return str(image)


@pytest.mark.usefixtures("far_image")
def test_api_refuses_code_that_the_image_would_not_run(sbatch):
    request = imgkit.JobRequest.of(command=("true",), code=Path())
    with pytest.raises(imgkit.ImgkitError, match=REFUSAL):
        imgkit.run("mine.yaml", request, on="far")
    assert list(sbatch.iterdir()) == []


@pytest.mark.usefixtures("far_image")
def test_scaling_refuses_code_that_the_image_would_not_run(call, sbatch):
    code, _, err = call("scaling", "--on", "far", "--nodes", "1,2", "--code", ".", "--", "true")
    assert (code, REFUSAL in err) == (2, True), err
    assert list(sbatch.iterdir()) == []


def test_api_reports_the_warnings_of_a_remote_job(far_image):
    notes = Notes()
    request = imgkit.JobRequest.of(command=("true",), image=far_image)
    imgkit.run("mine.yaml", request, on="far", report=notes)
    assert notes.texts == ["true starts once per node; `dist-run true ...` starts one process per GPU"]


def test_scaling_reports_the_warnings_of_its_jobs_once(call, far_image):
    options = ("--on", "far", "--image", far_image, "--nodes", "1,2", "--detach")
    code, _, err = call("scaling", "./mine.yaml", *options, "--", "true")
    assert (code, err.count("true starts once per node")) == (0, 1), err


def test_further_size_costs_one_call_of_ssh(call, far_image, ssh, sbatch, tmp_path):
    ssh.write_text(ssh.read_text().replace("\n", f"\necho >> {tmp_path}/calls\n", 1))
    counts = []
    for sizes in ("1,2", "1,2,3"):
        (tmp_path / "calls").write_text("")
        options = ("--on", "far", "--image", far_image, "--nodes", sizes, "--detach")
        assert call("scaling", "./mine.yaml", *options, "--", "true")[0] == 0
        counts.append((tmp_path / "calls").read_text().count("\n"))
    assert counts[1] == counts[0] + 1
    scripts = [path.read_text() for path in sbatch.iterdir()]
    assert len(scripts) == 5
    for nodes in (1, 2, 3):
        assert any(f"#SBATCH --nodes={nodes}\n" in text for text in scripts)
    assert all(far_image in text for text in scripts)
    assert not any(image_source.UNKNOWN_HOME + "/" in text for text in scripts)


def test_status_costs_one_call_of_ssh(call, far_image, ssh, tmp_path, fake_program):
    argv = ("run", "mine.yaml", "--on", "far", "--image", far_image, "--detach", "--", "true")
    assert call(*argv)[0] == 0
    use = {"readings": 480, "gpu_percent": 87.4, "memory_MiB": 61240.0}
    write_files(tmp_path / "store/runs/mine-1", {"gpu-use.json": json.dumps(use)})
    fake_program("squeue", "echo '1  gpu RUNNING, 1 nodes, elapsed 0:01'")
    ssh.write_text(ssh.read_text().replace("\n", f"\necho >> {tmp_path}/calls\n", 1))
    status, out, _ = call("status", "1@far", "--json")
    assert (status, (tmp_path / "calls").read_text()) == (0, "\n")
    answer = json.loads(out)
    assert (answer["state"], answer["gpu_use"]) == ("running", use)
    assert "squeue" in call("status", "1@far")[2]


@pytest.mark.programs("rsync")
def test_api_sends_the_code_of_the_project_file(far_image, sbatch, tmp_path):
    Path("imgkit.toml").write_text('code = "."\n')
    Path("mine.yaml").write_text(RECIPE.replace("project: .", "project: ., editable: /workspace"))
    project = toml_file.read_file(Path("imgkit.toml").absolute())
    request = imgkit.JobRequest.of(command=("true",), image=far_image)
    imgkit.run("mine.yaml", origins.fill_from_file(request, project), on="far")
    [sent] = (tmp_path / "store/code").glob("*/workspace")
    assert (sent / "mine.yaml").exists()
    assert f"--reflink=auto {sent}/. " in (sbatch / "1").read_text()


@pytest.mark.usefixtures("far_image")
@pytest.mark.programs("mksquashfs", "unsquashfs")
def test_ignored_files_that_the_sent_image_has_are_named(call, tmp_path):
    root, squashfs = tmp_path / "root", tmp_path / "squashfs"
    code = tmp_path / "code"
    for folder in (root / "workspace", code):
        folder.mkdir(parents=True)
        (folder / "_c.so").touch()
    (code / ".gitignore").write_text("*.so\n")
    subprocess.run(["mksquashfs", root, squashfs, "-quiet", "-no-progress"], check=True)
    small_sif.write(tmp_path / "site.sif", squashfs, recorded=False)
    argv = ("run", str(tmp_path / "site.sif"), "--on", "far", "--code", str(code), "--detach", "--", "true")
    status, _, err = call(*argv)
    assert (status, "not sent: _c.so (git" in err) == (0, True), err
