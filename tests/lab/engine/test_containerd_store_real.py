"""An engine with containerd's store: two platforms of one image, and where its image id comes from."""

from __future__ import annotations

import json

import pytest
import tiny_image
from labkit import docker, imgkit, imgkit_json, registry, run, verdicts

from imgkit_builder import engine as engines
from imgkit_builder.engine import images
from imgkit_builder.engine.images import inspect
from imgkit_entrypoints import json_text

pytestmark = [pytest.mark.docker, pytest.mark.singularity, pytest.mark.xdist_group("containerd")]

PORT = 5000  # in the engine's own network, where nobody else listens
BOTH = f"127.0.0.1:{PORT}/group/both:1"
BUILT = "imgkit.test/built:1"
RECIPE = f'description: x\nimage:\n  base: "{BOTH}"\n  platform: [linux/amd64, linux/arm64]\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The recipe and all files of this module."""
    folder = tmp_path_factory.mktemp("containerd")
    (folder / "both.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def engine(containerd_engine, folder):
    """The engine, with a registry on the loopback address of its network namespace."""
    with pytest.MonkeyPatch.context() as patch, registry(folder, containerd_engine.enter, port=PORT):
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for name, value in containerd_engine.env.items():
            patch.setenv(name, value)
        yield containerd_engine
        for name in docker("images", "--quiet").split():
            run("docker", "rmi", "--force", name)


@pytest.fixture(scope="module")
def configs(engine, folder):
    """The registry has an image of two platforms, and the engine only that for arm64; its image ids."""
    image_ids = tiny_image.write(folder / "both.tar", BOTH, ("amd64", "arm64"))
    docker("load", "-i", folder / "both.tar")
    docker("push", BOTH)
    docker("rmi", BOTH)
    docker("pull", "--platform", "linux/arm64", BOTH)
    pulled = imgkit_json("show", BOTH)
    assert (pulled["platform"], pulled["id"]) == ("linux/arm64", image_ids["arm64"])
    return image_ids


def build(folder, *args):
    return imgkit_json("build", folder / "both.yaml", "--no-test", "--tag", BUILT, *args)


@pytest.mark.soak  # tests/contract/engine has the recorded answers
@pytest.mark.qemu
def test_one_platform_and_then_both(engine, folder, configs):
    if engine.kind != "sid":
        pytest.skip("before release 28.1 an engine uses only its own platform of an image that has several")

    def built_for(arch):
        built = build(folder, "--platform", f"linux/{arch}")
        assert (built["platform"], built["base"]["id"]) == (f"linux/{arch}", configs[arch])
        inside = docker(
            "run", "--rm", "--network", "none", "--platform", f"linux/{arch}", BUILT, "cat", "/etc/arch"
        )
        assert inside == arch

    built_for("arm64")
    saved = imgkit_json("save", BOTH, "-o", "arm.tar", folder=folder)
    assert saved["image"]["id"] == configs["arm64"]
    assert verdicts(folder / "arm.tar")["sidecar"] == "ok"
    refused = imgkit("build", folder / "both.yaml", "--platform", "linux/amd64", "--no-test")
    assert refused.returncode == 2
    assert f"docker pull --platform linux/amd64 {BOTH}" in refused.stderr
    docker("pull", "--platform", "linux/amd64", BOTH)
    built_for("amd64")
    (folder / "both.yaml").write_text(RECIPE + "  env: {ANOTHER: step}\n")
    built_for("arm64")
    assert imgkit_json("show", BOTH)["id"] == configs["amd64"]


@pytest.fixture(scope="module")
def small(engine, folder):
    """An image for this machine with an id of its own."""
    name = "imgkit.test/small:1"
    ids = tiny_image.write(folder / "small.tar", name)
    docker("load", "-i", folder / "small.tar")
    assert imgkit_json("show", name)["id"] == ids["amd64"]
    return name


def test_sidecar_of_another_image_is_not_ok(small, folder):
    imgkit_json("save", small, "-o", "other.tar", folder=folder)
    path = folder / "other.tar.manifest.json"
    described = json.loads(path.read_text())
    del described[json_text.SEAL]
    described["image"]["id"] = "sha256:" + "0" * 64
    path.write_text(json.dumps(json_text.seal(described)))
    result = imgkit("verify", folder / "other.tar")
    assert result.returncode == 1
    assert "it describes image sha256:0000" in result.stdout


def test_save_stream_gives_the_same_id(small, monkeypatch):
    with engines.connect() as connected:
        info = inspect(connected, small)
        monkeypatch.setattr(images, "_OTHER_STORES", ())
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
        monkeypatch.setitem(connected.info, "DockerRootDir", "/nowhere")
        assert inspect(connected, small) == info
