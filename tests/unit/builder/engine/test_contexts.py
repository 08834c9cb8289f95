"""Which engine is meant: ``DOCKER_HOST``, a context, or a usual socket."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import refused

from imgkit_builder.engine import address
from imgkit_builder.engine.address import Endpoint
from imgkit_builder.engine.connection import sdk_options
from imgkit_entrypoints.errors import UsageError


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Docker's settings: the contexts ``lab`` (plain), ``tls`` and ``other`` (no Docker engine)."""
    # Short: a socket's path is limited.
    folder = Path(tempfile.mkdtemp(prefix="imgkit-"))
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setenv("HOME", str(folder / "home"))
    for name in ("XDG_CONFIG_HOME", "COLIMA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(address, "DEFAULT_HOST", f"unix://{folder}/docker.sock")
    monkeypatch.setattr("os.getuid", lambda: 1000)
    store(folder, "lab", {"docker": {"Host": "unix:///lab.sock", "SkipTLSVerify": False}})
    store(folder, "tls", {"docker": {"Host": "tcp://far:2376", "SkipTLSVerify": False}})
    store(folder, "other", {"kubernetes": {"Host": "https://far"}})
    certificates = folder / "contexts/tls" / hashlib.sha256(b"tls").hexdigest() / "docker"
    certificates.mkdir(parents=True)
    for name in ("ca", "cert", "key"):
        (certificates / f"{name}.pem").touch()
    yield folder
    shutil.rmtree(folder)


def store(folder: Path, name: str, endpoints: object) -> Path:
    """The file that ``docker context create`` writes."""
    path = folder / "contexts/meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"Name": name, "Metadata": {}, "Endpoints": endpoints}))
    return path


def use(folder: Path, name: str) -> str:
    """``docker context use NAME``."""
    path = folder / "config.json"
    path.write_text(json.dumps({"auths": {}, "currentContext": name}))
    return str(path)


def test_chosen_context_is_used(docker):
    source = use(docker, "lab")
    assert address.find_endpoint() == Endpoint(host="unix:///lab.sock", source=source, context="lab")


def test_variables_go_before_the_chosen_context(docker, monkeypatch):
    use(docker, "other")
    monkeypatch.setenv("DOCKER_CONTEXT", "lab")
    endpoint = address.find_endpoint()
    assert (endpoint.host, endpoint.source) == ("unix:///lab.sock", "DOCKER_CONTEXT")
    monkeypatch.setenv("DOCKER_HOST", "tcp://here:1")
    assert address.find_endpoint() == Endpoint(host="tcp://here:1", source="DOCKER_HOST")


def test_default_context_means_the_usual_socket(docker, monkeypatch):
    use(docker, "lab")
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert address.find_endpoint() == Endpoint(host=f"unix://{docker}/docker.sock")


@contextlib.contextmanager
def listening(path: Path) -> Iterator[None]:
    """A socket that accepts connections; afterwards its file stays, as a stopped engine leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield


# In the order in which they are tried.
PLACES = (
    "docker.sock",
    "run/docker.sock",
    "run/podman/podman.sock",
    "home/.docker/run/docker.sock",
    "home/.docker/desktop/docker.sock",
    "home/.colima/default/docker.sock",
    "home/.config/colima/default/docker.sock",
    "home/.rd/docker.sock",
)


def test_usual_sockets_are_tried_in_order(docker):
    with contextlib.ExitStack() as stack:
        for socket_path in reversed(PLACES):
            stack.enter_context(listening(docker / socket_path))
            assert address.find_endpoint() == Endpoint(host=f"unix://{docker / socket_path}")


def test_socket_of_a_stopped_engine_is_passed_over(docker):
    with listening(docker / PLACES[0]), listening(docker / PLACES[1]):
        pass
    (docker / PLACES[2]).parent.mkdir()
    (docker / PLACES[2]).touch()  # not even a socket
    with listening(docker / PLACES[-1]):
        assert address.find_endpoint().host == f"unix://{docker / PLACES[-1]}"
    assert address.find_endpoint().host == address.DEFAULT_HOST


def test_colima_may_live_elsewhere(docker, monkeypatch):
    monkeypatch.setenv("COLIMA_HOME", str(docker / "c"))
    with listening(docker / "c/default/docker.sock"):
        assert address.find_endpoint().host == f"unix://{docker}/c/default/docker.sock"


def test_certificates_of_a_context_reach_the_sdk(docker):
    use(docker, "tls")
    endpoint = address.find_endpoint()
    assert endpoint.tls is not None
    assert endpoint.tls.verify
    certificates = docker / "contexts/tls" / hashlib.sha256(b"tls").hexdigest() / "docker"
    tls = sdk_options(endpoint)["tls"]
    assert (tls.ca_cert, tls.cert) == (
        f"{certificates}/ca.pem",
        (f"{certificates}/cert.pem", f"{certificates}/key.pem"),
    )


def test_stated_certificates_reach_the_sdk(docker, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://far:2376")
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    (docker / "ca.pem").touch()
    assert sdk_options(address.find_endpoint())["tls"].ca_cert == f"{docker}/ca.pem"


def test_unknown_context_is_refused(docker, monkeypatch):
    source = use(docker, "gone")
    for where, leave in ((source, "docker context use default"), ("DOCKER_CONTEXT", "unset DOCKER_CONTEXT")):
        with refused(UsageError, "no Docker context 'gone'", where=where, hint=leave):
            address.find_endpoint()
        monkeypatch.setenv("DOCKER_CONTEXT", "gone")


def test_context_of_something_else_is_refused(docker):
    use(docker, "other")
    with pytest.raises(UsageError, match="'other' names no engine"):
        address.find_endpoint()


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_damaged_settings_are_refused(docker, text):
    (docker / "config.json").write_text(text)
    with refused(UsageError, "this file is not", where=str(docker / "config.json")):
        address.find_endpoint()


def test_folder_of_settings_is_in_the_home(monkeypatch):
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert address._settings_folder() == Path("/home/me/.docker")
