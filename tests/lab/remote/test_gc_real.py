"""``imgkit remote gc`` over a real sshd: what nothing uses goes, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit import Done
from remotekit import FarHost, far_host, sshd

from imgkit_builder.remote import connection, gc
from imgkit_builder.remote import store as far_store
from imgkit_builder.remote.config import Remote

SIF = f"{'a' * 64}-{'b' * 12}.sif"
OLD_S = 40 * 86400

pytestmark = [pytest.mark.sshd, pytest.mark.xdist_group("far-move")]


@pytest.fixture(scope="module")
def far() -> Iterator[FarHost]:
    with far_host(Path(f"/tmp/imgkit-gc-{os.getpid()}")) as host, sshd(host):
        yield host


@pytest.fixture
def store(far: FarHost, tmp_path: Path) -> Path:
    folder = tmp_path / "my store"
    for name in (*far_store.FOLDERS, "runs", "jobs"):
        (folder / name).mkdir(parents=True)
    (folder / "images/.incoming/.imgkit-part").mkdir(parents=True)
    done = far.imgkit("remote", "add", "mine", f"far:{folder}", "--replace")
    assert done.returncode == 0, done.stderr
    return folder


def old(path: Path, text: str = "x") -> Path:
    path.write_text(text)
    os.utime(path, (time.time() - OLD_S,) * 2)
    return path


def collected(far: FarHost, *words: object) -> Done:
    done = far.imgkit("remote", "gc", "mine", *words)
    assert done.returncode == 0, done.stderr
    return done


def reach(far: FarHost, store: Path, monkeypatch: pytest.MonkeyPatch) -> connection.Connection:
    for name, value in far.env.items():
        monkeypatch.setenv(name, value)
    return connection.connect(Remote(name="mine", address="far", folder=str(store)))


def test_only_old_files_of_imgkit_go(far: FarHost, store: Path) -> None:
    gone = [
        old(store / "images" / SIF),
        old(store / "images/.incoming" / f".{SIF}.AbCdEf"),
        old(store / "images/.incoming/.imgkit-part" / SIF),
        old(store / "deltas" / SIF.replace(".sif", ".imgdelta")),
    ]
    fresh = store / "images" / SIF.replace("a", "d")
    fresh.write_text("x")
    link = store / "images" / SIF.replace("a", "e")
    link.symlink_to(gone[0])
    (store / "runs/x-7").mkdir()
    stays = [
        old(store / "images/mine.sif"),
        old(store / "x.out"),
        old(store / "runs/x-7/metrics"),
        fresh,
        link,
    ]
    listed = collected(far)
    assert "4 files are unused" in listed.stdout
    assert listed.stdout.endswith("next: imgkit remote gc mine --days 30 --delete\n")
    assert all(path.exists() for path in gone)
    done = json.loads(collected(far, "--delete", "--json").stdout)
    assert sorted(row["path"] for row in done["unused"]) == sorted(
        str(path.relative_to(store)) for path in gone
    )
    assert all(row["removed"] for row in done["unused"])
    assert not any(path.exists() for path in gone)
    assert all(path.is_symlink() or path.exists() for path in stays)
    assert collected(far, "--delete").stdout == "nothing is unused; 1 files are in use\n"


def test_file_that_is_chosen_meanwhile_stays(
    far: FarHost, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = old(store / "images" / SIF)
    reached = reach(far, store, monkeypatch)
    found = gc.find_unused(reached, 30)
    assert [file.path for file in found.files] == [f"images/{SIF}"]
    kept.touch()
    assert gc.remove(reached, found) == ()
    assert [path.name for path in kept.parent.iterdir() if path.is_file()] == [SIF]


def test_two_removals_at_once_do_not_collide(
    far: FarHost, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for letter in "0123456789abcdef":
        old(store / "images" / (letter * 64 + SIF[64:]))
    reached = reach(far, store, monkeypatch)
    found = gc.find_unused(reached, 30)
    assert len(found.files) == 16
    removed: list[str] = []
    threads = [threading.Thread(target=lambda: removed.extend(gc.remove(reached, found))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(removed) == sorted(file.path for file in found.files)
    assert [path for path in store.rglob("*") if path.is_file()] == []


def test_what_a_killed_removal_put_aside_goes_later(far: FarHost, store: Path) -> None:
    left = old(store / "images" / f".{SIF}.gone")
    assert "1 files removed" in collected(far, "--delete").stdout
    assert not left.exists()


def test_jobs_of_a_silent_scheduler_keep_their_files(far: FarHost, store: Path) -> None:
    kept = old(store / "images" / SIF)
    old(store / "jobs/7", f"slurm\nx\nimages/{SIF}\n")
    done = collected(far, "--delete")
    assert kept.exists()
    assert "the files of all jobs there count as in use: squeue failed with exit code" in done.stderr


def test_store_that_is_not_there_is_empty(far: FarHost, store: Path) -> None:
    subprocess.run(["rm", "-rf", store], check=True)
    assert collected(far, "--delete").stdout == "nothing is unused; 0 files are in use\n"
    assert not store.exists()


@pytest.mark.parametrize("days", ["0", "-1", "x"])
def test_days_must_be_a_number_above_zero(far: FarHost, store: Path, days: str) -> None:
    done = far.imgkit("remote", "gc", "mine", "--days", days, "--delete")
    assert done.returncode == 2
    assert "--days" in done.stderr
