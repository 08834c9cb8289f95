"""A Hugging Face hub on this machine: it serves models and data sets of small files, as HF_ENDPOINT."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

TOKEN = "hf_tokenoftests"  # noqa: S105 - of no account


@dataclass(kw_only=True)
class HubRepo:
    """A model or a data set; each commit has files, and `main` is the last one."""

    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    gated: bool = False
    broken: bool = False
    """Whether the server refuses to send its files."""

    def commit(self, files: Mapping[str, bytes]) -> str:
        """Add a commit, and return its hash."""
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()  # noqa: S324 - as git
        self.commits[sha] = files
        return sha

    def find(self, revision: str) -> str:
        """Return the hash of a branch or of the start of a hash; empty: there is none."""
        hashes = list(self.commits)
        if revision == "main":
            return hashes[-1]
        return next((sha for sha in hashes if sha.startswith(revision)), "")


@dataclass(kw_only=True)
class Hub:
    """A hub that is served, and what it was asked for."""

    address: str = ""
    repos: dict[str, HubRepo] = field(default_factory=dict)
    """By their paths: ``me/tiny``, or ``datasets/me/letters``."""
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    """The tokens that were sent."""

    def add(self, path: str, files: Mapping[str, bytes], **kind: bool) -> str:
        """Add a repo with one commit, and return the hash of that."""
        self.repos[path] = HubRepo(**kind)
        return self.repos[path].commit(files)


class _Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        """Answer a question about a repo, ``/api/models/NAME/revision/main``, or send a file of it."""
        path = self.path.partition("?")[0].strip("/")
        self.hub.requests.append(f"{self.command} /{path}")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token:
            self.hub.tokens.add(token)
        is_api = path.startswith("api/")
        for name, repo in self.hub.repos.items():
            prefix = name
            if is_api:
                prefix = f"api/{name}" if name.startswith("datasets/") else f"api/models/{name}"
            if not path.startswith(f"{prefix}/"):
                continue
            verb, revision, *rest = path.removeprefix(f"{prefix}/").split("/")
            if repo.gated and token != TOKEN and not (is_api and verb == "revision"):
                self._send(401, b"", {"X-Error-Code": "GatedRepo"})
                return
            if repo.broken and verb == "resolve" and self.command == "GET":
                self._send(403, b"", {})
                return
            sha = repo.find(revision)
            if not sha:
                self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
                return
            self._send_part(name, repo.commits[sha], sha, verb, "/".join(rest))
            return
        self._send(401, b"", {"X-Error-Code": "RepoNotFound"})

    def _send_part(self, name: str, files: Mapping[str, bytes], sha: str, verb: str, file: str) -> None:
        etags = {path: hashlib.sha1(content).hexdigest() for path, content in files.items()}  # noqa: S324 - as git
        if verb == "resolve":
            self._send(200, files[file], {"ETag": f'"{etags[file]}"', "X-Repo-Commit": sha})
            return
        answer: object = {"id": name, "sha": sha, "siblings": [{"rfilename": path} for path in files]}
        if verb == "tree":
            answer = [
                {"type": "file", "path": path, "size": len(content), "oid": etags[path]}
                for path, content in files.items()
            ]
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def serve_hub(host: str = "127.0.0.1") -> Iterator[Hub]:
    """Serve a hub without repos, at a port of its own."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with http.server.ThreadingHTTPServer((host, 0), handler) as server:
        hub.address = f"http://{host}:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
