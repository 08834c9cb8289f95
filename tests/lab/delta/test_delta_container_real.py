"""A delta of changed layers that only a container can read, on real engines; and when a container cannot.

Without root on the engine's machine, or with containerd's store, no program can read the layers on the disk.
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_image
from labkit import (
    IMGKIT,
    PrivateEngine,
    docker,
    imgkit_as,
    imgkit_json,
    output,
    public_folder,
    run,
    until,
)

from imgkit_builder import engine as engines
from imgkit_builder.base.progress import Silent
from imgkit_builder.delta import tree
from imgkit_builder.delta.make import make
from imgkit_builder.delta.read_squashfs import SquashfsLayer
from imgkit_builder.engine import LocalImage
from imgkit_builder.sif.conversion import Options
from imgkit_entrypoints import json_text
from imgkit_entrypoints.errors import ToolFailed

pytestmark = [pytest.mark.docker, pytest.mark.singularity]

EDITS = base64.b64encode((Path(__file__).parent / "delta_edits.py").read_bytes()).decode()
TREES = 4
OURS = "mkdir -p /opt/imgkit"
"""Every image of imgkit has it. In another one, a .sif's may have another time than a delta's."""


def build(tag: str, base: str, *steps: str) -> None:
    """An image without BuildKit, as every engine builds it."""
    dockerfile = "\n".join((f"FROM {base}", *(f"RUN {step}" for step in steps)))
    output("docker", "build", "--quiet", "--tag", tag, "-", given=dockerfile, env={"DOCKER_BUILDKIT": "0"})


def edits(choice: str, count: int) -> str:
    return f"echo {EDITS} | base64 -d | python3 -I - {choice} {count} {TREES}"


@dataclass(frozen=True, kw_only=True)
class Edited:
    """An image whose upper layers are others than those of the image in a .sif."""

    folder: Path
    env: Mapping[str, str]
    """What makes programs use the engine that has it."""
    tag: str
    base: Path


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("sid", marks=pytest.mark.xdist_group("containerd")),
        *(
            pytest.param(
                kind, marks=[pytest.mark.podman, pytest.mark.xdist_group("podman"), pytest.mark.soak]
            )
            for kind in ("rootless-podman", "podman")
        ),
        pytest.param("rootless", marks=[pytest.mark.xdist_group("rootless"), pytest.mark.soak]),
    ],
)
def edited(
    request: pytest.FixtureRequest,
    standin_notorch: str,
    started: Callable[[str], PrivateEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Edited:
    folder = tmp_path_factory.mktemp("edited")
    engine = started(request.param)
    with subprocess.Popen(["docker", "save", standin_notorch], stdout=subprocess.PIPE) as save:
        env = {**os.environ, **engine.env}
        subprocess.run(["docker", "load", "--quiet"], stdin=save.stdout, check=True, env=env)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine.env.items():
            patch.setenv(name, value)
        old, new = f"imgkit-test-edited-{os.getpid()}:1", f"imgkit-test-edited-{os.getpid()}:2"
        build(old, standin_notorch, OURS, edits("common", 60), edits("a", 15), edits("aa", 6))
        build(new, standin_notorch, OURS, edits("common", 60), edits("b", 15), edits("bb", 6))
        imgkit_json("sif", old, "--no-test", "-o", folder / "old.sif")
    return Edited(folder=folder, env=engine.env, tag=new, base=folder / "old.sif")


def test_container_and_save_stream_give_the_same_bytes(
    edited: Edited, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in edited.env.items():
        monkeypatch.setenv(name, value)
    target = edited.folder / "container.imgdelta"
    made = imgkit_json("delta", edited.tag, "--against", edited.base, "-o", target)
    assert made["read_from"] == "container"
    assert made["changed"] > 20

    def refuse(*arguments: object, **options: object) -> None:
        raise ToolFailed("as where the image has no Python")

    monkeypatch.setattr(LocalImage, "changed", refuse)
    with engines.connect() as engine:
        image = engines.local_image(engine, edited.tag)
        saved = make(image, edited.base, edited.folder / "save.imgdelta", Options(test=False), Silent())
    assert saved.read_from == "save"
    assert saved.path.read_bytes() == target.read_bytes()


def raw(layer: SquashfsLayer, folder: str = "") -> Iterator[tuple[str, tuple[object, ...]]]:
    """Everything about every entry of a layer, whiteouts too."""
    for name, entry in sorted(layer.children(folder).items()):
        path = tree.join(folder, name)
        about = (entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime_s, entry.link, entry.device)
        linked = sorted(layer.names(entry.group)) if entry.group is not None else ()
        yield path, (*about, entry.xattrs, linked, tree.digest(entry) if entry.kind == "file" else b"")
        if entry.kind == "dir":
            yield from raw(layer, path)


@pytest.fixture
def prefix() -> Iterator[str]:
    """The name of images of the machine's own engine, which go at the end."""
    found = f"imgkit-test-container-{secrets.token_hex(3)}"
    yield found
    names = output("docker", "images", "--format", "{{.Repository}}:{{.Tag}}").split()
    run("docker", "image", "rm", "-f", *(name for name in names if name.startswith(found)))


def test_ordinary_user_reads_only_what_changed(standin_notorch: str, prefix: str, user: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("acts as another user")
    folder = public_folder("delta-user")
    try:
        old, new = f"{prefix}:1", f"{prefix}:2"
        build(old, standin_notorch, OURS, edits("common", 20), edits("a", 10))
        build(new, standin_notorch, OURS, edits("common", 20), edits("b", 10))
        imgkit_json("sif", old, "--no-test", "-o", folder / "old.sif")
        (folder / "old.sif").chmod(0o644)
        made = imgkit_json("delta", new, "--against", "old.sif", "-o", "root.imgdelta", folder=folder)
        assert made["read_from"] == "folders"
        shutil.chown(folder, user)
        # Members of this group may use the engine's socket.
        group = Path("/var/run/docker.sock").stat().st_gid
        words = imgkit_as(
            ("setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={group}"), {"HOME": str(folder)}
        )
        told = output(
            *words, "delta", new, "--against", "old.sif", "-o", "user.imgdelta", "--json", folder=folder
        )
        assert json_text.parse(told)["read_from"] == "container"
        # Not the bytes: mksquashfs also keeps the number of the user who calls it.
        users, roots = (dict(raw(SquashfsLayer(folder / f"{who}.imgdelta"))) for who in ("user", "root"))
        assert len(roots) > 20
        assert users == roots
    finally:
        shutil.rmtree(folder)


# ---- images whose python3 is another program


@pytest.fixture
def strange(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Gives an image with a script as its python3, and old.sif; its layers cannot be read on the disk."""
    monkeypatch.setattr(LocalImage, "folders", lambda self, diff_ids: None)
    tiny_image.write(tmp_path / "tiny.tar", f"{prefix}:tiny")
    docker("load", "-i", tmp_path / "tiny.tar")
    build(f"{prefix}:1", f"{prefix}:tiny", "echo old >/step")
    imgkit_json("sif", f"{prefix}:1", "--no-test", "-o", tmp_path / "old.sif")

    def give(script: str) -> str:
        program = f"#!/bin/busybox sh\n{script}\n"
        (tmp_path / "python3").write_text(program)
        (tmp_path / "python3").chmod(0o755)
        (tmp_path / "Dockerfile").write_text(f"FROM {prefix}:tiny\nCOPY python3 /bin/\n")
        docker("build", "--quiet", "--tag", f"{prefix}:2", tmp_path, env={"DOCKER_BUILDKIT": "0"})
        return f"{prefix}:2"

    return give


class Notes(Silent):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo hello", r"a program of the image wrote b'hello\n' instead of its files"),
        ("echo 'no such module' >&2; exit 1", "no such module"),
        pytest.param("exit 7", "python3 of the image ended with exit code 7", marks=pytest.mark.soak),
    ],
)
def test_another_program_as_python_is_told_before_the_image_is_saved(
    strange: Callable[[str], str], tmp_path: Path, script: str, reason: str
) -> None:
    report = Notes()
    with engines.connect() as engine:
        image = engines.local_image(engine, strange(script))
        made = make(image, tmp_path / "old.sif", tmp_path / "x.imgdelta", Options(test=False), report)
    assert made.read_from == "save"
    assert report.notes == [f"{reason}: imgkit reads the whole image (2 MB), and that of the base"]


DELTA = """
import sys
from imgkit_builder.cli.app import main
from imgkit_builder.engine import LocalImage
LocalImage.folders = lambda self, diff_ids: None
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupt_leaves_no_container(
    strange: Callable[[str], str], tmp_path: Path, number: signal.Signals
) -> None:
    image = strange("exec /bin/busybox sleep 600")

    def left(state: str = "") -> str:
        wanted = ("--filter", f"status={state}") if state else ()
        return docker("ps", "--all", "--quiet", "--filter", f"ancestor={image}", *wanted)

    words: list[Any] = [IMGKIT[0], "-c", DELTA, "delta", image, "--against", "old.sif", "-o", "x.imgdelta"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE) as process:
        try:
            until(lambda: left("running"), within_s=60)
            process.send_signal(number)
            said = process.communicate(timeout=60)[1].decode()
        finally:
            process.kill()
    assert process.returncode == (130 if number is signal.SIGINT else -9)
    assert "Traceback" not in said
    until(lambda: left() == "", within_s=60)
    assert not (tmp_path / "x.imgdelta").exists()
