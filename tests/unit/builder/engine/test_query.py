from __future__ import annotations

import contextlib
import http.server
import json
import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from imgkit_builder.engine import connection
from imgkit_builder.engine.address import Endpoint
from imgkit_entrypoints.errors import ToolFailed, ToolMissing, UsageError

VERSION = {"Version": "27.1.0", "ApiVersion": "1.46", "Arch": "arm64"}


@contextlib.contextmanager
def engine(folder: Path, answers: dict[str, object], *, status: int = 200) -> Iterator[str]:
    """An HTTP server on a Unix socket that answers as an engine does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = json.dumps(answers.get(re.sub(r"^/v[0-9.]+", "", self.path))).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def address_string(self) -> str:
            return "unix"

        def log_message(self, *_: object) -> None:
            pass

    path = folder / "engine.sock"
    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        server.daemon_threads = True
        server.socket.setblocking(False)  # else it would wait for a client that has hung up meanwhile
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"unix://{path}"
        finally:
            server.shutdown()


def test_engine_tells_version_and_space(tmp_path: Path) -> None:
    with engine(tmp_path, {"/version": VERSION, "/info": {"DockerRootDir": str(tmp_path)}}) as host:
        facts = connection.query_facts(Endpoint(host=host))
    assert (facts.product, facts.version, facts.api, facts.arch) == ("Docker", "27.1.0", "1.46", "arm64")
    assert facts.free_bytes


def test_images_in_a_virtual_machine_have_no_space(tmp_path: Path) -> None:
    with engine(tmp_path, {"/version": VERSION, "/info": {"DockerRootDir": "/nonexistent"}}) as host:
        assert connection.query_facts(Endpoint(host=host)).free_bytes is None


def test_docker_host_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, {"/version": VERSION, "/info": {"DockerRootDir": "/"}}) as host:
        monkeypatch.setenv("DOCKER_HOST", host)
        assert connection.query_facts().endpoint == Endpoint(host=host, source="DOCKER_HOST")


def test_absent_engine_names_the_start_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissing, match="no Docker engine") as caught:
        connection.query_facts(Endpoint(host=f"unix://{tmp_path}/absent.sock"))
    assert "apt-get install docker.io" in str(caught.value.hint)


def test_dead_engine_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/s")
    with pytest.raises(ToolMissing) as caught:
        connection.query_facts()
    assert "unset DOCKER_HOST" in str(caught.value.hint)


def test_something_else_at_the_socket_is_told(tmp_path: Path) -> None:
    with (
        engine(tmp_path, {"/version": ["hello"]}) as host,
        pytest.raises(ToolFailed, match="no usable Docker engine"),
    ):
        connection.query_facts(Endpoint(host=host))


def test_failing_engine_is_told(tmp_path: Path) -> None:
    with (
        engine(tmp_path, {"/version": {"message": "its disk is broken"}}, status=500) as host,
        pytest.raises(ToolFailed, match="its disk is broken"),
    ):
        connection.query_facts(Endpoint(host=host))


@pytest.mark.parametrize("host", ["nonsense", "tcp://"])
def test_unknown_addresses_are_refused(host: str) -> None:
    with pytest.raises(UsageError, match="not an engine's address"):
        connection.query_facts(Endpoint(host=host))
