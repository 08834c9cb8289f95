"""A flipped bit in an archive or its sidecars, or in a checkpoint is noticed."""

from __future__ import annotations

import secrets
import tarfile
from pathlib import Path

import bit_flips
import pytest
import stored_images

from imgkit_builder.archive import read, sidecar
from imgkit_builder.archive.sidecar import SavedArchive, SavedImage, Sidecar
from imgkit_builder.base import checks
from imgkit_builder.base.progress import Silent
from imgkit_builder.examine.verify import verify_file
from imgkit_entrypoints.errors import ImgkitError
from imgkit_entrypoints.run import disk


def refused(path: Path) -> bool:
    try:
        return not checks.passed(verify_file(path))
    except ImgkitError:
        return True


def archive(folder: Path) -> Path:
    path = folder / "x.tar"
    path.write_bytes(stored_images.archive([[(tarfile.TarInfo("file"), b"")]]))
    contents = read.digest_archive(path, compress="none", report=Silent())
    assert contents.image is not None
    config = contents.image.config
    image = SavedImage(
        id=config.image_id,
        tag="made:latest",
        platform="linux/amd64",
        diff_ids=config.diff_ids,
        labels={"a": "b"},
    )
    saved = SavedArchive(
        name="x.tar", size_bytes=contents.size_bytes, sha256=contents.sha256, compress="none"
    )
    with sidecar.replace_around(Sidecar(image=image, archive=saved, system=None, manifest=None), path):
        pass
    return path


def checkpoint(folder: Path) -> Path:
    temporary = disk.make_temporary_folder(folder, 7)
    path = temporary / "__0_0.distcp"
    path.write_bytes(b"weights")
    return disk.commit(temporary, 7, {path.name: disk.describe_file(path)}, keep=1)


def is_damaged(checkpoint: Path) -> bool:
    try:
        _, _, rows = disk.read_manifest(checkpoint)
    except disk.InvalidCheckpoint:
        return True
    return disk.find_damage(checkpoint, rows, sorted(rows)) != ""


@pytest.mark.parametrize(
    ("flips", "seed"),
    [(150, 1), pytest.param(10_000, secrets.randbits(32), marks=pytest.mark.soak, id="soak")],
)
@pytest.mark.parametrize(
    ("make", "select", "is_noticed"),
    [
        (archive, Path, refused),
        (archive, sidecar.json_path, refused),
        (archive, sidecar.sha256_path, refused),
        (checkpoint, lambda folder: folder / disk.MANIFEST, is_damaged),
        (checkpoint, lambda folder: folder / "__0_0.distcp", is_damaged),
    ],
    ids=["archive", "archive manifest", "archive checksum", "checkpoint manifest", "checkpoint part"],
)
def test_flipped_bit_is_noticed(
    make,
    select,
    is_noticed,
    flips,
    seed,
    tmp_path,
):
    whole = make(tmp_path)
    assert not is_noticed(whole)
    assert bit_flips.survivors(select(whole), lambda: is_noticed(whole), flips, seed=seed) == []
