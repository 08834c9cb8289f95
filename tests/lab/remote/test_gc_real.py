"""``imgkit remote gc`` over a real sshd: what nothing uses goes, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from labkit import expect_failure, expect_success
from remote_image import remote_image
from remotekit import far_host, run_at_once, sshd

from imgkit_builder.jobs.remote import connection, gc
from imgkit_builder.jobs.remote import store as far_store
from imgkit_builder.jobs.remote.config import Remote

IMAGE = f"{'a' * 64}-{'b' * 12}"
OLD_S = 40 * 86400

pytestmark = [pytest.mark.sshd, pytest.mark.xdist_group("far-move")]


@pytest.fixture(scope="module")
def served():
    with far_host(Path(f"/tmp/imgkit-gc-{os.getpid()}")) as host, sshd(host):
        yield host


@pytest.fixture
def store(far, tmp_path):
    folder = tmp_path / "my store"
    for name in (*far_store.FOLDERS, "runs", "jobs"):
        (folder / name).mkdir(parents=True)
    expect_success(far.imgkit("remote", "add", "mine", f"far:{folder}", "--replace"))
    return folder


def put_file(path, text="x", age_s=OLD_S):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def put_image(folder, file="image.sif", age_s=OLD_S):
    """Make the folder of an image with one file, both of that age."""
    put_file(folder / file, age_s=age_s)
    os.utime(folder, (time.time() - age_s,) * 2)
    return folder


def collected(far, *options):
    return expect_success(far.imgkit("remote", "gc", "mine", *options))


def reach(store):
    return connection.connect(Remote(name="mine", address="far", folder=str(store)))


def test_only_old_images_and_code_of_imgkit_go(far, store):
    removed = [
        put_image(store / "images" / IMAGE),
        put_image(store / "images/.incoming" / IMAGE, ".image.sif.AbCdEf"),
        put_image(store / "code" / ("c" * 64), "train.py"),
    ]
    fresh = put_image(store / "images" / IMAGE.replace("a", "d"), age_s=0)
    link = store / "images" / IMAGE.replace("a", "e")
    link.symlink_to(removed[0])
    (store / "runs/x-7").mkdir()
    remaining = [
        put_file(store / "images/mine.sif"),
        put_file(store / "x.out"),
        put_file(store / "runs/x-7/metrics"),
        fresh,
        link,
    ]
    output = collected(far).stdout
    assert "3 unused" in output
    assert output.endswith("next: imgkit remote gc mine --days 30 --delete\n")
    assert all(path.exists() for path in removed)
    report = json.loads(collected(far, "--delete", "--json").stdout)
    assert sorted(row["path"] for row in report["unused"]) == sorted(
        str(path.relative_to(store)) for path in removed
    )
    assert all(row["removed"] for row in report["unused"])
    assert not any(path.exists() for path in removed)
    assert all(path.is_symlink() or path.exists() for path in remaining)
    assert collected(far, "--delete").stdout == "nothing is unused; 1 in use\n"


def test_image_that_is_chosen_meanwhile_stays(store):
    image = put_image(store / "images" / IMAGE)
    connected = reach(store)
    unused = gc.find_unused(connected, 30)
    assert [folder.path for folder in unused.folders] == [f"images/{IMAGE}"]
    (image / "image.sif").touch()
    assert gc.remove_unused(connected, unused) == ()
    assert [path.name for path in image.parent.iterdir()] == [IMAGE]


def test_two_removals_at_once_do_not_collide(store):
    for letter in "0123456789abcdef":
        put_image(store / "images" / (letter * 64 + IMAGE[64:]))
    connected = reach(store)
    unused = gc.find_unused(connected, 30)
    assert len(unused.folders) == 16
    removed: list[str] = []
    run_at_once(lambda: removed.extend(gc.remove_unused(connected, unused)))
    assert sorted(removed) == sorted(folder.path for folder in unused.folders)
    assert [path for path in store.rglob("*") if path.is_file()] == []


def test_what_a_killed_removal_put_aside_goes_later(far, store):
    aside = put_image(store / "images" / f".{IMAGE}.gone")
    assert "1 removed" in collected(far, "--delete").stdout
    assert not aside.exists()


def test_jobs_of_a_silent_scheduler_keep_their_images(far, store):
    image = put_image(store / "images" / IMAGE)
    put_file(store / "jobs/7", f"slurm\nx\nimages/{IMAGE}/image.sif\n")
    result = collected(far, "--delete")
    assert image.exists()
    assert "what any job there names counts as in use: squeue failed with exit code" in result.stderr


def test_new_image_of_a_project_replaces_older_ones(store, monkeypatch):
    images = [remote_image(letter) for letter in "edcb"]
    for image in images:
        put_image(store / "images" / image.name)
    put_file(store / "jobs/7", f"standalone\nx\n{images[3].path}\n")
    put_file(store / "runs/x-7/result", "7 85\n")
    (store / "runs/x-7/checkpoints/step-0000000005").mkdir(parents=True)
    monkeypatch.setattr(gc, "unfinished_jobs", lambda connection, system: gc.UnfinishedJobs())
    os.link(store / images[2].path, store / "mine.sif")
    connected = reach(store)
    unused, by_path = gc.find_superseded(connected, images, remote_image("f"))
    # The newest older one stays, one has another name, and one belongs to a run that can be resumed.
    assert gc.remove_unused(connected, unused) == (f"images/{images[1].name}",)
    assert by_path[f"images/{images[1].name}"] == images[1]
    assert sorted(path.name for path in (store / "images").iterdir()) == sorted(
        images[number].name for number in (0, 2, 3)
    )


def test_store_that_is_not_there_is_empty(far, store):
    subprocess.run(["rm", "-rf", store], check=True)
    assert collected(far, "--delete").stdout == "nothing is unused; 0 in use\n"
    assert not store.exists()


@pytest.mark.parametrize("days", ["0", "-1", "x"])
def test_days_must_be_a_number_above_zero(far, store, days):
    expect_failure(far.imgkit("remote gc mine --days", days, "--delete"), 2, "--days")
