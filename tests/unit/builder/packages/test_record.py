"""The record at the end of a file with packages."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from imgkit_builder.base import files
from imgkit_builder.packages import record
from imgkit_builder.packages.record import AddedPackage, PackagesRecord
from imgkit_entrypoints.errors import CheckFailed, UsageError

EINOPS = AddedPackage(name="einops", version="0.8.1", sha256="ab" * 32)
RECORD = PackagesRecord(
    imgkit="0.4.0",
    image="pytorch.sif",
    image_digest="d1",
    image_id="sha256:1",
    arch="amd64",
    python="3.10.12",
    arguments=("einops", "omegaconf>=2.3"),
    packages=(EINOPS,),
    modules=("einops",),
    squashfs_sha256="",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "pytorch+2.sqsh"
    file.write_bytes(b"hsqs" + bytes(1000))
    stored = dataclasses.replace(RECORD, squashfs_sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    files.append_file(file, record.to_bytes(stored))
    return file


def test_record_is_read_back(file):
    stored = record.read_record(file)
    assert dataclasses.replace(stored, squashfs_sha256="") == RECORD
    assert record.squashfs_sha256(file) == stored.squashfs_sha256


def test_changed_record_is_refused(file):
    file.write_bytes(file.read_bytes().replace(b"0.8.1", b"0.8.2"))
    with pytest.raises(CheckFailed, match="its record cannot be read"):
        record.read_record(file)


@pytest.mark.parametrize("content", [b"", b"hsqs"])
def test_file_without_a_record_is_refused(tmp_path, content):
    file = tmp_path / "image.sqsh"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="imgkit add did not write this file"):
        record.read_record(file)


@pytest.mark.parametrize("size", [0, 10, 70_000, 200_000])
def test_digest_of_an_image_is_that_of_jobs(tmp_path, size):
    image = tmp_path / "x.sif"
    image.write_bytes(os.urandom(size))
    script = record.digest_command("$1")
    output = subprocess.run(["sh", "-c", script, "sh", image], check=True, capture_output=True, text=True)
    assert output.stdout.split()[0] == record.image_digest(image)


def refuse_unfit(*records: PackagesRecord, digests: Sequence[str] = ("d2", "")) -> None:
    names = ("a.sqsh", "b.sqsh")
    record.refuse_unfit([*zip(names, records, strict=False)], image="new.sif", digests=digests)


@pytest.mark.parametrize("digest", ["d1", "sha256:1"])
def test_image_is_known_by_either_digest(digest):
    refuse_unfit(RECORD, RECORD, digests=[digest])  # one package may be in two files


def test_packages_fit_an_image_that_was_packed_again(file, monkeypatch):
    image = file.with_name("again.sif")
    image.touch()
    with pytest.raises(UsageError, match="was made for another image"):
        record.read_records_for([str(file)], image)
    monkeypatch.setattr(record, "read_image_id", lambda _: "sha256:1")
    assert record.read_records_for([str(file)], image) == (record.read_record(file),)


@pytest.mark.parametrize("image_id", ["sha256:1", ""])  # an image without an id matches no other
def test_other_image_is_refused_with_the_command(image_id):
    with pytest.raises(UsageError, match="was made for another image, pytorch") as caught:
        refuse_unfit(dataclasses.replace(RECORD, image_id=image_id))
    assert caught.value.hint == "imgkit add einops 'omegaconf>=2.3' --image new.sif -o a.sqsh"


def test_two_versions_of_a_package_are_refused():
    other = dataclasses.replace(RECORD, packages=(dataclasses.replace(EINOPS, name="Einops", version="1"),))
    with pytest.raises(UsageError, match=re.escape("einops is 0.8.1 in a.sqsh, and 1 in b.sqsh")):
        refuse_unfit(RECORD, other, digests=["d1"])
