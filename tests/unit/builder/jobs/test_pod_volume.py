"""Jobs in pods whose files a remote stores.

The ``ssh`` is a fake that runs its script on this machine, and the ``runai`` is a fake, too. rsync and the
script with which a pod starts are real; pods have the volume by the same path as this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from file_tree import FakeProgram, write_files

from imgkit_builder.jobs import records
from imgkit_builder.jobs.remote import config, store
from imgkit_builder.jobs.remote.config import Remote
from imgkit_entrypoints.errors import UsageError

pytestmark = [pytest.mark.programs("rsync"), pytest.mark.usefixtures("home")]
PROGRAM = """\
echo more >> "it's a/b c.txt"
echo "$PWD" >> place
cat data/x/table >> seen
"""
RUN = ("run", "--on", "mlo", "--image", "r/x:1", "--trust-folder")
COMMAND = ("--", "sh", "train.sh")


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_program: FakeProgram) -> Path:
    """The volume, on which a remote stores; the current folder has a project with code and data."""
    fake_program("ssh", 'for line; do :; done\nexec sh -c "$line"')
    root = tmp_path / "volume"
    root.mkdir()
    config.add_remote(
        Remote(
            name="mlo",
            address="far",
            folder=f"{root}/homes/me",
            recipe="mlo",
            keep_s=0,
            pvc=f"scratch:{root}",
            volume=str(root),
        )
    )
    project = write_files(
        tmp_path / "my code", {"train.sh": PROGRAM, "it's a/b c.txt": "text", "data/x/table": "1 2 3"}
    )
    (project / "imgkit.toml").write_text('code = "."\ndata = ["data/x"]\n')
    monkeypatch.chdir(project)
    return root


def submit(call: Any, *options: str) -> Path:
    """Submit a job by the command line, and return its run folder."""
    code, out, err = call(*RUN, "--gpus", "0", "--detach", *options, *COMMAND)
    assert code in (0, None), f"{out}\n{err}"
    return records.find_record("mlo").job.run_folder


def start_pod(argv: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start the command of a pod, of whose image HOME cannot be written to."""
    return subprocess.Popen(argv, cwd=folder, env={**os.environ, "HOME": "/nowhere"}, text=True)


def pod_argv(called: Path) -> list[str]:
    """Return the command of the pods in what the fake client was told."""
    words = called.read_text().splitlines()
    return words[words.index("--") + 1 :]


def test_pods_start_in_one_copy_of_the_code(call, volume, first_runai):
    run_folder = submit(call)
    argv = pod_argv(first_runai)
    assert argv == ["bash", f"{run_folder}/start.sh", "sh", "train.sh"]
    assert (run_folder.stat().st_mode & 0o777, run_folder.parent) == (0o700, volume / "homes/me/runs")
    words = first_runai.read_text().splitlines()
    assert words[words.index("--run-as-uid") + 1] == str(os.getuid())
    assert words[words.index("--working-dir") + 1] == str(run_folder)
    assert not any(word.startswith("IMGKIT_CODE=") for word in words), "dist-run would look for a mount"
    pods = [start_pod(argv, run_folder) for _ in range(2)]
    assert [pod.wait(timeout=60) for pod in pods] == [0, 0]
    workspace = run_folder / "workspace"
    assert (workspace / "place").read_text() == f"{workspace}\n" * 2
    assert (workspace / "seen").read_text() == "1 2 3\n" * 2
    assert list(run_folder.glob(".imgkit-workspace.*")) == []
    (stored,) = (volume / "homes/me/code").glob("*/workspace/it's a/b c.txt")
    assert stored.read_text() == "text\n"


def test_edit_reaches_the_next_run_alone(call, volume, first_runai):
    first = submit(call)
    argv = pod_argv(first_runai)
    Path("train.sh").write_text("echo edited > place\n")
    second = submit(call)
    assert start_pod(argv, first).wait(timeout=60) == 0
    assert start_pod(pod_argv(first_runai), second).wait(timeout=60) == 0
    assert (second / "workspace/place").read_text() == "edited\n"
    assert (first / "workspace/place").read_text() == f"{first}/workspace\n"


def test_files_of_the_run_are_fetched(call, volume, first_runai):
    run_folder = submit(call)
    (run_folder / "metrics.jsonl").write_text("{}\n")
    assert call("fetch", "mlo")[0] in (0, None)
    assert Path("runs", run_folder.name, "metrics.jsonl").read_text() == "{}\n"
    assert call("cancel", "mlo")[0] in (0, None)
    assert first_runai.read_text().splitlines() == ["delete", "job", "mlo"]
    assert json.loads(call("runs", "--json")[1])["runs"][0]["remote"] == "mlo"


def test_resumed_pods_go_on_in_the_run_folder(call, volume, first_runai):
    run_folder = submit(call)
    pod = start_pod(pod_argv(first_runai), run_folder)
    assert pod.wait(timeout=60) == 0
    (run_folder / "stop").touch()
    Path("train.sh").write_text(f"{PROGRAM}echo edited\n")
    code, _, err = call("resume", "mlo", "--detach")
    assert (code, err) == (
        2,
        "imgkit: ID: mlo may go on: the commands of runai do not report whether it has ended\n"
        "  -> delete it first: imgkit cancel mlo, then imgkit resume mlo\n",
    )
    before = (run_folder / "workspace/train.sh").read_text()
    assert "edited" not in before
    call("cancel", "mlo")
    assert call("resume", "mlo", "--detach")[0] in (0, None)
    assert [run_folder] == [*run_folder.parent.iterdir()]
    assert not (run_folder / "stop").exists()
    pod = start_pod(pod_argv(first_runai), run_folder)
    assert pod.wait(timeout=60) == 0
    assert (run_folder / "workspace/place").read_text() == f"{run_folder}/workspace\n" * 2
    assert (run_folder / "workspace/train.sh").read_text() == f"{PROGRAM}echo edited\n"
    assert records.find_record("mlo").job.run_folder == run_folder


def test_pods_of_a_deleted_job_go_on_with_the_code_of_the_run(call, volume, first_runai):
    run_folder = submit(call)
    argv = pod_argv(first_runai)
    Path("train.sh").write_text("exit 3\n")
    client = first_runai.parent / "bin/runai"
    forgotten = 'case "$*" in describe*) echo "job mlo not found" >&2; exit 1;;'
    client.write_text(client.read_text().replace('case "$*" in', forgotten, 1))
    assert call("resume", "mlo", "--detach", "--same-code", "--gpus", "1")[0] in (0, None)
    assert "--gpu\n1\n" in first_runai.read_text()
    assert pod_argv(first_runai) == argv
    pod = start_pod(argv, run_folder)
    assert pod.wait(timeout=60) == 0
    assert (run_folder / "workspace/train.sh").read_text() != Path("train.sh").read_text()


def test_code_and_data_of_a_run_are_in_use(call, volume, first_runai):
    submit(call)
    for folder in (*volume.glob("homes/me/code/*"), *volume.glob("homes/me/data/*")):
        os.utime(folder, (0, 0))
    assert "nothing is unused; 2 in use" in call("remote", "gc", "mlo", "--days", "1")[1]


def test_manifest_has_the_ids_of_the_user(call, volume, fake_program):
    name = "pytorchjob.kubeflow.org/mlo"
    kubectl = fake_program("kubectl", f'cat > "$(dirname "$0")/manifest"; echo {name} created')
    call(*RUN, "--detach", "--format", "pytorchjob", *COMMAND)
    roles = yaml.safe_load((kubectl.parent / "manifest").read_text())["spec"]["pytorchReplicaSpecs"]
    spec = roles["Master"]["template"]["spec"]
    assert spec["securityContext"] == {"runAsUser": os.getuid(), "runAsGroup": os.getgid()}
    (container,) = spec["containers"]
    assert container["args"] == ["bash", f"{container['workingDir']}/start.sh", "sh", "train.sh"]


MLO = Remote(name="mlo", address="me@far", pvc="mlo-scratch:/mloscratch")


@pytest.mark.parametrize(
    ("home", "volume_root", "path"),
    [("/mnt/mlo/homes/me", "/mnt/mlo", "/mloscratch/homes/me"), ("/mnt/a b", "/mnt/a b", "/mloscratch")],
)
def test_path_on_the_remote_becomes_that_in_pods(home, volume_root, path):
    assert store.pod_folder(MLO, home, volume_root) == path


ADD = "imgkit remote add mlo me@far:/DIR --pvc mlo-scratch:/mloscratch --replace"


@pytest.mark.parametrize(
    ("home", "volume_root", "message"),
    [
        (
            "/home/me/imgkit",
            "/",
            "mlo: /home/me/imgkit is on the root file system of me@far, and not on a volume of pods\n"
            f"  -> {ADD}; if it is on the volume mlo-scratch: --volume /PATH, that of the volume there",
        ),
        (
            "/mnt/mlo/scratch2/me",
            "/mnt/mlo/scratch",
            "mlo: /mnt/mlo/scratch2/me is not below /mnt/mlo/scratch, where me@far has the volume "
            f"mlo-scratch\n  -> {ADD}",
        ),
    ],
)
def test_folder_outside_of_the_volume_is_refused(home, volume_root, message):
    with pytest.raises(UsageError) as caught:
        store.pod_folder(MLO, home, volume_root)
    assert str(caught.value) == message


def test_root_of_the_volume_that_is_missing_is_refused(call, volume, first_runai):
    remote = config.get_remote("mlo")
    text = config.remotes_file().read_text().replace(f'volume = "{volume}"', 'volume = "/nowhere"')
    config.remotes_file().write_text(text)
    code, _, err = call(*RUN, *COMMAND)
    assert code == 2
    assert err.splitlines()[-2:] == [
        "imgkit: mlo: far has no folder /nowhere, the root of the volume scratch",
        f"  -> imgkit remote add mlo far:/DIR --pvc {remote.pvc} --replace --volume /PATH",
    ]
    assert not first_runai.exists()


def test_doctor_names_the_path_in_pods(call, volume):
    code, out, _ = call("doctor", "--on", "mlo")
    assert code in (0, None)
    assert f"{volume}/homes/me in pods, for the user and group {os.getuid()}:{os.getgid()}" in out
    assert "scheduler" not in out
