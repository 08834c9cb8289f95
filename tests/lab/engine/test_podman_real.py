"""Builds on a real Podman with a storage of its own; gated by the marker ``podman``. The base is busybox."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from labkit import output, run, until

from imgkit_builder import engine as engines
from imgkit_builder.base.progress import Silent
from imgkit_builder.engine import images
from imgkit_builder.image.context import BuildContext
from imgkit_builder.image.members import TarMember, tar_chunks
from imgkit_builder.image.secret_values import SecretValues
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_entrypoints.errors import ToolFailed

pytestmark = [
    pytest.mark.podman,
    pytest.mark.xdist_group("podman"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a storage outside of the user's own needs root"),
]

BASE = "imgkit.local/busybox:1"
MARK = 4321 + os.getpid()
"""Seconds that steps of this run sleep: the number marks their processes."""


def podman(*args):
    return output("podman", "--remote=false", *args).strip()


@pytest.fixture(scope="module")
def service(started):
    """The folder of a Podman that ``DOCKER_HOST`` names, with the base in it."""
    private = started("podman")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in private.env.items():
            patch.setenv(name, value)
        patch.setenv("XDG_STATE_HOME", str(private.folder / "state"))
        patch.delenv("SOURCE_DATE_EPOCH", raising=False)
        _import_base(private.folder)
        yield private.folder


def _import_base(folder):
    """Make an image of nothing but busybox."""
    with tarfile.open(folder / "base.tar", "w") as tar:
        tar.add(str(shutil.which("busybox")), "bin/busybox")
        for name in ("sh", "sleep", "echo"):
            member = tarfile.TarInfo(f"bin/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(member)
    podman("import", folder / "base.tar", BASE)


def context(*steps, copied=b"1"):
    """A context as imgkit packs it, without what needs Python in the base."""
    rows = [f"# small.yaml:{number}\nRUN {step}\n" for number, step in enumerate(steps, 5)]
    members = (TarMember(name="file", data=copied, size_bytes=len(copied)),)
    base = BaseImage(name=BASE, id="sha256:" + "b" * 64, platform="linux/amd64")
    return BuildContext(
        dockerfile=f"# small.yaml:3\nFROM {BASE}\n" + "".join(rows) + 'COPY ["file", "/x/"]\n',
        manifest=Manifest(
            imgkit="1",
            recipe="small",
            recipe_sha256="",
            base=base,
            platform=_platform(),
            wheel_sha256="",
            revision="",
        ),
        members=members,
        sha256=hashlib.sha256(b"".join(tar_chunks(members))).hexdigest(),
        size_bytes=0,
    )


def _platform():
    with engines.connect() as engine:
        return engine.platform


class Stages(Silent):
    """Records the stages and notes."""

    def __init__(self):
        self.seen: list[str] = []

    def stage(self, text):
        self.seen.append(text)

    def note(self, text):
        self.seen.append(text)


class Lines(Silent):
    """Records the output."""

    def __init__(self):
        self.seen: list[str] = []

    def line(self, text):
        self.seen.append(text)


def build(engine, packed, *, tag, builder="auto"):
    """Build, and return the image and the log."""
    chosen = engines.choose(engine.facts(), builder)
    assert chosen.name == ("podman" if builder == "auto" else builder)
    built = engines.build(engine, packed, tag=tag, report=Silent(), builder=chosen)
    return built.image, built.log.read_text()


@pytest.fixture
def engine(service):
    with engines.connect() as connection:
        yield connection


def steps():
    """Processes of this run's sleeping step."""
    lines = output("ps", "-eo", "args").splitlines()
    return [line for line in lines if line.endswith(f"sleep {MARK}")]


def leftovers():
    """Return the processes of steps that still run, or else the working containers."""
    return steps() or podman("ps", "--all", "--external", "--quiet").splitlines()


def test_second_build_is_cached_and_has_the_labels(engine):
    assert engine.facts().product == "Podman"
    first, _ = build(engine, context("echo one"), tag="imgkit-cached")
    again, log = build(engine, context("echo one"), tag="imgkit-cached")
    assert again.id == first.id
    assert log.count("Using cache") == 3
    assert len(again.labels["imgkit.context.sha256"]) == 64
    assert again.labels["org.opencontainers.image.base.name"] == BASE
    # A changed file makes new layers from its step on.
    changed, log = build(engine, context("echo one", copied=b"2"), tag="imgkit-cached")
    assert (changed.id != first.id, log.count("Using cache")) == (True, 1)
    assert not leftovers()


def test_names_match_without_podmans_prefix(engine):
    build(engine, context("echo one"), tag="imgkit-named")
    podman("tag", "imgkit-named", "localhost/imgkit-other:2")
    assert engines.inspect(engine, "imgkit-named").tag == "imgkit-named:latest"
    assert engines.inspect(engine, "imgkit-other:2").tag == "imgkit-other:2"
    assert engines.inspect(engine, "localhost/imgkit-other:2").tag == "imgkit-other:2"


@pytest.mark.parametrize("builder", ["podman", "classic"])
def test_failing_step_names_its_line(engine, builder):
    stages = Stages()
    with pytest.raises(ToolFailed) as caught:
        engines.build(
            engine,
            context("echo fine", "echo why-it-failed >&2; exit 7"),
            tag="imgkit-fails",
            report=stages,
            builder=engines.choose(engine.facts(), builder),
        )
    assert caught.value.where == "small.yaml:6"
    assert (
        "step 3/5 (RUN echo why-it-failed >&2; exit 7): while running runtime: exit status 7"
        in caught.value.what
    )
    assert "\nwhy-it-failed\n" in str(caught.value.hint)
    assert "step 2/5: RUN echo fine" in stages.seen
    assert images.find_image(engine, "imgkit-fails") is None


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from test_podman_real import *
with engines.connect() as engine:
    build(engine, context("echo one", "sleep {seconds}"), tag="imgkit-ends")
"""


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.soak), signal.SIGINT])
def test_interrupted_build_leaves_nothing(service, number):
    folder = Path(__file__).resolve().parent
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(folder=str(folder), seconds=MARK)],
        env={**os.environ, "PYTHONPATH": str(folder.parent)},
        stderr=subprocess.DEVNULL,
    )
    try:
        until(steps, within_s=60, describe=lambda: str(process.poll()))
        process.send_signal(number)
        process.wait(timeout=120)
        until(lambda: not leftovers(), within_s=60, describe=lambda: json.dumps(leftovers()))
    finally:
        process.kill()
    with engines.connect() as engine:
        assert images.find_image(engine, "imgkit-ends") is None


def test_secret_is_in_the_step_and_nowhere_else(engine, service, monkeypatch):
    value = "marker-0123456789"
    monkeypatch.setenv("MY_TOKEN", value)
    values = SecretValues(options=("--secret", "id=mine,env=MY_TOKEN"), lines=(value,))
    report = Lines()
    step = "--mount=type=secret,id=mine read v < /run/secrets/mine; echo length ${#v} is $v; echo ${#v} > /y"
    engines.build(
        engine,
        context(step, "echo after; ! read v < /run/secrets/mine"),
        tag="imgkit-secret",
        report=report,
        builder=dataclasses.replace(engines.choose(engine.facts()), options=values.options),
        mask=values.mask,
    )
    assert f"length {len(value)} is ***" in report.seen
    podman("save", "--output", service / "secret.tar", "imgkit-secret")
    # The whole storage, the saved layers, the log and what the engine wrote.
    matches = run("grep", "--recursive", "--text", "--files-with-matches", "--devices=skip", value, service)
    assert (matches.returncode, matches.stdout) == (1, ""), matches
    assert value not in podman("history", "--no-trunc", "imgkit-secret") + podman("inspect", "imgkit-secret")


def test_other_storage_is_not_used(service, monkeypatch):
    # Not this machine's own storage: it would note the folders of this Podman as its own for ever.
    storage = service / "other.conf"
    storage.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{service}/other"\nrunroot = "{service}/other-run"\n'
    )
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(storage))
    with engines.connect() as engine:
        choice = engines.choose(engine.facts())
    assert choice.name == "classic"
    assert str(service / "data") in choice.note
