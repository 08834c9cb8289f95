"""What a delta file says of itself, and what the commands of an image make of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import sample_delta
from sample_delta import KNOWN, MANIFEST

from imgkit_builder.archive.tar_read import DIRECTORY, REGULAR
from imgkit_builder.delta import descriptor
from imgkit_builder.job import container
from imgkit_builder.job.request import Request
from imgkit_builder.job.resolve import resolve
from imgkit_builder.job.systems.local import SYSTEM as local
from imgkit_builder.recipe.targets import find
from imgkit_builder.sif.entries import ImageEntry
from imgkit_builder.sif.file_manifest import BakedFacts, ManifestWriter
from imgkit_entrypoints.errors import CheckFailed, NoPlan, UsageError
from imgkit_entrypoints.launch import delta_check

BEFORE = KNOWN.size_bytes + KNOWN.manifest_bytes
"""Bytes before the description."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return sample_delta.put(tmp_path / "x.imgdelta")


def test_file_says_what_it_is(file: Path) -> None:
    found = descriptor.read(file)
    assert replace(found, sha256="") == KNOWN
    assert descriptor.is_delta(file)
    assert descriptor.sha256(file, found) == found.sha256
    assert descriptor.manifest(file, found) == MANIFEST


def test_other_file_manifest_refused(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[KNOWN.size_bytes] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckFailed, match="its file manifest is damaged"):
        descriptor.manifest(file, descriptor.read(file))


def test_cut_or_grown_file_refused(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    for wrong in (
        data[:-1],
        data[:4200],
        data[4096:],
        data[:4150] + data[4151:],
        data[:100] + data[200:],
        b"x" + data,
        b"",
    ):
        (tmp_path / "wrong").write_bytes(wrong)
        with pytest.raises(CheckFailed):
            descriptor.read(tmp_path / "wrong")


def test_file_that_is_not_there_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        descriptor.read(tmp_path / "none")
    assert not descriptor.is_delta(tmp_path / "none")


def test_later_schema_refused(file: Path, tmp_path: Path) -> None:
    text = json.dumps({"schema": 2}).encode()
    (tmp_path / "x").write_bytes(text + len(text).to_bytes(8, "little") + b"IMGDELTA")
    with pytest.raises(CheckFailed, match="later version of imgkit"):
        descriptor.read(tmp_path / "x")


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"schema": NaN}', b"5", b'{"schema": 1, "base": 7}'])
def test_description_that_is_none_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "x").write_bytes(text + len(text).to_bytes(8, "little") + b"IMGDELTA")
    with pytest.raises(CheckFailed, match="its description cannot be read"):
        descriptor.read(tmp_path / "x")


def test_description_without_its_digest_is_refused(file: Path) -> None:
    values = json.loads(file.read_bytes()[BEFORE:-16])
    del values["self_sha256"]
    text = json.dumps(values, indent=1, sort_keys=True).encode()
    end = len(text).to_bytes(8, "little") + b"IMGDELTA"
    file.write_bytes(file.read_bytes()[:BEFORE] + text + end)
    with pytest.raises(CheckFailed, match="does not match its sha256"):
        descriptor.read(file)


def test_changed_description_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"amd64", b"arm64"))
    with pytest.raises(CheckFailed, match="does not match its sha256"):
        descriptor.read(file)


def test_description_of_another_type_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(4096))
    descriptor.append(path, MANIFEST, replace(KNOWN, image_id=5))  # type: ignore[arg-type]
    with pytest.raises(CheckFailed, match="image_id is 5"):
        descriptor.read(path)


def request(file: Path) -> Request:
    given = Path(file.name)  # read where the job runs
    return Request(command=("dist-train",), directory=file.parent, delta=given, runtime="singularity")


def test_job_lays_it_over_and_says_what_it_is(file: Path) -> None:
    job = resolve(find("cpu"), request(file))
    words = local.script(job).submit
    # Inside the container, where --cleanenv does not reach.
    assert words[-3:] == ("env", "IMGKIT_DELTA=sha256:new", "dist-train")
    at = words.index("--overlay")
    assert words[at + 1] == f"{file}:ro"
    assert words.index("exec") < at < words.index(f"{file.parent}/cpu.sif")
    shell = container.shell(resolve(find("cpu"), replace(request(file), command=(), interactive=True)))
    assert f"{file}:ro" in shell


def test_job_without_one_says_nothing() -> None:
    given = Request(command=("dist-train",), directory=Path("/home/me"), runtime="singularity")
    words = local.script(resolve(find("cpu"), given)).submit
    assert not [word for word in words if "overlay" in word or "IMGKIT_DELTA" in word]


@pytest.mark.parametrize("runtime", ["docker", "host"])
def test_delta_without_singularity_refused(file: Path, runtime: str) -> None:
    with pytest.raises(UsageError, match=r"mounted over a \.sif"):
        resolve(find("cpu"), replace(request(file), runtime=runtime))


@pytest.mark.parametrize("name", ["a,b.imgdelta", "a:b.imgdelta", "a\nb.imgdelta"])
def test_name_that_the_runtime_would_split_refused(file: Path, name: str) -> None:
    (file.parent / name).write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match="cannot be used in a job"):
        resolve(find("cpu"), replace(request(file), delta=Path(name)))


def image_root(folder: Path, text: str | None) -> dict[str, str]:
    if text is not None:
        (folder / "opt/imgkit").mkdir(parents=True)
        (folder / "opt/imgkit/delta.json").write_text(text)
    return {"IMGKIT_ROOT": str(folder), "IMGKIT_DELTA": "sha256:new"}


def test_commands_go_on_with_the_right_delta(tmp_path: Path) -> None:
    delta_check.require(image_root(tmp_path, descriptor.inside("sha256:new").decode()))
    delta_check.require({})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "without it"),
        (descriptor.inside("sha256:other").decode(), "a different delta"),
        ("{", "unreadable"),
        ("[]", "unreadable"),
    ],
)
def test_commands_refuse_another_delta_or_none(tmp_path: Path, text: str | None, message: str) -> None:
    with pytest.raises(NoPlan, match=message) as caught:
        delta_check.require(image_root(tmp_path, text))
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("text", [None, '{"sha256": "other"}', "{"])
def test_commands_refuse_other_code_or_none(tmp_path: Path, text: str | None) -> None:
    env = {"IMGKIT_ROOT": str(tmp_path), "IMGKIT_CODE": "wanted"}
    (tmp_path / "opt/imgkit").mkdir(parents=True)
    file = tmp_path / "opt/imgkit/code.json"
    file.write_text('{"sha256": "wanted"}')
    delta_check.require(env)
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(NoPlan, match="the job's code is not mounted"):
        delta_check.require(env)


@pytest.mark.parametrize(
    ("names", "is_code"),
    [
        (("workspace", "workspace/a.py", "opt/imgkit/manifest.json", ".singularity.d/labels.json"), True),
        (("workspace/a.py", "etc/passwd"), False),
        (("opt/imgkit/manifest.json",), False),
    ],
)
def test_delta_of_code_alone_is_recognised(tmp_path: Path, names: tuple[str, ...], is_code: bool) -> None:
    writer = ManifestWriter(tmp_path / "manifest")
    kinds = [DIRECTORY if name == "workspace" else REGULAR for name in names]
    entries = [ImageEntry(names=(name,), kind=kind) for name, kind in zip(names, kinds, strict=True)]
    assert len(list(writer.recorded(entries))) == len(names)
    manifest = writer.finish(BakedFacts())
    delta = replace(KNOWN, manifest_sha256=hashlib.sha256(manifest).hexdigest(), manifest_bytes=len(manifest))
    path = tmp_path / "x.imgdelta"
    path.write_bytes(bytes(KNOWN.size_bytes))
    descriptor.append(path, manifest, delta)
    assert descriptor.is_code(path, delta) == is_code
