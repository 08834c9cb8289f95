"""Inside the real .sif: read-only root, HOME unset, and host files that would end any other program."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from labkit import expect_failure, expect_success, public_folder, run

pytestmark = [pytest.mark.docker, pytest.mark.singularity]


@pytest.fixture(scope="module")
def hostile():
    """A folder of Python files; importing any of them ends the program."""
    folder = public_folder("hostile")
    (folder / "torch").mkdir()
    for name in ("json.py", "sitecustomize.py", "torch/__init__.py"):
        (folder / name).write_text(f"raise SystemExit('the wrong {name}')")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=["root", "user"])
def as_user(request):
    """Return the start of a command that chooses the user of the host."""
    if request.param == "user" and os.geteuid() == 0:
        return ("runuser", "-u", request.getfixturevalue("user"), "--")
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("only root runs it as root")
    return ()


def inside(sif, path, *args, as_user=(), options=()):
    """Run `args` in `sif` without HOME, in the folder `path`, which is on PYTHONPATH."""
    # HOME is unset inside: the runtime sets it by itself.
    shell = ("sh", "-c", 'unset HOME; cd "$PYTHONPATH"; exec "$@"', "sh")
    mounted = ("--bind", str(path), "--env", f"PYTHONPATH={path}", *options)
    command = (*as_user, "singularity", "exec", *mounted, sif, *shell, *args)
    return run(*command, folder="/")


def test_hello_connects_all_ranks(mn5_sif, hostile):
    result = expect_success(inside(mn5_sif, hostile, "dist-hello", "--device", "cpu", "--nproc", "2"))
    assert "all_reduce of ones: 2" in result.stdout
    assert len(re.findall(r": +\d  \S+ +cpu, 1 threads ", result.stdout)) == 2, result.stdout


def test_nothing_of_the_host_is_needed(mn5_sif, hostile, user):
    # Neither the host's environment and folders nor a /tmp: only /dev/shm can be written to.
    options = ("--containall", "--no-mount", "tmp")
    as_user = ("runuser", "-u", user, "--") if os.geteuid() == 0 else ()
    command = ("dist-hello", "--device", "cpu", "--nproc", "2")
    assert inside(mn5_sif, hostile, "touch", "/tmp/x", as_user=as_user, options=options).returncode == 1
    result = expect_success(inside(mn5_sif, hostile, *command, as_user=as_user, options=options))
    assert "all_reduce of ones: 2" in result.stdout


def test_found_facts_are_json(mn5_sif, hostile, as_user):
    result = expect_success(inside(mn5_sif, hostile, "dist-env", "--json", as_user=as_user))
    report = json.loads(result.stdout)
    assert report["host"]["arch"] == os.uname().machine
    assert report["host"]["cpus"] == len(os.sched_getaffinity(0))
    assert (report["system"]["scheduler"], report["system"]["node"]["gpus"]) == ("slurm", 4)
    assert (report["placement"]["scheduler"], report["placement"]["nnodes"]) == ("standalone", 1)


def test_doctor_examines_the_node(mn5_sif, hostile, as_user):
    result = inside(mn5_sif, hostile, "dist-doctor", "--json", "--device", "cpu", as_user=as_user)
    report = json.loads(result.stdout)
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert verdicts["image"] == "ok", result.stdout
    assert {"/dev/shm", "processors", "stack", "network"} <= verdicts.keys()
    failed = [name for name, verdict in verdicts.items() if verdict == "fail"]
    assert (report["passed"], result.returncode) == (not failed, 1 if failed else 0)
    assert "gpus" not in failed  # none was asked for


def test_doctor_runs_a_collective(mn5_sif, hostile):
    result = expect_success(inside(mn5_sif, hostile, "dist-doctor", "--device", "cpu", "--nproc", "2"))
    assert "verified on 1 node, 2 ranks" in result.stdout


def test_own_program_keeps_its_modules(mn5_sif, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "helper.py").write_text("said = 'mine'")
    (tmp_path / "main.py").write_text("import helper; print(helper.said)")
    result = expect_success(
        inside(mn5_sif, tmp_path, "dist-run", "--device", "cpu", "--nproc", "1", str(tmp_path / "main.py"))
    )
    assert "]: mine" in result.stdout
    assert f"PYTHONPATH: {tmp_path} contains another torch, which shadows that of the image" in result.stderr


def test_missing_gpus_are_named_by_the_doctor(mn5_sif, hostile):
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has GPUs")
    result = expect_failure(inside(mn5_sif, hostile, "dist-doctor"), 1)
    assert re.search(r"^fail +gpus +0 visible .*the recipe says 4 per node\n +-> .*--nv", result.stdout, re.M)
