"""``imgkit build --with buildah``: the real program builds, and imgkit's own writer makes the .sif."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny_image
from labkit import IMGKIT, imgkit, imgkit_json, output, run, until

from imgkit_builder.sif import coverage, image

pytestmark = [
    pytest.mark.skipif(shutil.which("buildah") is None, reason="apt-get install buildah"),
    pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user needs /etc/subuid"),
]

RECIPE = """
image:
  base: tiny:1
  run: [{run}]
system: {{scheduler: standalone}}
"""
USES_VARIABLE = """
image:
  base: tiny:1
  secrets: [{id: token, env: IMGKIT_TEST_TOKEN}]
  run: [{command: "echo $TOKEN_FILE", secrets: [token]}]
system: {scheduler: standalone}
"""
WITH = ("--with", "buildah", "--no-test")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with a blank in its name and a base of 2 MB, in which nothing of Python works."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    tiny_image.write(folder / "tiny.tar", "tiny:1")
    return folder


def words(folder: Path, run_step: str, base: str = "tiny.tar") -> tuple[str, ...]:
    (folder / "small.yaml").write_text(RECIPE.format(run=json.dumps(run_step)))
    return ("build", "./small.yaml", *WITH, "--base-from", base)


def build(folder: Path, run_step: str, *more: object, base: str = "tiny.tar") -> Any:
    return imgkit(*words(folder, run_step, base), *more, folder=folder)


def left(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if one.name.startswith("."))


def test_sif_has_the_image_of_buildah(tiny: Path) -> None:
    built = imgkit_json(*words(tiny, "echo one > /one"), folder=tiny)
    record = image.read(tiny / "small.sif").record
    assert record is not None
    assert (record.route, record.image_id) == ("stream", built["id"])
    assert len(record.diff_ids) == 2  # the base's layer, and one for all steps
    assert coverage.check(tiny / "small.sif").faults == ()
    assert built["labels"]["imgkit.context.sha256"]
    assert left(tiny) == []


def test_failed_step_names_the_line(tiny: Path) -> None:
    done = build(tiny, "echo before; exit 7")
    assert done.returncode == 4
    assert "small.yaml:4: step " in done.stderr
    assert "exit status 7\n  -> its last lines:\nbefore\n" in done.stderr
    assert not (tiny / "small.sif").exists()
    assert left(tiny) == []


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_build_leaves_nothing_running(tiny: Path, number: signal.Signals) -> None:
    argv = (*IMGKIT, *words(tiny, "echo here; while true; do true; done"))
    with subprocess.Popen(argv, cwd=tiny, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        for line in program.stderr:
            if "echo here" in line:
                break
        # Only a step that has begun is there to be ended.
        until(lambda: bool(run("pgrep", "-f", "^buildah-chroot-exec .*echo here").stdout))
        program.send_signal(number)
        program.stderr.read()
    until(lambda: not run("pgrep", "-f", "echo here; while true").stdout)
    assert not (tiny / "small.sif").exists()
    assert build(tiny, "true").returncode == 0
    assert left(tiny) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--tag", "x:1"), "--tag means nothing --with buildah"),
        (("--platform", "linux/arm64"), "--with buildah builds for this machine's platform"),
        (("--base-from", "absent.tar"), "there is no such base"),
    ],
)
def test_impossible_requests_are_refused(tiny: Path, more: tuple[str, ...], said: str) -> None:
    done = build(tiny, "true", *more)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert left(tiny) == []


@pytest.mark.soak
def test_oci_folder_with_a_blank_is_a_base(tiny: Path) -> None:
    storage = ("--root", tiny / "storage", "--runroot", tiny / "run", "--storage-driver", "vfs")
    image_id = output("buildah", *storage, "pull", "--quiet", "docker-archive:tiny.tar", folder=tiny).strip()
    output("buildah", *storage, "push", "--quiet", image_id, "oci:layout", folder=tiny)
    (tiny / "layout").rename(tiny / "an image")
    assert build(tiny, "true", base="an image").returncode == 0
    assert "up to date" in build(tiny, "true", base="an image").stdout


def test_sif_as_base_is_refused(tiny: Path) -> None:
    imgkit_json("sif", "tiny.tar", "-o", "tiny.sif", "--no-test", folder=tiny)
    done = build(tiny, "true", base="tiny.sif")
    assert done.returncode == 2
    assert "buildah builds on layers, and a .sif has none" in done.stderr


def test_missing_secret_is_refused(tiny: Path) -> None:
    (tiny / "secret.yaml").write_text(USES_VARIABLE)
    done = imgkit("build", "./secret.yaml", *WITH, "--base-from", "tiny.tar", folder=tiny)
    assert (done.returncode, "IMGKIT_TEST_TOKEN" in done.stderr) == (2, True), done.stderr


def test_little_space_is_named_first(tiny: Path) -> None:
    small = tiny / "small disk"
    small.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small)
    try:
        for way in ("buildah", "apptainer"):
            done = build(tiny, "true", "-o", small / "x.sif", "--with", way)
            assert (done.returncode, "are free, an image of" in done.stderr) == (1, True), done.stderr
            assert left(small) == []
    finally:
        run("umount", small)
