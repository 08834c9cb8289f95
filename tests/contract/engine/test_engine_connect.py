"""Reaching the engine: every way in which there is none."""

from __future__ import annotations

import socket

import pytest
from refusals import refused

from imgkit_builder import engine as engines
from imgkit_builder.engine import connection
from imgkit_builder.engine.address import Endpoint
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError


def test_missing_socket_says_how_to_start(tmp_path, monkeypatch):
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("imgkit_builder.engine.address.DEFAULT_HOST", f"unix://{tmp_path}/docker.sock")
    with refused(ToolMissing, "no Docker engine answers", hint="apt-get install docker.io") as caught:
        engines.connect()
    assert "systemctl start docker" in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("engine", "start"), [("colima", "colima start"), ("podman", "systemctl --user start podman.socket")]
)
def test_socket_that_a_stopped_engine_left_names_its_start(tmp_path, monkeypatch, engine, start):
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


def test_dead_address_names_the_other_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/other.sock")
    monkeypatch.setattr("imgkit_builder.engine.address.DEFAULT_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "other.sock"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "docker.sock"))
        listener.listen()
        with pytest.raises(ToolMissing) as caught:
            engines.connect()
    assert caught.value.where == "DOCKER_HOST"
    assert f"unset DOCKER_HOST, which leads to {tmp_path}/docker.sock" in str(caught.value.hint)


def test_closed_tcp_port_is_missing(monkeypatch):
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{reserved.getsockname()[1]}")
        with pytest.raises(ToolMissing, match="no Docker engine answers"):
            engines.connect()


@pytest.mark.parametrize("host", ["garbage", "tcp://"])
def test_garbage_address_is_a_usage_error(monkeypatch, host):
    monkeypatch.setenv("DOCKER_HOST", host)
    with refused(UsageError, "not an engine's address", hint="unix:///"):
        engines.connect()


def test_silent_engine_does_not_hang(tmp_path, monkeypatch):
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
@pytest.mark.parametrize(
    ("uid", "advice", "other_advice"),
    [(1000, "usermod -aG docker", "security policy"), (0, "security policy", "sudo")],
)
def test_denied_socket_names_the_group_except_to_root(monkeypatch, uid, advice, other_advice):
    monkeypatch.setattr("os.geteuid", lambda: uid)
    with refused(ToolMissing, "no permission", hint=advice) as caught:
        engines.connect()
    assert other_advice not in str(caught.value.hint)


def test_engine_tells_version_and_space(fake, tmp_path):
    version = {"Version": "27.1.0", "ApiVersion": "1.46", "Arch": "arm64"}
    fake.on("GET", "/version", fake.json(version))
    fake.on("GET", "/info", fake.json({"DockerRootDir": str(tmp_path)}))
    facts = connection.query_facts()
    assert facts.endpoint == Endpoint(host=f"unix://{fake.socket}", source="DOCKER_HOST")
    assert (facts.product, facts.version, facts.api, facts.arch) == ("Docker", "27.1.0", "1.46", "arm64")
    assert facts.free_bytes
    # In a virtual machine, the folder is not on this one.
    fake.on("GET", "/info", fake.json({"DockerRootDir": "/nonexistent"}))
    assert connection.query_facts(Endpoint(host=f"unix://{fake.socket}")).free_bytes is None


@pytest.mark.parametrize(
    ("status", "data", "message"),
    [
        (200, ["hello"], "no usable Docker engine"),
        (500, {"message": "its disk is broken"}, "its disk is broken"),
    ],
)
def test_socket_without_a_working_engine_is_told(fake, status, data, message):
    fake.on("GET", "/version", fake.json(data, status))
    with pytest.raises(ToolFailed, match=message):
        connection.query_facts()
