"""Which engine is meant: ``DOCKER_HOST``, a context, or a usual socket."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from imgkit_builder.engine import address, contexts
from imgkit_builder.engine.connection import client_options
from imgkit_builder.engine.contexts import Endpoint
from imgkit_entrypoints.errors import UsageError


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Docker's settings: the contexts ``lab`` (plain), ``tls`` and ``other`` (no Docker engine)."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(address, "DEFAULT_HOST", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setattr("os.getuid", lambda: 1000)
    store(tmp_path, "lab", {"docker": {"Host": "unix:///lab.sock", "SkipTLSVerify": False}})
    store(tmp_path, "tls", {"docker": {"Host": "tcp://far:2376", "SkipTLSVerify": False}})
    store(tmp_path, "other", {"kubernetes": {"Host": "https://far"}})
    place = tmp_path / "contexts/tls" / hashlib.sha256(b"tls").hexdigest() / "docker"
    place.mkdir(parents=True)
    for name in ("ca", "cert", "key"):
        (place / f"{name}.pem").touch()
    return tmp_path


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


def test_chosen_context_is_used(docker: Path) -> None:
    source = use(docker, "lab")
    assert address.endpoint() == Endpoint(host="unix:///lab.sock", source=source, context="lab")


def test_variables_go_before_the_chosen_context(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(docker, "other")
    monkeypatch.setenv("DOCKER_CONTEXT", "lab")
    found = address.endpoint()
    assert (found.host, found.source) == ("unix:///lab.sock", "DOCKER_CONTEXT")
    monkeypatch.setenv("DOCKER_HOST", "tcp://here:1")
    assert address.endpoint() == Endpoint(host="tcp://here:1", source="DOCKER_HOST")


def test_default_context_means_the_usual_socket(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(docker, "lab")
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert address.endpoint() == Endpoint(host=f"unix://{docker}/docker.sock")


def test_usual_sockets_are_tried_in_order(docker: Path) -> None:
    podman = docker / "run/podman/podman.sock"
    podman.parent.mkdir(parents=True)
    podman.touch()
    assert address.endpoint().host == f"unix://{podman}"
    (docker / "run/docker.sock").touch()
    assert address.endpoint().host == f"unix://{docker}/run/docker.sock"
    (docker / "docker.sock").touch()
    assert address.endpoint().host == f"unix://{docker}/docker.sock"


def test_certificates_of_a_context_reach_the_sdk(docker: Path) -> None:
    use(docker, "tls")
    found = address.endpoint()
    assert found.tls is not None
    assert found.tls.verify
    place = docker / "contexts/tls" / hashlib.sha256(b"tls").hexdigest() / "docker"
    tls = client_options(found)["tls"]
    assert (tls.ca_cert, tls.cert) == (f"{place}/ca.pem", (f"{place}/cert.pem", f"{place}/key.pem"))


def test_stated_certificates_reach_the_sdk(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://far:2376")
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    (docker / "ca.pem").touch()
    assert client_options(address.endpoint())["tls"].ca_cert == f"{docker}/ca.pem"


def test_ssh_goes_through_the_ssh_program() -> None:
    assert client_options(Endpoint(host="ssh://me@far")) == {
        "base_url": "ssh://me@far",
        "use_ssh_client": True,
    }


def test_unknown_context_is_refused(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = use(docker, "gone")
    with pytest.raises(UsageError, match="no Docker context 'gone'") as caught:
        address.endpoint()
    assert caught.value.where == source
    assert "docker context use default" in str(caught.value.hint)
    monkeypatch.setenv("DOCKER_CONTEXT", "gone")
    with pytest.raises(UsageError) as caught:
        address.endpoint()
    assert (caught.value.where, "unset DOCKER_CONTEXT" in str(caught.value.hint)) == ("DOCKER_CONTEXT", True)


def test_context_of_something_else_is_refused(docker: Path) -> None:
    use(docker, "other")
    with pytest.raises(UsageError, match="'other' names no engine"):
        address.endpoint()


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_damaged_settings_are_refused(docker: Path, text: str) -> None:
    (docker / "config.json").write_text(text)
    with pytest.raises(UsageError, match="this file is not") as caught:
        address.endpoint()
    assert caught.value.where == str(docker / "config.json")


def test_folder_of_settings_is_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert contexts.folder() == Path("/home/me/.docker")
