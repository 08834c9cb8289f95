"""Archives of every layout become the same OCI folder, and verify passes each of them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from sample_image import SampleImage, lay_out, verdicts
from tars import tar_of_files

from imgkit_builder.archive.oci_folder import OciLayout
from imgkit_builder.sif.entries import Archive, peek_config
from imgkit_entrypoints.errors import CheckFailed, ToolMissing


def lay(path: Path, tmp_path: Path) -> OciLayout:
    """Read the archive as conversion does; verify, the other reader, must pass it."""
    answers = verdicts(path)
    layers = answers.pop("layers")
    assert answers == {"sha256": "warn", "archive": "ok", "image id": "ok", "sidecar": "skip"}
    assert layers in ("ok", "warn")  # warn: zstd inside, which verify does not unpack
    return lay_out(path, tmp_path / "laid")


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "image.tar"
    path.write_bytes(data)
    return path


def assert_laid_out(laid: OciLayout, sample: SampleImage) -> None:
    """The folder holds exactly the image's layers, uncompressed and in order."""
    (entry,) = json.loads((laid.folder / "index.json").read_text())["manifests"]
    blobs = laid.folder / "blobs/sha256"

    def blob(descriptor: dict[str, Any]) -> bytes:
        data = (blobs / descriptor["digest"].removeprefix("sha256:")).read_bytes()
        assert len(data) == descriptor["size"]
        return data

    manifest = json.loads(blob(entry))
    assert [blob(layer) for layer in manifest["layers"]] == sample.layers
    assert blob(manifest["config"]) == sample.config
    assert laid.config.image_id == sample.image_id
    assert laid.layer_bytes == sum(map(len, sample.layers))
    assert sorted(path.name for path in laid.folder.iterdir()) == ["blobs", "index.json", "oci-layout"]


def assert_archive_of(sample: SampleImage, data: bytes, tmp_path: Path) -> None:
    """Verify accepts the archive `data`, and a conversion gets exactly the image from it."""
    assert_laid_out(lay(write(tmp_path, data), tmp_path), sample)


def test_older_layout_manifest_last(archive, sample, tmp_path):
    laid = lay(archive, tmp_path)
    assert_laid_out(laid, sample)
    assert laid.names == ("made:latest",)


def without_manifest_json(image: SampleImage) -> bytes:
    members = image.modern_members()
    del members["manifest.json"]
    return tar_of_files(members)


def attestation_of_unknown_platform(image: SampleImage) -> bytes:
    members = image.oci_members()
    entries = json.loads(members["index.json"])["manifests"]
    attestation = {"digest": "sha256:" + "0" * 64, "platform": {"architecture": "unknown", "os": "unknown"}}
    members["index.json"] = json.dumps({"manifests": [*entries, attestation]}).encode()
    return tar_of_files(members)


def configuration_named_by_its_digest(image: SampleImage) -> bytes:
    """Tools made of go-containerregistry name it ``sha256:...``."""
    members = image.legacy_members()
    (entry,) = json.loads(members["manifest.json"])
    members[image.image_id] = members.pop(entry["Config"])
    members["manifest.json"] = json.dumps([entry | {"Config": image.image_id}]).encode()
    return tar_of_files(members)


def gzip_of_several_members(image: SampleImage) -> bytes:
    data = tar_of_files(image.legacy_members())
    return gzip.compress(data[:5000]) + gzip.compress(data[5000:])


LAYOUTS: dict[str, Callable[[SampleImage], bytes]] = {
    "newer layout, OCI inside": lambda image: tar_of_files(image.modern_members()),
    "newer layout, gzip layers": lambda image: tar_of_files(image.modern_members(gzip.compress)),
    "OCI archive without manifest.json": without_manifest_json,
    "attestation": lambda image: tar_of_files(image.oci_members()),
    "attestation of an unknown platform": attestation_of_unknown_platform,
    "configuration named by its digest": configuration_named_by_its_digest,
    "gzip": lambda image: gzip.compress(tar_of_files(image.legacy_members())),
    "gzip of several members": gzip_of_several_members,
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_image_of_every_layout(sample, tmp_path, make):
    assert_archive_of(sample, make(sample), tmp_path)


@pytest.mark.parametrize("packed", ["archive", "layers"])
def test_zstd_is_unpacked(sample, tmp_path, zstd, packed):
    data = tar_of_files(sample.modern_members(zstd) if packed == "layers" else sample.legacy_members())
    assert_archive_of(sample, data if packed == "layers" else zstd(data), tmp_path)


def test_zstd_archive_without_program(sample, tmp_path, zstd, monkeypatch):
    path = write(tmp_path, zstd(tar_of_files(sample.legacy_members())))
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused(ToolMissing, "zstd is not on PATH", hint="zstd -d"):
        lay_out(path, tmp_path / "laid")


def test_equal_layers_by_symlink(sample, tmp_path):
    """Docker 20.10 writes a layer that occurs twice as a link to the other one."""
    twice = dataclasses.replace(sample, layers=[*sample.layers[:2], sample.layers[0]])
    members = twice.legacy_members()
    first, _, third = json.loads(members["manifest.json"])[0]["Layers"]
    del members[third]
    links = {third: f"../{Path(first).parent}/layer.tar"}
    assert_archive_of(twice, tar_of_files(members, links), tmp_path)


def test_oci_folder_by_hard_links(sample, tmp_path):
    source = tmp_path / "oci"
    for name, data in sample.modern_members().items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    laid = lay_out(source, tmp_path / "laid")
    assert_laid_out(laid, sample)
    blob = laid.folder / "blobs/sha256" / laid.config.diff_ids[0].removeprefix("sha256:")
    assert blob.stat().st_nlink == 2
    shutil.rmtree(laid.folder)
    assert (source / "blobs/sha256" / blob.name).read_bytes() == sample.layers[0]


def test_oci_folder_damaged_layer(sample, tmp_path):
    source = tmp_path / "oci"
    for name, data in sample.modern_members().items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data[:-1] + b"?" if data == sample.layers[1] else data)
    with pytest.raises(CheckFailed, match="layer 2 of 3 is damaged"):
        lay_out(source, tmp_path / "laid")


def test_peek_reads_no_layers(archive, sample, tmp_path):
    config = peek_config(Archive(path=archive))
    assert config is not None
    assert config.image_id == sample.image_id
    assert config.labels == sample.labels
    packed = write(tmp_path, gzip.compress(archive.read_bytes()))
    assert peek_config(Archive(path=packed)) is None
