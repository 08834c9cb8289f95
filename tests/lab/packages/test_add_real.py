"""``imgkit add`` in a real image, and its packages in jobs of an ordinary user on a real Slurm."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import (
    IMGKIT,
    SlurmSite,
    expect_failure,
    expect_success,
    imgkit,
    imgkit_as,
    imgkit_json,
    public_folder,
    run,
    slurm_marks,
    small_disk,
    split_line,
    until,
)
from package_index import write_links, write_wheel
from remotekit import FarSite, far_host

SITE = ("-A", "bsc98", "--qos", "acc_debug", "--time", "10m", "--nodes", "2")
ONE = ("--device", "cpu", "--nproc", "1")
PROGRAM = """\
import os, shutil, lib, torch
seen = os.environ["RANK"], lib.__file__, str(lib.VALUE), str(shutil.which("lib-program"))
print(f"rank {' '.join(seen)}", flush=True)
"""
LIB = "VALUE = {!r}\ndef main(): print('program', VALUE)\n"
RECIPE = """\
image: {base: "imgkit.local/standin:24.03", platform: amd64}
system: {scheduler: slurm, runtime: {kind: singularity}, node: {gpus: 0, cpus: 2}}
"""
PORT = "8731"
INDEX = {"PIP_INDEX_URL": f"http://localhost:{PORT}/simple", "PIP_TRUSTED_HOST": "localhost"}
PROJECT_JOB = ("--image", "pytorch.sif", "--", "dist-run", *ONE, "train.py")

pytestmark = [*slurm_marks, pytest.mark.xdist_group("add")]


def add_program(wheel):
    """Give a wheel a program."""
    info = "-".join(wheel.name.split("-")[:2])
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(f"{info}.dist-info/entry_points.txt", "[console_scripts]\nlib-program = lib:main\n")


@pytest.fixture(scope="module")
def folder(standin):
    """A folder that every user can enter and write to, with an image and wheels for it."""
    folder = public_folder("add")
    wheels = folder / "wheels"
    wheels.mkdir()
    for version in ("1.0", "2.0"):
        add_program(write_wheel(wheels, "lib", version, code=LIB.format(version), requires=["torch>=2"]))
    write_wheel(wheels, "stale", "1.0", requires=["torch<2"])
    foreign = write_wheel(wheels, "foreign", "1.0")
    foreign.rename(foreign.with_name("foreign-1.0-cp311-cp311-manylinux_2_17_aarch64.whl"))
    (folder / "train.py").write_text(PROGRAM)
    try:
        imgkit_json("sif", standin, "--no-test", "-o", folder / "pytorch.sif")
        yield folder
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True, kw_only=True)
class Site(SlurmSite):
    """A login node and two nodes, for the jobs of an ordinary user."""

    def imgkit(self, *args):
        home = {"HOME": str(self.state / "home/researcher"), "USER": "researcher", "SHELL": "/bin/bash"}
        as_user = self.argv("exec", "--user", "login", "--cwd", self.folder, "--")
        argv = (
            *imgkit_as(as_user, {**home, "BASH_FUNC_module%%": "() { :; }", **INDEX}),
            *map(str, split_line(*args)),
        )
        return run(*argv, folder="/")

    def run_to_end(self, *args):
        job = expect_success(self.imgkit("run --detach mn5", *SITE, *args)).stdout.strip()
        return self.wait_for_end(job)


@pytest.fixture(scope="module")
def site(folder):
    cluster = Site(state=Path(f"/tmp/imgkit-added-{os.getpid()}"), folder=folder)
    try:
        cluster.up(2, "--cpus", "80")
        shutil.chown(folder, (cluster.state / "home/researcher").stat().st_uid)
        yield cluster
    finally:
        cluster.down()


@contextlib.contextmanager
def index_server(site, folder):
    """Serve `folder` on the login node."""
    argv = site.argv("exec", "login", "--", sys.executable, "-m", "http.server", "--directory", folder, PORT)
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        listens = ("exec", "login", "--", "grep", "-q", f":{int(PORT):04X} .* 0A ", "/proc/net/tcp")
        try:
            until(lambda: site(*listens).returncode == 0)
            yield
        finally:
            server.terminate()


def test_packages_come_first_on_two_nodes(site, folder):
    image = ("--image", "pytorch.sif")
    add = ("add", "lib", *image, "--wheels", "wheels", "-o", "extra.sqsh")
    expect_success(site.imgkit(*add))
    text = site.run_to_end(*image, "--packages", "extra.sqsh", "--", "dist-run", *ONE, "train.py")
    path = "/run/imgkit/packages/1"
    for rank in (0, 1):
        assert f"rank {rank} {path}/lib.py 2.0 {path}/bin/lib-program" in text, text
    text = site.run_to_end(*image, "--packages", "extra.sqsh", "--", "lib-program")
    assert text.count("program 2.0") == 2, text
    assert (folder / "extra.sqsh").stat().st_uid != 0


def test_packages_of_a_project_are_made_when_they_change(site, folder):
    """The index is on the login node, and a variable of the user names it."""
    write_links(folder / "wheels", sorted((folder / "wheels").glob("lib-*.whl")))
    (folder / "simple").mkdir()
    (folder / "simple/lib").symlink_to(folder / "wheels")
    project = folder / "imgkit.toml"
    with index_server(site, folder):
        try:
            for version in ("1.0", "2.0"):
                project.write_text(f'recipe = "mn5"\npackages = ["lib=={version}"]\n')
                job = expect_success(site.imgkit("run --detach", *SITE, *PROJECT_JOB)).stdout.strip()
                text = site.wait_for_end(job)
                assert f"rank 1 /run/imgkit/packages/1/lib.py {version} " in text, text
            again = expect_success(site.imgkit("run --detach", *SITE, *PROJECT_JOB))
            assert "pip in pytorch.sif" not in again.stderr
            assert len(list(folder.glob("pytorch+*.sqsh"))) == 2
            site.wait_for_end(again.stdout.strip())
        finally:
            project.unlink()


@pytest.fixture(scope="module")
def far(site):
    """A person's folder here, and the login node as the ordinary user."""
    folder = Path(f"/tmp/imgkit-add-far-{os.getpid()}")
    with far_host(folder) as host:
        store = site.state / "home/researcher/store"
        far_site = FarSite(far=host, cluster=site, folder=folder / "here", store=store)
        far_site.add_remote(RECIPE, user="researcher")
        (far_site.folder / "train.py").write_text(PROGRAM)
        (far_site.folder / "pytorch.sif").symlink_to(site.folder / "pytorch.sif")
        yield far_site


@pytest.mark.sshd
def test_packages_stay_beside_their_image_on_a_remote(site, folder, far):
    wheel = f"http://localhost:{PORT}/wheels/lib-2.0-py3-none-any.whl"
    (far.folder / "imgkit.toml").write_text(f'code = "."\npackages = ["lib @ {wheel}"]\n')
    job = ("run", "pytorch.sif", "--on", "far", "--time", "5m", "--nodes", "2")
    command = ("--", "dist-run", *ONE, "train.py")
    with index_server(site, folder):
        first = expect_success(far.imgkit(*job, *command))
        assert "rank 1 /run/imgkit/packages/1/lib.py 2.0" in first.stdout
    second = expect_success(far.imgkit(*job, *command))
    assert "pip in" not in second.stderr
    sent = expect_success(far.imgkit(*job, "--packages", add_here(folder), *command))
    assert "to send: packages: " in sent.stderr
    assert "rank 0 /run/imgkit/packages/1/lib.py 1.0" in sent.stdout
    (image,) = (far.store / "images").glob("*-*")
    assert len(list(image.glob("*.sqsh"))) == 2
    assert list(image.glob(".packages*")) == []


@pytest.mark.sshd
def test_wheels_here_become_packages_on_a_remote(folder, far):
    """The login node needs no network, and the image is sent to nobody."""
    (far.folder / "imgkit.toml").unlink(missing_ok=True)
    (far.folder / "requirements.txt").write_text("-r base.txt\n")
    (far.folder / "base.txt").write_text("lib\n")
    target = far.store.with_name("extra.sqsh")
    add = ("add", "--on", "far", "--image", folder / "pytorch.sif", "-o", target)
    added = expect_success(far.imgkit(*add, "-r", "requirements.txt", "--wheels", folder / "wheels"))
    assert f"next:  imgkit run ... --on far --packages {target}" in added.stdout
    assert target.stat().st_uid != 0
    assert [path.name for path in target.parent.glob(".packages*")] == []
    job = ("run", "pytorch.sif", "--on", "far", "--time", "5m", "--packages", target)
    done = expect_success(far.imgkit(*job, "--code", ".", "--", "dist-run", *ONE, "train.py"))
    assert "rank 0 /run/imgkit/packages/1/lib.py 2.0" in done.stdout
    refused = far.imgkit(*add, "stale", "--wheels", folder / "wheels")
    assert "the file exists and holds -r requirements.txt" in refused.stderr


@pytest.mark.sshd
def test_package_that_a_remote_cannot_install_is_refused(site, far):
    (far.folder / "imgkit.toml").write_text('packages = ["torch<2"]\n')
    expect_failure(
        far.imgkit("run pytorch.sif --on far --time 5m -- true"),
        2,
        "torch<2 is asked for, and the image has torch 2.",
    )
    assert list(far.store.glob("images/*/.packages*")) == []


def image_options(folder):
    return ("--image", folder / "pytorch.sif", "--wheels", folder / "wheels")


def add_here(folder):
    """Return a file with lib 1.0, made on this machine."""
    target = folder / "here.sqsh"
    expect_success(imgkit("add lib==1.0", *image_options(folder), "-o", target))
    return target


def refused(folder, *args, code=2):
    """Return the message of ``imgkit add``, which must leave nothing behind."""
    before = sorted(folder.rglob("*"))
    result = expect_failure(imgkit("add", *args, *image_options(folder)), code)
    assert sorted(folder.rglob("*")) == before
    return result.stderr


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("stale", "stale 1.0 needs torch<2, and the image has torch 2."),
        ("nothing-like-it", "there is no nothing-like-it for Python 3"),
        ("foreign", f"on {platform.machine()}"),  # a wheel for another architecture
    ],
)
def test_package_that_does_not_fit_is_refused(folder, package, message):
    assert message in refused(folder, package)


@pytest.mark.qemu
def test_pip_of_an_arm64_image_runs_under_qemu(standin_arm64_notorch, tmp_path):
    write_wheel(tmp_path, "plain", "1.0")
    image = tmp_path / "arm.sif"
    imgkit_json("sif", standin_arm64_notorch, "--no-test", "-o", image)
    added = imgkit_json("add plain --image", image, "--wheels", tmp_path)
    assert added["record"]["arch"] == "arm64"
    assert [package["name"] for package in added["record"]["packages"]] == ["plain"]


def test_image_without_pip_is_refused(folder):
    hidden = {"SINGULARITY_BIND": "/var/empty:/usr/lib/python3/dist-packages/pip"}
    Path("/var/empty").mkdir(exist_ok=True)
    result = imgkit("add lib --image", folder / "pytorch.sif", env=hidden)
    assert "the image has no pip" in result.stderr


def test_folder_of_others_is_refused(folder, user):
    (folder / "closed").mkdir(mode=0o755)
    as_user = imgkit_as(("runuser", "-u", user, "--"), {"HOME": "/nonexistent"})
    target = folder / "closed/x.sqsh"
    result = run(*as_user, "add", "lib", "--image", folder / "pytorch.sif", "-o", target, folder="/")
    assert f"you may not write in {folder}/closed" in result.stderr
    assert list((folder / "closed").iterdir()) == []


def test_full_disk_leaves_nothing(folder, tmp_path):
    with small_disk(tmp_path / "disk", 40) as disk:
        message = refused(folder, "lib", "-o", disk / "x.sqsh", code=4)
        assert f"the disk of {disk} is full" in message
        assert list(disk.iterdir()) == []


def test_second_process_is_refused_and_a_killed_one_mended(folder, tmp_path):
    target = tmp_path / "x.sqsh"
    argv = [*IMGKIT, "add", "lib", *image_options(folder), "-o", target]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as first:
        until(lambda: any(tmp_path.glob(".packages.*/*/tmp")))
        assert "another imgkit process is writing this file" in run(*argv).stderr
        first.send_signal(signal.SIGKILL)
    assert not target.exists()
    expect_success(run(*argv))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.sqsh"]
