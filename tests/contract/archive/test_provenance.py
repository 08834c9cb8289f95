"""What ``imgkit sbom --provenance`` states about archives of every layout; in-toto reads it back."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from labkit import imgkit

from imgkit_builder.base.progress import Silent
from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_builder.recipe import lock_file
from imgkit_builder.recipe.model import (
    Lock,
    LockedBase,
    LockedDeb,
    LockedPlatform,
    LockedStep,
    LockedWheel,
    LockRequest,
)
from imgkit_builder.signing import provenance
from imgkit_entrypoints.errors import CheckFailed, UsageError

Made = Any
"""The class of the fixture `made`."""

BASE = f"sha256:{'ba' * 32}"
MANIFEST = Manifest(
    imgkit="0.3.0",
    recipe="mine",
    recipe_sha256="11" * 32,
    base=BaseImage(name="example.org/base:1", id=f"sha256:{'22' * 32}", digest=f"example.org/base@{BASE}"),
    platform="linux/amd64",
    wheel_sha256="33" * 32,
    revision=f"{'4' * 40}-dirty",
)
LOCK = Lock(
    recipe="mine",
    imgkit="0.3.0",
    platforms=(
        LockedPlatform(
            platform="linux/amd64",
            source_date_epoch=1_700_000_000,
            request=LockRequest(
                base="example.org/base:1", pip=(LockedStep(requirements=("typing_extensions",)),)
            ),
            base=LockedBase(name="example.org/base:1", digest=BASE),
            apt=(
                LockedDeb(
                    name="less",
                    version="590",
                    architecture="amd64",
                    file="less_590_amd64.deb",
                    url="https://example.org/less_590_amd64.deb",
                    sha256="55" * 32,
                    size_bytes=5,
                ),
            ),
            pip=(
                LockedWheel(
                    step=0,
                    name="Typing_Extensions",
                    version="4.9.0",
                    file="typing_extensions-4.9.0-py3-none-any.whl",
                    sha256="66" * 32,
                    kept=True,
                ),
            ),
        ),
    ),
)


@pytest.fixture
def image(made: Made) -> Made:
    """An image of a recipe: the manifest of its base's build lies below its own."""
    older = dataclasses.replace(MANIFEST, recipe="base")
    made.labels["org.opencontainers.image.created"] = "2026-01-02T03:04:05Z"
    made.labels["imgkit.context.sha256"] = "77" * 32
    made.layers = [
        made.tar({"opt/imgkit/manifest.json": manifests.to_json(older).encode()}),
        made.tar({"./opt/imgkit/manifest.json": manifests.to_json(MANIFEST).encode()}),
        made.layer("code"),
    ]
    return made


def locked(image: Made) -> Made:
    image.layers.append(image.tar({"opt/imgkit/lock.toml": lock_file.text(LOCK).encode()}))
    return image


def statement(path: Path) -> Any:
    """The statement about the file `path`, after the library of in-toto has read it."""
    found = provenance.of_file(path, Silent())
    text = provenance.text((found.file,), found.evidence)
    read = json_format.Parse(text, statement_pb2.Statement())
    Statement.copy_from_pb(read).validate()
    content = json.loads(text)
    json_format.ParseDict(content["predicate"], provenance_pb2.Provenance())
    return content


@pytest.mark.parametrize("layout", ["legacy", "modern", "packed", "oci", "compressed"])
def test_every_layout_says_the_same(image: Made, layout: str, tmp_path: Path) -> None:
    members = {
        "legacy": lambda: image.legacy_members(),
        "packed": lambda: image.modern_members(gzip.compress),
        "oci": lambda: image.oci_members(),
    }.get(layout, image.modern_members)()
    data = image.tar(members)
    file = tmp_path / "mine.tar"
    file.write_bytes(gzip.compress(data) if layout == "compressed" else data)
    found = statement(file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert found["subject"] == [{"name": "mine.tar", "digest": {"sha256": digest}}]
    definition = found["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {
        "platform": "linux/amd64",
        "recipe": {"name": "mine", "sha256": "11" * 32},
    }
    assert definition["resolvedDependencies"] == [
        {"name": "base", "uri": "docker://example.org/base:1", "digest": {"sha256": "ba" * 32}},
        {"name": "imgkit_entrypoints", "digest": {"sha256": "33" * 32}},
        {
            "name": "folder of the recipe",
            "digest": {"gitCommit": "4" * 40},
            "annotations": {"uncommittedChanges": True},
        },
    ]
    run = found["predicate"]["runDetails"]
    assert run["metadata"] == {"startedOn": "2026-01-02T03:04:05Z"}
    assert run["byproducts"][0]["digest"] == {"sha256": image.image_id.removeprefix("sha256:")}


def test_lock_names_every_package(image: Made, tmp_path: Path) -> None:
    file = tmp_path / "mine.tar"
    file.write_bytes(image.tar(locked(image).modern_members()))
    definition = statement(file)["predicate"]["buildDefinition"]
    digest = hashlib.sha256(lock_file.text(LOCK).encode()).hexdigest()
    assert definition["externalParameters"]["lock"] == {"sha256": digest}
    assert definition["resolvedDependencies"][3:] == [
        {
            "name": "less_590_amd64.deb",
            "digest": {"sha256": "55" * 32},
            "downloadLocation": "https://example.org/less_590_amd64.deb",
        },
        {
            "name": "typing_extensions-4.9.0-py3-none-any.whl",
            "uri": "pkg:pypi/typing-extensions@4.9.0",
            "digest": {"sha256": "66" * 32},
        },
    ]


def test_verb_writes_the_same_bytes_again(image: Made, tmp_path: Path) -> None:
    file = tmp_path / "mine.tar"
    file.write_bytes(image.tar(image.modern_members()))
    target = tmp_path / "mine.tar.intoto.json"
    done = imgkit("sbom", file, "--provenance", "-o", target)
    first = target.read_bytes()
    assert (done.returncode, done.stdout) == (0, "")
    assert f"imgkit: wrote {target}: names the base only: no lock, no packages\n" in done.stderr
    assert imgkit("sbom", file, "--provenance", "-o", target).returncode == 0
    assert target.read_bytes() == first
    assert imgkit("sbom", file, "--provenance").stdout.encode() == first


def test_other_file_is_not_replaced(image: Made, tmp_path: Path) -> None:
    file, other = tmp_path / "mine.tar", tmp_path / "notes.json"
    file.write_bytes(image.tar(image.modern_members()))
    other.write_text('{"mine": 1}')
    done = imgkit("sbom", file, "--provenance", "-o", other)
    assert (done.returncode, other.read_text()) == (2, '{"mine": 1}')
    assert "is not a provenance statement" in done.stderr
    assert imgkit("sbom", file, "--provenance", "-o", tmp_path / "absent" / "x.json").returncode == 2


def test_statement_about_an_archive_cannot_be_added(image: Made, tmp_path: Path) -> None:
    file = tmp_path / "mine.tar"
    file.write_bytes(image.tar(image.modern_members()))
    done = imgkit("sbom", file, "--provenance", "--add")
    assert (done.returncode, f"imgkit sbom {file} --provenance -o FILE" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--add"], "--add needs --provenance"),
        (["--provenance", "--add", "-o", "x.json"], "cannot be combined with --output"),
    ],
)
def test_add_needs_provenance_and_no_output(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = imgkit("sbom", tmp_path / "mine.tar", *arguments)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_provenance_of_a_recipe_is_refused() -> None:
    done = imgkit("sbom", "mn5", "--provenance")
    assert (done.returncode, "--provenance needs a .sif" in done.stderr) == (2, True), done.stderr


def test_image_of_others_is_refused(made: Made, tmp_path: Path) -> None:
    file = tmp_path / "made.tar"
    file.write_bytes(made.tar(made.modern_members()))
    with pytest.raises(CheckFailed, match="imgkit did not build this image"):
        provenance.of_file(file, Silent())


def test_damaged_and_foreign_files_are_refused(image: Made, tmp_path: Path) -> None:
    members = image.modern_members()
    name = next(name for name, data in members.items() if data == image.layers[1])
    members[name] = members[name].replace(b'"mine"', b'"thin"')
    file = tmp_path / "mine.tar"
    file.write_bytes(image.tar(members))
    with pytest.raises(CheckFailed, match="damaged"):
        provenance.of_file(file, Silent())
    file.write_bytes(b"text")
    with pytest.raises(UsageError, match=r"neither a \.sif nor an image archive"):
        provenance.of_file(file, Silent())
