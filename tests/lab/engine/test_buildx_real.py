"""Builds by ``docker buildx`` on a real engine; gated by the marker ``buildx``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import socketserver
import subprocess
import threading

import pytest
from labkit import IMGKIT, docker, imgkit, imgkit_json, output, run, until

pytestmark = [pytest.mark.docker, pytest.mark.buildx]

NAME = f"imgkit-test-buildx-{os.getpid()}"
MARK = 54321 + os.getpid()


@pytest.fixture(autouse=True)
def _remove_images():
    yield
    subprocess.run(["docker", "rmi", "--force", f"{NAME}:latest", f"{NAME}:classic"], capture_output=True)


def recipe(folder, *steps):
    rows = "".join(f"    - {json.dumps(step)}\n" for step in steps)
    file = folder / f"{NAME}.yaml"
    file.write_text(f"description: test\nimage:\n  base: registry.invalid/base:1\n  run:\n{rows}")
    return file


def build(file, base, *options):
    return imgkit_json("build", file, "--base", base, "--no-test", *options)


def test_labels_are_those_of_the_classic_builder(home, standin_notorch):
    file = recipe(home, "echo hello > /hello")
    first = build(file, standin_notorch, "--builder", "buildx")
    assert build(file, standin_notorch, "--builder", "buildx")["id"] == first["id"]
    classic = build(file, standin_notorch, "--builder", "classic", "--tag", f"{NAME}:classic")
    created = "org.opencontainers.image.created"
    assert {**first["labels"], created: ""} == {**classic["labels"], created: ""}


class RefusingEngine(socketserver.StreamRequestHandler):
    """Stands before the real engine and refuses its classic builder, as no release does yet."""

    def handle(self):
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect("/var/run/docker.sock")
            back = threading.Thread(target=self._pass, args=(engine, self.connection))
            back.start()
            self._pass(self.connection, engine)
            back.join()

    def _pass(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if re.match(rb"POST /v[0-9.]+/build\?", data):
                    answer = b'{"message": "the classic builder is gone"}'
                    head = f"HTTP/1.1 501 Not Implemented\r\nContent-Length: {len(answer)}\r\n"
                    self.connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + answer)
                    break
                target.sendall(data)
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR if source is self.connection else socket.SHUT_WR)


def test_buildx_builds_where_the_classic_builder_is_refused(home, standin_notorch, monkeypatch):
    file = recipe(home, "echo hello > /hello")
    with socketserver.ThreadingUnixStreamServer(str(home / "relay.sock"), RefusingEngine) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with monkeypatch.context() as patch:  # the end of `home` asks the engine itself
            patch.setenv("DOCKER_HOST", f"unix://{home}/relay.sock")
            result = imgkit("build", file, "--base", standin_notorch, "--no-test")
            classic = imgkit("build", file, "--base", standin_notorch, "--no-test", "--builder", "classic")
        server.shutdown()
    assert result.returncode == 0, result.stderr
    assert "the engine refuses its classic builder, so buildx builds: " in result.stderr
    assert (classic.returncode, "the classic builder is gone" in classic.stderr) == (4, True)


def test_failing_step_names_its_line(home, standin_notorch):
    file = recipe(home, "echo fine", "echo why-it-failed >&2; exit 7")
    result = imgkit("build", file, "--base", standin_notorch, "--builder", "buildx")
    assert result.returncode == 4
    assert f"{file.name}:6: step " in result.stderr
    assert "\n     why-it-failed\n" in result.stderr


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.soak), signal.SIGINT])
def test_interrupted_build_leaves_no_step(home, standin_notorch, number):
    file = recipe(home, f"sleep {MARK}")
    argv = [*IMGKIT, "build", str(file), "--base", standin_notorch, "--builder", "buildx"]
    run("docker", "image", "rm", "--force", NAME)  # another test may have built it
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)

    def steps():
        return any(line.endswith(f"sleep {MARK}") for line in output("ps", "-eo", "args").splitlines())

    try:
        until(steps, describe=lambda: "the step never began")
        process.send_signal(number)
        process.wait(timeout=120)
        until(lambda: not steps(), describe=lambda: "the step goes on")
    finally:
        process.kill()
    assert f"{NAME}:latest" not in docker("images", "--format", "{{.Repository}}:{{.Tag}}").splitlines()
