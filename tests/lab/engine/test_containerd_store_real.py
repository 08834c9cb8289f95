"""An engine with containerd's store: one image id everywhere, two platforms of one image, pushed digests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_image
from labkit import PrivateEngine, docker, imgkit, imgkit_json, run, until

from imgkit_builder import engine as engines
from imgkit_builder.engine import identity
from imgkit_builder.engine.images import inspect
from imgkit_entrypoints import json_text

pytestmark = [pytest.mark.docker, pytest.mark.singularity, pytest.mark.xdist_group("containerd")]

PORT = 5000  # in the engine's own network, where nobody else listens
BOTH = f"127.0.0.1:{PORT}/group/both:1"
BUILT = "imgkit.test/built:1"
REGISTRY = "docker-registry"
RECIPE = f'description: x\nimage:\n  base: "{BOTH}"\n  platform: [linux/amd64, linux/arm64]\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe and all files of this module."""
    found = tmp_path_factory.mktemp("containerd")
    (found / "both.yaml").write_text(RECIPE)
    return found


@pytest.fixture(scope="module")
def engine(containerd_engine: PrivateEngine, folder: Path) -> Iterator[PrivateEngine]:
    """The engine, with a registry on the loopback address of its network namespace."""
    config = folder / "registry.yml"
    config.write_text(
        "version: 0.1\nlog: {level: error}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/registry}}}}\nhttp: {{addr: '127.0.0.1:{PORT}'}}\n"
    )
    enter = ("nsenter", "--net", "--target", (containerd_engine.folder / "docker.pid").read_text().strip())
    try:
        server = subprocess.Popen(
            [*enter, REGISTRY, "serve", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except FileNotFoundError:
        pytest.skip("docker-registry is not installed: apt-get install docker-registry")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for name, value in containerd_engine.env.items():
            patch.setenv(name, value)
        until(lambda: run(*enter, "grep", "-q", f":{PORT:04X} .* 0A ", "/proc/net/tcp").returncode == 0)
        yield containerd_engine
        for name in docker("images", "--quiet").split():
            run("docker", "rmi", "--force", name)
    server.terminate()
    server.wait()


@pytest.fixture(scope="module")
def configs(engine: PrivateEngine, folder: Path) -> dict[str, str]:
    """The registry has an image of two platforms, and the engine only that for arm64; its image ids."""
    found = tiny_image.write(folder / "both.tar", BOTH, ("amd64", "arm64"))
    docker("load", "-i", folder / "both.tar")
    docker("push", BOTH)
    docker("rmi", BOTH)
    pulled = imgkit_json("pull", BOTH, "--platform", "linux/arm64")
    assert (pulled["platform"], pulled["id"]) == ("linux/arm64", found["arm64"])
    return found


def build(folder: Path, *words: str) -> dict[str, Any]:
    return imgkit_json("build", folder / "both.yaml", "--no-test", "--tag", BUILT, *words)


def arch_in(image: str) -> str:
    return docker("run", "--rm", "--network", "none", image, "cat /etc/arch")


@pytest.mark.qemu
def test_one_platform_and_then_both(engine: PrivateEngine, folder: Path, configs: dict[str, str]) -> None:
    if engine.suite != "sid":
        pytest.skip("before release 28.1 an engine uses only its own platform of an image that has several")

    def built_for(arch: str) -> None:
        built = build(folder, "--platform", f"linux/{arch}")
        assert (built["platform"], built["base"]["id"]) == (f"linux/{arch}", configs[arch])
        inside = docker(
            "run", "--rm", "--network", "none", "--platform", f"linux/{arch}", BUILT, "cat", "/etc/arch"
        )
        assert inside == arch

    built_for("arm64")
    saved = imgkit_json("save", BOTH, "-o", "arm.tar", folder=folder)
    assert saved["image"]["id"] == configs["arm64"]
    assert verdict(folder / "arm.tar", "sidecar") == "ok"
    refused = imgkit("build", folder / "both.yaml", "--platform", "linux/amd64", "--no-test")
    assert refused.returncode == 2
    assert f"docker pull --platform linux/amd64 {BOTH}" in refused.stderr
    docker("pull", "--platform", "linux/amd64", BOTH)
    built_for("amd64")
    (folder / "both.yaml").write_text(RECIPE + "  env: {ANOTHER: step}\n")
    built_for("arm64")
    assert imgkit_json("show", BOTH)["id"] == configs["amd64"]


@pytest.fixture(scope="module")
def small(engine: PrivateEngine, folder: Path) -> str:
    """An image for this machine with an id of its own."""
    name = "imgkit.test/small:1"
    ids = tiny_image.write(folder / "small.tar", name)
    docker("load", "-i", folder / "small.tar")
    assert imgkit_json("show", name)["id"] == ids["amd64"]
    return name


def verdict(path: Path, check: str) -> str:
    checks: Sequence[dict[str, str]] = imgkit_json("verify", path)["checks"]
    return next(one["verdict"] for one in checks if one["name"] == check)


def test_one_id_in_every_file(small: str, folder: Path) -> None:
    shown = imgkit_json("show", small)["id"]
    saved = imgkit_json("save", small, "-o", "small.tar", folder=folder)
    assert verdict(folder / "small.tar", "sidecar") == "ok"
    words = ("sif", small, "--from", "daemon", "-o", "small.sif", "--no-test")
    made = imgkit_json(*words, folder=folder)
    assert {saved["image"]["id"], made["record"]["image_id"]} == {shown}
    again = imgkit_json(*words, folder=folder)
    assert (made["up_to_date"], again["up_to_date"]) == (False, True)


def test_sidecar_of_another_image_is_not_ok(small: str, folder: Path) -> None:
    imgkit_json("save", small, "-o", "other.tar", folder=folder)
    path = folder / "other.tar.manifest.json"
    described = json.loads(path.read_text())
    del described[json_text.SEAL]
    described["image"]["id"] = docker("image", "inspect", "--format", "{{.Id}}", small)
    path.write_text(json.dumps(json_text.sealed(described)))
    assert verdict(folder / "other.tar", "sidecar") == "warn"
    described["image"]["id"] = "sha256:" + "0" * 64
    path.write_text(json.dumps(json_text.sealed(described)))
    done = imgkit("verify", folder / "other.tar")
    assert done.returncode == 1
    assert "it describes image sha256:0000" in done.stdout


def test_save_stream_gives_the_same_id(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engines.connect() as connected:
        info = inspect(connected, small)
        monkeypatch.setattr(identity, "_OTHER_STORES", ())
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
        monkeypatch.setattr(type(connected), "root", "/nowhere")
        assert inspect(connected, small) == info


def test_push_prints_the_registrys_digest(small: str) -> None:
    ref = f"127.0.0.1:{PORT}/group/small:1"
    digest = imgkit_json("push", small, ref)["digest"]
    docker("rmi", ref)
    assert imgkit_json("pull", f"127.0.0.1:{PORT}/group/small@{digest}")["digest"].endswith(digest)


def test_push_to_nobody_is_no_success(small: str) -> None:
    done = imgkit("push", small, "127.0.0.1:1/group/small:1")
    assert done.returncode == 4
    assert "connection refused" in done.stderr
