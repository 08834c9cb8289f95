"""Folders of data in jobs of this machine: mounted from where they lie, and no part of the code.

Refusals are in cli/refusals/job_data.yaml.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from file_tree import write_files

from imgkit_builder.base.progress import Silent
from imgkit_builder.jobs import code, scaling, submit
from imgkit_builder.jobs.prepared import PreparedJob
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.request import JobRequest
from imgkit_builder.jobs.templates import render_template
from imgkit_builder.jobs.transport import Transport

SITE = ("-A", "bsc98", "--qos", "acc_debug", "--time", "10m", "--dry-run")


@pytest.fixture
def project(home: Path) -> Path:
    """The current folder, with code and data."""
    return write_files(home, {"train.py": "", "data/x/train": "1", "data/prepare.py": ""})


def read(folder: Path, *data: str) -> list[str]:
    return [
        *code.read_code_folder(JobRequest.of(code=folder, data=data), large=False, report=Silent()).tree.files
    ]


def test_local_folder_is_mounted_from_where_it_lies(call, project):
    (project / "imgkit.toml").write_text('recipe = "mn5"\n\ndata = ["data/x", "/gpfs/y:/data"]\n')
    status, out, err = call("run", *SITE, "-v", "--json", "--", "dist-hello")
    assert status == 0, err
    document = json.loads(out)
    text = document["script"].replace("\\\n", "")
    assert f"{project}/data/x:/workspace/data/x:ro" in text
    assert "/gpfs/y:/data:ro" in text
    rows = [row for row in document["values"] if row["name"] == "data"]
    assert [(row["value"], row["line"]) for row in rows] == [("data/x", 3), ("/gpfs/y:/data", 3)]


def test_code_has_an_empty_folder_in_place_of_the_data(project):
    assert read(project, "data/x", "/gpfs/y:/workspace/big/y", "/gpfs/z:/z") == [
        *("data", "data/prepare.py", "train.py", "data/x", "big", "big/y")
    ]


def dry_run(call: Any, project: Path, recipe: str, *options: str) -> str:
    """Return the script of a job with a model and a data set of the hub, neither of which is downloaded."""
    (project / "imgkit.toml").write_text(
        f'recipe = "{recipe}"\ncode = "."\ndata = ["hf://me/tiny@v1", "hf://datasets/letters"]\n'
    )
    status, out, err = call("run", *SITE, *options, "--", "python3", "train.py")
    assert status == 0, err
    return re.sub(r"\\\n *", "", out)


def test_model_of_the_hub_is_mounted_into_a_cache(call, project, monkeypatch):
    monkeypatch.setenv("HF_HOME", f"{project}/mine")
    text = dry_run(call, project, "mn5", "--env", "HF_HUB_OFFLINE=0")
    assert f"{project}/mine/imgkit/models--me--tiny/v1:/workspace/hf/hub/models--me--tiny:ro" in text
    assert f"{project}/mine/imgkit/datasets--letters/main:/workspace/hf/data/letters:ro" in text
    assert "HF_HOME=/workspace/hf HF_HUB_CACHE=/workspace/hf/hub HF_HUB_OFFLINE=0" in text


def test_program_without_a_container_finds_the_hub_in_its_copy(call, project):
    text = dry_run(call, project, "mn5", "--runtime", "host")
    assert 'export HF_HUB_CACHE="$IMGKIT_RUN_DIR/workspace/hf/hub"\nexport HF_HUB_OFFLINE=1\n' in text
    assert "hf/data/letters" in text


def test_code_has_the_places_of_the_hub_and_no_lock(project):
    (project / "hf.lock").write_text(f"hf://me/tiny {'0' * 40}\n")
    request = JobRequest.of(code=project, data=("hf://me/tiny", "hf://datasets/me/letters"))
    tree = code.read_code_folder(request, large=False, report=Silent()).tree
    folders = ("hf", "hf/hub", "hf/hub/models--me--tiny", "hf/data", "hf/data/me", "hf/data/me/letters")
    assert [name for name in tree.files if name.startswith("hf")] == [
        *folders,
        "hf/hub/datasets--me--letters",
    ]
    assert tree.files["hf/hub/datasets--me--letters"].link == "../data/me/letters/.hub"


def test_path_of_the_cluster_that_is_missing_is_named(call, project, fake_program):
    fake_program("sbatch", "exit 1")
    (project / "mn5.sif").touch()
    (project / "imgkit.toml").write_text('recipe = "mn5"\ndata = ["/no/such:/data"]\n')
    status, _, err = call("run", *SITE[:-1], "--detach", "--", "dist-hello")
    assert status == 2
    assert "imgkit: data: this machine has no /no/such\n  -> correct the path in imgkit.toml\n" in err


def prepare(project: Path, recipe: str, *command: str, **options: str) -> PreparedJob:
    """Return a job without a container that has code and data."""
    request = JobRequest.of(code=project, directory=project, data=("data/x",), runtime="host")
    request = request.changed(command=command, **options)
    return submit.prepare(recipe, request, code.read_code_folder(request, large=False, report=Silent()))


def test_sizes_of_a_scaling_share_one_list_of_the_data(project):
    request = JobRequest.of(command=("true",), data=("data/x",), account="a", qos="acc_debug", time="5m")
    jobs = scaling.plan_scaling(
        "mn5", request, (1, 2), remote=Remote(name="far", address="far", folder="/far")
    )
    ((first,), (second,)) = (job.data for job in jobs)
    assert first is second


def test_program_without_a_container_reads_the_data_by_a_link(project):
    ready = submit.make_ready(prepare(project, "cpu", "cat", "data/x/train"), Transport(), Silent())
    printed = subprocess.run(ready.script.submit, check=True, capture_output=True, text=True).stdout
    assert printed == "1\n"
    assert Path(ready.job.workspace, "data/x").readlink() == project / "data/x"


def test_script_links_the_data_into_the_copy_of_the_code(project, tmp_path):
    prepared = prepare(project, "mn5", "true", account="a", qos="acc_debug", time="5m")
    assert prepared.code is not None
    prepared.code.tree.write(Path(prepared.job.container.code_folder))
    run_folder = tmp_path / "my run"
    run_folder.mkdir()
    script = f"set -e\ndir={shlex.quote(str(run_folder))}\n{render_template(prepared.job, 'workspace.sh.j2')}"
    for _ in range(2):  # a requeue keeps the copy
        subprocess.run(["bash", "-c", script], check=True)
    assert (run_folder / "workspace/data/x/train").read_text() == "1\n"
