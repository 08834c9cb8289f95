"""Where a node finds the run's secret, and which files it refuses."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.facts import Reader, storage
from imgkit_entrypoints.rollcall import secret

VALUE = bytes(range(32))
OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of another user")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a secret"
    path.write_bytes(VALUE)
    path.chmod(0o600)
    return path


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home")}


def secret_file(home: dict[str, str]) -> Path:
    return Path(home["HOME"]) / ".config/imgkit/secret"


def refused(path: Path, text: str) -> str:
    with pytest.raises(UsageError, match=text) as caught:
        secret.read_secret(path)
    assert str(VALUE) not in str(caught.value)
    return str(caught.value.hint)


def test_private_file_is_the_secret(file):
    assert secret.find_secret(str(file), {}, shared_home=False) == VALUE


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_file_with_bits_for_others_is_refused(file, mode):
    file.chmod(mode)
    assert refused(file, rf"other users have access to it \(mode {mode:04o}\)") == f"chmod 600 '{file}'"


@as_root
def test_file_of_another_user_is_refused(file):
    os.chown(file, OTHER_USER, OTHER_USER)
    assert f"sudo chown 0 '{file}'" in refused(file, f"belongs to user {OTHER_USER}, not to you")


@as_root
def test_root_of_a_container_reads_the_file_of_the_folder_s_owner(file):
    for path in (file, file.parent):
        os.chown(path, OTHER_USER, OTHER_USER)
    assert secret.read_secret(file) == VALUE


def test_link_pipe_folder_and_missing_file_are_refused(file, tmp_path):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    os.mkfifo(pipe, 0o600)
    assert str(file) in refused(link, "it is a symbolic link")
    refused(pipe, "not a regular file")  # at once, though nobody writes
    refused(tmp_path, "not a regular file")
    assert "all nodes share" in refused(tmp_path / "none", "No such file")


@pytest.mark.parametrize(("size", "text"), [(0, "0 bytes"), (31, "31 bytes"), (4097, "more than 4096")])
def test_file_of_a_wrong_size_is_refused(file, size, text):
    file.write_bytes(b"x" * size)
    refused(file, text)


def test_kubernetes_mounts_a_link_that_the_group_may_read(tmp_path, monkeypatch):
    """A volume of type Secret: ``secret`` is a link into a folder that a second link names."""
    (tmp_path / "..now").mkdir()
    (tmp_path / "..now/secret").write_bytes(VALUE)
    (tmp_path / "..now/secret").chmod(0o600)
    (tmp_path / "..data").symlink_to("..now")
    (tmp_path / "secret").symlink_to("..data/secret")
    monkeypatch.setattr(secret, "MOUNTED", tmp_path / "secret")
    assert secret.find_secret(None, {}, shared_home=False) == VALUE
    assert secret.describe_source(None, {}, shared_home=False) == str(tmp_path / "secret")
    (tmp_path / "..now/secret").chmod(0o640)  # as with an fsGroup, but this is no read-only mount of a pod
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(UsageError, match="other users"):
        secret.find_secret(None, {}, shared_home=False)


def test_home_file_is_made_on_a_network_disk_alone(home):
    assert secret.find_secret(None, home, shared_home=False) is None
    assert not secret_file(home).exists()
    value = secret.find_secret(None, home, shared_home=True)
    assert value is not None
    assert len(value) == 32
    assert value == secret_file(home).read_bytes()
    assert stat.S_IMODE(secret_file(home).stat().st_mode) == 0o600
    assert stat.S_IMODE(secret_file(home).parent.stat().st_mode) == 0o700
    # Once it is there, it counts everywhere: somebody may have copied it.
    assert secret.find_secret(None, home, shared_home=False) == value
    assert [path.name for path in secret_file(home).parent.iterdir()] == ["secret"]


def test_home_is_the_one_of_xdg(tmp_path):
    env = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": "/nowhere"}
    assert secret.home_file(env) == tmp_path / "imgkit/secret"
    assert secret.home_file({"HOME": ""}) is None
    assert secret.find_secret(None, {}, shared_home=True) is None


def test_plan_names_the_source_and_makes_nothing(home, file):
    assert secret.describe_source(str(file), home, shared_home=False) == str(file)
    assert secret.describe_source(None, home, shared_home=True) == str(secret_file(home))
    assert secret.describe_source(None, home, shared_home=False) == ""
    assert not secret_file(home).exists()


def test_home_that_cannot_be_written_leaves_the_start_open(home):
    Path(home["HOME"]).write_text("no folder")
    assert secret.find_secret(None, home, shared_home=True) is None


RACE = """
import sys, time
from imgkit_entrypoints.rollcall import secret
time.sleep(max(0, float(sys.argv[2]) - time.time()))
print(secret.find_secret(None, {"HOME": sys.argv[1]}, shared_home=True).hex())
"""


def test_nodes_that_race_agree_on_one_home_file(tmp_path):
    argv = [sys.executable, "-c", RACE, str(tmp_path), str(time.time() + 0.5)]
    racers = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert len({racer.communicate(timeout=30)[0] for racer in racers}) == 1
    assert len(secret_file({"HOME": str(tmp_path)}).read_bytes()) == 32


MOUNTS = """\
22 1 0:20 / / rw - overlay overlay rw
30 22 0:40 / /home rw,relatime shared:1 - autofs auto.home rw
31 30 0:41 /export/me /home/me rw - nfs4 filer:/export/me rw
32 22 0:42 / /my\\040disk rw - fuse.sshfs me@host: rw
33 22 0:43 / /lfs rw - lustre mds:/lfs rw
34 33 8:1 / /lfs/scratch rw - ext4 /dev/sda1 rw
35 22 0:45 / /rootless rw - fuse.fuse-overlayfs fuse-overlayfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/home/me/.config/imgkit/secret", "nfs4", True),
        ("/home/you", "autofs", False),
        ("/home/me2", "autofs", False),
        ("/my disk/x", "fuse.sshfs", True),
        ("/lfs/me", "lustre", True),
        ("/lfs/scratch/me", "ext4", False),
        ("/root", "overlay", False),
        ("/rootless/root", "fuse.fuse-overlayfs", False),
    ],
)
def test_network_disk_is_known_by_its_file_system(tmp_path, path, kind, shared):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    reader = Reader(root=tmp_path)
    assert (storage._file_system(reader, path), storage.on_network_disk(reader, path)) == (kind, shared)


def test_unknown_mounts_are_not_shared(tmp_path):
    assert not storage.on_network_disk(Reader(root=tmp_path), "/home/me")
