"""An engine in memory: Docker's HTTP API on a unix socket; records requests, replays prepared answers."""

from __future__ import annotations

import json
import re
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from imgkit_builder import engine as engines
from imgkit_builder.engine import Engine
from imgkit_builder.image.context import BuildContext, pack_context
from imgkit_builder.oci.manifest import BaseImage
from imgkit_builder.recipe.load import load
from imgkit_builder.recipe.model import Recipe

VERSION = {"Version": "20.10.24", "ApiVersion": "1.41", "Os": "linux", "Arch": "amd64"}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One answer. `chunks` makes it a stream; `dies` cuts the connection behind them, as a kill does."""

    status: int = 200
    data: Any = None
    chunks: Sequence[bytes] | None = None
    dies: bool = False
    delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as it came."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class FakeEngine:
    """Routes and records; a later route wins over an earlier one. Its static methods make replies."""

    socket: Path
    image_id: str = "sha256:" + "a" * 64
    routes: list[tuple[str, str, Reply | Callable[[Request], Reply]]] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)

    @staticmethod
    def events(*items: dict[str, Any], dies: bool = False, delay_s: float = 0) -> Reply:
        """A stream of JSON events, one a chunk."""
        chunks = [json.dumps(item).encode() + b"\r\n" for item in items]
        return Reply(chunks=chunks, dies=dies, delay_s=delay_s)

    @staticmethod
    def raw(*chunks: bytes, dies: bool = False, delay_s: float = 0) -> Reply:
        """A stream of bytes."""
        return Reply(chunks=chunks, dies=dies, delay_s=delay_s)

    @staticmethod
    def json(data: Any, status: int = 200) -> Reply:
        """An answer in JSON."""
        return Reply(data=data, status=status)

    @staticmethod
    def error(message: str) -> dict[str, Any]:
        """The in-band event of a failure."""
        return {"errorDetail": {"message": message}, "error": message}

    @staticmethod
    def refused(status: int, message: str, *, delay_s: float = 0) -> Reply:
        """A failure that comes before any stream."""
        return Reply(status=status, data={"message": message}, delay_s=delay_s)

    def image(
        self,
        *,
        identifier: str = "",
        tags: Sequence[str] = (),
        arch: str = "amd64",
        labels: dict[str, str] | None = None,
        digests: Sequence[str] = (),
    ) -> Reply:
        """Return the engine's description of a local image."""
        config = {"Labels": labels, "Env": ["PATH=/usr/bin", "A=b=c"], "Entrypoint": None, "Cmd": ["sh"]}
        data = {
            "Id": identifier or self.image_id,
            "RepoTags": list(tags),
            "RepoDigests": list(digests),
            "Architecture": arch,
            "Os": "linux",
            "Size": 1000,
            "Config": config,
            "RootFS": {"Type": "layers", "Layers": ["sha256:" + "1" * 64, "sha256:" + "2" * 64]},
        }
        return Reply(data=data)

    def on(self, method: str, path: str, reply: Reply | Callable[[Request], Reply]) -> None:
        """Answer requests whose path matches the pattern `path` in full."""
        self.routes.insert(0, (method, path, reply))

    def on_image(self, name: str, reply: Reply) -> None:
        """Answer the inspection of one image."""
        self.on("GET", f"/images/{re.escape(name)}/json", reply)

    def has(self, *names: str, **description: Any) -> None:
        """Keep local images that `image` describes."""
        for name in names:
            self.on_image(name, self.image(**{"tags": [name], **description}))

    def on_build(self, *output: str, error: str = "", image: str = "", dies: bool = False) -> None:
        """Answer builds with texts, and with an error or the id of an image behind them."""
        items = [{"stream": text} for text in output]
        if error:
            items.append(self.error(error))
        if image:
            items.append({"aux": {"ID": image}})
        self.on("POST", "/build", self.events(*items, dies=dies))

    def on_pull(self, reply: Reply | Callable[[Request], Reply]) -> None:
        self.on("POST", "/images/create", reply)

    def on_push(self, reply: Reply) -> None:
        self.on("POST", "/images/.+/push", reply)

    def on_save(self, reply: Reply) -> None:
        self.on("GET", "/images/.+/get", reply)

    def on_export(self, reply: Reply) -> None:
        self.on("GET", "/containers/.+/export", reply)

    def answer(self, request: Request) -> Reply:
        self.seen.append(request)
        for method, path, reply in self.routes:
            if method == request.method and re.fullmatch(path, request.path):
                return reply(request) if callable(reply) else reply
        return self.refused(500, f"the fake engine has no route for {request}")

    def requests(self, pattern: str) -> list[Request]:
        """Return the requests so far that match, in order."""
        return [request for request in self.seen if re.search(pattern, str(request))]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        path = re.sub(r"^/v1\.\d+", "", unquote(parts.path))
        reply = self.server.engine.answer(
            Request(method=self.command, path=path, query=query, body=self._body())
        )
        time.sleep(reply.delay_s)
        if reply.chunks is not None:
            self._stream(reply)
            return
        text = b"" if reply.data is None else json.dumps(reply.data).encode()
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_DELETE = do_HEAD = _handle

    def _stream(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in reply.chunks or ():
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            self.wfile.flush()
        if reply.dies:
            self.close_connection = True
            return
        self.wfile.write(b"0\r\n\r\n")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a unix socket's client has no address to print."""


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    engine: FakeEngine

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that hang up are what some tests are about."""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    """A running fake engine that ``DOCKER_HOST`` points to; its state and cache folders are fresh."""
    fake_engine = FakeEngine(socket=tmp_path / "docker.sock")
    fake_engine.on("GET", "/version", Reply(data=VERSION))
    fake_engine.on("GET", "/info", Reply(data={"OperatingSystem": "Debian", "Runtimes": {"runc": {}}}))
    fake_engine.on("GET", "/images/.+/json", FakeEngine.refused(404, "No such image"))
    fake_engine.on("POST", "/images/.+/tag", Reply(status=201))
    fake_engine.on("POST", "/containers/create", Reply(status=201, data={"Id": "c" * 12, "Warnings": []}))
    fake_engine.on("GET", "/containers/.+/json", Reply(data={"Config": {"Tty": False}}))
    fake_engine.on("POST", "/containers/.+/start", Reply(status=204))
    fake_engine.on("DELETE", "/containers/.+", Reply(status=204))
    with _Server(str(fake_engine.socket), _Handler) as server:
        server.engine = fake_engine
        server.socket.setblocking(False)  # else it would wait for a client that has hung up meanwhile
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{fake_engine.socket}")
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
        yield fake_engine
        server.shutdown()


@pytest.fixture
def engine(fake: FakeEngine) -> Iterator[Engine]:
    """A real connection to the fake engine."""
    with engines.connect(timeout_s=5) as engine:
        yield engine


@pytest.fixture
def container_says(fake: FakeEngine) -> Callable[[str, int], None]:
    """Make every container print a text and end with a code."""

    def says(text: str, code: int = 0) -> None:
        frame = struct.pack(">BxxxL", 1, len(text.encode())) + text.encode()
        fake.on("POST", "/containers/.+/wait", Reply(data={"StatusCode": code}))
        fake.on("GET", "/containers/.+/logs", Reply(chunks=[frame] if text else []))

    return says


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A small recipe whose failing step stands in line 6."""
    file = tmp_path / "small.yaml"
    file.write_text(
        "description: small\n"
        "image:\n"
        '  base: "registry.test/base:1"\n'
        "  platform: [linux/amd64, linux/arm64]\n"
        "  run:\n"
        "    - make things\n"
    )
    return load(file)


@pytest.fixture
def base() -> BaseImage:
    """The recipe's base as it would be resolved."""
    return BaseImage(name="registry.test/base:1", id="sha256:" + "b" * 64, platform="linux/amd64")


@pytest.fixture
def context(recipe: Recipe, base: BaseImage) -> BuildContext:
    """The build context of the recipe."""
    return pack_context(recipe, base=base, platform="linux/amd64", revision="")
