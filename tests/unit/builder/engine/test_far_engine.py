"""Connections to engines on other machines: TLS with a real handshake, and the words for ssh."""

from __future__ import annotations

import http.server
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import refused

from imgkit_builder import engine
from imgkit_builder.engine import address
from imgkit_entrypoints.errors import ToolFailed, ToolMissing

pytestmark = pytest.mark.programs("openssl")


class Answers(http.server.BaseHTTPRequestHandler):
    """What an engine answers to the question for its version."""

    def do_GET(self) -> None:
        data = json.dumps({"ApiVersion": "1.41", "Version": "20.10.24"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def certificate(folder: Path) -> None:
    folder.mkdir()
    options = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=here")
    named = ("-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", folder / "key.pem", "-out", folder / "ca.pem")
    subprocess.run(["openssl", *options, *named, *files], check=True, capture_output=True)


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the certificates of an engine behind TLS, which ``DOCKER_HOST`` names."""
    certificate(tmp_path / "engine")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "engine/ca.pem", tmp_path / "engine/key.pem")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        # The key is the engine's own: this client shows none.
        (tmp_path / "engine/key.pem").unlink()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
        monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path / "engine"))
        yield tmp_path
        server.shutdown()
        thread.join()


def test_authority_of_a_proxy_does_not_replace_the_engines(certificates, monkeypatch):
    certificate(certificates / "proxy")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificates / "proxy/ca.pem"))
    with engine.connect() as connection:
        assert connection.version["Version"] == "20.10.24"


def test_foreign_authority_is_named(certificates, monkeypatch):
    certificate(certificates / "other")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(certificates / "other"))
    with refused(
        ToolFailed,
        r"no TLS with the engine at tcp://127.0.0.1:.*VERIFY_FAILED",
        hint=f"{certificates}/other/ca.pem",
    ):
        engine.connect()


@pytest.mark.parametrize(
    ("host", "argv"),
    [
        ("ssh://far", "ssh -T -- far docker system dial-stdio"),
        ("ssh://me@far:2222", "ssh -l me -p 2222 -T -- far docker system dial-stdio"),
    ],
)
def test_ssh_gets_what_the_address_states(host, argv):
    assert " ".join(address._ssh_argv(host)) == argv


def test_missing_ssh_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "ssh://far")
    with pytest.raises(ToolMissing, match="'ssh' is not on PATH"):
        engine.connect()
