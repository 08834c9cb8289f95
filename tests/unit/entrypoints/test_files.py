"""Files in folders that other users can write to: complete or absent, and never somebody else's."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imgkit_entrypoints import files
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.launch import stop_protocol
from imgkit_entrypoints.launch.stop_protocol import RunFolder

STRANGER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as a second user")


def as_stranger(act: Callable[[], object]) -> None:
    """Do something as another user."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            act()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture(params=[0o777, 0o1777], ids=["open", "sticky"])
def shared(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder of this user into which everybody can write. Pytest's own folders are private."""
    with tempfile.TemporaryDirectory() as folder:
        shared_folder = Path(folder, "shared")
        shared_folder.mkdir()
        shared_folder.chmod(request.param)
        Path(folder).chmod(0o755)
        yield shared_folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / ".bashrc"
    path.write_text("mine\n")
    return path


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", [".state-saved.{pid}", ".state-saved.00c0ffee.part"])
def test_planted_link_is_not_followed(tmp_path, victim, name, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "00c0ffee"[: 2 * size])  # the luckiest guess
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name.format(pid=os.getpid())).symlink_to(victim)
    try:
        files.write_file(folder / "state-saved", "7 40\n")
    except FileExistsError:
        assert file_names(folder) == []
    else:
        assert (folder / "state-saved").read_text() == "7 40\n"
    assert victim.read_text() == "mine\n"


def test_link_at_the_target_is_replaced(tmp_path, victim):
    target = tmp_path / "config.json"
    target.symlink_to(victim)
    files.write_file(target, "{}")
    assert (target.is_symlink(), target.read_text(), victim.read_text()) == (False, "{}", "mine\n")


def test_new_file_has_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_file(tmp_path / "x", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_file_then_folder_are_synced(tmp_path, monkeypatch):
    synced: list[bool] = []
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    files.write_file(tmp_path / "x", "")
    assert synced == [False, True]


def test_failed_sync_keeps_the_old_file(tmp_path, monkeypatch):
    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    files.write_file(tmp_path / "x", "old")
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        files.write_file(tmp_path / "x", "new")
    assert (file_names(tmp_path), (tmp_path / "x").read_text()) == (["x"], "old")


def test_interrupt_leaves_the_old_file_alone(tmp_path):
    files.write_file(tmp_path / "x", "old")
    with contextlib.suppress(KeyboardInterrupt), files.replace_file(tmp_path / "x") as stream:
        stream.write(b"new")
        raise KeyboardInterrupt
    assert (file_names(tmp_path), (tmp_path / "x").read_text()) == (["x"], "old")


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (lambda path, victim: path.symlink_to(victim), "a symbolic link"),
        (lambda path, _: path.symlink_to("/nowhere/at/all"), "a symbolic link"),
        (os.link, "more than one hard link"),
        (lambda path, _: os.mkfifo(path), "not a regular file"),
    ],
    ids=["link", "dangling link", "hard link", "pipe"],
)
def test_lines_are_added_to_a_file_of_ones_own_only(tmp_path, victim, plant, reason):
    target = tmp_path / "metrics.jsonl"
    plant(*((victim, target) if plant is os.link else (target, victim)))
    with pytest.raises(PermissionError, match=reason):
        files.append_file(target, b"{}\n")
    with pytest.raises(PermissionError, match=reason):
        files.read_own(target)
    assert victim.read_text() == "mine\n"


@as_root
def test_strangers_file_takes_no_lines(shared):
    target = shared / "metrics.jsonl"
    as_stranger(lambda: (target.touch(), target.chmod(0o666)))
    with pytest.raises(PermissionError):  # in a sticky folder the kernel itself may refuse
        files.append_file(target, b"{}\n")
    assert target.read_bytes() == b""


@as_root
@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
@pytest.mark.parametrize("name", ["stop", "stop-for-requeue"])
def test_stop_file_of_a_stranger_does_not_count(shared, name, kind):
    messages: list[str] = []
    folder = RunFolder(path=shared, log=messages.append)
    plant = {
        "file": lambda path: path.touch(),
        "link": lambda path: path.symlink_to("/etc/hostname"),
        "pipe": os.mkfifo,
    }[kind]
    as_stranger(lambda: plant(shared / name))
    for _ in range(3):
        folder.refuse_if_stopped()
        assert folder.stop_request() is None
    assert len(messages) == 1
    assert f"{shared / name} is ignored: it " in messages[0]


@as_root
def test_persons_file_counts_where_the_program_is_root(tmp_path):
    tmp_path.chmod(0o755)
    os.chown(tmp_path, 1000, 1000)  # the person's folder, and a container that runs as root
    (tmp_path / "stop").touch()
    os.chown(tmp_path / "stop", 1000, 1000)
    assert RunFolder(path=tmp_path).stop_file() == tmp_path / "stop"


@as_root
def test_start_goes_on_beside_marks_of_a_stranger(shared, victim):
    as_stranger(
        lambda: [
            (shared / name).symlink_to(victim)
            for name in ("state-saved", "stop-for-requeue", f".state-saved.{os.getppid()}")
        ]
    )
    messages: list[str] = []
    folder = RunFolder(path=shared, log=messages.append)
    folder.clear()
    folder.write(stop_protocol.SAVED, "7 40\n")
    assert (shared / "state-saved").read_text() == "7 40\n"
    assert not (shared / "state-saved").is_symlink()
    assert victim.read_text() == "mine\n"


@as_root
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_stop_folder_of_a_stranger_is_refused(shared, tmp_path, kind):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    make = {"folder": lambda path: path.mkdir(0o777), "link": lambda path: path.symlink_to(theirs)}[kind]
    as_stranger(lambda: make(shared / "node0"))
    with (
        pytest.raises(UsageError, match="another user's folder"),
        stop_protocol.use_stop_folder(str(shared), 0),
    ):
        pass
    with stop_protocol.use_stop_folder(str(shared), 1) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@as_root
def test_saved_mark_of_a_stranger_does_not_count(shared):
    as_stranger(lambda: (shared / "state-saved").write_text("7 40\n"))
    step, reason = stop_protocol.read_saved_step(shared, "7")
    assert step is None
    assert f"is ignored: it belongs to another user ({STRANGER})" in reason


@as_root
def test_collectives_are_not_recorded_where_a_stranger_planted_links(shared):
    from imgkit_entrypoints.launch import nccl

    env = {"IMGKIT_DEVICE": "cuda", "IMGKIT_RUN_DIR": str(shared)}
    folder = shared / f"imgkit-nccl-{os.geteuid()}"
    assert nccl.recorder_variables(env, "2.13", "7")["TORCH_FR_DUMP_TEMP_FILE"] == f"{folder}/nccl-7-rank-"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    as_stranger(lambda: folder.mkdir(0o777))
    assert "TORCH_FR_DUMP_TEMP_FILE" not in nccl.recorder_variables(env, "2.13", "7")


@as_root
def test_folder_that_this_user_cannot_write_is_refused(shared):
    shared.chmod(0o755)

    def refuse() -> None:
        with pytest.raises(
            UsageError, match=r"^--run-dir: the run folder cannot be written: Permission denied"
        ):
            files.refuse_unusable_folder(shared, "run folder", where="--run-dir", hint="another")

    as_stranger(refuse)
