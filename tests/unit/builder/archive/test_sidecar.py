from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from refusals import refused

from imgkit_builder.archive import sidecar
from imgkit_builder.archive.sidecar import SavedArchive, SavedImage, Sidecar
from imgkit_builder.oci.manifest import BaseImage, Manifest, Probe
from imgkit_entrypoints.errors import UsageError
from imgkit_entrypoints.system import Queue, Runtime, SystemFacts

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

FULL = Sidecar(
    image=SavedImage(
        id="sha256:" + "1" * 64,
        tag="mn5:latest",
        platform="linux/amd64",
        diff_ids=("sha256:" + "2" * 64, "sha256:" + "3" * 64),
        labels={"imgkit.recipe": "mn5"},
    ),
    archive=SavedArchive(name="mn5.tar", size_bytes=0, sha256=EMPTY, compress="none"),
    system=SystemFacts(title="MareNostrum 5", runtime=Runtime(modules=("a", "b")), queue=Queue(sif=("-x",))),
    manifest=Manifest(
        imgkit="0.3.0",
        recipe="mn5",
        recipe_sha256="4" * 64,
        base=BaseImage(name="base:1", env={"A": "1"}, probe=Probe(pip_conflicts=("one",))),
        platform="linux/amd64",
        wheel_sha256="5" * 64,
    ),
)


def test_what_is_written_is_read_back(tmp_path):
    with sidecar.replace_around(FULL, tmp_path / "mn5.tar"):
        pass
    assert sidecar.read_sidecar(tmp_path / "mn5.tar") == FULL
    assert sidecar.read_sha256(tmp_path / "mn5.tar") == EMPTY


def test_foreign_image_has_no_system_or_manifest():
    plain = Sidecar(image=FULL.image, archive=FULL.archive, system=None, manifest=None)
    assert sidecar.from_json(sidecar.to_json(plain), where="x") == plain


def test_json_holds_the_baked_documents():
    document = json.loads(sidecar.to_json(FULL))
    assert document["schema"] == 1
    assert document["system"]["schema"] == 1
    assert document["manifest"]["recipe"] == "mn5"


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum")
def test_sha256sum_takes_the_checksum_file(tmp_path):
    (tmp_path / "mn5.tar").touch()
    with sidecar.replace_around(FULL, tmp_path / "mn5.tar"):
        pass
    assert (
        subprocess.run(
            ["sha256sum", "--strict", "-c", "mn5.tar.sha256"], cwd=tmp_path, check=False
        ).returncode
        == 0
    )


def test_absent_files_are_none(tmp_path):
    assert sidecar.read_sidecar(tmp_path / "x.tar") is None
    assert sidecar.read_sha256(tmp_path / "x.tar") is None


def test_later_schema_is_refused(tmp_path):
    sidecar.json_path(tmp_path / "x").write_text(sidecar.to_json(FULL).replace('"schema": 1', '"schema": 2'))
    with pytest.raises(UsageError, match="later version of imgkit"):
        sidecar.read_sidecar(tmp_path / "x")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "image": 3}', "\0"])
def test_what_is_no_sidecar_is_refused(tmp_path, text):
    sidecar.json_path(tmp_path / "x").write_text(text)
    with refused(UsageError, r"not a sidecar", where=str(tmp_path / "x.manifest.json")):
        sidecar.read_sidecar(tmp_path / "x")


@pytest.mark.parametrize("line", ["", f"{EMPTY}  other.tar", f"{EMPTY[:-1]}  x.tar", f"md5  {EMPTY}  x.tar"])
def test_checksum_of_another_file_is_refused(tmp_path, line):
    sidecar.sha256_path(tmp_path / "x.tar").write_text(line + "\n")
    with pytest.raises(UsageError, match=r"no line for x\.tar"):
        sidecar.read_sha256(tmp_path / "x.tar")


def test_checksum_of_binary_mode_is_read(tmp_path):
    sidecar.sha256_path(tmp_path / "x.tar").write_text(f"{EMPTY} *./x.tar\n")
    assert sidecar.read_sha256(tmp_path / "x.tar") == EMPTY
