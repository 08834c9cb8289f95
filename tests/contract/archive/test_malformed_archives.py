"""Malformed archives, each given to both readers: conversion refuses it, and verify fails the right check."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from imgkit_builder.archive import compressed, read, stored
from imgkit_builder.archive.oci_folder import Laid, write_layout
from imgkit_builder.base.checks import Check
from imgkit_builder.base.progress import Silent
from imgkit_builder.examine.verify import verify
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, UsageError

Made = Any

NO_ARCHIVE = "neither an image archive"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to spoil an archive, and how both readers answer."""

    name: str
    make: Callable[[Made], bytes]
    refusal: type[ImgkitError] = CheckFailed
    says: str
    """Regular expression for the refusal of a conversion."""
    check: str = "archive"
    """Check of verify that fails; ``usage`` if verify refuses the file as conversion does."""
    found: str | None = None
    """Regular expression for what it found, where that differs from `says`."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def legacy(made: Made) -> bytes:
    data: bytes = made.tar(made.legacy_members())
    return data


def listing(made: Made, **changes: object) -> bytes:
    """An archive of the older layout whose manifest.json is changed."""
    members = made.legacy_members()
    (one,) = json.loads(members["manifest.json"])
    data: bytes = made.tar(members | {"manifest.json": json.dumps([one | changes]).encode()})
    return data


def with_manifest(made: Made, text: bytes) -> bytes:
    data: bytes = made.tar(made.legacy_members() | {"manifest.json": text})
    return data


def with_index(made: Made, index: object) -> bytes:
    """An OCI archive with `index` as its index.json."""
    data: bytes = made.tar(made.oci_members() | {"index.json": json.dumps(index).encode()})
    return data


def flip(data: bytes, what: bytes) -> bytes:
    at = data.index(what)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def without_end(data: bytes) -> bytes:
    """The whole of the members, but not the zero blocks that say so."""
    content = len(data.rstrip(b"\0"))
    return data[: content + -content % 512]


def two_images(made: Made) -> bytes:
    members = made.legacy_members()
    (one,) = json.loads(members["manifest.json"])
    return with_manifest(made, json.dumps([one, one | {"RepoTags": ["other:2"]}]).encode())


def without(made: Made, number: int) -> bytes:
    members = made.legacy_members()
    del members[json.loads(members["manifest.json"])[0]["Layers"][number]]
    data: bytes = made.tar(members)
    return data


def some_layers(made: Made, count: int) -> bytes:
    layers = json.loads(made.legacy_members()["manifest.json"])[0]["Layers"]
    return listing(made, Layers=layers[:count])


def nested(made: Made, depth: int) -> bytes:
    members = made.oci_members()
    for _ in range(depth):
        inner = members["index.json"]
        members[f"blobs/sha256/{digest(inner)}"] = inner
        members["index.json"] = json.dumps({"manifests": [{"digest": f"sha256:{digest(inner)}"}]}).encode()
    data: bytes = made.tar(members)
    return data


def without_blob(made: Made, what: bytes) -> bytes:
    members = {name: data for name, data in made.oci_members().items() if what not in data}
    data: bytes = made.tar(members)
    return data


def config_without(made: Made, key: str) -> bytes:
    values = json.loads(made.config)
    del values[key]
    config = json.dumps(values).encode()
    members = made.legacy_members() | {f"{digest(config)}.json": config}
    (one,) = json.loads(members["manifest.json"])
    text = json.dumps([one | {"Config": f"{digest(config)}.json"}]).encode()
    data: bytes = made.tar(members | {"manifest.json": text})
    return data


CASES = [
    *(
        Case(name=f"cut after {share:.0%}", make=lambda made, s=share: cut(legacy(made), s), says="cut short")  # type: ignore[misc]
        for share in (0.2, 0.5, 0.9)
    ),
    Case(name="end missing", make=lambda made: without_end(legacy(made)), says="cut short"),
    Case(name="gzip half", make=lambda made: cut(gzip.compress(legacy(made)), 0.5), says="cut short"),
    Case(name="gzip end", make=lambda made: gzip.compress(legacy(made))[:-20], says="cut short"),
    Case(name="gzip flip", make=lambda made: flipped_gzip(legacy(made)), says="gzip data is damaged"),
    Case(
        name="bit flip",
        make=lambda made: flip(legacy(made), b"threexxx"),
        says="layer 3 of 3 is damaged",
        check="layers",
        found=r"layer\.tar has sha256:.*, the configuration says",
    ),
    Case(
        name="configuration flipped",
        make=lambda made: flip(legacy(made), b"created"),
        says="the configuration has digest .*, but is named",
        check="image id",
    ),
    Case(
        name="blob flipped",
        make=lambda made: flip(made.tar(made.modern_members()), b"threexxx"),
        says="layer 3 of 3 is damaged",
        found="damaged: blobs/sha256/",
    ),
    Case(
        name="manifest blob flipped",
        make=lambda made: flip(made.tar(made.oci_members()), b"schemaVersion"),
        says="blobs/sha256/[0-9a-f]{64} is damaged",
    ),
    Case(
        name="gzip layer damaged",
        make=lambda made: made.tar(made.oci_members(flipped_gzip)),
        says="gzip data is damaged|layer 1 of 3 is damaged",
    ),
    Case(name="empty file", make=lambda made: b"", says="cut short", check="usage"),
    Case(name="script", make=lambda made: b"#!/bin/sh\n", says="cut short", check="usage"),
    Case(
        name="zip",
        make=lambda made: b"PK\3\4" + bytes(600),
        says="an incomplete or damaged tar",
        check="usage",
    ),
    Case(
        name="no tar",
        make=lambda made: b"x" * 2000,
        says="an incomplete or damaged tar archive",
        check="usage",
    ),
    Case(
        name="zeros",
        make=lambda made: bytes(2000),
        refusal=UsageError,
        says="not an image archive",
        check="usage",
    ),
    Case(
        name="block overwritten",
        make=lambda made: (data := legacy(made))[:512] + b"y" * 512 + data[1024:],
        says="damaged|checksum|not JSON|is missing|configuration",
        check="any",
    ),
    Case(name="two images", make=two_images, refusal=UsageError, says=r"2 images \(made:latest, other:2\)"),
    Case(
        name="two manifests",
        make=lambda made: with_index(
            made, {"manifests": [{"digest": "a"}, {"platform": {"architecture": "b"}}]}
        ),
        refusal=UsageError,
        says=r"2 images \(\?, b\)|which is not a sha256 digest",
    ),
    Case(
        # As some releases of Docker 25 wrote them (moby issue 47065).
        name="no layers",
        make=lambda made: made.tar(dataclasses.replace(made, layers=[]).modern_members()),
        says="no layers",
    ),
    Case(
        name="file tree",
        make=lambda made: made.tar({"bin/sh": b"#!", "etc/passwd": b"root"}),
        refusal=UsageError,
        says=r"not an image archive: .*neither manifest\.json nor index\.json.*docker export",
    ),
    Case(name="layer missing", make=lambda made: without(made, 1), says=r"layer\.tar' is missing, though"),
    Case(name="blob missing", make=lambda made: without_blob(made, b"two"), says="is missing, though blobs/"),
    Case(
        name="manifest missing",
        make=lambda made: without_blob(made, b"schemaVersion"),
        says="is missing, though index.json",
    ),
    Case(
        name="layer not listed",
        make=lambda made: some_layers(made, 2),
        says="the archive has 2 layers, its configuration lists 3",
        check="layers",
    ),
    Case(
        # As a converter of another layout once left it: every file is there, and no layer is listed.
        name="no layer listed",
        make=lambda made: some_layers(made, 0),
        says="the archive has 0 layers, its configuration lists 3",
        check="layers",
    ),
    *(
        Case(
            name=f"configuration is {config}",
            make=lambda made, c=config: listing(made, Config=c),  # type: ignore[misc]
            says=f"'{re.escape(config)}' is missing, though manifest.json names it",
        )
        for config in ("../../../etc/passwd", "/etc/passwd", "absent.json")
    ),
    Case(
        name="link out of the archive",
        make=lambda made: made.tar(
            made.legacy_members() | {"manifest.json": b'[{"Config": "link"}]'}, {"link": "/etc/passwd"}
        ),
        says="'link' is missing",
    ),
    *(
        Case(
            name=f"digest {bad!r}",
            make=lambda made, b=bad: with_index(made, {"manifests": [{"digest": b}]}),  # type: ignore[misc]
            says="which is not a sha256 digest",
        )
        for bad in ("sha256:../../../etc/passwd", "sha512:00", 7, None)
    ),
    *(
        Case(
            name=f"manifest.json is {text.decode()[:20]}",
            make=lambda made, t=text: with_manifest(made, t),  # type: ignore[misc]
            refusal=ImgkitError,
            says=says,
        )
        for text, says in (
            (b"{", "manifest.json is not JSON"),
            (b"not json", "manifest.json is not JSON"),
            (b"[" * 100_000, "manifest.json is not JSON"),
            (b"[]", "0 images"),
            (b"{}", "manifest.json does not describe an image"),
            (b'"x"', "manifest.json does not describe an image"),
            (b"[{}]", "manifest.json does not describe an image"),
            (b"[7]", "manifest.json does not describe an image"),
            (b"[3]", "manifest.json does not describe an image"),
            (b"null", "manifest.json does not describe an image"),
            (b" " * (5 << 20), "manifest.json has more than 4 MiB"),
        )
    ),
    Case(
        name="index.json is a list",
        make=lambda made: with_index(made, []),
        says="index.json does not describe an image",
    ),
    Case(name="index too deep", make=lambda made: nested(made, 5), says="nests indexes more than 4 deep"),
    Case(
        name="configuration without diff_ids",
        make=lambda made: config_without(made, "rootfs"),
        says="configuration cannot be read",
    ),
    Case(
        name="configuration without architecture",
        make=lambda made: config_without(made, "architecture"),
        says="configuration cannot be read",
    ),
    *(
        Case(
            name=name,
            make=lambda made, m=magic: m + bytes(100),  # type: ignore[misc]
            refusal=UsageError,
            says=f"compressed with {name}",
            check="usage",
            found=f"compressed with {name}",
        )
        for magic, name in ((b"BZh91AY", "bzip2"), (b"\xfd7zXZ\x00\x00", "xz"))
    ),
]


def lay_out(path: Path, folder: Path, *, unpack_limit_bytes: int | None = None) -> Laid:
    """Write an OCI folder as the runtime gets it."""
    folder.mkdir()
    with stored.opened(path, folder, unpack_limit_bytes=unpack_limit_bytes) as image:
        return write_layout(image, folder, Silent(), unpack_limit_bytes=unpack_limit_bytes)


def cut(data: bytes, share: float) -> bytes:
    return data[: int(len(data) * share)]


def flipped_gzip(data: bytes) -> bytes:
    packed = bytearray(gzip.compress(data, mtime=0))
    packed[len(packed) // 2] ^= 0xFF
    return bytes(packed)


def written(case: Case, made: Made, tmp_path: Path) -> Path:
    path = tmp_path / "image.tar"
    path.write_bytes(case.make(made))
    return path


def answers(path: Path) -> dict[str, Check]:
    return {check.name: check for check in verify(path)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_damage_refused(case: Case, made: Made, tmp_path: Path) -> None:
    with pytest.raises(case.refusal, match=case.says) as caught:
        lay_out(written(case, made, tmp_path), tmp_path / "laid")
    assert str(tmp_path) in str(caught.value.where) or "layer" in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_damage_fails_verify(case: Case, made: Made, tmp_path: Path) -> None:
    path = written(case, made, tmp_path)
    if case.check == "usage":
        with pytest.raises(UsageError, match=case.found or NO_ARCHIVE):
            verify(path)
        return
    found = answers(path)
    # The digest is that of the whole file, wherever the damage is.
    assert digest(path.read_bytes()) in found["sha256"].found
    assert found["sha256"].verdict == "warn"
    failed = {name: check for name, check in found.items() if check.verdict == "fail"}
    if case.check == "any":
        assert failed
    else:
        assert re.search(case.found or case.says, failed[case.check].found)


def test_flipped_blob_fails_its_layer_too(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(flip(made.tar(made.modern_members()), b"threexxx"))
    assert {name for name, check in answers(path).items() if check.verdict == "fail"} == {"archive", "layers"}


def test_truncated_zstd_refused(made: Made, tmp_path: Path, zstd: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "image.tar.zst"
    path.write_bytes(zstd(legacy(made))[:-20])
    assert answers(path)["archive"].verdict == "fail"
    with pytest.raises(CheckFailed, match="zstd data is damaged"):
        lay_out(path, tmp_path / "laid")


def test_several_images_name_the_next_command(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(two_images(made))
    with pytest.raises(UsageError) as caught:
        lay_out(path, tmp_path / "laid")
    assert "docker save -o FILE.tar made:latest" in str(caught.value.hint)


def test_file_tree_names_the_next_command(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(made.tar({"bin/sh": b"#!"}))
    with pytest.raises(UsageError) as caught:
        lay_out(path, tmp_path / "laid")
    assert "docker save" in str(caught.value.hint)


@pytest.mark.parametrize(("magic", "name"), [(b"BZh91AY", "bzip2"), (b"\xfd7zXZ\x00\x00", "xz")])
def test_other_compressors_name_their_program(tmp_path: Path, magic: bytes, name: str) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(magic + bytes(100))
    with pytest.raises(UsageError) as caught:
        lay_out(path, tmp_path / "laid")
    assert f"{name} -dk" in str(caught.value.hint)


def test_too_many_members_refused(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "MAX_MEMBERS", 5)
    path = tmp_path / "image.tar"
    path.write_bytes(legacy(made))
    with pytest.raises(UsageError, match="more than 5 members"):
        lay_out(path, tmp_path / "laid")
    assert "more than 5 members" in answers(path)["archive"].found


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/../../evil", "spool/../../evil"])
def test_names_never_become_paths(made: Made, tmp_path: Path, name: str) -> None:
    inside = tmp_path / "deep/er"
    inside.mkdir(parents=True)
    path = tmp_path / "image.tar"
    path.write_bytes(made.tar({name: b"evil", **made.legacy_members()}))
    before = sorted(tmp_path.rglob("*"))
    laid = lay_out(path, inside / "laid")
    assert laid.config.image_id == made.image_id
    after = [one for one in sorted(tmp_path.rglob("*")) if inside / "laid" not in (one, *one.parents)]
    assert after == before
    assert not Path("/etc/evil").exists()
    assert answers(path)["layers"].verdict == "ok"
    assert sorted(tmp_path.rglob("*")) == sorted([*before, *(inside / "laid").rglob("*"), inside / "laid"])


@pytest.mark.parametrize("packed", ["archive", "layers", "both"])
def test_archive_made_to_fill_the_disk_refused(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: str
) -> None:
    """Eight thousand bytes of gzip unpack to eight million."""
    monkeypatch.setattr(compressed, "UNPACKED_LEAST_BYTES", 10**6)
    big = dataclasses.replace(made, layers=[made.layer("big", 8 << 20)])
    members = big.legacy_members() if packed == "archive" else big.modern_members(gzip.compress)
    path = tmp_path / "image.tar.gz"
    path.write_bytes(big.tar(members) if packed == "layers" else gzip.compress(big.tar(members)))
    if packed == "layers":
        path = path.rename(tmp_path / "image.tar")
    with pytest.raises(CheckFailed, match=r"unpack to more than .* GB.*--unpack-limit GB allows more"):
        lay_out(path, tmp_path / "laid")
    assert sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file()) < 3 * 10**6
    found = answers(path)["archive"]
    assert (found.verdict, "--unpack-limit" in found.found) == ("fail", True)
    laid = lay_out(path, tmp_path / "more", unpack_limit_bytes=10**8)
    assert laid.config.image_id == big.image_id


def test_archive_made_to_fill_the_memory_refused(made: Made, tmp_path: Path) -> None:
    """Forty files of 4 MiB that look like JSON, in 200 kB."""
    path = tmp_path / "image.tar.gz"
    text = b"{" + b" " * ((4 << 20) - 1)
    path.write_bytes(
        gzip.compress(made.tar(made.legacy_members() | {f"{one}.json": text for one in range(40)}))
    )
    found = answers(path)["archive"]
    assert (found.verdict, "more than 32 MiB together" in found.found) == ("fail", True)


def test_folder_made_to_fill_the_disk_refused(made: Made, tmp_path: Path) -> None:
    for name, data in made.oci_members(gzip.compress).items():
        (tmp_path / "oci" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "oci" / name).write_bytes(data)
    with pytest.raises(CheckFailed, match="unpack to more than"):
        lay_out(tmp_path / "oci", tmp_path / "laid", unpack_limit_bytes=50_000)
    lay_out(tmp_path / "oci", tmp_path / "more")


def test_verify_refuses_a_configuration_without_os(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(config_without(made, "os"))
    assert "no operating system" in answers(path)["archive"].found


def test_damage_at_the_start_is_hashed_to_the_end(made: Made, tmp_path: Path) -> None:
    big = dataclasses.replace(made, layers=[made.layer("big", 3 << 20)])
    data = flip(legacy(big), b"ustar")
    path = tmp_path / "image.tar.gz"  # plain would be no archive at all
    path.write_bytes(gzip.compress(data, compresslevel=0))
    found = answers(path)
    assert found["archive"].verdict == "fail"
    assert digest(path.read_bytes()) in found["sha256"].found
