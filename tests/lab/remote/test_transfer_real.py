"""A .sif goes to a remote through cuts, full disks and a second transfer, over a real sshd."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_sif
from labkit import output, until
from remotekit import FarHost, far_host, sshd

from imgkit_builder.base.progress import Silent
from imgkit_builder.remote import connection, store, transfer
from imgkit_builder.remote.config import Remote
from imgkit_builder.remote.connection import Connection, Cut
from imgkit_builder.remote.transfer import Source
from imgkit_builder.sif import image
from imgkit_entrypoints.errors import CheckFailed

PROXY = Path(__file__).with_name("cut_proxy.py")
MB = 1 << 20

pytestmark = [pytest.mark.sshd, pytest.mark.programs("rsync"), pytest.mark.xdist_group("far-move")]


class Notes(Silent):
    """What the user would always see."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def served() -> Iterator[FarHost]:
    with far_host(Path(f"/tmp/imgkit-move-{os.getpid()}")) as host, sshd(host):
        yield host


@pytest.fixture
def far(served: FarHost, monkeypatch: pytest.MonkeyPatch) -> FarHost:
    for name, value in served.env.items():
        monkeypatch.setenv(name, value)
    served.direct()
    return served


def reach(folder: Path, *, keep_s: int = 600) -> Connection:
    return connection.connect(Remote(name="far", address="far", folder=str(folder), keep_s=keep_s))


def looked(folder: Path, sif: Path) -> store.Store:
    record = image.read(sif).record
    assert record is not None
    return store.look(reach(folder), image_id=record.image_id, program="sh")


def upload(connection: Connection, file: Path, home: Path, target: str, report: Notes | None = None) -> str:
    source = Source(path=file, label="image", size_bytes=file.stat().st_size)
    return transfer.upload(connection, source, home=str(home), target=target, report=report or Notes())


def sent(folder: Path, sif: Path, report: Notes | None = None) -> Path:
    """Send `sif`, and return its path on the remote, which is this machine."""
    record = image.read(sif).record
    assert record is not None
    name = f"images/{image.store_name(record)}"
    (folder / "images").mkdir(parents=True, exist_ok=True)
    upload(reach(folder), sif, folder, name, report)
    return folder / name


def stored(folder: Path) -> list[Path]:
    """Return all files of the store, also those that have not arrived."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    """A .sif of 6 MB and some bytes; nothing in it can be compressed."""
    return small_sif.write(tmp_path / "x.sif", small_sif.ROOT + random.Random(7).randbytes(6 * MB + 123))  # noqa: S311


def test_store_finds_the_image_that_it_was_sent(far: FarHost, tmp_path: Path, sif: Path) -> None:
    folder = tmp_path / "my store"
    before = looked(folder, sif)
    assert (before.home, before.images, before.has_program) == (str(folder), (), True)
    place = sent(folder, sif)
    assert place.read_bytes() == sif.read_bytes()
    calls = len(far.calls())
    assert looked(folder, sif).images == (place.name,)
    assert len(far.calls()) == calls + 1
    assert stored(folder) == [place]


def test_look_reads_the_ends_of_a_file_only(far: FarHost, tmp_path: Path, sif: Path) -> None:
    place = sent(tmp_path / "s", sif)
    with place.open("r+b") as stream:  # a change in the middle is not seen, and costs nothing
        stream.seek(3 * MB)
        stream.write(b"x")
    assert looked(tmp_path / "s", sif).images == (place.name,)


@pytest.mark.parametrize("damage", ["cut", "renamed", "empty", "text"])
def test_damaged_image_does_not_count(far: FarHost, tmp_path: Path, sif: Path, damage: str) -> None:
    folder = tmp_path / "s"
    place = sent(folder, sif)
    if damage == "cut":
        os.truncate(place, 5 * MB)
    elif damage == "renamed":
        place.rename(place.with_name(place.name.replace(place.name[-16:-4], "0" * 12)))
    else:
        place.write_bytes(b"" if damage == "empty" else b"sif 12 x\nend\n" * 10000)
    assert looked(folder, sif).images == ()


LOST_BYTES = 2 * MB
"""What a cut can lose: OpenSSH's window, which the far end may hold in memory."""


def sent_bytes(far: FarHost) -> int:
    """Return the bytes that passed the proxy since `cuts`."""
    return sum(map(int, (far.folder / "limits.passed").read_text().split()))


SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 21))]


@pytest.fixture
def large_sif(tmp_path: Path) -> Path:
    """A .sif of 12 MB."""
    return small_sif.write(tmp_path / "x.sif", small_sif.ROOT + random.Random(7).randbytes(12 * MB))  # noqa: S311


def cuts(far: FarHost, seed: int, number: int, least: int) -> None:
    """Make the next connections end after random numbers of bytes."""
    chosen = random.Random(seed)  # noqa: S311
    limits = [chosen.randrange(least, least + 3 * MB) for _ in range(number)]
    (far.folder / "limits").write_text(" ".join(map(str, limits)))
    (far.folder / "limits.passed").unlink(missing_ok=True)
    far.through(sys.executable, PROXY, "%p", far.folder / "limits")


@pytest.mark.parametrize("seed", SEEDS)
def test_cut_transfer_goes_on_where_it_ended(
    far: FarHost, tmp_path: Path, large_sif: Path, seed: int
) -> None:
    cuts(far, seed, 3, LOST_BYTES + MB // 2)
    report = Notes()
    place = sent(tmp_path / "s", large_sif, report)
    assert place.read_bytes() == large_sif.read_bytes()
    assert sum("the connection was lost" in text for text in report.texts) >= 2
    assert any(text.endswith("MB were sent before") for text in report.texts)
    assert stored(tmp_path / "s") == [place]


def test_resumed_transfer_sends_only_the_rest(far: FarHost, tmp_path: Path, large_sif: Path) -> None:
    cuts(far, 1, 1, 9 * MB)
    place = sent(tmp_path / "s", large_sif)
    assert place.read_bytes() == large_sif.read_bytes()
    assert 12 * MB < sent_bytes(far) < 12 * MB + LOST_BYTES + MB


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_cut_at_any_moment_leaves_a_whole_file_or_none(
    far: FarHost, tmp_path: Path, sif: Path, seed: int
) -> None:
    cuts(far, seed, 6, 1000)
    place = tmp_path / "s/images" / image.store_name(small_record(sif))
    for _ in range(7):
        try:
            sent(tmp_path / "s", sif)
            break
        except Cut:
            assert not place.exists()
    assert place.read_bytes() == sif.read_bytes()
    assert stored(tmp_path / "s") == [place]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 6))])
def test_cut_folder_is_complete_or_absent(far: FarHost, tmp_path: Path, seed: int) -> None:
    folder, home = tmp_path / "my code", tmp_path / "s"
    (folder / "a\nb").mkdir(parents=True)
    (home / "code").mkdir(parents=True)
    for number in range(8):
        (folder / "a\nb" / f"{number} $(x)").write_bytes(random.Random(number).randbytes(MB))  # noqa: S311
    cuts(far, seed, 6, 1000)
    target = home / "code/digest"
    source = Source(path=folder, label="code", size_bytes=8 * MB)
    for _ in range(7):
        try:
            transfer.upload(reach(home), source, home=str(home), target="code/digest", report=Notes())
            break
        except Cut:
            assert not target.exists()
    assert stored(home) == [target / path.relative_to(folder) for path in stored(folder)]
    for path in stored(folder):
        assert (target / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_file_goes_through_the_host_for_transfers(far: FarHost, tmp_path: Path, sif: Path) -> None:
    (tmp_path / "s/images").mkdir(parents=True)
    before = len(far.calls())
    reached = connection.connect(
        Remote(name="far", address="far", folder=str(tmp_path / "s"), transfer="far2")
    )
    upload(reached, sif, tmp_path / "s", "images/x.sif")
    assert (tmp_path / "s/images/x.sif").read_bytes() == sif.read_bytes()
    calls = far.calls()[before:]
    assert len(calls) == 3
    assert all(" -- far2 exec " in call for call in calls)
    reached.run(":")
    assert " -- far exec " in far.calls()[-1]
    assert reached.close()
    assert far.master("check", "far2").returncode != 0


def test_limited_transfer_takes_its_time(far: FarHost, tmp_path: Path, sif: Path) -> None:
    (tmp_path / "images").mkdir()
    began = time.monotonic()
    limited = dataclasses.replace(reach(tmp_path), max_bytes_per_s=3 * MB)
    upload(limited, sif, tmp_path, "images/x.sif")
    assert time.monotonic() - began >= 2
    assert (tmp_path / "images/x.sif").read_bytes() == sif.read_bytes()


def test_transfer_that_gets_nowhere_gives_up(far: FarHost, tmp_path: Path, sif: Path) -> None:
    (far.folder / "limits").write_text("20000 " * 50)
    far.through(sys.executable, PROXY, "%p", far.folder / "limits")
    with pytest.raises(Cut):
        sent(tmp_path / "s", sif)
    far.direct()
    assert sent(tmp_path / "s", sif).read_bytes() == sif.read_bytes()


def test_killed_transfer_is_finished_by_the_next(far: FarHost, tmp_path: Path, sif: Path) -> None:
    folder = tmp_path / "s"
    slow = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[3:]\n"
        "import test_transfer_real as t; sif = Path(sys.argv[2])\n"
        "name = f'images/{t.image.store_name(t.small_record(sif))}'\n"
        "limited = t.dataclasses.replace(t.reach(Path()), max_bytes_per_s=2 * t.MB)\n"
        "t.upload(limited, sif, Path(sys.argv[1]), name)"
    )
    (folder / "images").mkdir(parents=True)
    paths = (str(Path(__file__).parent), str(Path(__file__).parents[1]))
    argv = [sys.executable, "-c", slow, str(folder), str(sif), *paths]
    first = subprocess.Popen(argv, env={**os.environ, "TMPDIR": str(tmp_path)})
    while not any(path.stat().st_size > 2 * MB for path in stored(folder)):
        assert first.poll() is None
    first.kill()
    first.wait()
    for shell in Path("/tmp").glob("imgkit-*/shell"):  # it had no time to remove this
        if str(folder) in shell.read_text():
            shutil.rmtree(shell.parent)
    until(lambda: all(path.parent.name == ".imgkit-part" for path in stored(folder)))
    report = Notes()
    assert sent(folder, sif, report).read_bytes() == sif.read_bytes()
    assert report.texts[0].endswith("MB were sent before")


def test_two_transfers_at_once_do_not_collide(far: FarHost, tmp_path: Path, sif: Path) -> None:
    folder = tmp_path / "s"
    places: list[Path] = []
    threads = [threading.Thread(target=lambda: places.append(sent(folder, sif))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(places) == 3
    assert places[0].read_bytes() == sif.read_bytes()
    assert stored(folder) == [places[0]]


@pytest.mark.parametrize("at", [".incoming/.imgkit-part", ".incoming"])
def test_damaged_part_is_corrected(far: FarHost, tmp_path: Path, sif: Path, at: str) -> None:
    """An edited file has the size and the time of the one here."""
    name = image.store_name(small_record(sif))
    part = tmp_path / "s/images" / at / name
    part.parent.mkdir(parents=True)
    part.write_bytes(b"rubbish" + sif.read_bytes()[7:])
    shutil.copystat(sif, part)
    place = sent(tmp_path / "s", sif)
    assert place.read_bytes() == sif.read_bytes()
    assert stored(tmp_path / "s") == [place]


def small_record(sif: Path) -> image.ImgkitRecord:
    record = image.read(sif).record
    assert record is not None
    return record


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    output("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place)
    yield place
    output("umount", "--lazy", place)


def test_disk_without_room_is_refused_before_the_start(far: FarHost, small_disk: Path, sif: Path) -> None:
    with pytest.raises(CheckFailed, match=r"but 4\.2 MB free"):
        sent(small_disk, sif)
    assert stored(small_disk) == []


def test_disk_that_fills_up_is_named(
    far: FarHost, small_disk: Path, sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "free_bytes", lambda _: None)  # somebody else takes the room later
    with pytest.raises(CheckFailed, match="the disk of far is full") as caught:
        sent(small_disk, sif)
    assert "No space left" in str(caught.value.hint)
    assert not [path for path in (small_disk / "images").iterdir() if path.suffix == ".sif"]


def test_changed_file_is_not_published(
    far: FarHost, tmp_path: Path, sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_sha256", lambda _: "0" * 64)
    with pytest.raises(CheckFailed, match="differs from the image here"):
        sent(tmp_path / "s", sif)
    assert stored(tmp_path / "s") == []
