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

from imgkit_builder.archive import oci_folder, stored
from imgkit_builder.archive.oci_folder import Laid, write_layout
from imgkit_builder.base.progress import Silent
from imgkit_builder.examine.verify import verify
from imgkit_entrypoints.errors import CheckFailed, ToolMissing

Made = Any


def lay_out(path: Path, folder: Path, *, unpack_limit_bytes: int | None = None) -> Laid:
    """Write an OCI folder as the runtime gets it."""
    folder.mkdir()
    with stored.opened(path, folder, unpack_limit_bytes=unpack_limit_bytes) as image:
        return write_layout(image, folder, Silent(), unpack_limit_bytes=unpack_limit_bytes)


def lay(path: Path, tmp_path: Path) -> Laid:
    """Read the archive as conversion does; verify, the other reader, must pass it."""
    answers = {check.name: check.verdict for check in verify(path)}
    layers = answers.pop("layers")
    assert answers == {"sha256": "warn", "archive": "ok", "image id": "ok", "sidecar": "skip"}
    assert layers in ("ok", "warn")  # warn: zstd inside, which verify does not unpack
    return lay_out(path, tmp_path / "laid")


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "image.tar"
    path.write_bytes(data)
    return path


def assert_is(laid: Laid, made: Made) -> None:
    """The folder holds exactly the image's layers, uncompressed and in order."""
    (entry,) = json.loads((laid.folder / "index.json").read_text())["manifests"]
    blobs = laid.folder / "blobs/sha256"

    def blob(one: dict[str, Any]) -> bytes:
        data = (blobs / one["digest"].removeprefix("sha256:")).read_bytes()
        assert len(data) == one["size"]
        return data

    manifest = json.loads(blob(entry))
    assert [blob(one) for one in manifest["layers"]] == made.layers
    assert blob(manifest["config"]) == made.config
    assert laid.config.image_id == made.image_id
    assert laid.layer_bytes == sum(map(len, made.layers))
    assert sorted(path.name for path in laid.folder.iterdir()) == ["blobs", "index.json", "oci-layout"]


def test_older_layout_manifest_last(archive: Path, made: Made, tmp_path: Path) -> None:
    laid = lay(archive, tmp_path)
    assert_is(laid, made)
    assert laid.names == ("made:latest",)


def test_newer_layout_oci_inside(made: Made, tmp_path: Path) -> None:
    assert_is(lay(write(tmp_path, made.tar(made.modern_members())), tmp_path), made)


def test_newer_layout_gzip_layers(made: Made, tmp_path: Path) -> None:
    assert_is(lay(write(tmp_path, made.tar(made.modern_members(gzip.compress))), tmp_path), made)


def test_newer_layout_zstd_layers(made: Made, tmp_path: Path, zstd: Callable[[bytes], bytes]) -> None:
    assert_is(lay(write(tmp_path, made.tar(made.modern_members(zstd))), tmp_path), made)


def test_oci_archive_without_manifest_json(made: Made, tmp_path: Path) -> None:
    members = made.modern_members()
    del members["manifest.json"]
    assert_is(lay(write(tmp_path, made.tar(members)), tmp_path), made)


def test_attestation_is_no_image(made: Made, tmp_path: Path) -> None:
    assert_is(lay(write(tmp_path, made.tar(made.oci_members())), tmp_path), made)


def test_attestation_of_unknown_platform_is_no_image(made: Made, tmp_path: Path) -> None:
    members = made.oci_members()
    entries = json.loads(members["index.json"])["manifests"]
    other = {"digest": "sha256:" + "0" * 64, "platform": {"architecture": "unknown", "os": "unknown"}}
    members["index.json"] = json.dumps({"manifests": [*entries, other]}).encode()
    assert_is(lay(write(tmp_path, made.tar(members)), tmp_path), made)


def test_configuration_named_by_its_digest(made: Made, tmp_path: Path) -> None:
    """Tools made of go-containerregistry name it ``sha256:...``."""
    members = made.legacy_members()
    (one,) = json.loads(members["manifest.json"])
    members[made.image_id] = members.pop(one["Config"])
    members["manifest.json"] = json.dumps([one | {"Config": made.image_id}]).encode()
    assert_is(lay(write(tmp_path, made.tar(members)), tmp_path), made)


def test_gzip_archive_unpacked(made: Made, tmp_path: Path) -> None:
    assert_is(lay(write(tmp_path, gzip.compress(made.tar(made.legacy_members()))), tmp_path), made)


def test_gzip_of_several_members(made: Made, tmp_path: Path) -> None:
    data = made.tar(made.legacy_members())
    packed = gzip.compress(data[:5000]) + gzip.compress(data[5000:])
    assert_is(lay(write(tmp_path, packed), tmp_path), made)


def test_zstd_archive_unpacked(made: Made, tmp_path: Path, zstd: Callable[[bytes], bytes]) -> None:
    assert_is(lay(write(tmp_path, zstd(made.tar(made.legacy_members()))), tmp_path), made)


def test_zstd_archive_without_program(
    made: Made, tmp_path: Path, zstd: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, zstd(made.tar(made.legacy_members())))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissing, match="zstd is not on PATH") as caught:
        lay_out(path, tmp_path / "laid")
    assert "zstd -d" in str(caught.value.hint)


def test_equal_layers_by_symlink(made: Made, tmp_path: Path) -> None:
    """Docker 20.10 writes a layer that occurs twice as a link to the other one."""
    twice = dataclasses.replace(made, layers=[made.layers[0], made.layers[1], made.layers[0]])
    members = twice.legacy_members()
    first, _, third = json.loads(members["manifest.json"])[0]["Layers"]
    del members[third]
    links = {third: f"../{Path(first).parent}/layer.tar"}
    assert_is(lay(write(tmp_path, twice.tar(members, links)), tmp_path), twice)


def test_oci_folder_by_hard_links(made: Made, tmp_path: Path) -> None:
    source = tmp_path / "oci"
    for name, data in made.modern_members().items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    laid = lay_out(source, tmp_path / "laid")
    assert_is(laid, made)
    blob = laid.folder / "blobs/sha256" / laid.config.diff_ids[0].removeprefix("sha256:")
    assert blob.stat().st_nlink == 2
    shutil.rmtree(laid.folder)
    assert (source / "blobs/sha256" / blob.name).read_bytes() == made.layers[0]


def test_oci_folder_damaged_layer(made: Made, tmp_path: Path) -> None:
    source = tmp_path / "oci"
    for name, data in made.modern_members().items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data[:-1] + b"?" if data == made.layers[1] else data)
    with pytest.raises(CheckFailed, match="layer 2 of 3 is damaged"):
        lay_out(source, tmp_path / "laid")


def test_peek_reads_no_layers(archive: Path, made: Made, tmp_path: Path) -> None:
    config = oci_folder.peek(archive)
    assert config is not None
    assert config.image_id == made.image_id
    assert config.labels == made.labels
    assert oci_folder.peek(write(tmp_path, gzip.compress(archive.read_bytes()))) is None
