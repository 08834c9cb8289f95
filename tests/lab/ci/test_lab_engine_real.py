"""``ci/lab/engine`` for real, on a second engine beside the one that the tests use."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from labkit import LAB, expect_success, ordinary_user, output, run

pytestmark = [
    pytest.mark.docker,
    pytest.mark.xdist_group("engine"),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("dockerd", path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None,
        reason="starting an engine needs root and dockerd",
    ),
]


def engine(verb, folder, *options):
    return run(LAB / "engine", verb, "--private", folder, *options)


def answers(folder):
    env = {**os.environ, "DOCKER_HOST": f"unix://{folder}/docker.sock"}
    return subprocess.run(["docker", "version"], env=env, capture_output=True, timeout=30).returncode == 0


def processes(folder):
    """Command lines that name this engine's folder."""
    command_lines = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if entry.name.isdigit() and str(folder) in line and "ci/lab/engine" not in line:
            command_lines.append(line)
    return command_lines


def mounts(folder):
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if line.split()[1].replace("\\040", " ").startswith(str(folder))]


@pytest.fixture
def folder():
    # Short, since a socket's path is limited; with a space, since a checkout's path may have one.
    folder = Path(f"/tmp/imgkit engine {os.getpid()}")
    yield folder
    engine("stop", folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    "options",
    [(), ("--podman",), ("--rootless",), ("--podman", "--rootless")],
    ids=["docker", "podman", "rootless", "rootless-podman"],
)
def test_engine_starts_and_stops_cleanly(folder, options):
    with contextlib.ExitStack() as stack:
        owner = (stack.enter_context(ordinary_user()),) if "--rootless" in options else ()
        assert engine("status", folder).returncode == 1
        expect_success(engine("start", folder, *options, *owner))
        assert answers(folder)
        again = engine("start", folder, *options, *owner)
        assert "answers already" in again.stderr
        expect_success(engine("stop", folder))
        assert not answers(folder)
        assert processes(folder) == []
        assert mounts(folder) == []
        for user in owner:
            # Another process than a dead one would keep the user from being removed.
            states = run("ps", "-o", "stat=", "--user", user).stdout.split()
            assert [state for state in states if not state.startswith("Z")] == []


def test_newer_engine_keeps_images_in_containerd(folder):
    expect_success(engine("start", folder, "--debian", "sid", "--store", "containerd"))
    env = {"DOCKER_HOST": f"unix://{folder}/docker.sock"}
    assert "io.containerd.snapshotter" in output("docker", "info", "--format", "{{.DriverStatus}}", env=env)
    assert engine("stop", folder).returncode == 0
    assert processes(folder) == []
    assert mounts(folder) == []


@pytest.mark.parametrize(
    "options",
    [("--store", "btrfs"), ("--debian", "../x"), ("--debian",), ("--podman", "--store", "containerd")],
)
def test_unknown_store_or_release_refused(folder, options):
    assert engine("start", folder, *options).returncode != 0
    assert not folder.exists()


def test_machines_own_engine_is_never_another_release():
    result = run(LAB / "engine", "start", "--debian", "sid")
    assert result.returncode == 2
    assert "--private" in result.stderr


def test_machines_own_engine_keeps_its_bridge(folder):
    bridge = Path("/sys/class/net/docker0")
    before = bridge.exists()
    engine("start", folder)
    assert bridge.exists() == before


def test_stop_leaves_a_foreign_engine(folder):
    assert engine("start", folder).returncode == 0
    note = folder / "started"
    ours = note.read_text()
    for foreign in (None, "4194304 1\n"):  # no note of a start; the note of one that is long dead
        note.unlink() if foreign is None else note.write_text(foreign)
        assert "nothing to stop" in engine("stop", folder).stderr
        assert answers(folder)
    note.write_text(ours)


def test_stop_checks_more_than_the_pid(folder):
    folder.mkdir()
    bystander = subprocess.Popen(["sleep", "60"])
    (folder / "started").write_text(f"{bystander.pid} 1\n")  # its pid, another one's start time
    engine("stop", folder)
    time.sleep(0.2)
    alive = bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert alive


def test_stop_cleans_up_after_a_killed_engine(folder):
    assert engine("start", folder).returncode == 0
    pid = int((folder / "started").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    assert engine("stop", folder).returncode == 0
    assert processes(folder) == []
    assert mounts(folder) == []


def test_failing_engine_quotes_its_log(folder):
    folder.mkdir()
    (folder / "data").write_text("a file where the engine needs a folder")
    result = engine("start", folder)
    assert result.returncode == 4
    assert str(folder / "data") in result.stderr
    assert processes(folder) == []
