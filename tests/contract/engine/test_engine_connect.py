"""Reaching the engine: every way in which there is none."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from imgkit_builder import engine as engines
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError


def test_missing_socket_says_how_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("imgkit_builder.engine.address.DEFAULT_HOST", f"unix://{tmp_path}/docker.sock")
    with pytest.raises(ToolMissing, match="no Docker engine answers") as caught:
        engines.connect()
    assert "systemctl start docker" in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("engine", "start"), [("colima", "colima start"), ("podman", "systemctl --user start podman.socket")]
)
def test_socket_that_a_stopped_engine_left_names_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, start: str
) -> None:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLIMA_HOME", str(tmp_path / "colima"))
    monkeypatch.setattr("imgkit_builder.engine.address.DEFAULT_HOST", f"unix://{tmp_path}/docker.sock")
    socket_path = tmp_path / {"colima": "colima/default/docker.sock", "podman": "podman/podman.sock"}[engine]
    socket_path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(socket_path))
    with pytest.raises(ToolMissing, match="no Docker engine answers") as caught:
        engines.connect()
    assert caught.value.hint == f"start it: {start}"


def test_dead_address_names_the_other_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/other.sock")
    monkeypatch.setattr("imgkit_builder.engine.address.DEFAULT_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "docker.sock"))
        listener.listen()
        with pytest.raises(ToolMissing) as caught:
            engines.connect()
    assert caught.value.where == "DOCKER_HOST"
    assert f"unset DOCKER_HOST, which leads to {tmp_path}/docker.sock" in str(caught.value.hint)


def test_closed_tcp_port_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{reserved.getsockname()[1]}")
        with pytest.raises(ToolMissing, match="no Docker engine answers"):
            engines.connect()


def test_garbage_address_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "garbage")
    with pytest.raises(UsageError, match="not an engine's address") as caught:
        engines.connect()
    assert "unix:///" in str(caught.value.hint)


def test_silent_engine_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute.sock"))
        mute.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/mute.sock")
        with pytest.raises(ToolFailed, match="did not answer"):
            engines.connect(timeout_s=0.3)


@pytest.fixture
def denied_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may open every socket, so the system call itself refuses here.
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("DOCKER_HOST", "unix:///var/run/docker.sock")
    monkeypatch.setattr("docker.transport.unixconn.UnixHTTPConnection.connect", refuse)


@pytest.mark.usefixtures("denied_socket")
def test_denied_socket_names_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ToolMissing, match="no permission") as caught:
        engines.connect()
    assert "usermod -aG docker" in str(caught.value.hint)


@pytest.mark.usefixtures("denied_socket")
def test_root_is_not_told_to_use_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(ToolMissing, match="no permission") as caught:
        engines.connect()
    assert "security policy" in str(caught.value.hint)
    assert "sudo" not in str(caught.value.hint)
