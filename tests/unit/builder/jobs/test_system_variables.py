"""Variables of ``system.env``: each command of a job gets them, and the user's own win."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import stored_images
import yaml
from file_tree import write_program
from job_builder import MANIFEST, make_job, make_script, write_recipe

from imgkit_builder.base.progress import Silent
from imgkit_builder.jobs.runtimes import runtime_of
from imgkit_builder.jobs.systems.pods import PodFlags
from imgkit_builder.oci import manifest
from imgkit_builder.oci.manifest import MANIFEST_JSON
from imgkit_builder.sif import convert
from imgkit_builder.sif.conversion import Options
from imgkit_builder.sif.entries import Archive
from imgkit_entrypoints import system
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import SYSTEM_JSON, SystemFacts

TEXT = """it's "one" } \\ word ` of a recipe"""
SHOW = ("sh", "-c", 'printf "%s\\n" "$TEXT" "$FLAG" "$USERS" "$HF_HOME"')
SRUN = 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"'
SINGULARITY = """\
# A container that is none: as in a real one, the image's variables win over exported ones.
while [ "${1%.sif}" = "$1" ]; do shift; done
shift
TEXT='of the image' exec "$@"
"""


def on_site(folder: Path, scheduler: str = "slurm", **fields: Any) -> dict[str, Any]:
    """Return the arguments of a job on a site with variables. `fields` are values of its request."""
    values = {"TEXT": TEXT, "FLAG": "recipe", "USERS": "recipe", "HF_HOME": "$IMGKIT_JOB_DIR/hf"}
    values["NCCL_SOCKET_IFNAME"] = "hsn0"
    site: dict[str, Any] = {"scheduler": scheduler, "env": values}
    if scheduler == "slurm":
        site["partitions"] = {"other": {"interfaces": ["eth1"]}}
    text = json.dumps({"image": {"base": "ubuntu:24.04", "platform": "amd64"}, "system": site})
    request = {"directory": folder, "command": SHOW, "env": ("FLAG=flag",), **fields}
    return {"recipe": write_recipe(folder, text), **request}


@pytest.mark.parametrize("runtime", ["singularity", "pyxis", "host"])
def test_script_sets_what_the_user_does_not(tmp_path, runtime):
    script = make_script(**on_site(tmp_path, runtime=runtime)).text
    write_program(tmp_path / "srun", SRUN)
    write_program(tmp_path / "singularity", SINGULARITY)
    (tmp_path / "mine.sqsh").touch()
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "USERS": "mine"}
    result = subprocess.run(
        ["bash"], input=script, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.splitlines() == [TEXT, "flag", "mine", f"{tmp_path}/hf"], result.stderr


def test_docker_gets_what_the_user_does_not_set(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("USERS=mine\n")
    site = on_site(tmp_path, "standalone", runtime="docker", image="a:1", env_file=file)
    write_program(tmp_path / "docker", 'printf "%s\\n" "$@"')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    output = subprocess.run(
        make_script(**site).submit, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=60
    ).stdout
    rows = output.splitlines()
    values = {rows[number + 1] for number, row in enumerate(rows) if row == "--env"}
    assert values == {f"TEXT={TEXT}", "FLAG=flag", f"HF_HOME={tmp_path}/hf", "NCCL_SOCKET_IFNAME=hsn0"}


def test_dist_commands_read_the_variables_in_the_image(tmp_path):
    script = make_script(**on_site(tmp_path, command=("dist-run", "a.py"))).text
    assert "TEXT" not in script
    assert "HF_HOME" not in script


def test_shell_of_a_job_gets_the_variables(tmp_path):
    job = make_job(**on_site(tmp_path, command=("dist-run", "a.py")))
    line = runtime_of(job).shell_line(job)
    assert f"export IMGKIT_JOB_DIR={shlex.quote(str(tmp_path))} && " in line
    assert 'then export HF_HOME="$IMGKIT_JOB_DIR/hf"; fi && ' in line
    assert '"HF_HOME=$HF_HOME"' in line


@pytest.mark.programs("mksquashfs")
def test_shell_on_this_machine_can_have_them(call, fake_program, tmp_path, monkeypatch):
    facts = SystemFacts(env={"HF_HOME": "/recipe", "USERS": "recipe"})
    texts = {MANIFEST_JSON: manifest.to_json(MANIFEST), str(SYSTEM_JSON): system.to_json(facts)}
    files = []
    for name, text in texts.items():
        files.append((tarfile.TarInfo(name.lstrip("/")), text.encode()))
        files[-1][0].size = len(text)
    archive, sif = tmp_path / "x.tar", tmp_path / "x.sif"
    archive.write_bytes(stored_images.archive([files]))
    convert.convert(Archive(path=archive), sif, Options(test=False), Silent())
    program = fake_program("singularity", "echo singularity-ce version 4.1.0")
    monkeypatch.setenv("USERS", "mine")
    shared = call("shell", str(sif), "--host", "--dry-run")[1]
    assert shared == f"{program} exec --nv {sif} env HF_HOME=/recipe bash\n"
    assert "HF_HOME" not in call("shell", str(sif), "--dry-run")[1]


def test_interfaces_of_other_nodes_are_left_out(tmp_path):
    for queue in ("", "other"):
        job = make_job(**on_site(tmp_path, queue=queue))
        assert ("NCCL_SOCKET_IFNAME" in runtime_of(job).system_variables(job)) == (queue == "")


@pytest.fixture
def rcp(tmp_path: Path) -> Path:
    """A recipe whose pods have a variable that names another one."""
    return write_recipe(tmp_path, "extends: rcp\nsystem:\n  env:\n    HF_HOME: $SCRATCH/hf\n")


def test_pods_get_the_variables_of_their_system(rcp):
    program: dict[str, Any] = {"command": ("python", "a.py"), "image": "r/i:1", "env": ("HF_HOME=/mine",)}
    assert "-e NCCL_NSOCKS_PERTHREAD=8 " in make_script(rcp, **program).text
    kubeflow = make_script(rcp, PodFlags(format="pytorchjob"), **program).text
    text = json.dumps(yaml.safe_load(kubeflow))
    assert '{"name": "NCCL_NSOCKS_PERTHREAD", "value": "8"}' in text
    assert '{"name": "HF_HOME", "value": "/mine"}' in text


def test_pods_refuse_a_value_that_only_a_shell_replaces(rcp):
    with pytest.raises(UsageError) as caught:
        make_script(rcp, command=("python", "a.py"), image="r/i:1")
    assert str(caught.value) == (
        "mine.yaml:4: system.env sets HF_HOME=$SCRATCH/hf, and a pod replaces no variable in it\n"
        "  -> --env HF_HOME=VALUE"
    )
