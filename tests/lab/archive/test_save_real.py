"""Save and verify with a real engine and a real runtime."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import labkit
import pytest
from bit_flips import flip
from labkit import IMGKIT, imgkit, imgkit_json, inspect_image, output, run

from imgkit_builder.archive import write
from imgkit_builder.recipe import sources
from imgkit_builder.sif import image as sif_image
from imgkit_entrypoints.errors import ToolFailed

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("save")]

NAME = f"imgkit-test-save-{os.getpid()}"
TAG = f"{NAME}:1"


def verdicts(path):
    result = imgkit("verify", path, "--json")
    document = json.loads(result.stdout)
    assert document["schema"] == 1
    assert document["passed"] == (result.returncode == 0)
    return result.returncode, {check["name"]: check["verdict"] for check in document["checks"]}


@pytest.fixture(scope="module")
def image(standin_notorch):
    """mn5 on the small stand-in."""
    imgkit_json("build", "mn5", "--base", standin_notorch, "--tag", TAG, "--no-test")
    yield TAG
    run("docker", "rmi", "--force", TAG)


@pytest.fixture(scope="module")
def saved(image, tmp_path_factory):
    """The archive, and the output of the command."""
    folder = tmp_path_factory.mktemp("saved")
    return folder / "mn5.tar", output(*IMGKIT, "save", image, "-o", "mn5.tar", folder=folder)


@pytest.fixture
def copied(saved, tmp_path):
    """A copy with its sidecars, to be damaged."""
    for path in saved[0].parent.glob("mn5.tar*"):
        shutil.copy(path, tmp_path)
    return tmp_path / "mn5.tar"


def test_archive_is_what_docker_saves(saved):
    docker = subprocess.run(["docker", "save", TAG], capture_output=True, check=True).stdout
    assert hashlib.sha256(docker).digest() == hashlib.sha256(saved[0].read_bytes()).digest()
    assert sorted(path.name for path in saved[0].parent.iterdir()) == [
        "mn5.tar",
        "mn5.tar.manifest.json",
        "mn5.tar.sha256",
    ]


def test_sidecar_tells_image_system_and_manifest(saved, standin_notorch):
    document: dict[str, Any] = json.loads((saved[0].parent / "mn5.tar.manifest.json").read_text())
    image = inspect_image(TAG)
    assert document["image"]["id"] == image["Id"]
    assert document["image"]["diff_ids"] == image["RootFS"]["Layers"]
    assert document["image"]["tag"] == TAG
    assert document["image"]["labels"]["imgkit.recipe"] == "mn5"
    assert document["system"]["title"].startswith("MareNostrum 5")
    assert document["manifest"]["base"]["name"] == standin_notorch


def test_printed_commands_are_the_clusters(saved):
    path, printed = saved
    assert "rsync -P mn5.tar mn5.tar.sha256 mn5.tar.manifest.json USER@transfer1.bsc.es:" in printed
    assert "imgkit sif mn5.tar --submit -A ACCOUNT --time 1h\n" in printed
    assert "STAND-IN" in printed
    command = next(line.strip() for line in printed.splitlines() if "sha256sum" in line)
    assert run(*command.split(), folder=path.parent).returncode == 0


def test_saved_archive_verifies(saved):
    code, checks = verdicts(saved[0])
    assert code == 0
    assert set(checks.values()) == {"ok"}


def test_flipped_byte_is_found(copied):
    flip(copied, 8 * (copied.stat().st_size // 2))
    code, checks = verdicts(copied)
    assert code == 1
    assert (checks["sha256"], checks["layers"], checks["image id"]) == ("fail", "fail", "ok")


def test_cut_transfer_is_found(copied):
    os.truncate(copied, copied.stat().st_size // 2)
    code, checks = verdicts(copied)
    assert code == 1
    assert (checks["sha256"], checks["archive"]) == ("fail", "fail")


def test_two_images_in_an_archive_are_found(image, standin_notorch, tmp_path):
    assert run("docker", "save", image, standin_notorch, "-o", tmp_path / "two.tar").returncode == 0
    code, checks = verdicts(tmp_path / "two.tar")
    assert (code, checks["archive"]) == (1, "fail")


@pytest.mark.parametrize("compress", [pytest.param("gzip", marks=pytest.mark.soak), "zstd"])
def test_compressed_archive_loads_again(image, tmp_path, compress):
    if compress == "zstd" and shutil.which("zstd") is None:
        pytest.skip("no zstd program")
    document = imgkit_json("save", image, "--compression", compress, folder=tmp_path)
    path = tmp_path / document["archive"]["name"]
    assert path.name == f"{NAME}-1{write.SUFFIXES[compress]}"  # type: ignore[index]
    assert verdicts(path)[0] == 0
    if compress == "zstd":  # the engine of 20.10 reads gzip only
        subprocess.run(["zstd", "-q", "-d", path], check=True)
        path = path.with_suffix("")
    assert TAG in run("docker", "load", "-i", path).stdout


def test_unknown_image_is_a_usage_error(tmp_path):
    result = imgkit("save", "imgkit-test-absent:1", folder=tmp_path)
    assert result.returncode == 2
    assert "imgkit build" in result.stderr


def test_missing_engine_is_told(tmp_path):
    result = imgkit("save", "mn5", folder=tmp_path, env={"DOCKER_HOST": "unix:///nonexistent/docker.sock"})
    assert result.returncode == 3
    assert list(tmp_path.iterdir()) == []


def test_image_without_a_name_is_refused(image, tmp_path):
    container = run("docker", "create", image, "true").stdout.strip()
    unnamed = run("docker", "commit", container).stdout.strip()
    run("docker", "rm", container)
    try:
        result = imgkit("save", unnamed, folder=tmp_path)
    finally:
        run("docker", "rmi", unnamed)
    assert result.returncode == 2
    assert "docker tag" in result.stderr


@pytest.mark.parametrize("compress", write.SUFFIXES)
def test_memory_stays_below_64_mib(image, tmp_path, compress):
    if compress == "zstd" and shutil.which("zstd") is None:
        pytest.skip("no zstd program")
    measure = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    args = ("save", image, "-o", tmp_path / "x.tar", "--compression", compress)
    assert int(run(sys.executable, "-c", measure, *IMGKIT, *args).stdout) <= 64 * 1024


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_save_keeps_the_old_archive(image, tmp_path, number):
    target = tmp_path / "x.tar"
    target.write_bytes(b"old")
    argv = [*IMGKIT, "save", image, "-o", str(target)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        while not list(tmp_path.glob(".imgkit-*.part")):
            assert running.poll() is None
            time.sleep(0.001)
        running.send_signal(number)
        _, stderr = running.communicate(timeout=60)
    assert target.read_bytes() == b"old"
    leftovers = [path.name for path in tmp_path.iterdir() if path != target]
    if number != signal.SIGKILL:
        assert running.returncode == 130
        assert "Traceback" not in stderr
        assert leftovers == []
    else:
        assert [name[:8] for name in leftovers] == [".imgkit-"]
        assert [entry.name for entry in sources.list_source(tmp_path).entries] == ["x.tar"]
    assert imgkit("save", image, "-o", target).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "x.tar",
        "x.tar.manifest.json",
        "x.tar.sha256",
    ]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB."""
    with labkit.small_disk(tmp_path / "small", 8 << 10) as folder:
        yield folder


def test_full_disk_leaves_nothing(small_disk):
    chunks = (os.urandom(32_768) for _ in range(1_000))
    with pytest.raises(ToolFailed, match="no space left after 8 MB"):
        write.save_archive(chunks, target=small_disk / "x.tar")
    assert list(small_disk.iterdir()) == []


def test_too_small_disk_is_refused_at_once(image, small_disk):
    result = imgkit("save", image, "-o", small_disk / "x.tar")
    assert result.returncode == 2
    assert re.search(r"[MG]B needed, .* free", result.stderr)
    assert "the engine stages" not in result.stderr


@pytest.fixture(scope="module")
def sif(saved, tmp_path_factory):
    path = tmp_path_factory.mktemp("sif") / "mn5.sif"
    imgkit_json("sif", saved[0], "-o", path)
    return path


VERIFIED = {"header": "ok", "root partition": "ok", "manifest": "ok"}


@pytest.mark.singularity
def test_converted_sif_verifies(sif):
    code, checks = verdicts(sif)
    assert code == 0
    assert checks == VERIFIED


@pytest.mark.singularity
def test_flipped_byte_in_the_root_partition_is_found(sif, tmp_path):
    damaged = Path(shutil.copy(sif, tmp_path / "x.sif"))
    root = sif_image.read(damaged).root
    assert root is not None
    flip(damaged, 8 * (root.offset + root.size_bytes // 2))
    code, checks = verdicts(damaged)
    assert code == 1
    assert checks == {"header": "ok", "root partition": "fail", "manifest": "skip"}


@pytest.mark.singularity
def test_cut_sif_is_found(sif, tmp_path):
    damaged = Path(shutil.copy(sif, tmp_path / "x.sif"))
    os.truncate(damaged, damaged.stat().st_size // 2)
    assert verdicts(damaged) == (1, {"header": "fail"})


@pytest.mark.singularity
def test_sif_is_verified_without_a_runtime(sif):
    result = imgkit("verify", sif, "--json", env={"PATH": "/nonexistent"})
    checks = {check["name"]: check["verdict"] for check in json.loads(result.stdout)["checks"]}
    assert checks == VERIFIED


@pytest.mark.singularity
def test_checksum_beside_a_sif_is_used(sif, tmp_path):
    copy = Path(shutil.copy(sif, tmp_path / "x.sif"))
    (tmp_path / "x.sif.sha256").write_text(f"{'0' * 64}  x.sif\n")
    code, checks = verdicts(copy)
    assert (code, checks["sha256"]) == (1, "fail")
