"""``imgkit run --image`` with images that imgkit did not build, on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import site_images
from labkit import IMGKIT, ROOT, SlurmSite, expect_failure, expect_success, run, slurm_marks, soak, split_line
from remotekit import FarSite, far_host

from imgkit_entrypoints import __version__

ONE = ("--device", "cpu", "--nproc", "1")
COUNT = ("dist-run", *ONE, "--grace", "20", "save_and_resume.py")
SITE = ("-A", "bsc98", "--qos", "acc_debug", "--time", "10m", "--nodes", "2")
CHOICES = {
    "debian": (),
    "venv": ("--python", f"/{site_images.VENV}/bin/python"),
    "conda": ("--activate", "$WITH_CONDA"),
}
"""What chooses the Python of each image."""

pytestmark = [*slurm_marks, pytest.mark.xdist_group("any-image")]


@dataclass(frozen=True, kw_only=True)
class Site(SlurmSite):
    """A login node and two nodes, in the soak three."""

    def imgkit(self, *args):
        env = {name: str(self.state / name) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
        env["BASH_FUNC_module%%"] = "() { :; }"
        return self("exec", "login", "--cwd", self.folder, "--", *IMGKIT, *split_line(*args), env=env)

    def submit(self, name, *args):
        image = name if "." in name else f"{name}.sif"
        chosen = CHOICES[name.partition(".")[0]]
        options = ("mn5", *SITE, "--image", image, *chosen, *args)
        return expect_success(self.imgkit("run --detach", *options)).stdout.strip()

    def record(self, job):
        file = self.state / f"XDG_STATE_HOME/imgkit/jobs/{job}.json"
        return str(json.loads(file.read_text())["bound_entry_points"])


@pytest.fixture(scope="module")
def site(standin, request):
    if os.geteuid() != 0 or shutil.which("mksquashfs") is None:
        pytest.skip("images with other Pythons are made by root with mksquashfs (squashfs-tools)")
    names = tuple(CHOICES) if request.config.getoption("--soak") else ("debian",)
    cluster = Site(
        state=Path(f"/tmp/imgkit-any-image-{os.getpid()}"),
        folder=Path(f"/tmp/imgkit-any-jobs-{os.getpid()}"),
    )
    cluster.folder.mkdir(mode=0o755)
    try:
        for _ in zip(names, site_images.write(standin, cluster.folder), strict=False):
            pass
        shutil.copy(ROOT / "examples/save_and_resume.py", cluster.folder)
        cluster.up(3 if request.config.getoption("--soak") else 2, "--cpus", "80")
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(cluster.folder)


@pytest.mark.parametrize(
    "name",
    ["debian", *soak("venv", "conda", "venv.sqsh")],
)
def test_image_of_a_site_runs_is_stopped_and_resumes(site, name):
    job = site.submit(name, "--", *COUNT, "60")
    site.wait_for_text(job, "starts at 0")
    site("scancel --batch --signal=USR1", job)  # as --signal=B:USR1@120 does
    site.wait_for_text(job, "requeued")
    saved = re.search(r"state saved at step (\d+)", site.output_of(job))
    assert saved, site.output_of(job)
    site.start_again(job)
    output = site.wait_for_end(job)
    assert f"starts at {saved[1]}\n" in output
    assert "finished at 60" in output, output
    assert site.record(job) == __version__
    assert (site.folder / f"runs/mn5-{job}").is_dir()


@pytest.mark.parametrize("name", ["debian.sqsh", *soak("debian", "venv")])
def test_node_without_a_mounted_folder_is_named(site, name):
    mounted = Path("/run/imgkit-only-node1")  # each node has a /run of its own
    expect_success(site("exec node1 -- mkdir -p", mounted))
    job = site.submit(name, "--bind", mounted, "--", "dist-hello", *ONE)
    output = site.wait_for_end(job)
    assert f"ls: cannot access '{mounted}': No such file or directory" in output, output
    assert re.findall(r"srun: error: (\w+): task \d: Exited with exit code 2", output) == ["node2"], output
    assert "imgkit: a node lacks what the job mounts (--bind" in output


PYXIS = """\
image: {base: "imgkit.local/standin:24.03", platform: amd64}
system: {scheduler: slurm, runtime: {kind: pyxis}, node: {gpus: 0, cpus: 2}}
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("singularity", marks=pytest.mark.singularity),
        *soak("apptainer", "enroot"),
    ],
)
def test_sqsh_for_pyxis_is_looked_into_where_it_is_submitted(site, program, tmp_path):
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    (site.folder / "pyxis.yaml").write_text(PYXIS)
    starter = str(shutil.which(program))
    # Programs but no other starter; not those of this PATH count in the container.
    programs = [*Path("/usr/bin").iterdir(), *Path(starter).parent.glob(f"{program}*")]
    starters = {"apptainer", "singularity", "enroot"} - {program}
    for path in {path.name: path for path in programs if path.name not in starters}.values():
        (tmp_path / path.name).symlink_to(path)
    env = {"PATH": str(tmp_path), "XDG_CACHE_HOME": f"{tmp_path}/cache", "USER": "root"}
    argv = (*IMGKIT, "run", "pyxis.yaml", "--dry-run", "--time", "5m", "--image", "debian.sqsh")
    result = expect_success(run(*argv, "--", "dist-hello", folder=site.folder, env=env))
    assert f"/imgkit_entrypoints:/{site_images.SYSTEM}/imgkit_entrypoints:ro," in result.stdout
    assert "/usr/bin/python3 -I -m imgkit_entrypoints dist-hello" in result.stdout
    expect_failure(
        run(*argv, "--python", "/opt/none", "--", "dist-hello", folder=site.folder, env=env),
        2,
        "found no Python in it: no program /opt/none",
    )
    (tmp_path / program).unlink()
    expect_failure(
        run(*argv, "--python", "python3", "--", "dist-hello", folder=site.folder, env=env),
        3,
        "nothing here starts a .sqsh",
    )


def test_image_that_changed_after_the_submission_is_not_started(site):
    job = site.submit("debian", "--option=--hold", "--", "dist-hello", *ONE)
    image = site.folder / "debian.sif"
    with image.open("ab") as stream:
        stream.write(b"another")
    try:
        site("scontrol release", job)
        output = site.wait_for_end(job)
    finally:
        os.truncate(image, image.stat().st_size - len(b"another"))
    assert f"imgkit: {image} has changed since its job was submitted, or this node lacks it" in output, output
    assert "dist-hello" not in output


RECIPE = """\
image: {base: "imgkit.local/standin:24.03", platform: amd64}
system: {scheduler: slurm, runtime: {kind: singularity, command: singularity}, node: {gpus: 0, cpus: 2}}
"""


@pytest.fixture(scope="module")
def far(site):
    folder = Path(f"/tmp/imgkit-any-far-{os.getpid()}")
    with far_host(folder) as host:
        far_site = FarSite(far=host, cluster=site, folder=folder / "here", store=folder / "store")
        far_site.add_remote(RECIPE)
        shutil.copy(ROOT / "examples/save_and_resume.py", far_site.folder)
        yield far_site


@pytest.mark.soak
@pytest.mark.sshd
def test_image_that_a_remote_has_runs_without_a_build(site, far):
    image = site.folder / "conda.sif"
    args = ("run", "--on", "far", "--image", image, "--time", "5m", "--nodes", "2", "--code", ".")
    count = ("dist-run", *ONE, "/workspace/save_and_resume.py", "5")
    result = expect_success(far.imgkit(*args, *CHOICES["conda"], "--", *count))
    assert "finished at 5" in result.stdout
    assert "images" not in result.stderr
    assert list((far.store / "images").iterdir()) == []
    expect_failure(far.imgkit(*args, "--", *count), 2, "found no Python in it: no program python3")
    absent = far.imgkit("run --on far --image /none.sif --time 5m --", *count)
    assert "/none.sif does not exist or cannot be read on the remote" in absent.stderr


@pytest.mark.soak
@pytest.mark.sshd
def test_sqsh_that_a_remote_has_runs(site, far):
    args = ("run", "--on", "far", "--image", site.folder / "venv.sqsh", *CHOICES["venv"], "--time", "5m")
    result = expect_success(far.imgkit(*args, "--nodes", "2", "--", "dist-hello", *ONE))
    assert "all_reduce of ones: 2" in result.stdout
    expect_failure(
        far.imgkit("run", site.folder / "venv.sqsh", "--on", "far", "--", "dist-hello"),
        2,
        "imgkit run sends a .sif, and this is a .sqsh",
        "--image PATH",
    )


@pytest.mark.soak
@pytest.mark.sshd
def test_image_that_is_here_is_sent_once(site, far):
    args = ("run", site.folder / "debian.sif", "--on", "far", "--time", "5m", "--", "dist-hello", *ONE)
    first = expect_success(far.imgkit(*args))
    assert "all_reduce of ones: 1" in first.stdout
    second = far.imgkit(*args)
    assert "to send: nothing; far has the image" in second.stderr, second.stderr
    assert "all_reduce of ones: 1" in second.stdout
    assert len(list((far.store / "images").iterdir())) == 1
