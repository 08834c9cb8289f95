"""``imgkit run --image`` with images that imgkit did not build, on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import site_images
from labkit import IMGKIT, ROOT, Cluster, Done, run, slurm_marks, until
from remotekit import FarSite, far_host, login_node

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
class Site(Cluster):
    """A login node, two nodes, in the soak three, and the folder in which the jobs run."""

    folder: Path

    def imgkit(self, *words: object) -> Done:
        env = {name: str(self.state / name) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
        env["BASH_FUNC_module%%"] = "() { :; }"
        return self("exec", "login", "--cwd", self.folder, "--", *IMGKIT, *words, env=env)

    def submit(self, name: str, *words: object) -> str:
        image = name if "." in name else f"{name}.sif"
        chosen = CHOICES[name.partition(".")[0]]
        done = self.imgkit("run", "--detach", "mn5", *SITE, "--image", image, *chosen, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def told(self, job: str) -> str:
        output = self.folder / f"mn5-{job}.out"
        return output.read_text() if output.exists() else ""

    def ended(self, job: str) -> str:
        self.until(lambda: not self("squeue", "--noheader", f"--jobs={job}").stdout.strip(), job)
        return self.told(job)

    def until(self, condition: Callable[[], bool], job: str) -> None:
        until(condition, describe=lambda: self.told(job))

    def record(self, job: str) -> str:
        file = self.state / f"XDG_STATE_HOME/imgkit/jobs/{job}.json"
        return str(json.loads(file.read_text())["bound_entry_points"])


@pytest.fixture(scope="module")
def site(standin: str, request: pytest.FixtureRequest) -> Iterator[Site]:
    if os.geteuid() != 0 or shutil.which("mksquashfs") is None:
        pytest.skip("images with other Pythons are made by root with mksquashfs (squashfs-tools)")
    names = tuple(CHOICES) if request.config.getoption("--soak") else ("debian",)
    made = Site(
        state=Path(f"/tmp/imgkit-any-image-{os.getpid()}"),
        folder=Path(f"/tmp/imgkit-any-jobs-{os.getpid()}"),
    )
    made.folder.mkdir(mode=0o755)
    try:
        for _ in zip(names, site_images.write(standin, made.folder), strict=False):
            pass
        shutil.copy(ROOT / "examples/save_and_resume.py", made.folder)
        made.up(3 if request.config.getoption("--soak") else 2, "--cpus", "80")
        yield made
    finally:
        made.down()
        shutil.rmtree(made.folder)


@pytest.mark.parametrize(
    "name",
    ["debian", *(pytest.param(name, marks=pytest.mark.soak) for name in ("venv", "conda", "venv.sqsh"))],
)
def test_image_of_a_site_runs_is_stopped_and_resumes(site: Site, name: str) -> None:
    job = site.submit(name, "--", *COUNT, "60")
    site.until(lambda: "starts at 0" in site.told(job), job)
    site("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@120 does
    site.until(lambda: "requeued" in site.told(job), job)
    saved = re.search(r"state saved \(\S+ (\d+)\): requeued", site.told(job))
    assert saved, site.told(job)
    site.start_again(job)
    told = site.ended(job)
    assert f"starts at {saved[1]}\n" in told
    assert "finished at 60" in told, told
    assert site.record(job) == __version__
    assert (site.folder / f"runs/mn5-{job}").is_dir()


@pytest.mark.parametrize(
    "name", ["debian.sqsh", *(pytest.param(name, marks=pytest.mark.soak) for name in ("debian", "venv"))]
)
def test_node_without_a_mounted_folder_is_named(site: Site, name: str) -> None:
    place = Path("/run/imgkit-only-node1")  # each node has a /run of its own
    made = site("exec", "node1", "--", "mkdir", "-p", place)
    assert made.returncode == 0, made.stderr
    job = site.submit(name, "--bind", place, "--", "dist-hello", *ONE)
    told = site.ended(job)
    assert f"imgkit: node node2 has no {place}, which the job mounts (--bind, " in told, told
    assert "node1 has no" not in told


PYXIS = """\
image: {base: "imgkit.local/standin:24.03", platform: amd64}
system: {scheduler: slurm, runtime: {kind: pyxis}, node: {gpus: 0, cpus: 2}}
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("singularity", marks=pytest.mark.singularity),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("apptainer", "enroot")),
    ],
)
def test_sqsh_for_pyxis_is_looked_into_where_it_is_submitted(
    site: Site, program: str, tmp_path: Path
) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    (site.folder / "pyxis.yaml").write_text(PYXIS)
    place = str(shutil.which(program))
    # Programs but no other starter; not those of this PATH count in the container.
    programs = [*Path("/usr/bin").iterdir(), *Path(place).parent.glob(f"{program}*")]
    starters = {"apptainer", "singularity", "enroot"} - {program}
    for path in {path.name: path for path in programs if path.name not in starters}.values():
        (tmp_path / path.name).symlink_to(path)
    env = {"PATH": str(tmp_path), "XDG_CACHE_HOME": f"{tmp_path}/cache", "USER": "root"}
    words = (*IMGKIT, "run", "pyxis.yaml", "--dry-run", "--time", "5m", "--image", "debian.sqsh")
    done = run(*words, "--", "dist-hello", folder=site.folder, env=env)
    assert done.returncode == 0, done.stderr
    assert f"/imgkit_entrypoints:/{site_images.SYSTEM}/imgkit_entrypoints:ro," in done.stdout
    assert "/usr/bin/python3 -I -m imgkit_entrypoints dist-hello" in done.stdout
    refused = run(*words, "--python", "/opt/none", "--", "dist-hello", folder=site.folder, env=env)
    assert refused.returncode == 2
    assert "found no Python in it: no program /opt/none" in refused.stderr
    (tmp_path / program).unlink()
    lacking = run(*words, "--python", "python3", "--", "dist-hello", folder=site.folder, env=env)
    assert lacking.returncode == 3
    assert "nothing here starts a .sqsh" in lacking.stderr


def test_image_that_changed_after_the_submission_is_not_started(site: Site) -> None:
    job = site.submit("debian", "--option=--hold", "--", "dist-hello", *ONE)
    image = site.folder / "debian.sif"
    with image.open("ab") as stream:
        stream.write(b"another")
    try:
        site("scontrol", "release", job)
        told = site.ended(job)
    finally:
        os.truncate(image, image.stat().st_size - len(b"another"))
    assert f"imgkit: {image} has changed since its job was submitted, or this node lacks it" in told, told
    assert "dist-hello" not in told


RECIPE = """\
image: {base: "imgkit.local/standin:24.03", platform: amd64}
system: {scheduler: slurm, runtime: {kind: singularity, command: singularity}, node: {gpus: 0, cpus: 2}}
"""


@pytest.fixture(scope="module")
def far(site: Site) -> Iterator[FarSite]:
    folder = Path(f"/tmp/imgkit-any-far-{os.getpid()}")
    with far_host(folder) as host:
        made = FarSite(far=host, cluster=site, here=folder / "here", store=folder / "store")
        made.here.mkdir()
        (made.here / "site.yaml").write_text(RECIPE)
        shutil.copy(ROOT / "examples/save_and_resume.py", made.here)
        login_node(host, site)
        added = made.imgkit("remote", "add", "far", f"far:{made.store}", "--recipe", "./site.yaml")
        assert added.returncode == 0, added.stderr
        yield made


@pytest.mark.soak
@pytest.mark.sshd
def test_image_that_a_remote_has_runs_without_a_build(site: Site, far: FarSite) -> None:
    image = site.folder / "conda.sif"
    words = ("run", "--on", "far", "--image", image, "--time", "5m", "--nodes", "2", "--code", ".")
    count = ("dist-run", *ONE, "/workspace/save_and_resume.py", "5")
    done = far.imgkit(*words, *CHOICES["conda"], "--", *count)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "finished at 5" in done.stdout
    assert "images" not in done.stderr
    assert list((far.store / "images").iterdir()) == []
    refused = far.imgkit(*words, "--", *count)
    assert refused.returncode == 2
    assert "found no Python in it: no program python3" in refused.stderr
    absent = far.imgkit("run", "--on", "far", "--image", "/none.sif", "--time", "5m", "--", *count)
    assert "/none.sif does not exist or cannot be read on the remote" in absent.stderr


@pytest.mark.soak
@pytest.mark.sshd
def test_sqsh_that_a_remote_has_runs(site: Site, far: FarSite) -> None:
    words = ("run", "--on", "far", "--image", site.folder / "venv.sqsh", *CHOICES["venv"], "--time", "5m")
    done = far.imgkit(*words, "--nodes", "2", "--", "dist-hello", *ONE)
    assert done.returncode == 0, done.stderr
    assert "all_reduce of ones: 2" in done.stdout
    refused = far.imgkit("run", site.folder / "venv.sqsh", "--on", "far", "--", "dist-hello")
    assert refused.returncode == 2
    assert "imgkit run sends a .sif, and this is a .sqsh" in refused.stderr
    assert "--image PATH" in refused.stderr


@pytest.mark.soak
@pytest.mark.sshd
def test_image_that_is_here_is_sent_once(site: Site, far: FarSite) -> None:
    words = ("run", site.folder / "debian.sif", "--on", "far", "--time", "5m", "--", "dist-hello", *ONE)
    first = far.imgkit(*words)
    assert first.returncode == 0, first.stderr
    assert "all_reduce of ones: 1" in first.stdout
    second = far.imgkit(*words)
    assert "to send: nothing; far has the image" in second.stderr, second.stderr
    assert "all_reduce of ones: 1" in second.stdout
    assert len(list((far.store / "images").iterdir())) == 1
