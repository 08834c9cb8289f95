"""An image whose every program leaves a mark where the caller would find it: looking at it leaves none.

`TOUCH` runs before each of its programs, and wherever a runtime sources a file of an image.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from file_tree import write_program
from labkit import docker, expect_success, imgkit, output, run
from stored_images import archive
from tars import tar_of_files
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
    """The image as a .sif and in the engine."""

    folder: Path
    name: str
    sif: Path
    marks: Path
    """This machine's folder for marks: home and current folder of every command."""
    calls: Path
    """A file with the arguments of each call of the runtime."""

    def __call__(self, *args):
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return imgkit(*args, folder=self.marks, env={"PATH": path, "HOME": str(self.marks)})

    def run(self, *argv):
        """Run a command where marks count."""
        return run(*argv, folder=self.marks, env={"HOME": str(self.marks)})

    def executed(self):
        """Return and forget what ran since the last call: marks, and runs by the runtime."""
        home = Path("~root").expanduser()
        folders = (self.marks, Path("/tmp"), Path("/var/tmp"), home)
        marks = [path for folder in folders for path in folder.glob(f"canary-{self.folder.name}*")]
        for path in marks:
            path.unlink()
        ran = [line for line in self.calls.read_text().splitlines() if line.split()[0] in RUNS]
        ran = [line for line in ran if "imgkit-empty-" not in line]
        self.calls.write_text("")
        return [*map(str, marks), *ran]


def programs(token):
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


def baked():
    mn5 = load("mn5")
    base = BaseImage(name="imgkit.local/canary", platform="linux/amd64")
    manifest = Manifest(
        imgkit="0.3.0", recipe="mn5", recipe_sha256="0", base=base, platform="linux/amd64", wheel_sha256="0"
    )
    facts = dataclasses.replace(mn5.system, env={})
    return {
        "opt/imgkit/manifest.json": to_json(manifest).encode(),
        "opt/imgkit/system.json": system.to_json(facts).encode(),
    }


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    if not BUSYBOX.exists():
        pytest.skip("busybox is missing: apt-get install busybox-static")
    folder = tmp_path_factory.mktemp(f"canary-{secrets.token_hex(4)}")
    (folder / "bin").mkdir()
    (folder / "marks").mkdir()
    calls = folder / "calls"
    calls.touch()
    for command in ("singularity", "apptainer"):
        real = output("sh", "-c", f"command -v {command} || command -v apptainer || command -v singularity")
        write_program(folder / "bin" / command, f'echo "$@" >>{calls}\nexec {real.strip()} "$@"')
    name = f"imgkit-test-canary:{secrets.token_hex(4)}"
    lab = Lab(
        folder=folder,
        name=name,
        sif=folder / "canary.sif",
        marks=folder / "marks",
        calls=calls,
    )
    config = {
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
        "Cmd": ["sh"],
        "Labels": {"imgkit.version": "0.3.0", "imgkit.recipe": "mn5", "canary": folder.name},
    }
    first = tar_of_files({**programs(folder.name), **baked()}, mode=0o755)
    (folder / "one.tar").write_bytes(archive([], name=lab.name, raw=[first], config=config))
    try:
        docker("load", "--input", folder / "one.tar")
        expect_success(lab("sif", folder / "one.tar", "-o", lab.sif, "--no-test"))
        assert lab.executed() == []
        yield lab
    finally:
        docker("rmi", "--force", lab.name)
        lab.executed()


def test_the_canary_leaves_marks_where_it_runs(lab):
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
def test_looking_runs_nothing_of_the_image(lab, line):
    since = docker("info", "--format", "{{.SystemTime}}")
    args = (lab.folder / argument if "." in argument else argument for argument in line.split())
    expect_success(lab(*(lab.name if argument == "NAME" else argument for argument in args)))
    assert lab.executed() == []
    assert started(lab, since) == ""


@pytest.mark.parametrize("args", [("sif", "one.tar", "--force", "-o", "run.sif"), ("test", "canary.sif")])
def test_what_must_run_says_so_and_reaches_nothing(lab, args):
    result = lab(*(lab.folder / argument if "." in argument else argument for argument in args))
    ran = lab.executed()
    assert ran, "it ran nothing"
    for line in ran:  # and no mark
        assert line.startswith("exec --containall --no-home --net --network none "), ran
    assert "runs in the image: no home folder, no network" in result.stderr


def test_a_test_of_an_image_in_the_engine_reaches_nothing(lab):
    since = docker("info", "--format", "{{.SystemTime}}")
    result = lab("test", lab.name)
    assert "runs in the image: without folders of this machine and without a network" in result.stderr
    assert "container start" in started(lab, since)
    assert lab.executed() == []


@pytest.mark.parametrize(("host", "marks"), [((), False), (("--host",), True)])
def test_a_shell_sees_the_home_folder_only_if_told(lab, host, marks):
    result = expect_success(lab("shell", lab.sif, *host, "--dry-run"))
    argv = shlex.split(result.stdout)
    argv[argv.index("shell")] = "exec"
    lab.run(*argv, "cat", "/dev/null")
    assert any("canary-" in line for line in lab.executed() if line.startswith("/")) is marks


def started(lab, since):
    """The containers of the lab's images that ran since then."""
    until = docker("info", "--format", "{{.SystemTime}}")
    of = ("--filter", "event=start", "--filter", f"label=canary={lab.folder.name}")
    return docker("events", *of, "--since", since, "--until", until)
