"""Compressed layers are unpacked once, side by side."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import stored_images
from tars import tar_of_files

from imgkit_builder.archive import stored
from imgkit_builder.archive.layers import scan_layers
from imgkit_builder.archive.stored import NoRoom, Spool
from imgkit_builder.archive.tar_read import TarStream
from imgkit_entrypoints.errors import CheckFailed

ROOM = 1 << 30


def write_image(
    path: Path, layers: Sequence[bytes], *, packed: Callable[[bytes], bytes] = gzip.compress
) -> stored.StoredImage:
    path.write_bytes(stored_images.archive([], raw=layers, packed=packed))
    return stored.open_image(path)


def names(layers: Sequence[stored.StoredLayer]) -> list[list[str]]:
    member_texts = []
    for layer in layers:
        with layer.open(bodies=True) as stream:
            member_texts.append([f"{member.name} {b''.join(stream.content())!r}" for member in stream])
    return member_texts


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    (tmp_path / "spool").mkdir()
    with Spool(folder=tmp_path / "spool", room_bytes=ROOM) as layer_spool:
        yield layer_spool
    assert not list((tmp_path / "spool").iterdir())


@pytest.mark.parametrize("threads", [1, 4])
def test_spooled_layers_are_the_layers(tmp_path, spool, threads):
    layers = [tar_of_files({f"{number}/{n}": b"x" * n for n in range(5)}) for number in range(3)]
    image = write_image(tmp_path / "x.tar", layers)
    seen: list[list[str]] = []
    plain = scan_layers(
        image, lambda stream: seen.append([member.name for member in stream]), threads=threads, spool=spool
    )
    assert seen == [[f"{number}/{n}" for n in range(5)] for number in range(3)]
    assert names(plain.layers) == names(image.layers)
    assert {layer.compress for layer in plain.layers} == {"none"}


def test_layers_without_a_spool_stay_where_they_are(tmp_path):
    image = write_image(tmp_path / "x.tar", [tar_of_files({"a": b"1"})])
    assert scan_layers(image, lambda stream: None) == image


def test_plain_bytes_beyond_the_room_are_refused(tmp_path):
    layers = [tar_of_files({"a": b"1"}), tar_of_files({"zeros": bytes(100_000)})]
    image = write_image(tmp_path / "x.tar", layers)
    with Spool(folder=tmp_path, room_bytes=50_000) as small, pytest.raises(NoRoom):
        scan_layers(image, lambda stream: None, threads=2, spool=small)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_layer_with_other_bytes_is_named(tmp_path, spool, number):
    layers = [tar_of_files({f"{n}": b"1" * n}) for n in range(3)]
    false_layers = {layers[number]: gzip.compress(b"no tar" * 1000)}
    image = write_image(
        tmp_path / "x.tar", layers, packed=lambda data: false_layers.get(data, gzip.compress(data))
    )

    def walk(stream: TarStream) -> None:
        for _ in stream:
            pass

    with pytest.raises(CheckFailed, match=f"layer {number + 1} of 3 is damaged: its sha256 is"):
        scan_layers(image, walk, threads=2, spool=spool)


def test_cut_gzip_layer_is_refused(tmp_path, spool):
    layers = [tar_of_files({"a": bytes(range(256)) * 100})]
    image = write_image(tmp_path / "x.tar", layers, packed=lambda data: gzip.compress(data)[:-9])
    with pytest.raises(CheckFailed, match="the gzip data is cut short"):
        scan_layers(image, lambda stream: None, spool=spool)


def test_bomb_in_one_of_many_layers_is_refused(tmp_path, spool):
    layers = [tar_of_files({f"{n}": bytes(1_000_000)}) for n in range(4)]
    image = write_image(tmp_path / "x.tar", layers)
    with pytest.raises(CheckFailed, match="unpack to more than"):
        scan_layers(image, lambda stream: None, threads=4, unpack_limit_bytes=3_000_000, spool=spool)


def test_equal_digests_of_other_bytes_are_compared(tmp_path):
    """Two layers claim one digest, and the second has other bytes."""
    layer, later = tar_of_files({"a": b"1"}), iter([bytes, lambda data: data[:-1] + b"1"])
    image = write_image(tmp_path / "x.tar", [layer, layer], packed=lambda data: next(later)(data))
    with pytest.raises(CheckFailed, match="layer 2 of 2 is damaged"):
        scan_layers(image, lambda stream: None)
