"""An image whose every program leaves a mark where the caller would find it: looking at it leaves none.

`TOUCH` runs before each of its programs, and wherever a runtime sources a file of an image.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import secrets
import shlex
import stat
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from labkit import Done, docker, imgkit, output, run
from tiny_image import BUSYBOX

from imgkit_builder.oci.manifest import BaseImage, Manifest, to_json
from imgkit_builder.recipe.load import load
from imgkit_entrypoints import system

pytestmark = [pytest.mark.docker, pytest.mark.singularity, pytest.mark.xdist_group("canary")]

PROGRAMS = (
    *("bin/cat", "bin/sh", "bin/bash", "bin/ls", "bin/test", "bin/true", "bin/env", "bin/id", "bin/uname"),
    *("usr/bin/python3", "usr/bin/env", "usr/bin/cat", "usr/local/bin/dist-env", "usr/local/bin/dist-train"),
    *(".singularity.d/runscript", ".singularity.d/startscript", ".singularity.d/test"),
    *(".singularity.d/actions/exec", ".singularity.d/actions/run", ".singularity.d/actions/shell"),
)
RUNS = ("exec", "run", "shell", "test", "inspect", "instance")
"""Commands of a runtime that run programs of an image; inspect does where a .sif does not describe itself."""

JOB = ("-A", "x", "--qos", "acc_debug", "--time", "10m", "--", "dist-train")


@dataclass(frozen=True, kw_only=True)
class Lab:
    """The image as a .sif and in the engine, and a second image over it with its delta."""

    folder: Path
    name: str
    newer: str
    sif: Path
    marks: Path
    """This machine's folder for marks: home and current folder of every command."""
    calls: Path
    """What the runtime was called with."""

    def __call__(self, *words: object) -> Done:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return imgkit(*words, folder=self.marks, env={"PATH": path, "HOME": str(self.marks)})

    def run(self, *words: str) -> Done:
        """Run a command where marks count."""
        return run(*words, folder=self.marks, env={"HOME": str(self.marks)})

    def executed(self) -> list[str]:
        """What ran since the last question: marks, and runs by the runtime; forgets both."""
        home = Path("~root").expanduser()
        places = (self.marks, Path("/tmp"), Path("/var/tmp"), home)
        marks = [path for place in places for path in place.glob(f"canary-{self.folder.name}*")]
        for path in marks:
            path.unlink()
        ran = [line for line in self.calls.read_text().splitlines() if line.split()[0] in RUNS]
        ran = [line for line in ran if "imgkit-empty-" not in line]
        self.calls.write_text("")
        return [*map(str, marks), *ran]


def programs(token: str) -> dict[str, bytes]:
    touch = (
        f'for place in "$HOME" "$PWD" /root /tmp /var/tmp; do : >"$place/canary-{token}"; done 2>/dev/null\n'
    )
    files = {
        path: f'#!/canary/busybox sh\n{touch}exec /canary/busybox {Path(path).name} "$@"\n'.encode()
        for path in PROGRAMS
    }
    return {
        **files,
        ".singularity.d/env/91-canary.sh": touch.encode(),
        "environment": touch.encode(),
        "canary/busybox": BUSYBOX.read_bytes(),
    }


def archive(path: Path, token: str, name: str, layers: Sequence[bytes]) -> None:
    digests = [hashlib.sha256(layer).hexdigest() for layer in layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": "2024-01-01T00:00:00Z",
        "config": {
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "Cmd": ["sh"],
            "Labels": {"imgkit.version": "0.3.0", "imgkit.recipe": "mn5", "canary": token},
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
    }
    raw = json.dumps(config).encode()
    listed = [
        {
            "Config": f"{hashlib.sha256(raw).hexdigest()}.json",
            "RepoTags": [name],
            "Layers": [f"{one}.tar" for one in digests],
        }
    ]
    files = {f"{digest}.tar": layer for digest, layer in zip(digests, layers, strict=True)}
    files |= {str(listed[0]["Config"]): raw, "manifest.json": json.dumps(listed).encode()}
    path.write_bytes(tar_of(files))


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def baked() -> dict[str, bytes]:
    mn5 = load("mn5")
    base = BaseImage(name="imgkit.local/canary", platform="linux/amd64")
    made = Manifest(
        imgkit="0.3.0", recipe="mn5", recipe_sha256="0", base=base, platform="linux/amd64", wheel_sha256="0"
    )
    facts = dataclasses.replace(mn5.system, env={})
    return {
        "opt/imgkit/manifest.json": to_json(made).encode(),
        "opt/imgkit/system.json": system.to_json(facts).encode(),
    }


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if not BUSYBOX.exists():
        pytest.skip("busybox is missing: apt-get install busybox-static")
    folder = tmp_path_factory.mktemp(f"canary-{secrets.token_hex(4)}")
    (folder / "bin").mkdir()
    (folder / "marks").mkdir()
    calls = folder / "calls"
    calls.touch()
    for command in ("singularity", "apptainer"):
        wrapper = folder / "bin" / command
        real = output("sh", "-c", f"command -v {command} || command -v apptainer || command -v singularity")
        wrapper.write_text(f'#!/bin/sh\necho "$@" >>{calls}\nexec {real.strip()} "$@"\n')
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    name = f"imgkit-test-canary:{secrets.token_hex(4)}"
    found = Lab(
        folder=folder,
        name=name,
        newer=f"{name}-newer",
        sif=folder / "canary.sif",
        marks=folder / "marks",
        calls=calls,
    )
    first = tar_of({**programs(folder.name), **baked()})
    archive(folder / "one.tar", folder.name, found.name, [first])
    archive(folder / "two.tar", folder.name, found.newer, [first, tar_of({"code/new": b"new\n"})])
    try:
        for file in ("one.tar", "two.tar"):
            docker("load", "--input", folder / file)
        made = found("sif", folder / "one.tar", "-o", found.sif, "--no-test")
        assert made.returncode == 0, made.stderr
        assert found.executed() == []
        yield found
    finally:
        docker("rmi", "--force", found.name, found.newer)
        found.executed()


def test_the_canary_leaves_marks_where_it_runs(lab: Lab) -> None:
    output(lab.folder / "bin/singularity", "exec", lab.sif, "cat", "/dev/null", folder=lab.marks)
    marks = lab.executed()
    assert len(marks) > 1, marks
    assert marks[-1].startswith("exec ")


RUN = "run --detach --dry-run {} -A x --qos acc_debug --time 10m -- dist-train"


@pytest.mark.parametrize(
    "line",
    [
        "verify canary.sif",
        "show canary.sif",
        RUN.format("canary.sif"),
        RUN.format("mn5 --image canary.sif"),
        "shell canary.sif --dry-run",
        "verify one.tar",
        "show NAME",
        "save NAME -o saved.tar",
        "sif NAME -o converted.sif --no-test",
    ],
)
def test_looking_runs_nothing_of_the_image(lab: Lab, line: str) -> None:
    since = docker("info", "--format", "{{.SystemTime}}")
    files = (lab.folder / word if "." in word else word for word in line.split())
    done = lab(*(lab.name if word == "NAME" else word for word in files))
    assert done.returncode == 0, done.stderr
    assert lab.executed() == []
    assert started(lab, since) == ""


def test_deltas_run_nothing_of_the_image(lab: Lab) -> None:
    delta, applied = lab.folder / "c.imgdelta", lab.folder / "applied.sif"
    since = docker("info", "--format", "{{.SystemTime}}")
    for words in (
        ("delta", lab.newer, "--against", lab.sif, "-o", delta),
        ("show", delta),
        ("verify", delta),
        ("apply", delta, lab.sif, "-o", applied),
        ("verify", applied),
    ):
        done = lab(*words)
        assert done.returncode == 0, (words, done.stderr)
        assert lab.executed() == [], words
    assert started(lab, since) == ""


@pytest.mark.parametrize("words", [("sif", "one.tar", "--force", "-o", "run.sif"), ("test", "canary.sif")])
def test_what_must_run_says_so_and_reaches_nothing(lab: Lab, words: tuple[str, ...]) -> None:
    done = lab(*(lab.folder / word if "." in word else word for word in words))
    ran = lab.executed()
    assert ran, "it ran nothing"
    for line in ran:  # and no mark
        assert line.startswith("exec --containall --no-home --net --network none "), ran
    assert "runs in the image: no home folder, no network" in done.stderr


def test_a_test_of_an_image_in_the_engine_reaches_nothing(lab: Lab) -> None:
    since = docker("info", "--format", "{{.SystemTime}}")
    done = lab("test", lab.name)
    assert "runs in the image: without folders of this machine and without a network" in done.stderr
    assert "container start" in started(lab, since)
    assert lab.executed() == []


@pytest.mark.parametrize(("host", "marks"), [((), False), (("--host",), True)])
def test_a_shell_sees_the_home_folder_only_if_told(lab: Lab, host: tuple[str, ...], marks: bool) -> None:
    shown = lab("shell", lab.sif, *host, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    words = shlex.split(shown.stdout)
    words[words.index("shell")] = "exec"
    lab.run(*words, "cat", "/dev/null")
    assert any("canary-" in line for line in lab.executed() if line.startswith("/")) is marks


def started(lab: Lab, since: str) -> str:
    """The containers of the lab's images that ran since then."""
    until = docker("info", "--format", "{{.SystemTime}}")
    of = ("--filter", "event=start", "--filter", f"label=canary={lab.folder.name}")
    return docker("events", *of, "--since", since, "--until", until)
