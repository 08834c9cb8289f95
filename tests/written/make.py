"""Write small files with this version, for the tests that later versions still read them.

    python tests/written/make.py

Writes ``tests/written/VERSION``: an archive, a .sif, a .sqsh, the record of a job,
and a run folder of dist-train without checkpoints, which belong to their release of torch, too.
Needs Docker, the stand-in image and mksquashfs.
Once the version is released, its files never change: a reader that refuses them is the bug.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kit"))
from job_records import full_record

from imgkit_builder.jobs import records
from imgkit_builder.oci import manifest
from imgkit_builder.oci.manifest import BaseImage, Manifest, Probe
from imgkit_builder.recipe import load
from imgkit_entrypoints import __version__, system

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STANDIN = "imgkit.local/standin:24.03"
IMAGE = "imgkit.test/written"
DOCKERFILE = """FROM scratch
LABEL imgkit.recipe=cpu imgkit.version={version}
COPY system.json manifest.json /opt/imgkit/
COPY passwd /etc/
COPY code /workspace/code
"""
RUNS = """
cd /tmp
export IMGKIT_RUN_DIR=/tmp/dist-train
dist-train --nproc 2 --model linear --device cpu --steps 6 --save-every 3 --keep 1
tar -cf - --exclude checkpoints dist-train
"""


def run(*argv: object, **options: object) -> bytes:
    """Run a program that must succeed, and return its output."""
    return subprocess.run(list(map(str, argv)), check=True, stdout=subprocess.PIPE, **options).stdout


def imgkit(*argv: object) -> None:
    run(sys.executable, "-m", "imgkit_builder", *argv)


def images(target: Path) -> None:
    """An archive with its sidecars, and its .sif and .sqsh."""
    recipe = load.load("cpu")
    base = BaseImage(name="scratch", platform="linux/amd64", probe=Probe(python="3.11.2"))
    image_manifest = Manifest(
        imgkit=__version__,
        recipe=recipe.name,
        recipe_sha256=recipe.sha256,
        base=base,
        platform="linux/amd64",
        wheel_sha256="0" * 64,
    )
    tag = f"{IMAGE}:1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "Dockerfile").write_text(DOCKERFILE.format(version=__version__))
        (folder / "system.json").write_text(system.to_json(recipe.system))
        (folder / "manifest.json").write_text(manifest.to_json(image_manifest))
        (folder / "passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
        (folder / "code").write_text("1")
        run("docker", "build", "--quiet", "--tag", tag, folder, env={**os.environ, "DOCKER_BUILDKIT": "0"})
    try:
        imgkit("save", tag, "--compression", "gzip", "-o", target / "small.tar.gz")
        imgkit("sif", target / "small.tar.gz", "-o", target / "small.sif", "--no-test")
        imgkit("sif", target / "small.tar.gz", "-o", target / "small.sqsh")
    finally:
        run("docker", "rmi", tag)


def runs(target: Path) -> None:
    """A run folder of six steps."""
    package = "/usr/local/lib/python3.11/dist-packages/imgkit_entrypoints"
    mounted = ("-v", f"{ROOT}/entrypoints/imgkit_entrypoints:{package}:ro", "-v", f"{HERE}:/test:ro")
    start = ("docker", "run", "--rm", "--network", "none", "-e", "GLOO_SOCKET_IFNAME=lo", *mounted)
    # The stand-in has no dist-* commands.
    script = RUNS.replace("\ndist-", "\npython3 -m imgkit_entrypoints >&2 dist-")
    run("tar", "-xf", "-", "-C", target, input=run(*start, STANDIN, "sh", "-ec", script))
    for leftover in ("dist-train/curves.svg", "dist-train/run.lock"):
        (target / leftover).unlink(missing_ok=True)


def job(target: Path) -> None:
    """The record of a job with every field, as `imgkit run` keeps it."""
    os.environ["XDG_STATE_HOME"] = str(target / "state")
    records.save_record(full_record())


if __name__ == "__main__":
    folder = HERE / __version__
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    images(folder)
    job(folder)
    runs(folder)
