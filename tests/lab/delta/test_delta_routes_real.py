"""Names resolve under every kind of delta, whatever wrote the .sif and whether the engine has its image.

The engine keeps its images in containerd's store, where the image ids in a .sif are not the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_image
from labkit import PrivateEngine, docker, run

from imgkit_builder import engine as engines
from imgkit_builder.base.progress import Silent
from imgkit_builder.delta.make import local_base, make
from imgkit_builder.sif.conversion import Options
from imgkit_builder.sif.convert import convert
from imgkit_builder.sif.entries import Archive
from imgkit_builder.sif.unsquash import Squashfs

pytestmark = [pytest.mark.docker, pytest.mark.singularity, pytest.mark.xdist_group("containerd")]

BASE, OLD, CODE, STEP = (f"imgkit.test/{name}:1" for name in ("tiny", "old", "code", "step"))
ROUTES = ("export", "archive")
QUIET = Options(test=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A delta over the .sif that one route wrote."""

    base: Path
    delta: Path


def build(tag: str, folder: Path, *, step: str, code: str) -> None:
    (folder / "code").write_text(code)
    (folder / "Dockerfile").write_text(f"FROM {BASE}\nRUN {step}\nCOPY code /workspace/\n")
    docker("build", "--quiet", "--tag", tag, folder, env={"DOCKER_BUILDKIT": "0"})


@pytest.fixture(scope="module")
def made(
    containerd_engine: PrivateEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Made]]:
    """The deltas by route and by what changed; those called pruned came last, without the old image."""
    folder = tmp_path_factory.mktemp("routes")
    found: dict[tuple[str, str], Made] = {}
    with pytest.MonkeyPatch.context() as patch, engines_of(containerd_engine, patch) as engine:
        tiny_image.write(folder / "tiny.tar", BASE)
        docker("load", "-i", folder / "tiny.tar")
        build(OLD, folder, step="echo old >/step", code="old")
        build(CODE, folder, step="echo old >/step", code="new")
        build(STEP, folder, step="rm /etc/arch", code="new")
        old = engines.local_image(engine, OLD)
        with old.save() as chunks:
            (folder / "old.tar").write_bytes(b"".join(chunks))
        for route in ROUTES:
            source = Archive(path=folder / "old.tar") if route == "archive" else old
            convert(source, folder / f"{route}.sif", Options(test=False), Silent())
        for kind, tag in (("code", CODE), ("step", STEP), ("pruned", STEP)):
            if kind == "pruned":
                docker("rmi", "--force", OLD)
            for route in ROUTES:
                base, target = folder / f"{route}.sif", folder / f"{route}-{kind}.imgdelta"
                make(engines.local_image(engine, tag), local_base(base), target, QUIET, Silent())
                found[route, kind] = Made(base=base, delta=target)
        yield found


def engines_of(engine: PrivateEngine, patch: pytest.MonkeyPatch) -> engines.Engine:
    for name, value in engine.env.items():
        patch.setenv(name, value)
    return engines.connect()


@pytest.mark.parametrize("kind", ["code", "step", "pruned"])
@pytest.mark.parametrize("route", ROUTES)
def test_names_resolve_over_every_base(made: dict[tuple[str, str], Made], route: str, kind: str) -> None:
    here = made[route, kind]
    inside = ("singularity", "exec", "--overlay", f"{here.delta}:ro", here.base, "/bin/sh", "-c")
    done = run(*inside, "cat /workspace/code; ping -c 1 -W 5 localhost")
    assert done.stdout.startswith("new"), done.stderr
    # A machine may forbid ping, but only after it has found the address.
    assert "127.0.0.1" in done.stdout or "permission denied" in done.stderr, done.stderr


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.programs("unsquashfs")
def test_only_the_images_own_files_are_deleted(made: dict[tuple[str, str], Made], route: str) -> None:
    for kind, gone in (("code", []), ("step", ["etc/arch", "step"]), ("pruned", ["etc/arch", "step"])):
        listed = Squashfs(path=made[route, kind].delta).listed()
        assert sorted(file.path for file in listed if file.mode[0] == "c") == gone, kind
