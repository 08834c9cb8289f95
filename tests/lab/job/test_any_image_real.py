"""``imgkit submit --image`` with images that imgkit did not build, on a real Slurm of two nodes."""

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
from labkit import IMGKIT, ROOT, Cluster, Done, slurm_marks, until
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
    """A login node, two nodes, and the folder in which the jobs run."""

    folder: Path

    def imgkit(self, *words: object) -> Done:
        env = {name: str(self.state / name) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
        env["BASH_FUNC_module%%"] = "() { :; }"
        return self("exec", "login", "--cwd", self.folder, "--", *IMGKIT, *words, env=env)

    def submit(self, name: str, *words: object) -> str:
        done = self.imgkit("submit", "mn5", *SITE, "--image", f"{name}.sif", *CHOICES[name], *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def told(self, job: str) -> str:
        output = self.folder / f"mn5-{job}.out"
        return output.read_text() if output.exists() else ""

    def ended(self, job: str) -> str:
        self.until(lambda: not self("squeue", "--noheader", f"--jobs={job}").stdout.strip(), job)
        return self.told(job)

    def until(self, condition: Callable[[], bool], job: str) -> None:
        until(condition, told=lambda: self.told(job))

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
        made.up(2, "--cpus", "80")
        yield made
    finally:
        made.down()
        shutil.rmtree(made.folder)


@pytest.mark.parametrize(
    "name", ["debian", *(pytest.param(name, marks=pytest.mark.soak) for name in ("venv", "conda"))]
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


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "words", "what"),
    [
        ("venv", (), "is 3.11.2 and has no torch"),
        ("venv", ("--python", "/opt/none"), "found no Python in it: no program /opt/none"),
        ("conda", (), "found no Python in it: no program python3"),
        ("conda", ("--activate", "source /opt/conda/bin/activate x"), "no environment named 'x'"),
        ("conda", ("--activate", "exit 7"), "exit code 7"),
    ],
)
def test_image_without_a_usable_python_is_refused(
    site: Site, name: str, words: tuple[str, ...], what: str
) -> None:
    done = site.imgkit("submit", "mn5", *SITE, "--image", f"{name}.sif", *words, "--", "dist-hello")
    assert done.returncode == 2, done.stdout
    assert what in done.stderr
    assert "--python PATH" in done.stderr or "try it there" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("name", CHOICES)
def test_training_with_its_code_goes_on_after_a_killed_worker(site: Site, name: str) -> None:
    train = ("dist-train", *ONE, "--steps", "3000", "--save-every", "200")
    job = site.submit(name, "--max-failures", "2", "--code", ROOT / "examples", "--", *train)
    site.until(lambda: bool(re.search(r"step +[4-9]\d\d/", site.told(job))), job)
    site("exec", "node2", "--", "pkill", "-KILL", "-f", "imgkit_entrypoints.apps.train")
    told = site.ended(job)
    assert re.search(r"resumes after step [1-9]\d+", told), told
    assert "step 3000/3000" in told


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
def test_image_that_is_here_is_sent_once(site: Site, far: FarSite) -> None:
    words = ("run", site.folder / "debian.sif", "--on", "far", "--time", "5m", "--", "dist-hello", *ONE)
    first = far.imgkit(*words)
    assert first.returncode == 0, first.stderr
    assert "all_reduce of ones: 1" in first.stdout
    second = far.imgkit(*words)
    assert "to send: nothing; far has the image" in second.stderr, second.stderr
    assert "all_reduce of ones: 1" in second.stdout
    assert len(list((far.store / "images").iterdir())) == 1
