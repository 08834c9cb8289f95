"""The file of one rank in a sharded checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from imgkit_entrypoints.run import shard_file
from imgkit_entrypoints.run.shard_file import Piece

WEIGHT = Piece(name="w", dtype="F32", offsets=(2, 0), sizes=(2, 3))
SCALE = Piece(name="s", dtype="BF16", offsets=(), sizes=())


def written(folder: Path, *, header: bytes | None = None, data: bytes = bytes(26)) -> Path:
    path = folder / shard_file.name_of(0, 2)
    path.write_bytes((header or shard_file.header([WEIGHT, SCALE])) + data)
    return path


def test_header_tells_the_pieces_and_their_bytes(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert path.name == "shard-00001-of-00002.safetensors"
    weight, scale = shard_file.read(path)
    assert dataclasses.replace(weight, file="", begin=0) == WEIGHT
    assert scale.begin == weight.begin + 24
    assert path.stat().st_size == scale.begin + 2
    assert weight.begin % 8 == 0


def test_header_is_that_of_the_safetensors_format(tmp_path: Path) -> None:
    data = written(tmp_path).read_bytes()
    table = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert table["w"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert json.loads(table["__metadata__"]["DCP_SHARDING_INFO"])["w"] == {"saved_offsets": [2, 0]}


@pytest.mark.parametrize("size", [0, 7, 8, 25, 27])
def test_file_of_another_length_is_refused(tmp_path: Path, size: int) -> None:
    path = written(tmp_path)
    whole = path.read_bytes() + b"\0"
    keep = {25: len(whole) - 2, 27: len(whole)}.get(size, size)
    path.write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=r"header of|pieces end after"):
        shard_file.read(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"F32"', b'"Q32"'),
        (b"[2, 3]", b"[3, 3]"),
        (b"[0, 24]", b"[1, 24]"),
        (b"DCP_SHARDING_INFO", b"DCP_SHARDING_ARGO"),
        (b'"shape": [2', b'"shape": [-'),
        (b'{\\"w\\"', b'{\\"v\\"'),
    ],
)
def test_header_with_other_words_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    header = shard_file.header([WEIGHT, SCALE])
    assert header.count(old) == 1
    with pytest.raises(ValueError, match=r"."):
        shard_file.read(written(tmp_path, header=header.replace(old, new)))


def rows(*ranges: tuple[int, int], width: int = 3, column: int = 0) -> list[Piece]:
    return [
        Piece(name="w", dtype="F32", offsets=(begin, column), sizes=(end - begin, width))
        for begin, end in ranges
    ]


@pytest.mark.parametrize(
    ("pieces", "fits"),
    [
        (rows((0, 2), (2, 4)), True),
        (rows((2, 4), (0, 1), (1, 2)), True),
        (rows((0, 4)), True),
        (rows((0, 4), width=1) + rows((0, 2), (2, 4), width=2, column=1), True),
        (rows((0, 2)), False),
        (rows((0, 2), (0, 2)), False),
        (rows((0, 3), (2, 3)), False),
        (rows((0, 2), (3, 5)), False),
        (rows((0, 4), width=1) + rows((0, 4), width=2, column=0), False),
        ([], False),
    ],
)
def test_pieces_have_to_make_up_the_tensor(pieces: list[Piece], fits: bool) -> None:
    assert (shard_file.first_gap({"w": pieces}, {"w": ("F32", (4, 3))}) == "") is fits


def test_piece_that_no_index_names_is_refused() -> None:
    pieces = {"w": rows((0, 4)), "x": rows((0, 4))}
    gap = shard_file.first_gap(pieces, {"w": ("F32", (4, 3))})
    assert gap == "there are pieces of x, which the index does not name"
