"""Malformed archives, each given to both readers: conversion refuses it, and verify fails the right check."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from refusals import refused
from sample_image import SampleImage, digest, lay_out, layer_tar, run_checks
from tars import tar_of_files

from imgkit_builder.archive import compressed, read
from imgkit_builder.examine.verify import verify_file
from imgkit_entrypoints.errors import CheckFailed, ImgkitError, UsageError

NO_ARCHIVE = "neither an image archive"


@dataclass(frozen=True)
class Case:
    """One way to spoil an archive, and how both readers answer."""

    name: str
    make: Callable[[SampleImage], bytes]
    says: str
    """Regular expression for the refusal of a conversion."""
    refusal: type[ImgkitError] = CheckFailed
    check: str = "archive"
    """Check of verify that fails; ``usage`` if verify refuses the file as conversion does."""
    verify_message: str | None = None
    """Regular expression for what it found, where that differs from `says`."""
    hint: str = ""
    """What the hint of the refusal contains: the next command."""


def legacy(image: SampleImage) -> bytes:
    return tar_of_files(image.legacy_members())


def listing(image: SampleImage, **changes: object) -> bytes:
    """An archive of the older layout whose manifest.json is changed."""
    members = image.legacy_members()
    (entry,) = json.loads(members["manifest.json"])
    return tar_of_files(members | {"manifest.json": json.dumps([entry | changes]).encode()})


def with_manifest(image: SampleImage, text: bytes) -> bytes:
    return tar_of_files(image.legacy_members() | {"manifest.json": text})


def with_index(image: SampleImage, index: object) -> bytes:
    """An OCI archive with `index` as its index.json."""
    return tar_of_files(image.oci_members() | {"index.json": json.dumps(index).encode()})


def flip(data: bytes, marker: bytes) -> bytes:
    at = data.index(marker)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def without_end(data: bytes) -> bytes:
    """The whole of the members, but not the zero blocks that say so."""
    content = len(data.rstrip(b"\0"))
    return data[: content + -content % 512]


def two_images(image: SampleImage) -> bytes:
    members = image.legacy_members()
    (entry,) = json.loads(members["manifest.json"])
    return with_manifest(image, json.dumps([entry, entry | {"RepoTags": ["other:2"]}]).encode())


def without(image: SampleImage, number: int) -> bytes:
    members = image.legacy_members()
    del members[json.loads(members["manifest.json"])[0]["Layers"][number]]
    return tar_of_files(members)


def some_layers(image: SampleImage, count: int) -> bytes:
    layers = json.loads(image.legacy_members()["manifest.json"])[0]["Layers"]
    return listing(image, Layers=layers[:count])


def nested(image: SampleImage, depth: int) -> bytes:
    members = image.oci_members()
    for _ in range(depth):
        inner = members["index.json"]
        members[f"blobs/sha256/{digest(inner)}"] = inner
        members["index.json"] = json.dumps({"manifests": [{"digest": f"sha256:{digest(inner)}"}]}).encode()
    return tar_of_files(members)


def without_blob(image: SampleImage, content: bytes) -> bytes:
    members = {name: data for name, data in image.oci_members().items() if content not in data}
    return tar_of_files(members)


def config_without(image: SampleImage, key: str) -> bytes:
    values = json.loads(image.config)
    del values[key]
    config = json.dumps(values).encode()
    members = image.legacy_members() | {f"{digest(config)}.json": config}
    (entry,) = json.loads(members["manifest.json"])
    text = json.dumps([entry | {"Config": f"{digest(config)}.json"}]).encode()
    return tar_of_files(members | {"manifest.json": text})


CASES = [
    *(
        Case(f"cut after {share:.0%}", lambda image, s=share: cut(legacy(image), s), "cut short")
        for share in (0.2, 0.5, 0.9)
    ),
    Case("end missing", lambda image: without_end(legacy(image)), "cut short"),
    Case("gzip half", lambda image: cut(gzip.compress(legacy(image)), 0.5), "cut short"),
    Case("gzip end", lambda image: gzip.compress(legacy(image))[:-20], "cut short"),
    Case("gzip flip", lambda image: flipped_gzip(legacy(image)), "gzip data is damaged"),
    Case(
        "bit flip",
        lambda image: flip(legacy(image), b"threexxx"),
        "layer 3 of 3 is damaged",
        check="layers",
        verify_message=r"layer\.tar has sha256:.*, the configuration says",
    ),
    Case(
        "configuration flipped",
        lambda image: flip(legacy(image), b"created"),
        "the configuration has digest .*, but is named",
        check="image id",
    ),
    Case(
        "blob flipped",
        lambda image: flip(tar_of_files(image.modern_members()), b"threexxx"),
        "layer 3 of 3 is damaged",
        verify_message="damaged: blobs/sha256/",
    ),
    Case(
        "manifest blob flipped",
        lambda image: flip(tar_of_files(image.oci_members()), b"schemaVersion"),
        "blobs/sha256/[0-9a-f]{64} is damaged",
    ),
    Case(
        "gzip layer damaged",
        lambda image: tar_of_files(image.oci_members(flipped_gzip)),
        "gzip data is damaged|layer 1 of 3 is damaged",
    ),
    Case("empty file", lambda image: b"", "cut short", check="usage"),
    Case("script", lambda image: b"#!/bin/sh\n", "cut short", check="usage"),
    Case("zip", lambda image: b"PK\3\4" + bytes(600), "an incomplete or damaged tar", check="usage"),
    Case("no tar", lambda image: b"x" * 2000, "an incomplete or damaged tar archive", check="usage"),
    Case("zeros", lambda image: bytes(2000), "not an image archive", refusal=UsageError, check="usage"),
    Case(
        "block overwritten",
        lambda image: (data := legacy(image))[:512] + b"y" * 512 + data[1024:],
        "damaged|checksum|not JSON|is missing|configuration",
        check="any",
    ),
    Case(
        "two images",
        two_images,
        r"2 images \(made:latest, other:2\)",
        refusal=UsageError,
        hint="docker save -o FILE.tar made:latest",
    ),
    Case(
        "two manifests",
        lambda image: with_index(
            image, {"manifests": [{"digest": "a"}, {"platform": {"architecture": "b"}}]}
        ),
        r"2 images \(\?, b\)|which is not a sha256 digest",
        refusal=UsageError,
    ),
    Case(
        # As some releases of Docker 25 wrote them (moby issue 47065).
        "no layers",
        lambda image: tar_of_files(dataclasses.replace(image, layers=[]).modern_members()),
        "no layers",
    ),
    Case(
        "file tree",
        lambda image: tar_of_files({"bin/sh": b"#!", "etc/passwd": b"root"}),
        r"not an image archive: .*neither manifest\.json nor index\.json.*docker export",
        refusal=UsageError,
        hint="docker save",
    ),
    Case("layer missing", lambda image: without(image, 1), r"layer\.tar' is missing, though"),
    Case("blob missing", lambda image: without_blob(image, b"two"), "is missing, though blobs/"),
    Case(
        "manifest missing",
        lambda image: without_blob(image, b"schemaVersion"),
        "is missing, though index.json",
    ),
    Case(
        "layer not listed",
        lambda image: some_layers(image, 2),
        "the archive has 2 layers, its configuration lists 3",
        check="layers",
    ),
    Case(
        # As a converter of another layout once left it: every file is there, and no layer is listed.
        "no layer listed",
        lambda image: some_layers(image, 0),
        "the archive has 0 layers, its configuration lists 3",
        check="layers",
    ),
    *(
        Case(
            f"configuration is {config}",
            lambda image, c=config: listing(image, Config=c),
            f"'{re.escape(config)}' is missing, though manifest.json names it",
        )
        for config in ("../../../etc/passwd", "/etc/passwd", "absent.json")
    ),
    Case(
        "link out of the archive",
        lambda image: tar_of_files(
            image.legacy_members() | {"manifest.json": b'[{"Config": "link"}]'}, {"link": "/etc/passwd"}
        ),
        "'link' is missing",
    ),
    *(
        Case(
            f"digest {bad!r}",
            lambda image, b=bad: with_index(image, {"manifests": [{"digest": b}]}),
            "which is not a sha256 digest",
        )
        for bad in ("sha256:../../../etc/passwd", "sha512:00", 7, None)
    ),
    *(
        Case(
            f"manifest.json is {text.decode()[:20]}",
            lambda image, t=text: with_manifest(image, t),
            says,
            refusal=ImgkitError,
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
            (b"null", "manifest.json does not describe an image"),
            (b" " * (5 << 20), "manifest.json has more than 4 MiB"),
        )
    ),
    Case(
        "index.json is a list", lambda image: with_index(image, []), "index.json does not describe an image"
    ),
    Case("index too deep", lambda image: nested(image, 5), "nests indexes more than 4 deep"),
    Case(
        "configuration without diff_ids",
        lambda image: config_without(image, "rootfs"),
        "configuration cannot be read",
    ),
    Case(
        "configuration without architecture",
        lambda image: config_without(image, "architecture"),
        "configuration cannot be read",
    ),
    *(
        Case(
            name,
            lambda image, m=magic: m + bytes(100),
            f"compressed with {name}",
            refusal=UsageError,
            check="usage",
            verify_message=f"compressed with {name}",
            hint=f"{name} -dk",
        )
        for magic, name in ((b"BZh91AY", "bzip2"), (b"\xfd7zXZ\x00\x00", "xz"))
    ),
]


def cut(data: bytes, share: float) -> bytes:
    return data[: int(len(data) * share)]


def flipped_gzip(data: bytes) -> bytes:
    packed = bytearray(gzip.compress(data, mtime=0))
    packed[len(packed) // 2] ^= 0xFF
    return bytes(packed)


def write(tmp_path: Path, data: bytes, name: str = "image.tar") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_damage_refused(case, sample, tmp_path):
    with refused(case.refusal, case.says, hint=case.hint) as caught:
        lay_out(write(tmp_path, case.make(sample)), tmp_path / "laid")
    assert str(tmp_path) in str(caught.value.where) or "layer" in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_damage_fails_verify(case, sample, tmp_path):
    path = write(tmp_path, case.make(sample))
    if case.check == "usage":
        with pytest.raises(UsageError, match=case.verify_message or NO_ARCHIVE):
            verify_file(path)
        return
    checks = run_checks(path)
    # The digest is that of the whole file, wherever the damage is.
    assert digest(path.read_bytes()) in checks["sha256"].found
    assert checks["sha256"].verdict == "warn"
    failed = {name: check for name, check in checks.items() if check.verdict == "fail"}
    if case.check == "any":
        assert failed
    else:
        assert re.search(case.verify_message or case.says, failed[case.check].found)


def test_flipped_blob_fails_its_layer_too(sample, tmp_path):
    path = write(tmp_path, flip(tar_of_files(sample.modern_members()), b"threexxx"))
    assert {name for name, check in run_checks(path).items() if check.verdict == "fail"} == {
        "archive",
        "layers",
    }


def test_truncated_zstd_refused(sample, tmp_path, zstd):
    path = write(tmp_path, zstd(legacy(sample))[:-20], "image.tar.zst")
    assert run_checks(path)["archive"].verdict == "fail"
    with pytest.raises(CheckFailed, match="zstd data is damaged"):
        lay_out(path, tmp_path / "laid")


def test_too_many_members_refused(sample, tmp_path, monkeypatch):
    monkeypatch.setattr(read, "MAX_MEMBERS", 5)
    path = write(tmp_path, legacy(sample))
    with pytest.raises(UsageError, match="more than 5 members"):
        lay_out(path, tmp_path / "laid")
    assert "more than 5 members" in run_checks(path)["archive"].found


@pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "a/../../evil", "spool/../../evil"])
def test_names_never_become_paths(sample, tmp_path, name):
    inside = tmp_path / "deep/er"
    inside.mkdir(parents=True)
    path = write(tmp_path, tar_of_files({name: b"evil", **sample.legacy_members()}))
    before = sorted(tmp_path.rglob("*"))
    laid = lay_out(path, inside / "laid")
    assert laid.config.image_id == sample.image_id
    after = [file for file in sorted(tmp_path.rglob("*")) if inside / "laid" not in (file, *file.parents)]
    assert after == before
    assert not Path("/etc/evil").exists()
    assert run_checks(path)["layers"].verdict == "ok"
    assert sorted(tmp_path.rglob("*")) == sorted([*before, *(inside / "laid").rglob("*"), inside / "laid"])


@pytest.mark.parametrize("packed", ["archive", "layers", "both"])
def test_archive_made_to_fill_the_disk_refused(sample, tmp_path, monkeypatch, packed):
    """Eight thousand bytes of gzip unpack to eight million."""
    monkeypatch.setattr(compressed, "UNPACKED_LEAST_BYTES", 10**6)
    big = dataclasses.replace(sample, layers=[layer_tar("big", 8 << 20)])
    members = big.legacy_members() if packed == "archive" else big.modern_members(gzip.compress)
    path = write(
        tmp_path,
        tar_of_files(members) if packed == "layers" else gzip.compress(tar_of_files(members)),
        "image.tar.gz",
    )
    if packed == "layers":
        path = path.rename(tmp_path / "image.tar")
    with pytest.raises(CheckFailed, match=r"unpack to more than .* GB.*--unpack-limit GB allows more"):
        lay_out(path, tmp_path / "laid")
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 3 * 10**6
    check = run_checks(path)["archive"]
    assert (check.verdict, "--unpack-limit" in check.found) == ("fail", True)
    laid = lay_out(path, tmp_path / "more", unpack_limit_bytes=10**8)
    assert laid.config.image_id == big.image_id


def test_archive_made_to_fill_the_memory_refused(sample, tmp_path):
    """Forty files of 4 MiB that look like JSON, in 200 kB."""
    path = tmp_path / "image.tar.gz"
    text = b"{" + b" " * ((4 << 20) - 1)
    path.write_bytes(
        gzip.compress(
            tar_of_files(sample.legacy_members() | {f"{number}.json": text for number in range(40)})
        )
    )
    check = run_checks(path)["archive"]
    assert (check.verdict, "more than 32 MiB together" in check.found) == ("fail", True)


def test_folder_made_to_fill_the_disk_refused(sample, tmp_path):
    for name, data in sample.oci_members(gzip.compress).items():
        (tmp_path / "oci" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "oci" / name).write_bytes(data)
    with pytest.raises(CheckFailed, match="unpack to more than"):
        lay_out(tmp_path / "oci", tmp_path / "laid", unpack_limit_bytes=50_000)
    lay_out(tmp_path / "oci", tmp_path / "more")


def test_verify_refuses_a_configuration_without_os(sample, tmp_path):
    path = write(tmp_path, config_without(sample, "os"))
    assert "no operating system" in run_checks(path)["archive"].found


def test_damage_at_the_start_is_hashed_to_the_end(sample, tmp_path):
    big = dataclasses.replace(sample, layers=[layer_tar("big", 3 << 20)])
    data = flip(legacy(big), b"ustar")
    path = write(
        tmp_path, gzip.compress(data, compresslevel=0), "image.tar.gz"
    )  # plain would be no archive at all
    checks = run_checks(path)
    assert checks["archive"].verdict == "fail"
    assert digest(path.read_bytes()) in checks["sha256"].found
