"""Two builds of one lock are one .sif: at another time, in another folder, by another user and engine."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import locked_recipe
import pytest
from labkit import (
    IMGKIT,
    PrivateEngine,
    docker,
    imgkit,
    imgkit_json,
    output,
    public_folder,
    run,
    shared_folder,
    until,
)

pytestmark = [
    pytest.mark.docker,
    pytest.mark.programs("dpkg-deb"),
]

TAG = f"imgkit-test-equal-{shared_folder().name}:1"


@pytest.fixture(scope="module")
def folder(standin_notorch: str) -> Iterator[Path]:
    """A recipe with its lock, and the .sif that the machine's engine makes of it: ``mine.sif``."""
    found = public_folder("equal")
    base_id = docker("image", "inspect", "--format", "{{.Id}}", standin_notorch)
    recipe = locked_recipe.write(found, standin_notorch, base_id)
    try:
        made(recipe, standin_notorch, found / "mine.sif")
        yield found
    finally:
        shutil.rmtree(found)
        run("docker", "rmi", "--force", TAG)


def made(
    recipe: Path, base: str, sif: Path, *ways: str, imgkit: tuple[str, ...] = IMGKIT, umask: str = "022"
) -> str:
    """Build and convert; the result is the sha256 of the .sif."""
    build = ("build", recipe.name, "--locked", "--base", base, "--tag", TAG, "--no-test", "--no-cache")
    start = ("sh", "-c", 'umask "$1"; shift; exec "$@"', "sh", umask, *imgkit)
    output(*start, *build, folder=recipe.parent)
    output(*start, "sif", TAG, "--no-test", "--force", "-o", sif, *ways, folder=recipe.parent)
    return sha256(sif)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def give_base(base: str, engine: PrivateEngine) -> None:
    with subprocess.Popen(["docker", "save", base], stdout=subprocess.PIPE) as save:
        env = {**os.environ, **engine.env}
        subprocess.run(["docker", "load", "--quiet"], stdin=save.stdout, check=True, env=env)


@pytest.mark.xdist_group("equal")
def test_another_folder_and_umask(folder: Path, tmp_path: Path, standin_notorch: str) -> None:
    other = tmp_path / "a folder"
    shutil.copytree(folder, other, symlinks=True, ignore=shutil.ignore_patterns("*.sif"))
    output("chmod", "-R", "go-rwx", other)
    found = made(other / "mine.yaml", standin_notorch, other / "new.sif", umask="077")
    assert found == sha256(folder / "mine.sif")


@pytest.mark.soak
@pytest.mark.xdist_group("equal")
def test_another_clock_user_umask_and_folder(
    folder: Path, standin_notorch: str, started: Callable[[str], PrivateEngine], user: str
) -> None:
    """The containers of the second engine are 400 days ahead: shadow, logs and byte code have that date."""
    engine = started("ahead")
    give_base(standin_notorch, engine)
    there = public_folder("equal there")
    try:
        other = there / "a folder"
        shutil.copytree(folder, other, symlinks=True, ignore=shutil.ignore_patterns("*.sif"))
        output("chmod", "-R", "go-rwx", other)
        output("chown", "-R", user, there)
        for path in (engine.folder, engine.folder / "docker.sock"):
            path.chmod(0o777)
        words = dataclasses.replace(engine, owner=user).as_owner
        found = made(other / "mine.yaml", standin_notorch, other / "new.sif", imgkit=words, umask="077")
        assert found == sha256(folder / "mine.sif")
    finally:
        shutil.rmtree(there)


@pytest.mark.soak
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("sid", marks=pytest.mark.xdist_group("containerd")),
        pytest.param("podman", marks=[pytest.mark.podman, pytest.mark.xdist_group("podman")]),
        pytest.param("trixie-podman", marks=[pytest.mark.podman, pytest.mark.xdist_group("podman")]),
    ],
)
def test_another_engine(
    folder: Path,
    tmp_path: Path,
    standin_notorch: str,
    started: Callable[[str], PrivateEngine],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = started(kind)
    give_base(standin_notorch, engine)
    for name, value in engine.env.items():
        monkeypatch.setenv(name, value)
    wanted, recipe = sha256(folder / "mine.sif"), folder / "mine.yaml"
    assert made(recipe, standin_notorch, tmp_path / "export.sif") == wanted
    output(*IMGKIT, "sif", TAG, "--no-test", "--from", "layers", "-o", tmp_path / "layers.sif")
    assert sha256(tmp_path / "layers.sif") == wanted
    imgkit_json("save", TAG, "-o", tmp_path / "mine.tar.gz")
    output(*IMGKIT, "sif", tmp_path / "mine.tar.gz", "--no-test", "-o", tmp_path / "archive.sif")
    assert sha256(tmp_path / "archive.sif") == wanted


@pytest.mark.soak
@pytest.mark.xdist_group("equal")
def test_rebuild_finds_the_same_file(folder: Path) -> None:
    """The recipe copies the folder that the .sif, the rebuild and what a killed conversion left lie in."""
    argv = [*IMGKIT, "sif", TAG, "--from", "layers", "--no-test", "-o", str(folder / "killed.sif")]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        until(lambda: any(path.stat().st_size > 1e6 for path in folder.glob(".imgkit-sif.*/spool.tar")))
        running.kill()
    words = ("rebuild", folder / "mine.sif", "--recipe", folder / "mine.yaml")
    found = imgkit_json(*words)
    assert (found["same"], found["made_sha256"]) == (True, sha256(folder / "mine.sif"))
    assert "imgkit-rebuild" not in docker("images")


@pytest.mark.soak
@pytest.mark.xdist_group("equal")
def test_rebuild_without_the_recipe_needs_its_code(folder: Path) -> None:
    done = imgkit("rebuild", folder / "mine.sif")
    assert done.returncode == 2
    assert "--recipe mine.yaml" in done.stderr


@pytest.mark.soak
@pytest.mark.xdist_group("equal")
def test_rebuild_names_the_step_that_differs(tmp_path: Path, standin_notorch: str) -> None:
    base_id = docker("image", "inspect", "--format", "{{.Id}}", standin_notorch)
    step = "date +%N > /opt/now"
    recipe = locked_recipe.write(tmp_path, standin_notorch, base_id, run=step)
    made(recipe, standin_notorch, tmp_path / "mine.sif")
    done = imgkit("rebuild", tmp_path / "mine.sif", "--recipe", recipe)
    assert done.returncode == 1
    assert "differs in 1 files" in done.stdout
    assert f"mine.yaml:10 (RUN {step})" in done.stdout
