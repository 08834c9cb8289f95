"""The line on every engine: build, save, both ways to a .sif, push, pull, verify.

The base is busybox; ci/soak takes the stand-in.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_image
from labkit import (
    PrivateEngine,
    docker,
    expect_failure,
    expect_success,
    imgkit,
    imgkit_json,
    locked,
    output,
    registry,
    run,
    shared_folder,
    soak,
    verdicts,
)

pytestmark = [pytest.mark.docker, pytest.mark.singularity]

BASE = f"imgkit.test/{shared_folder().name}:1"
NO_CACHE = ("rootless-podman",)
"""Podman as root of the machine sees it, behind its API: its cache does not work there."""
RECIPE = """description: x
image:
  base: {base}
  run: [echo one > /step]
  copy: [{{source: code, target: /opt/code}}]
"""
WAYS = ("engine", "archive")
"""How a .sif is made; the one called foreign is an archive's of another engine."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """An image of one engine, and what imgkit made of it."""

    kind: str
    folder: Path
    name: str
    registry: str
    built: dict[str, Any]
    ids: set[str]
    """The image ids that the engine, the archive and the .sif files name."""
    sifs: dict[str, Path]

    @property
    def image_id(self):
        return str(self.built["id"])


def recipe(folder, name, base, code):
    """A recipe and what it copies."""
    (folder / "code").mkdir(exist_ok=True)
    (folder / "code/main").write_text(code)
    file = folder / f"{name}.yaml"
    file.write_text(RECIPE.format(base=base))
    return file


def build(file, tag, base, *args):
    test = () if base != BASE else ("--no-test",)
    return imgkit_json("build", file, "--base", base, "--tag", tag, *test, *args)


@pytest.fixture(scope="module", params=[BASE, *soak("standin")])
def base(request):
    """The name of the base."""
    return BASE if request.param == BASE else str(request.getfixturevalue("standin"))


def load_base(folder, base):
    """Give the engine of the variables the base."""
    if base == BASE:
        tiny_image.write(folder / "base.tar", BASE)
        docker("load -i", folder / "base.tar")
        return
    env = {name: value for name, value in os.environ.items() if name != "DOCKER_HOST"}
    with subprocess.Popen(["docker", "save", base], stdout=subprocess.PIPE, env=env) as save:
        subprocess.run(["docker", "load", "--quiet"], stdin=save.stdout, check=True, capture_output=True)


@pytest.fixture(scope="module")
def foreign(base):
    """A .sif of an archive that the machine's own engine saved; the first worker that needs it makes it."""
    folder = shared_folder() / f"foreign-{'tiny' if base == BASE else 'standin'}"
    tag = f"imgkit-test-foreign-{shared_folder().name}:1"
    with locked(folder.name):
        if not (folder / "foreign.sif").exists():
            folder.mkdir(exist_ok=True)
            if base == BASE:
                load_base(folder, base)
            # tests/conftest.py removes them when no worker needs them any more.
            (shared_folder() / f"tags-{folder.name}").write_text(tag + (f" {base}" if base == BASE else ""))
            build(recipe(folder, "line", base, "one"), tag, base)
            imgkit_json("save", tag, "-o", "foreign.tar", folder=folder)
            imgkit_json("sif foreign.tar -o foreign.sif --no-test", folder=folder)
            (folder / "foreign.tar").unlink()
    return folder / "foreign.sif"


def engine(kind, *marks, group=""):
    return pytest.param(kind, marks=[*marks, pytest.mark.xdist_group(group or kind)])


DOCKER = engine("docker", group="every-docker")
OTHERS = (
    engine("sid", group="containerd"),
    engine("trixie", pytest.mark.soak, group="containerd"),
    engine("podman", pytest.mark.podman),
    engine("trixie-podman", pytest.mark.soak, pytest.mark.podman),
    engine("rootless", pytest.mark.soak),
    engine("rootless-podman", pytest.mark.soak, pytest.mark.podman),
)


@pytest.fixture(scope="module", params=[DOCKER, *OTHERS])
def line(
    request,
    base,
    foreign,
    tmp_path_factory,
):
    """The image, the archive and the .sif files of one recipe on one engine."""
    kind, folder, tag = request.param, tmp_path_factory.mktemp(request.param), f"imgkit-line-{os.getpid()}:1"
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in ("STATE", "CACHE"):
            patch.setenv(f"XDG_{name}_HOME", str(folder / name))
        patch.delenv("SOURCE_DATE_EPOCH", raising=False)
        enter: tuple[str, ...] = ()
        if kind != "docker":
            started: Callable[[str], PrivateEngine] = request.getfixturevalue("started")
            private = started(kind)
            enter = private.enter
            for name, value in private.env.items():
                patch.setenv(name, value)
            load_base(folder, base)
        address = stack.enter_context(registry(folder, enter))
        built = build(recipe(folder, "line", base, "one"), tag, base)
        sifs, ids = {"foreign": foreign}, {imgkit_json("show", tag)["id"]}
        saved = imgkit_json("save", tag, "-o", "saved.tar", folder=folder)
        for way in WAYS:
            sifs[way] = folder / f"{way}.sif"
            converted = imgkit_json(
                "sif", "saved.tar" if way == "archive" else tag, "-o", sifs[way], "--no-test", folder=folder
            )
            ids.add(converted["record"]["image_id"])
        ids.add(saved["image"]["id"])
        yield Line(kind=kind, folder=folder, name=tag, registry=address, built=built, ids=ids, sifs=sifs)
        tags = docker("images --format {{.Repository}}:{{.Tag}}").splitlines()
        leftover_tags = [name for name in tags if tag[:-2] in name or (kind != "docker" and base in name)]
        run("docker", "rmi", "--force", *leftover_tags)


def test_one_id_in_every_file(line):
    assert line.ids == {line.image_id}


def test_every_file_verifies(line):
    assert verdicts(line.folder / "saved.tar")["sidecar"] == "ok"
    for way in WAYS:
        assert "fail" not in verdicts(line.sifs[way]).values()


def test_both_ways_have_the_same_files(line):
    listed = {
        way: output(
            "singularity", "exec", line.sifs[way], "/bin/sh", "-c", "cat /opt/code/main /step /etc/passwd"
        )
        for way in WAYS
    }
    assert listed["engine"] == listed["archive"]
    assert listed["engine"].startswith("oneone\n")


def test_second_build_is_cached(line, base):
    if line.kind in NO_CACHE:
        tag = f"{line.name}-again"
        result = expect_success(
            imgkit("build", line.folder / "line.yaml", "--base", base, "--tag", tag, "--no-test")
        )
        assert "its cache is not used" in result.stderr
        return
    again = build(line.folder / "line.yaml", line.name, base)
    assert (again["id"], again["labels"]) == (line.image_id, line.built["labels"])


def test_pushed_image_comes_back(line):
    ref = f"{line.registry}/group/line:1"
    digest = imgkit_json("push", line.name, ref)["digest"]
    docker("rmi", ref)
    docker("pull", f"{line.registry}/group/line@{digest}")
    pulled = imgkit_json("show", f"{line.registry}/group/line@{digest}")
    assert (pulled["id"], pulled["digest"].endswith(digest)) == (line.image_id, True)


def test_doctor_tells_version_store_and_builder(line):
    checks = json.loads(imgkit("doctor --json").stdout)["checks"]
    (check,) = (check for check in checks if check["name"] == "docker")
    product, store, builder = {
        "podman": ("Podman", "overlay", "podman"),
        "trixie-podman": ("Podman", "overlay", "podman"),
        # Root's own Podman has another storage, so the builder is the one behind the API.
        "rootless-podman": ("Podman", "overlay", "classic"),
        "sid": ("Docker", "containerd (overlayfs)", "classic"),
        "trixie": ("Docker", "containerd (overlayfs)", "classic"),
    }.get(line.kind, ("Docker", "", "classic"))
    version = docker("version --format {{.Server.Version}}")
    assert check["found"].startswith(f"{product} {version}, API ")
    assert f", store {store}" in check["found"]
    assert f", builder {builder}" in check["found"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", [engine("rootless"), engine("rootless-podman", pytest.mark.podman)])
def test_owner_of_a_rootless_engine_needs_no_root(kind, started, base, tmp_path):
    private, tag = started(kind), f"imgkit-owner-{os.getpid()}:1"
    work = private.folder / f"work {os.getpid()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", private.env["DOCKER_HOST"])
        load_base(tmp_path, base)
    work.mkdir()
    output("chown", private.owner, work)

    def owner(*args):
        return dict(json.loads(output(*private.as_owner, *args, "--json", folder=work)))

    def built(code, name):
        file = recipe(work, "line", base, code)
        return owner("build", file, "--base", base, "--tag", name, *(("--no-test",) if base == BASE else ()))

    first = built("one", tag)
    assert built("one", tag)["id"] == first["id"]
    saved = owner("save", tag, "-o", "saved.tar")
    assert saved["image"]["id"] == first["id"]
    for number, source in enumerate(("saved.tar", tag)):
        converted = owner("sif", source, "-o", f"{number}.sif", "--no-test")
        assert converted["record"]["image_id"] == first["id"]
    args = ("0.sif", "/bin/sh", "-c", "cat /opt/code/main /step")
    as_owner = ("runuser", "-u", private.owner, "--")
    assert output(*as_owner, "singularity", "exec", *args, folder=work) == "oneone\n"
    result = run(*private.as_owner, "doctor", "--json", folder=work)
    (check,) = (check for check in json.loads(result.stdout)["checks"] if check["name"] == "docker")
    assert f", builder {'podman' if kind == 'rootless-podman' else 'classic'}" in check["found"]


def test_push_to_nobody_is_no_success(line):
    try:
        result = imgkit("push", line.name, "127.0.0.1:1/group/line:1")
    finally:
        run("docker", "rmi", "127.0.0.1:1/group/line:1")  # a push gives the image this name first
    assert result.returncode == 4
    assert "connection refused" in result.stderr


def test_failing_step_names_its_line(line, base):
    file = line.folder / "fails.yaml"
    file.write_text(f"description: x\nimage:\n  base: {base}\n  run:\n    - echo why >&2; exit 7\n")
    expect_failure(
        imgkit("build", file, "--base", base, "--tag", f"{line.name}-fails"),
        4,
        "fails.yaml:5: step ",
        "\n     why\n",
    )
    assert imgkit("show", f"{line.name}-fails").returncode == 2
