"""Archives of every layout become the same OCI folder; what is damaged or no image is refused."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.archive import oci_folder
from imgkit_builder.archive.oci_folder import Laid
from imgkit_builder.base.progress import Silent
from imgkit_builder.image.config import parse_config
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError

Made = Any


def lay(path: Path, tmp_path: Path) -> Laid:
    return oci_folder.from_archive(path, tmp_path / "laid", Silent())


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
        lay(path, tmp_path)
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
    laid = oci_folder.from_folder(source, tmp_path / "laid", Silent())
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
        oci_folder.from_folder(source, tmp_path / "laid", Silent())


def test_peek_reads_no_layers(archive: Path, made: Made, tmp_path: Path) -> None:
    config = oci_folder.peek(archive)
    assert config is not None
    assert config.image_id == made.image_id
    assert config.labels == made.labels
    assert oci_folder.peek(write(tmp_path, gzip.compress(archive.read_bytes()))) is None


def test_empty_image_same_configuration(made: Made, tmp_path: Path) -> None:
    config = parse_config(made.config, where="test")
    folder = oci_folder.empty(config, tmp_path / "empty")
    (entry,) = json.loads((folder / "index.json").read_text())["manifests"]
    manifest = json.loads((folder / "blobs/sha256" / entry["digest"][7:]).read_text())
    written = json.loads((folder / "blobs/sha256" / manifest["config"]["digest"][7:]).read_text())
    assert written["config"] == json.loads(made.config)["config"]
    assert written["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]


def _flip(data: bytes, what: bytes) -> bytes:
    at = data.index(what)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _without_end(data: bytes) -> bytes:
    """The whole of the members, but not the zero blocks that say so."""
    content = len(data.rstrip(b"\0"))
    return data[: content + -content % 512]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: len(data) // 2], "cut short"),
        (lambda data: _without_end(data), "cut short"),
        (lambda data: gzip.compress(data)[:-2000], "cut short"),
        (lambda data: _flip(data, b"threexxx"), "layer 3 of 3 is damaged"),
        (lambda data: b"", "cut short"),
        (lambda data: b"x" * 2000, "not a whole tar archive"),
        (
            lambda data: data[:512] + b"y" * 512 + data[1024:],
            "damaged|checksum|not JSON|not in it|configuration",
        ),
    ],
    ids=["half", "end missing", "gzip half", "bit flip", "empty file", "no tar", "block overwritten"],
)
def test_damage_refused(
    archive: Path, tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    with pytest.raises(CheckFailed, match=message):
        lay(write(tmp_path, change(archive.read_bytes())), tmp_path)


def test_several_images_refused(made: Made, tmp_path: Path) -> None:
    members = made.legacy_members()
    one = json.loads(members["manifest.json"])[0]
    members["manifest.json"] = json.dumps([one, one | {"RepoTags": ["other:2"]}]).encode()
    with pytest.raises(UsageError, match=r"2 images \(made:latest, other:2\)") as caught:
        lay(write(tmp_path, made.tar(members)), tmp_path)
    assert "docker save -o FILE.tar made:latest" in str(caught.value.hint)


def test_image_without_layers_refused(made: Made, tmp_path: Path) -> None:
    """As some releases of Docker 25 wrote them (moby issue 47065)."""
    empty = dataclasses.replace(made, layers=[])
    with pytest.raises(CheckFailed, match="no layers"):
        lay(write(tmp_path, made.tar(empty.modern_members())), tmp_path)


def test_file_tree_is_no_image(made: Made, tmp_path: Path) -> None:
    path = write(tmp_path, made.tar({"bin/sh": b"#!", "etc/passwd": b"root"}))
    with pytest.raises(UsageError, match=r"no manifest\.json.*docker export") as caught:
        lay(path, tmp_path)
    assert "docker save" in str(caught.value.hint)


def test_missing_layer_refused(made: Made, tmp_path: Path) -> None:
    members = made.legacy_members()
    name = json.loads(members["manifest.json"])[0]["Layers"][1]
    del members[name]
    with pytest.raises(CheckFailed, match="which is not in it"):
        lay(write(tmp_path, made.tar(members)), tmp_path)


def test_layer_count_differs(made: Made, tmp_path: Path) -> None:
    members = made.legacy_members()
    one = json.loads(members["manifest.json"])[0]
    members["manifest.json"] = json.dumps([one | {"Layers": one["Layers"][:2]}]).encode()
    with pytest.raises(CheckFailed, match="2 layers, its configuration 3"):
        lay(write(tmp_path, made.tar(members)), tmp_path)


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/../../evil", "spool/../../evil"])
def test_names_never_become_paths(made: Made, tmp_path: Path, name: str) -> None:
    inside = tmp_path / "deep/er"
    inside.mkdir(parents=True)
    path = write(tmp_path, made.tar({name: b"evil", **made.legacy_members()}))
    before = sorted(tmp_path.rglob("*"))
    assert_is(oci_folder.from_archive(path, inside / "laid", Silent()), made)
    after = [one for one in sorted(tmp_path.rglob("*")) if inside / "laid" not in (one, *one.parents)]
    assert after == before
    assert not Path("/etc/evil").exists()


@pytest.mark.parametrize("config", ["../../../etc/passwd", "/etc/passwd", "link"])
def test_manifest_cannot_point_outside(made: Made, tmp_path: Path, config: str) -> None:
    members = made.legacy_members()
    one = json.loads(members["manifest.json"])[0]
    members["manifest.json"] = json.dumps([one | {"Config": config}]).encode()
    with pytest.raises(CheckFailed, match="which is not in it"):
        lay(write(tmp_path, made.tar(members, {"link": "/etc/passwd"})), tmp_path)


@pytest.mark.parametrize("bad", ["sha256:../../../etc/passwd", "sha512:00", 7, None])
def test_bad_digest_refused(made: Made, tmp_path: Path, bad: object) -> None:
    members = made.modern_members()
    del members["manifest.json"]
    members["index.json"] = json.dumps({"manifests": [{"digest": bad}]}).encode()
    with pytest.raises(CheckFailed, match="where a sha256 digest belongs"):
        lay(write(tmp_path, made.tar(members)), tmp_path)


@pytest.mark.parametrize("text", [b"{", b"[]", b'"x"', b"[{}]", b"[7]", b"null"])
def test_bad_manifest_json_refused(made: Made, tmp_path: Path, text: bytes) -> None:
    members = made.legacy_members() | {"manifest.json": text}
    with pytest.raises((CheckFailed, UsageError)):
        lay(write(tmp_path, made.tar(members)), tmp_path)


@pytest.mark.parametrize(("magic", "name"), [(b"BZh91AY", "bzip2"), (b"\xfd7zXZ\x00\x00", "xz")])
def test_other_compressors_refused(tmp_path: Path, magic: bytes, name: str) -> None:
    with pytest.raises(UsageError, match=f"compressed with {name}") as caught:
        lay(write(tmp_path, magic + bytes(100)), tmp_path)
    assert f"{name} -dk" in str(caught.value.hint)
