"""The base of a delta on a remote is chosen by what its .sif files hold; a fake ssh runs the scripts here."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

import pytest
import small_sif

from imgkit_builder.remote import connection, store
from imgkit_builder.remote.config import Remote
from imgkit_builder.remote.connection import Connection
from imgkit_builder.sif import frame, image
from imgkit_builder.sif.image import DataType
from imgkit_entrypoints.errors import CheckFailed

LAYERS = tuple(f"sha256:{number:064d}" for number in range(4))


@pytest.fixture
def images(tmp_path: Path, ssh: Path) -> Path:
    folder = tmp_path / "far/images"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def far(images: Path) -> Connection:
    return connection.connect(Remote(name="far", address="me@far", folder=str(images.parent), keep_s=0))


def put(
    images: Path,
    layers: tuple[str, ...],
    *,
    manifest: bytes = b"a manifest",
    arch: str = "amd64",
    age_s: int = 0,
) -> str:
    """Put a .sif with these layers into the store; returns its name."""
    digest = hashlib.sha256(repr((layers, manifest, arch)).encode()).hexdigest()
    path = small_sif.write(images / "new", arch=arch, recorded=False)
    if manifest:
        data = frame.NewObject(datatype=DataType.GENERIC, name=image.MANIFEST_OBJECT, data=manifest)
        frame.add(path, data)
    record = dataclasses.replace(
        small_sif.record(),
        image_id=f"sha256:{digest}",
        diff_ids=layers,
        manifest_sha256=hashlib.sha256(manifest).hexdigest() if manifest else "",
        manifest_bytes=len(manifest),
    )
    frame.put_record(path, record)
    path.rename(images / image.store_name(record))
    os.utime(images / image.store_name(record), (2e9 - age_s, 2e9 - age_s))
    return image.store_name(record)


def closest(far: Connection, layers: tuple[str, ...] = LAYERS) -> str:
    sif = store.closest_base(far, layers, "amd64")
    return str(sif.path) if sif else ""


def test_image_with_most_layers_in_common_is_the_base(images: Path, far: Connection) -> None:
    put(images, LAYERS[:1])
    nearest = put(images, (*LAYERS[:3], f"sha256:{9:064d}"), manifest=b"of the nearest")
    put(images, LAYERS[:2])
    sif = store.closest_base(far, LAYERS, "amd64")
    assert sif is not None
    assert str(sif.path) == nearest
    assert store.read_manifest(far, sif) == b"of the nearest"


def test_images_that_can_be_no_base_are_passed_over(images: Path, far: Connection) -> None:
    put(images, LAYERS, manifest=b"")
    put(images, LAYERS, arch="arm64")
    put(images, (f"sha256:{9:064d}",))
    renamed = put(images, LAYERS)
    (images / renamed).rename(images / f"{'0' * 64}-{'0' * 12}.sif")
    (images / "note").write_text("hello")
    (images / "-n x.sif").write_bytes(b"")
    (images / "folder.sif").mkdir()
    assert closest(far) == ""
    fit = put(images, LAYERS[:1])
    assert closest(far) == fit


def test_only_the_last_used_images_are_read(images: Path, far: Connection) -> None:
    put(images, LAYERS, age_s=1000)
    for number in range(store._MOST_BASES):
        put(images, LAYERS[:1], manifest=b"%d" % number)
    shared = store.closest_base(far, LAYERS, "amd64")
    assert shared is not None
    assert shared.record is not None
    assert shared.record.diff_ids == LAYERS[:1]


def test_empty_store_has_no_base(images: Path, far: Connection) -> None:
    assert closest(far) == ""


def test_forged_manifest_is_refused(images: Path, far: Connection) -> None:
    name = put(images, LAYERS)
    sif = store.closest_base(far, LAYERS, "amd64")
    assert sif is not None
    data = (images / name).read_bytes()
    (images / name).write_bytes(data.replace(b"a manifest", b"a forgery!"))
    with pytest.raises(CheckFailed, match="its file manifest is damaged"):
        store.read_manifest(far, sif)


def test_remote_that_sends_more_than_the_manifest_is_cut(images: Path, far: Connection) -> None:
    put(images, LAYERS)
    sif = store.closest_base(far, LAYERS, "amd64")
    assert sif is not None
    (images.parents[1] / "bin/ssh").write_text('#!/bin/sh\nread -r echo token\necho "$token"\nyes\n')
    with pytest.raises(CheckFailed, match="its file manifest is damaged"):
        store.read_manifest(far, sif)
