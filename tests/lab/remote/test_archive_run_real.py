"""``imgkit run ARCHIVE --on`` over a real sshd to a real Slurm: a job there converts a tiny image, once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_image
from labkit import IMGKIT, Cluster, Done, cluster_marks, output, run, until
from remotekit import FarSite, far_host, login_node

RECIPE = """\
image: {base: "imgkit.local/tiny:1", platform: amd64}
system:
  title: the virtual cluster
  scheduler: slurm
  runtime: {kind: singularity, command: singularity}
  node: {gpus: 0, cpus: 2}
  queue: {sif: [--comment=conversion]}
"""
SHOW = ("--", "cat", "/etc/name")

pytestmark = [*cluster_marks, pytest.mark.sshd, pytest.mark.xdist_group("far-archive")]


@dataclass(frozen=True, kw_only=True)
class Site(FarSite):
    """A site whose store has a blank in its name."""

    def run(self, archive: Path, *words: object) -> Done:
        return self.imgkit("run", archive.name, "--on", "far", "--time", "5m", *words)

    def archive(self, name: str) -> Path:
        """A new image that nothing has converted."""
        path = self.here / f"{name}.tar"
        tiny_image.write(path, f"{name}:1")
        return path

    def kept(self, place: str) -> list[str]:
        return sorted(path.name for path in (self.store / place).iterdir())

    def images(self, name: str) -> list[str]:
        """The .sif files there of the image `name`."""
        digest = tiny_image.write(self.here / "digest.tar", f"{name}:1")["amd64"].removeprefix("sha256:")
        return [one for one in self.kept("images") if digest in one]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    folder = Path(f"/tmp/imgkit-arc-{os.getpid()}")
    cluster = Cluster(state=folder / "c")
    with far_host(folder) as far:
        made = Site(far=far, cluster=cluster, here=folder / "here", store=folder / "my store")
        made.here.mkdir()
        (made.here / "tiny.yaml").write_text(RECIPE)
        (made.here / "held.yaml").write_text(RECIPE.replace("sif: [", "sif: [--hold, "))
        small = folder / "small"
        small.mkdir()
        output("mount", "-t", "tmpfs", "-o", "size=4500k", "tmpfs", small)
        cluster.up(2)
        try:
            login_node(far, cluster)
            for name, place, recipe in (
                ("far", made.store, "tiny"),
                ("held", made.store, "held"),
                ("small", small, "tiny"),
            ):
                added = made.imgkit("remote", "add", name, f"far:{place}", "--recipe", f"./{recipe}.yaml")
                assert added.returncode == 0, added.stderr
            yield made
        finally:
            far.disconnect()
            cluster.down()
            run("umount", small)


def test_job_there_converts_the_archive_once(site: Site) -> None:
    archive = site.archive("first")
    done = site.run(archive, "--json", *SHOW)
    assert done.returncode == 0, done.stderr
    assert "to send: first.tar" in done.stderr
    number = json.loads(done.stdout)["conversion"].removesuffix("@far")
    script = site.cluster("scontrol", "write", "batch_script", number, "-").stdout
    assert "#SBATCH --comment=conversion" in script
    assert site.kept("archives") == []
    assert len(site.images("first")) == 1
    again = site.run(archive, *SHOW)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1] == "first:1"
    assert "to send: nothing; far has the image" in again.stderr


def test_plan_names_the_bytes_and_the_job(site: Site) -> None:
    archive = site.archive("planned")
    before = len(site.far.calls())
    done = site.run(archive, "--plan", *SHOW)
    assert done.returncode == 0, done.stderr
    assert f"{archive.stat().st_size / 1e6:.1f} MB, if far does not have the image" in done.stdout
    assert "--comment=conversion" in done.stdout
    assert len(site.far.calls()) == before


@pytest.mark.soak
def test_broken_archive_fails_with_the_end_of_the_job(site: Site) -> None:
    archive = site.archive("broken")
    whole = archive.read_bytes()
    at = whole.index(b"broken:1\0")  # in the layer: the file /etc/name
    archive.write_bytes(whole[:at] + b"X" + whole[at + 1 :])
    done = site.run(archive, *SHOW)
    assert done.returncode == 4, done.stderr
    assert "the conversion on far has failed" in done.stderr
    assert "the end of its output:" in done.stderr
    assert len(site.kept("archives")) == 1
    assert site.images("broken") == []
    archive.write_bytes(whole)
    mended = site.run(archive, *SHOW)
    assert mended.returncode == 0, mended.stderr
    assert mended.stdout.splitlines()[-1] == "broken:1"
    assert site.kept("archives") == []


@pytest.mark.soak
def test_full_disk_there_leaves_no_half_file(site: Site) -> None:
    archive = site.archive("full")
    done = site.imgkit("run", archive.name, "--on", "small", "--time", "5m", *SHOW)
    assert done.returncode == 4, done.stderr
    assert "-o FILE.sif on a larger disk" in done.stderr
    assert list((site.here.parent / "small/images").iterdir()) == []
    assert len(list((site.here.parent / "small/archives").iterdir())) == 1


@pytest.mark.soak
def test_transfer_that_was_cut_goes_on(site: Site) -> None:
    archive = site.archive("cut")
    with archive.open("ab") as stream:
        stream.write(bytes(30_000_000))  # tar ends before it; the transfer does not
    words = (*IMGKIT, "run", archive.name, "--on", "far", "--time", "5m", "--bwlimit", "5", *SHOW)
    with started(site, words) as running:
        until(lambda: [name for name in site.kept("archives") if name.endswith(".part")])
        site.far.kill_master()
        said = running.communicate(timeout=240)
    assert running.returncode == 0, said
    assert "MB are there already" in said[1]
    assert said[0].splitlines()[-1] == "cut:1"


@pytest.mark.soak
def test_interrupted_wait_is_taken_up_again(site: Site) -> None:
    archive = site.archive("held")
    words = (*IMGKIT, "run", archive.name, "--on", "held", "--time", "5m", *SHOW)
    with started(site, words) as running:
        assert running.stderr is not None
        job = ""
        for line in running.stderr:
            if found := re.search(r"job (\d+)@held converts", line):
                job = found[1]
            if line == "imgkit: convert on held\n":
                break
        os.killpg(running.pid, signal.SIGINT)
        said = running.communicate(timeout=60)[1]
    assert running.returncode == 130
    assert (
        f"the conversion goes on, and the same command takes what it makes; imgkit logs|cancel {job}@held"
        in said
    )
    assert "Traceback" not in said
    with started(site, words) as running:
        assert running.stderr is not None
        until(lambda: f"job {job}@held converts" in running.stderr.readline())
        assert site.cluster("scontrol", "release", job).returncode == 0
        out, said = running.communicate(timeout=240)
    assert running.returncode == 0, said
    assert out.splitlines()[-1] == "held:1"
    assert "imgkit: send" not in said


@pytest.mark.soak
def test_two_runs_at_once_do_not_collide(site: Site) -> None:
    archive = site.archive("twice")
    words = (*IMGKIT, "run", archive.name, "--on", "far", "--time", "5m", *SHOW)
    with started(site, words) as first, started(site, words) as second:
        ends = [running.communicate(timeout=240) for running in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], ends
    assert [out.splitlines()[-1] for out, _ in ends] == ["twice:1"] * 2
    assert site.kept("archives") == []
    assert len(site.images("twice")) == 1


@pytest.mark.soak
def test_folder_of_an_image_goes_as_one_file(site: Site) -> None:
    with tarfile.open(site.archive("folder")) as tar:
        tar.extractall(site.here / "folder", filter="data")
    done = site.run(site.here / "folder", "--code", site.here / "folder/blobs", *SHOW)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "folder:1"
    assert [path.name for path in site.here.iterdir() if path.name.startswith(".imgkit")] == []


def started(site: Site, words: tuple[object, ...]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(word) for word in words],
        cwd=site.here,
        env={**os.environ, **site.far.env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
