from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from imgkit_builder.archive.tar_read import DIRECTORY, HARD_LINK, REGULAR, SYMLINK
from imgkit_builder.inventory.collector import DOCUMENT
from imgkit_builder.oci.config import ImageConfig
from imgkit_builder.sif.entries import ImageEntry, with_document

CONFIG = ImageConfig(
    image_id="sha256:" + "0" * 64,
    raw=b"{}",
    os="linux",
    arch="amd64",
    diff_ids=(),
    labels={},
    created="2024-03-20T00:00:00Z",
)
CREATED_S = 1710892800
METADATA = "srv/site-packages/a-1.dist-info/METADATA"


def folder(path: str) -> ImageEntry:
    return ImageEntry(names=(path,), kind=DIRECTORY)


def file(*names: str, data: bytes = b"") -> ImageEntry:
    return ImageEntry(names=names, kind=REGULAR, size_bytes=len(data), content=iter((data[:3], data[3:])))


def passed(*entries: ImageEntry) -> list[tuple[ImageEntry, bytes]]:
    """What comes out, each with its content, which is read as it comes."""
    found = with_document(iter(entries), CONFIG)
    return [(one, b"".join(map(bytes, one.content))) for one in found]


def packages(found: list[tuple[ImageEntry, bytes]]) -> list[str]:
    entry, data = found[-1]
    assert entry.names == (DOCUMENT,)
    assert entry.size_bytes == len(data)
    return [one["name"] for one in json.loads(data)["packages"]][1:]


def test_document_comes_last_with_its_folders() -> None:
    found = passed(file(METADATA, data=b"Name: a\nVersion: 1\n"))
    names = [one.name for one, _ in found]
    assert names == [METADATA, "opt", "opt/imgkit", DOCUMENT]
    assert found[0][1] == b"Name: a\nVersion: 1\n"
    assert {one.mtime_s for one, _ in found[1:]} == {CREATED_S}
    assert packages(found) == ["a"]


def test_folders_of_the_image_stay_as_they_are() -> None:
    names = [one.name for one, _ in passed(folder("opt"), folder("opt/imgkit"))]
    assert names == ["opt", "opt/imgkit", DOCUMENT]


@pytest.mark.parametrize(
    "there",
    [
        ImageEntry(names=("opt",), kind=SYMLINK, link="srv"),
        file("opt/imgkit"),
        folder(DOCUMENT),
    ],
    ids=["link", "file", "folder"],
)
def test_no_document_without_a_place_for_it(there: ImageEntry) -> None:
    assert [one.name for one, _ in passed(there)] == [there.name]


def test_document_of_another_image_gives_way() -> None:
    found = passed(folder("opt"), folder("opt/imgkit"), file(DOCUMENT, data=b"old"), file(METADATA))
    assert [one.name for one, _ in found].count(DOCUMENT) == 1
    assert packages(found) == ["a"]


def test_other_name_of_the_old_document_stays() -> None:
    found = passed(file(DOCUMENT, "srv/list", data=b"old"))
    assert found[0][0].names == ("srv/list",)
    assert found[0][1] == b"old"


def test_large_file_is_not_read_early() -> None:
    def content() -> Iterator[bytes]:
        read.append(1)
        yield b"x"

    read: list[int] = []
    large = ImageEntry(names=(METADATA,), kind=REGULAR, size_bytes=1 << 40, content=content())
    found = with_document(iter((large,)), CONFIG)
    assert next(found) is large
    assert read == []
    *_, (last, data) = [(one, b"".join(map(bytes, one.content))) for one in found]
    assert last.name == DOCUMENT
    assert "METADATA: too large" in json.loads(data)["comment"]


def test_hard_links_of_both_kinds_are_names_of_a_package() -> None:
    cached = "root/.cache/a-1.dist-info/METADATA"
    text = b"Name: a\nVersion: 1\n"
    link = ImageEntry(names=(METADATA,), kind=HARD_LINK, link=cached)
    split, joined = passed(file(cached, data=text), link), passed(file(cached, METADATA, data=text))
    assert split[-1][1] == joined[-1][1]
    assert '"name": "a"' in split[-1][1].decode()
