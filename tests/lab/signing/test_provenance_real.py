"""Statements beside and inside a .sif: what verifies, signs and deltas do with one more object."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_sif
from labkit import imgkit, output

from imgkit_builder.oci import manifest as manifests
from imgkit_builder.oci.manifest import BaseImage, Manifest
from imgkit_builder.sif import coverage, image
from imgkit_builder.signing import provenance

pytestmark = pytest.mark.singularity

MANIFEST = Manifest(
    imgkit="0.3.0",
    recipe="mine",
    recipe_sha256="11" * 32,
    base=BaseImage(name="example.org/base:1", id=f"sha256:{'22' * 32}"),
    platform="linux/amd64",
    wheel_sha256="33" * 32,
)


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    """A .sif of imgkit, with the manifest of its build."""
    place = tmp_path / "tree/opt/imgkit"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(manifests.to_json(MANIFEST))
    output("mksquashfs", tmp_path / "tree", tmp_path / "root", "-all-root", "-quiet")
    return small_sif.write(tmp_path / "mine.sif", (tmp_path / "root").read_bytes())


def added(path: Path) -> list[str]:
    """The statements in a .sif."""
    found = image.read(path)
    return [
        image.data(found, one).decode() for one in found.descriptors if one.name == provenance.OBJECT_NAME
    ]


def test_statement_beside_names_the_file(sif: Path) -> None:
    before = sif.read_bytes()
    target = sif.with_name("mine.sif.intoto.json")
    assert imgkit("sbom", sif, "--provenance", "-o", target).returncode == 0
    stated = json.loads(target.read_text())
    digest = output("sha256sum", sif).split()[0]
    assert stated["subject"] == [{"name": "mine.sif", "digest": {"sha256": digest}}]
    assert sif.read_bytes() == before


def test_added_statement_is_covered_and_signed(sif: Path, tmp_path: Path) -> None:
    private, public = tmp_path / "k.pem", tmp_path / "k.pub"
    output("openssl", "genpkey", "-algorithm", "ed25519", "-out", private)
    output("openssl", "pkey", "-in", private, "-pubout", "-out", public)
    record = image.read(sif).record
    assert imgkit("sbom", sif, "--provenance", "--add").returncode == 0
    once = sif.read_bytes()
    # The statement is about the partition: adding it again changes nothing.
    assert imgkit("sbom", sif, "--provenance", "--add").returncode == 0
    assert sif.read_bytes() == once
    (text,) = added(sif)
    assert record is not None
    assert json.loads(text)["subject"] == [
        {"name": "root partition", "digest": {"sha256": record.root_sha256}}
    ]
    assert image.read(sif).record == record
    assert imgkit("verify", sif).returncode == 0
    assert imgkit("sign", sif, "--key", private).returncode == 0
    assert imgkit("verify", sif, "--keyring", public).returncode == 0
    output("singularity", "verify", "--key", public, sif)
    signed = sif.read_bytes()
    done = imgkit("sbom", sif, "--provenance", "--add")
    assert (done.returncode, sif.read_bytes() == signed) == (1, True)
    assert "it is signed, and one more object would break the signature" in done.stderr


def test_changed_statement_is_noticed(sif: Path) -> None:
    assert imgkit("sbom", sif, "--provenance", "--add").returncode == 0
    data = sif.read_bytes()
    assert data.count(b'"mine"') == 1
    sif.write_bytes(data.replace(b'"mine"', b'"thin"'))
    assert coverage.check(sif).faults == ("object 4 (imgkit-provenance)",)
    done = imgkit("sbom", sif, "--provenance")
    assert (done.returncode, "it was modified" in done.stderr) == (1, True)


def test_sif_of_another_tool_is_refused(sif: Path) -> None:
    coverage.clear(sif)
    done = imgkit("sbom", sif, "--provenance")
    assert (done.returncode, "imgkit did not make this .sif" in done.stderr) == (1, True)
    assert [path.name for path in sif.parent.glob("*.intoto.json")] == []
