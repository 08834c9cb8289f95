"""A .sif goes to a remote through cuts, full disks and a second transfer, over a real sshd."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_sif
from file_tree import write_program
from labkit import output, soak, until
from notes import Notes
from remotekit import far_host, far_marks, run_at_once, sshd

from imgkit_builder.jobs.remote import connection, store, transfer
from imgkit_builder.jobs.remote.config import Remote
from imgkit_builder.jobs.remote.connection import Cut
from imgkit_builder.jobs.remote.store import SIF
from imgkit_entrypoints.errors import CheckFailed

PROXY = Path(__file__).with_name("cut_proxy.py")
UNPACK = Path(__file__).parents[3] / "ci/lab/unpack"
MB = 1 << 20

pytestmark = [*far_marks, pytest.mark.xdist_group("far-move")]


@pytest.fixture(scope="module")
def served():
    with far_host(Path(f"/tmp/imgkit-move-{os.getpid()}")) as host, sshd(host):
        yield host


def reach(folder, *, keep_s=600, bwlimit=0.0):
    """Return the connection to this machine over ssh; `bwlimit` is in MB/s."""
    remote = Remote(name="far", address="far", folder=str(folder), keep_s=keep_s, bwlimit=bwlimit)
    return connection.connect(remote)


def look(folder):
    return store.open_store(reach(folder), program="sh")


def send(folder, sif, report=None, *, basis=None):
    """Send `sif`, and return its path on the remote, which is this machine."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    return send_over(reach(folder), folder, sif, report, basis=basis)


def send_over(
    connection,
    home,
    sif,
    report=None,
    *,
    basis=None,
):
    image = store.describe_sif(sif)
    transfer.send_image(connection, sif, image, home=str(home), basis=basis, report=report or Notes())
    return home / image.path


def assert_only(folder, sif):
    """Fail if the store has anything but one whole image."""
    assert stored(folder) == [sif.with_name("image.json"), sif]


def stored(folder):
    """Return all files of the store, also those that have not arrived."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def content(seed, size_bytes):
    """Return random bytes, which cannot be compressed."""
    return random.Random(seed).randbytes(size_bytes)  # noqa: S311


def write_sif(path, root):
    return small_sif.write(path, small_sif.ROOT + root)


@pytest.fixture
def sif(tmp_path):
    """A .sif of 6 MB and some bytes; nothing in it can be compressed."""
    return write_sif(tmp_path / "x.sif", content(7, 6 * MB + 123))


def test_store_finds_the_image_that_it_was_send(far, tmp_path, sif):
    folder = tmp_path / "my store"
    before = look(folder)
    assert (before.home, before.images, before.has_program) == (str(folder), (), True)
    target = send(folder, sif)
    assert target.read_bytes() == sif.read_bytes()
    calls = len(far.calls())
    assert look(folder).images == (store.describe_sif(sif),)
    assert len(far.calls()) == calls + 1
    assert_only(folder, target)


@pytest.mark.parametrize("damage", ["cut", "text", "renamed", "no sif", "another version"])
def test_damaged_note_does_not_count(far, tmp_path, sif, damage):
    folder = tmp_path / "s"
    target = send(folder, sif)
    note = target.with_name("image.json")
    if damage == "cut":
        os.truncate(note, 100)
    elif damage == "text":
        note.write_bytes(b"image 12 x\nend\n" * 1000)
    elif damage == "renamed":
        target.parent.rename(target.parent.with_name("0" * 64 + target.parent.name[64:]))
    elif damage == "no sif":
        target.unlink()
    else:
        note.write_text(note.read_text().replace('"schema": 1', '"schema": 99'))
    assert look(folder).images == ()


def edited(sif):
    """Return the next version of a .sif: some bytes are new, and the rest has moved."""
    return write_sif(sif.with_name("next.sif"), content(8, 5000) + content(7, 6 * MB + 123))


def test_next_version_sends_what_changed(far, tmp_path, sif):
    folder = tmp_path / "my store"
    older = send(folder, sif)
    (far.folder / "limits").write_text("")
    (far.folder / "limits.passed").unlink(missing_ok=True)
    far.through(sys.executable, PROXY, "%p", far.folder / "limits")
    target = send(folder, edited(sif), basis=store.describe_sif(sif))
    far.disconnect()
    until(lambda: (far.folder / "limits.passed").exists())
    assert target.read_bytes() == edited(sif).read_bytes()
    assert older.read_bytes() == sif.read_bytes()
    assert sent_bytes(far) < MB // 2


@pytest.fixture
def newer_rsync(tmp_path):
    """A folder with the rsync of Debian trixie.

    It lacks a fault of Debian 12's 3.2.7, which discards a file if the path of the basis is relative.
    """
    unpacked = Path(output(UNPACK, "trixie", "rsync", "rsync", "usr/bin/rsync").strip())
    loader = next(unpacked.glob("usr/lib64/ld-linux-*"))
    libraries = next(unpacked.glob("usr/lib/*-linux-gnu"))
    script = f'exec {loader} --library-path {libraries} {unpacked}/usr/bin/rsync "$@"'
    return write_program(tmp_path / "newer/rsync", script).parent


@pytest.mark.soak
@pytest.mark.parametrize("side", ["here", "on the remote"])
def test_next_version_sends_what_changed_by_another_rsync(newer_rsync, tmp_path, sif, monkeypatch, side):
    paths = {"here": "", "on the remote": ""} | {side: f"{newer_rsync}:"}
    with (
        far_host(Path(f"/tmp/imgkit-rsync-{os.getpid()}")) as host,
        sshd(host, f"SetEnv PATH={paths['on the remote']}/usr/bin:/bin"),
    ):
        host.enter(monkeypatch)
        monkeypatch.setenv("PATH", f"{paths['here']}{host.env['PATH']}")
        folder = tmp_path / "s"
        send(folder, sif)
        far_program = reach(folder).run("command -v rsync").decode().strip()
        assert (far_program == f"{newer_rsync}/rsync") == (side == "on the remote")
        image = store.describe_sif(edited(sif))
        sent = transfer.send_image(
            reach(folder),
            edited(sif),
            image,
            home=str(folder),
            basis=store.describe_sif(sif),
            report=Notes(),
        )
    assert (folder / image.path).read_bytes() == edited(sif).read_bytes()
    assert sent is not None
    assert sent.new_bytes < MB // 2


def test_basis_of_the_same_size_and_time_is_not_the_file(far, tmp_path, sif):
    folder = tmp_path / "s"
    different = write_sif(tmp_path / "y.sif", content(9, 6 * MB + 123))
    os.utime(different, ns=(sif.stat().st_mtime_ns, sif.stat().st_mtime_ns))
    older = send(folder, sif)
    shutil.copystat(sif, older)
    target = send(folder, different, basis=store.describe_sif(sif))
    assert target.read_bytes() == different.read_bytes()


@pytest.mark.parametrize("seed", [1, *soak(*range(2, 26))])
def test_cut_of_a_next_version_does_not_lose_the_basis(far, tmp_path, seed):
    chosen = random.Random(seed)  # noqa: S311
    rest = chosen.randbytes(12 * MB)
    sif = write_sif(tmp_path / "x.sif", chosen.randbytes(6 * MB) + rest)
    # The rest has moved towards the end, has its place, or has moved towards the start.
    new_bytes = 6 * MB + (300_000, 0, -300_000)[(seed - 1) % 3]
    new = write_sif(tmp_path / "y.sif", chosen.randbytes(new_bytes) + rest)
    folder = tmp_path / "s"
    send(folder, sif)
    cuts(far, seed, 1, LOST_BYTES + MB // 2)  # within the new 6 MB
    report = Notes()
    target = send(folder, new, report, basis=store.describe_sif(sif))
    far.disconnect()
    assert target.read_bytes() == new.read_bytes()
    assert any("the connection was lost" in text for text in report.texts)
    until(lambda: len((far.folder / "limits.passed").read_text().split()) >= 2)
    assert sent_bytes(far) < 6 * MB + LOST_BYTES + MB
    assert len(stored(folder)) == 4


LOST_BYTES = 2 * MB
"""What a cut can lose: OpenSSH's window, which the far end may hold in memory."""


def sent_bytes(far):
    """Return the bytes that passed the proxy since `cuts`."""
    return sum(map(int, (far.folder / "limits.passed").read_text().split()))


SEEDS = [1, *soak(*range(2, 21))]


@pytest.fixture
def large_sif(tmp_path):
    """A .sif of 12 MB."""
    return write_sif(tmp_path / "x.sif", content(7, 12 * MB))


def cuts(far, seed, number, least):
    """Make the next connections end after random numbers of bytes."""
    chosen = random.Random(seed)  # noqa: S311
    limits = [chosen.randrange(least, least + 3 * MB) for _ in range(number)]
    (far.folder / "limits").write_text(" ".join(map(str, limits)))
    (far.folder / "limits.passed").unlink(missing_ok=True)
    far.through(sys.executable, PROXY, "%p", far.folder / "limits")


@pytest.mark.parametrize("seed", SEEDS)
def test_cut_transfer_goes_on_where_it_ended(far, tmp_path, large_sif, seed):
    cuts(far, seed, 3, LOST_BYTES + MB // 2)
    report = Notes()
    target = send(tmp_path / "s", large_sif, report)
    assert target.read_bytes() == large_sif.read_bytes()
    assert sum("the connection was lost" in text for text in report.texts) >= 2
    assert any(text.endswith("MB were sent before") for text in report.texts)
    assert_only(tmp_path / "s", target)


def test_resumed_transfer_sends_only_the_rest(far, tmp_path, large_sif):
    cuts(far, 1, 1, 9 * MB)
    target = send(tmp_path / "s", large_sif)
    assert target.read_bytes() == large_sif.read_bytes()
    assert 12 * MB < sent_bytes(far) < 12 * MB + LOST_BYTES + MB


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_cut_at_any_moment_leaves_a_whole_file_or_none(far, tmp_path, sif, seed):
    cuts(far, seed, 6, 1000)
    target = tmp_path / "s" / store.describe_sif(sif).path
    for _ in range(7):
        try:
            send(tmp_path / "s", sif)
            break
        except Cut:
            assert not target.exists()
    assert target.read_bytes() == sif.read_bytes()
    assert_only(tmp_path / "s", target)


@pytest.mark.parametrize("seed", [1, *soak(*range(2, 6))])
def test_cut_folder_is_complete_or_absend(far, tmp_path, seed):
    folder, home = tmp_path / "my code", tmp_path / "s"
    (folder / "a\nb").mkdir(parents=True)
    (home / "code").mkdir(parents=True)
    for number in range(8):
        (folder / "a\nb" / f"{number} $(x)").write_bytes(content(number, MB))
    cuts(far, seed, 6, 1000)
    target = home / "code/digest"
    for _ in range(7):
        try:
            transfer.send_folder(
                reach(home),
                folder,
                label="code",
                size_bytes=8 * MB,
                home=str(home),
                target="code/digest",
                report=Notes(),
            )
            break
        except Cut:
            assert not target.exists()
    assert stored(home) == [target / path.relative_to(folder) for path in stored(folder)]
    for path in stored(folder):
        assert (target / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_file_goes_through_the_host_for_transfers(far, tmp_path, sif):
    (tmp_path / "s/images").mkdir(parents=True)
    before = len(far.calls())
    reached = connection.connect(
        Remote(name="far", address="far", folder=str(tmp_path / "s"), transfer="far2")
    )
    assert send_over(reached, tmp_path / "s", sif).read_bytes() == sif.read_bytes()
    calls = far.calls()[before:]
    assert len(calls) == 3
    assert all(" -- far2 exec " in call for call in calls)
    reached.run(":")
    assert " -- far exec " in far.calls()[-1]
    assert reached.close()
    assert far.master("check", "far2").returncode != 0


def test_limited_transfer_takes_its_time(far, tmp_path, sif):
    (tmp_path / "images").mkdir()
    start_s = time.monotonic()
    limited = reach(tmp_path, bwlimit=3)
    assert send_over(limited, tmp_path, sif).read_bytes() == sif.read_bytes()
    assert time.monotonic() - start_s >= 2


def test_transfer_that_gets_nowhere_gives_up(far, tmp_path, sif):
    folder = tmp_path / "s"
    (folder / "images").mkdir(parents=True)
    # By turns the script that looks how much has arrived, and rsync, which gets no connection.
    (far.folder / "limits").write_text("20000 3000 " * 25)
    far.through(sys.executable, PROXY, "%p", far.folder / "limits")
    with pytest.raises(Cut):
        send_over(reach(folder, keep_s=0), folder, sif)
    far.direct()
    assert send(folder, sif).read_bytes() == sif.read_bytes()


def test_killed_transfer_is_finished_by_the_next(far, tmp_path, sif):
    folder = tmp_path / "s"
    slow = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[3:]\n"
        "import test_transfer_real as t; sif = Path(sys.argv[2])\n"
        "limited = t.reach(Path(), bwlimit=2)\n"
        "t.send_over(limited, Path(sys.argv[1]), sif)"
    )
    (folder / "images").mkdir(parents=True)
    tests = Path(__file__).parents[2]
    paths = (str(Path(__file__).parent), str(tests / "lab"), str(tests / "kit"))
    argv = [sys.executable, "-c", slow, str(folder), str(sif), *paths]
    first = subprocess.Popen(argv, env={**os.environ, "TMPDIR": str(tmp_path)})
    while not any(path.stat().st_size > 2 * MB for path in stored(folder)):
        assert first.poll() is None
    first.kill()
    first.wait()
    for shell in Path("/tmp").glob("imgkit-*/shell"):  # it had no time to remove this
        if str(folder) in shell.read_text():
            shutil.rmtree(shell.parent)
    until(
        lambda: all(
            path.parent.name == ".imgkit-part" or path.name == "image.json" for path in stored(folder)
        )
    )
    report = Notes()
    assert send(folder, sif, report).read_bytes() == sif.read_bytes()
    assert report.texts[0].endswith("MB were sent before")


def test_two_transfers_at_once_do_not_collide(far, tmp_path, sif):
    folder = tmp_path / "s"
    targets: list[Path] = []
    run_at_once(lambda: targets.append(send(folder, sif)))
    assert len(targets) == 3
    assert targets[0].read_bytes() == sif.read_bytes()
    assert_only(folder, targets[0])


@pytest.mark.parametrize("at", [".imgkit-part", "."])
def test_damaged_part_is_corrected(far, tmp_path, sif, at):
    """An edited file has the size and the time of the one here."""
    part = tmp_path / "s/images/.incoming" / store.describe_sif(sif).name / at / SIF
    part.parent.mkdir(parents=True)
    part.write_bytes(b"rubbish" + sif.read_bytes()[7:])
    shutil.copystat(sif, part)
    target = send(tmp_path / "s", sif)
    assert target.read_bytes() == sif.read_bytes()
    assert_only(tmp_path / "s", target)


def test_temporary_file_of_a_killed_rsync_is_used(far, tmp_path, sif):
    folder = tmp_path / "s/images/.incoming" / store.describe_sif(sif).name
    folder.mkdir(parents=True)
    (folder / f".{SIF}.AbCdEf").write_bytes(sif.read_bytes()[: 4 * MB])
    report = Notes()
    target = send(tmp_path / "s", sif, report)
    assert report.texts == ["4.2 MB of 6.3 MB were sent before"]
    assert_only(tmp_path / "s", target)


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    output("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk)
    yield disk
    output("umount", "--lazy", disk)


def test_disk_without_room_is_refused_before_the_start(far, small_disk, sif):
    with pytest.raises(CheckFailed, match=r"but 4\.2 MB free"):
        send(small_disk, sif)
    assert stored(small_disk) == []


def test_disk_that_fills_up_is_named(far, small_disk, sif, monkeypatch):
    monkeypatch.setattr(transfer, "free_bytes", lambda _: None)  # somebody else takes the room later
    with pytest.raises(CheckFailed, match="the disk of far is full") as caught:
        send(small_disk, sif)
    assert "No space left" in str(caught.value.hint)
    assert "imgkit remote gc far --delete" in str(caught.value.hint)
    assert [path.name for path in (small_disk / "images").iterdir()] == [".incoming"]


def change_byte(sif):
    with sif.open("r+b") as stream:
        stream.seek(3 * MB)
        stream.write(b"x")


def test_changed_file_is_not_published(far, tmp_path, sif):
    change_byte(sif)
    with pytest.raises(CheckFailed, match="differs from the image here"):
        send(tmp_path / "s", sif)
    assert stored(tmp_path / "s") == []


def test_changed_file_is_not_published_without_openssl(tmp_path, sif, monkeypatch):
    program = write_program(tmp_path / "bin/openssl", "exit 1")
    with (
        far_host(Path(f"/tmp/imgkit-digest-{os.getpid()}")) as host,
        sshd(host, f"SetEnv PATH={program.parent}:/usr/bin:/bin"),
    ):
        host.enter(monkeypatch)
        target = send(tmp_path / "s", sif)
        change_byte(sif)
        assert target.read_bytes() != sif.read_bytes()
        with pytest.raises(CheckFailed, match="differs from the image here"):
            send(tmp_path / "other", sif)
    assert_only(tmp_path / "s", target)
    assert stored(tmp_path / "other") == []
