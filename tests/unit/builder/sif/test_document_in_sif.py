from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from small_sif import CONFIG, CREATED_S

from imgkit_builder.archive.tar_read import DIRECTORY, HARD_LINK, REGULAR, SYMLINK
from imgkit_builder.inventory.collector import SPDX_PATH
from imgkit_builder.sif.entries import ImageEntry, with_package_list

METADATA = "srv/site-packages/a-1.dist-info/METADATA"


def folder(path: str) -> ImageEntry:
    return ImageEntry(names=(path,), kind=DIRECTORY)


def file(*names: str, data: bytes = b"") -> ImageEntry:
    return ImageEntry(names=names, kind=REGULAR, size_bytes=len(data), content=iter((data[:3], data[3:])))


def document_added(*entries: ImageEntry) -> list[tuple[ImageEntry, bytes]]:
    """What comes out, each with its content, which is read as it comes."""
    written = with_package_list(iter(entries), CONFIG)
    return [(entry, b"".join(map(bytes, entry.content))) for entry in written]


def packages(entries: list[tuple[ImageEntry, bytes]]) -> list[str]:
    entry, data = entries[-1]
    assert entry.names == (SPDX_PATH,)
    assert entry.size_bytes == len(data)
    return [package["name"] for package in json.loads(data)["packages"]][1:]


def test_document_comes_last_with_its_folders():
    entries = document_added(file(METADATA, data=b"Name: a\nVersion: 1\n"))
    names = [entry.name for entry, _ in entries]
    assert names == [METADATA, "opt", "opt/imgkit", SPDX_PATH]
    assert entries[0][1] == b"Name: a\nVersion: 1\n"
    assert {entry.mtime_s for entry, _ in entries[1:]} == {CREATED_S}
    assert packages(entries) == ["a"]


def test_folders_of_the_image_stay_as_they_are():
    names = [entry.name for entry, _ in document_added(folder("opt"), folder("opt/imgkit"))]
    assert names == ["opt", "opt/imgkit", SPDX_PATH]


@pytest.mark.parametrize(
    "obstacle",
    [
        ImageEntry(names=("opt",), kind=SYMLINK, link="srv"),
        file("opt/imgkit"),
        folder(SPDX_PATH),
    ],
    ids=["link", "file", "folder"],
)
def test_no_document_without_a_place_for_it(obstacle):
    assert [entry.name for entry, _ in document_added(obstacle)] == [obstacle.name]


def test_document_of_another_image_gives_way():
    entries = document_added(
        folder("opt"), folder("opt/imgkit"), file(SPDX_PATH, data=b"old"), file(METADATA)
    )
    assert [entry.name for entry, _ in entries].count(SPDX_PATH) == 1
    assert packages(entries) == ["a"]


def test_other_name_of_the_old_document_stays():
    entries = document_added(file(SPDX_PATH, "srv/list", data=b"old"))
    assert entries[0][0].names == ("srv/list",)
    assert entries[0][1] == b"old"


def test_large_file_is_not_read_early():
    def content() -> Iterator[bytes]:
        read.append(1)
        yield b"x"

    read: list[int] = []
    large = ImageEntry(names=(METADATA,), kind=REGULAR, size_bytes=1 << 40, content=content())
    entries = with_package_list(iter((large,)), CONFIG)
    assert next(entries) is large
    assert read == []
    *_, (last, data) = [(entry, b"".join(map(bytes, entry.content))) for entry in entries]
    assert last.name == SPDX_PATH
    assert "METADATA: too large" in json.loads(data)["comment"]


def test_hard_links_of_both_kinds_are_names_of_a_package():
    cached = "root/.cache/a-1.dist-info/METADATA"
    text = b"Name: a\nVersion: 1\n"
    link = ImageEntry(names=(METADATA,), kind=HARD_LINK, link=cached)
    split = document_added(file(cached, data=text), link)
    joined = document_added(file(cached, METADATA, data=text))
    assert split[-1][1] == joined[-1][1]
    assert '"name": "a"' in split[-1][1].decode()
