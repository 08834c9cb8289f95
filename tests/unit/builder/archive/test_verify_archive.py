from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from imgkit_builder.archive import contents, sidecar
from imgkit_builder.archive.sidecar import SavedArchive, SavedImage, Sidecar
from imgkit_builder.base.checks import Check
from imgkit_builder.base.progress import Silent
from imgkit_builder.examine.verify import verify
from imgkit_entrypoints.errors import ToolMissing, UsageError

needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="no zstd program")


def answers(path: Path) -> dict[str, Check]:
    return {check.name: check for check in verify(path)}


def verdicts(path: Path) -> dict[str, str]:
    return {check.name: check.verdict for check in verify(path)}


GOOD = {"sha256": "ok", "archive": "ok", "image id": "ok", "layers": "ok", "sidecar": "ok"}
ALONE = GOOD | {"sha256": "warn", "sidecar": "skip"}


def describe(path: Path, **changed: object) -> Sidecar:
    """Write the sidecar that `path` should have, but for `changed` of its image."""
    held = contents.read(path, compress="none", report=Silent())
    assert held.image is not None
    facts = {"id": held.image.id, "platform": held.image.platform, "diff_ids": held.image.diff_ids}
    image = SavedImage(tag="small:1", labels={}, **(facts | changed))  # type: ignore[arg-type]
    archive = SavedArchive(name=path.name, size_bytes=held.size_bytes, sha256=held.sha256, compress="none")
    made = Sidecar(image=image, archive=archive, system=None, manifest=None)
    sidecar.write(made, path)
    return made


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_good_archive_passes_everything(archive_path: Path) -> None:
    describe(archive_path)
    assert verdicts(archive_path) == GOOD


def test_archive_without_sidecar_warns(archive_path: Path) -> None:
    assert verdicts(archive_path) == ALONE


def test_checksum_alone_is_enough(archive_path: Path) -> None:
    describe(archive_path)
    sidecar.json_path(archive_path).unlink()
    assert verdicts(archive_path) == GOOD | {"sidecar": "skip"}


@pytest.mark.parametrize("docker", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_oci_layouts_pass(
    tmp_path: Path, make_oci: Callable[..., tuple[Path, str]], packed: bool, docker: bool
) -> None:
    path, _ = make_oci(tmp_path / "x.tar", packed=packed, docker=docker)
    describe(path)
    assert verdicts(path) == GOOD


def test_manifest_digest_counts_as_image_id(
    tmp_path: Path, make_oci: Callable[..., tuple[Path, str]]
) -> None:
    # Engines with the containerd store show the manifest's digest as the image's id.
    path, manifest_digest = make_oci(tmp_path / "x.tar")
    describe(path, id=manifest_digest)
    assert verdicts(path) == GOOD


def test_gzipped_archive_passes(tmp_path: Path, archive_path: Path) -> None:
    packed = tmp_path / "small.tar.gz"
    packed.write_bytes(gzip.compress(archive_path.read_bytes()))
    assert verdicts(packed) == ALONE


def test_gzip_of_many_members_passes(tmp_path: Path, archive_path: Path) -> None:
    data, packed = archive_path.read_bytes(), tmp_path / "small.tar.gz"
    packed.write_bytes(b"".join(gzip.compress(data[at : at + 10_000]) for at in range(0, len(data), 10_000)))
    assert verdicts(packed) == ALONE


@needs_zstd
def test_zstd_archive_passes(archive_path: Path) -> None:
    subprocess.run(["zstd", "-q", archive_path], check=True)
    assert verdicts(archive_path.with_name("small.tar.zst")) == ALONE


@needs_zstd
def test_zstd_archive_needs_the_program(archive_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["zstd", "-q", archive_path], check=True)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ToolMissing, match="zstd"):
        verify(archive_path.with_name("small.tar.zst"))


def test_linked_layer_is_followed(
    tmp_path: Path, make_tar: Callable[..., Path], image_config: Callable[..., bytes]
) -> None:
    config = image_config([b"same", b"same"])
    entry = {"Config": "c.json", "RepoTags": None, "Layers": ["a/layer.tar", "b/layer.tar"]}
    members = [("a/layer.tar", b"same"), ("b/layer.tar", "../a/layer.tar"), ("c.json", config)]
    path = make_tar(tmp_path / "x.tar", [*members, ("manifest.json", json.dumps([entry]).encode())])
    assert verdicts(path)["layers"] == "ok"


def test_flipped_byte_in_a_layer_fails(archive_path: Path) -> None:
    flip(archive_path, 2000)
    found = answers(archive_path)
    assert found["sha256"].verdict == "warn"
    assert found["layers"].verdict == "fail"
    assert "layer.tar" in found["layers"].found


def test_flipped_byte_fails_the_checksum(archive_path: Path) -> None:
    describe(archive_path)
    flip(archive_path, 2000)
    found = answers(archive_path)
    assert found["sha256"].verdict == "fail"
    assert "rsync" in found["sha256"].hint


def test_flipped_byte_in_the_configuration_fails(archive_path: Path) -> None:
    data = archive_path.read_bytes()
    flip(archive_path, data.index(b'"amd64"') + 1)
    assert answers(archive_path)["image id"].verdict == "fail"


def test_flipped_byte_in_a_blob_fails(tmp_path: Path, make_oci: Callable[..., tuple[Path, str]]) -> None:
    path, _ = make_oci(tmp_path / "x.tar")
    flip(path, path.read_bytes().index(b"second layer") + 3)
    found = answers(path)
    assert found["archive"].verdict == "fail"
    assert found["layers"].verdict == "fail"


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_truncated_archive_fails(archive_path: Path, share: float) -> None:
    describe(archive_path)
    data = archive_path.read_bytes()
    archive_path.write_bytes(data[: int(len(data) * share)])
    found = answers(archive_path)
    assert found["sha256"].verdict == "fail"
    assert f"of {len(data)} bytes" in found["sha256"].found
    assert found["archive"].verdict == "fail"


@needs_zstd
@pytest.mark.parametrize("packer", ["gzip", "zstd"])
def test_truncated_compressed_archive_fails(archive_path: Path, packer: str) -> None:
    packed = subprocess.run([packer, "-c", archive_path], capture_output=True, check=True).stdout
    archive_path.write_bytes(packed[:-20])
    assert answers(archive_path)["archive"].verdict == "fail"


def test_two_images_in_an_archive_fail(tmp_path: Path, make_legacy: Callable[..., Path]) -> None:
    found = answers(make_legacy(tmp_path / "x.tar", images=2))["archive"]
    assert found.verdict == "fail"
    assert found.found.startswith("2 images")


def test_missing_layer_fails(
    tmp_path: Path, make_tar: Callable[..., Path], image_config: Callable[..., bytes]
) -> None:
    entry = {"Config": "c.json", "Layers": ["a/layer.tar"]}
    members = [("c.json", image_config([b"a"])), ("manifest.json", json.dumps([entry]).encode())]
    assert "a/layer.tar is missing" in answers(make_tar(tmp_path / "x.tar", members))["archive"].found


def test_emptied_archive_fails(
    tmp_path: Path, make_tar: Callable[..., Path], image_config: Callable[..., bytes]
) -> None:
    # What a converter of another layout once left: all files there, no layers listed.
    config = image_config([b"a"])
    entry = {"Config": f"{hashlib.sha256(config).hexdigest()}.json", "Layers": []}
    members = [(entry["Config"], config), ("manifest.json", json.dumps([entry]).encode())]
    assert answers(make_tar(tmp_path / "x.tar", members))["layers"].found.startswith(
        "the archive has 0 layers, its configuration lists 1"
    )


@pytest.mark.parametrize("text", [b"{}", b"[]", b"[3]", b"not json", b'[{"Config": "absent.json"}]'])
def test_nonsense_manifest_fails(tmp_path: Path, make_tar: Callable[..., Path], text: bytes) -> None:
    assert answers(make_tar(tmp_path / "x.tar", [("manifest.json", text)]))["archive"].verdict == "fail"


def test_tar_of_something_else_fails(tmp_path: Path, make_tar: Callable[..., Path]) -> None:
    path = make_tar(tmp_path / "x.tar", [("readme", b"hello")])
    assert "not an image archive" in answers(path)["archive"].found


@pytest.mark.parametrize(
    ("key", "value"),
    [("id", "sha256:" + "0" * 64), ("diff_ids", ("sha256:1",)), ("platform", "linux/arm64")],
)
def test_sidecar_of_another_image_fails(archive_path: Path, key: str, value: object) -> None:
    describe(archive_path, **{key: value})
    assert verdicts(archive_path) == GOOD | {"sidecar": "fail"}


def test_checksum_of_another_archive_fails(archive_path: Path) -> None:
    sidecar.sha256_path(archive_path).write_text(f"{'0' * 64}  {archive_path.name}\n")
    assert verdicts(archive_path) == ALONE | {"sha256": "fail"}


def test_unreadable_sidecar_fails(archive_path: Path) -> None:
    sidecar.json_path(archive_path).write_text("{")
    assert verdicts(archive_path) == ALONE | {"sha256": "fail", "sidecar": "fail"}


@pytest.mark.parametrize("data", [b"", b"#!/bin/sh\n", b"PK\3\4" + bytes(600), bytes(2000)])
def test_other_files_are_a_usage_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="neither an image archive"):
        verify(path)


@pytest.mark.parametrize("name", ["absent.tar", "."])
def test_absent_file_is_a_usage_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        verify(tmp_path / name)
