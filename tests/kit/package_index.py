"""A package index of small wheels, and a server for it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import ssl
import threading
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, *_: object) -> None:
        """Ignore."""


def write_wheel(
    folder: Path, name: str, version: str, *, requires: Sequence[str] = (), code: str = ""
) -> Path:
    """Write a wheel with one module, which contains `code`; equal arguments give equal bytes."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    members = {
        f"{module}.py": code,
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {package}\n" for package in requires),
        f"{info}/WHEEL": WHEEL,
    }
    members[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in members)
    file = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in members.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # has no time of its own
    return file


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_links(folder: Path, files: Sequence[Path], *, hashed: bool = True) -> None:
    """Write the page of a package, which lists `files`; pip does without their sha256."""
    links = ""
    for file in files:
        fragment = f"#sha256={file_sha256(file)}" if hashed else ""
        links += f'<a href="{file.name}{fragment}">{file.name}</a>\n'
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")


@contextlib.contextmanager
def serve_folder(
    folder: Path,
    host: str = "127.0.0.1",
    *,
    handler: type[http.server.SimpleHTTPRequestHandler] = QuietHandler,
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """Serve the files in `folder` and yield the address, ``host:port``."""
    bound_handler = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer((host, 0), bound_handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"{host}:{server.server_port}"
        server.shutdown()
