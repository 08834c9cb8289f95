"""Compressed layers are unpacked once, side by side."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from imgkit_builder.archive import stored
from imgkit_builder.archive.layers import scan
from imgkit_builder.archive.stored import NoRoom, Spool
from imgkit_builder.archive.tar_read import TarStream
from imgkit_entrypoints.errors import CheckFailed

ROOM = 1 << 30


def tar_of(*files: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def image_of(
    path: Path, layers: Sequence[bytes], *, packed: Callable[[bytes], bytes] = gzip.compress
) -> stored.StoredImage:
    digests = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": digests}}
    names = [f"{number}.tar" for number in range(len(layers))]
    listed = [{"Config": "config.json", "RepoTags": ["made:1"], "Layers": names}]
    documents = [("config.json", config), ("manifest.json", listed)]
    files = [(name, packed(layer)) for name, layer in zip(names, layers, strict=True)]
    path.write_bytes(tar_of(*files, *((name, json.dumps(value).encode()) for name, value in documents)))
    return stored.open_image(path)


def names(layers: Sequence[stored.StoredLayer]) -> list[list[str]]:
    found = []
    for layer in layers:
        with layer.open(bodies=True) as stream:
            found.append([f"{member.name} {b''.join(stream.content())!r}" for member in stream])
    return found


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    (tmp_path / "spool").mkdir()
    with Spool(folder=tmp_path / "spool", room_bytes=ROOM) as made:
        yield made
    assert not list((tmp_path / "spool").iterdir())


@pytest.mark.parametrize("threads", [1, 4])
def test_spooled_layers_are_the_layers(tmp_path: Path, spool: Spool, threads: int) -> None:
    layers = [tar_of(*((f"{number}/{n}", b"x" * n) for n in range(5))) for number in range(3)]
    image = image_of(tmp_path / "x.tar", layers)
    seen: list[list[str]] = []
    plain = scan(
        image, lambda stream: seen.append([one.name for one in stream]), threads=threads, spool=spool
    )
    assert seen == [[f"{number}/{n}" for n in range(5)] for number in range(3)]
    assert names(plain.layers) == names(image.layers)
    assert {layer.compress for layer in plain.layers} == {"none"}


def test_layers_without_a_spool_stay_where_they_are(tmp_path: Path) -> None:
    image = image_of(tmp_path / "x.tar", [tar_of(("a", b"1"))])
    assert scan(image, lambda stream: None) == image


def test_plain_bytes_beyond_the_room_are_refused(tmp_path: Path) -> None:
    image = image_of(tmp_path / "x.tar", [tar_of(("a", b"1")), tar_of(("zeros", bytes(100_000)))])
    with Spool(folder=tmp_path, room_bytes=50_000) as small, pytest.raises(NoRoom):
        scan(image, lambda stream: None, threads=2, spool=small)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_layer_with_other_bytes_is_named(tmp_path: Path, spool: Spool, number: int) -> None:
    layers = [tar_of((f"{n}", b"1" * n)) for n in range(3)]
    other = {layers[number]: gzip.compress(b"no tar" * 1000)}
    image = image_of(tmp_path / "x.tar", layers, packed=lambda data: other.get(data, gzip.compress(data)))

    def walk(stream: TarStream) -> None:
        for _ in stream:
            pass

    with pytest.raises(CheckFailed, match=f"layer {number + 1} of 3 is damaged: its sha256 is"):
        scan(image, walk, threads=2, spool=spool)


def test_cut_gzip_layer_is_refused(tmp_path: Path, spool: Spool) -> None:
    layers = [tar_of(("a", bytes(range(256)) * 100))]
    image = image_of(tmp_path / "x.tar", layers, packed=lambda data: gzip.compress(data)[:-9])
    with pytest.raises(CheckFailed, match="the gzip data is cut short"):
        scan(image, lambda stream: None, spool=spool)


def test_bomb_in_one_of_many_layers_is_refused(tmp_path: Path, spool: Spool) -> None:
    image = image_of(tmp_path / "x.tar", [tar_of((f"{n}", bytes(1_000_000))) for n in range(4)])
    with pytest.raises(CheckFailed, match="unpack to more than"):
        scan(image, lambda stream: None, threads=4, unpack_limit_bytes=3_000_000, spool=spool)


def test_equal_digests_of_other_bytes_are_compared(tmp_path: Path) -> None:
    """Two layers claim one digest, and the second has other bytes."""
    layer, later = tar_of(("a", b"1")), iter([bytes, lambda data: data[:-1] + b"1"])
    image = image_of(tmp_path / "x.tar", [layer, layer], packed=lambda data: next(later)(data))
    with pytest.raises(CheckFailed, match="layer 2 of 2 is damaged"):
        scan(image, lambda stream: None)
