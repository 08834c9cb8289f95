"""What lies over an old image shows the new one: random trees, and the cases that they seldom hit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from imgkit_builder.archive.tar_read import CHARACTER, DIRECTORY, HARD_LINK, REGULAR, SYMLINK
from imgkit_builder.delta import changes as changes_module
from imgkit_builder.delta.changes import Changes
from imgkit_builder.sif import file_manifest
from imgkit_builder.sif.entries import ImageEntry
from imgkit_builder.sif.file_manifest import BakedFacts, FileRecord, ManifestWriter
from imgkit_entrypoints.errors import CheckFailed

Records = dict[str, FileRecord]
WHITEOUT = FileRecord("c", 0, 0, 0, 0, "0,0", "")


def file(name: str, data: bytes = b"", mode: int = 0o644) -> ImageEntry:
    return ImageEntry(names=(name,), kind=REGULAR, mode=mode).with_content(data)


def folder(name: str, mode: int = 0o755) -> ImageEntry:
    return ImageEntry(names=(name,), kind=DIRECTORY, mode=mode)


def link(name: str, target: str) -> ImageEntry:
    return ImageEntry(names=(name,), kind=HARD_LINK, link=target)


def records(entries: Iterable[ImageEntry], tmp_path: Path) -> Records:
    writer = ManifestWriter(tmp_path / "manifest")
    for entry in writer.recorded(entries):
        entry.read()
    return file_manifest.parse_records(writer.finish(BakedFacts()), where="x")


class Compared:
    """The changes from `old` to `new`, and how often the new image was read."""

    def __init__(self, old: list[ImageEntry], new: list[ImageEntry], tmp_path: Path) -> None:
        self.reads = 0
        self.changes = Changes(records(old, tmp_path))

        @contextlib.contextmanager
        def reopen() -> Iterator[Iterator[ImageEntry]]:
            self.reads += 1
            yield iter(new)

        self.delta = records(self.changes.entries(reopen), tmp_path)


def laid_over(delta: Records, old: Records) -> Records:
    """What an overlay mount shows."""
    shown = dict(old)
    for path, record in delta.items():
        if record.type != "d" or shown.get(path, record).type != "d":
            for below in [name for name in shown if name.startswith(f"{path}/")]:
                del shown[below]
        shown[path] = record
    return {path: record for path, record in shown.items() if record != WHITEOUT}


def random_tree(source: random.Random) -> list[ImageEntry]:
    entries: dict[str, ImageEntry] = {}
    folders = [""]
    for _ in range(40):
        above = source.choice(folders)
        name = f"{above}/{source.choice('abcd')}".lstrip("/")
        regular = [entry.name for entry in entries.values() if entry.kind == REGULAR]
        made = source.choice(
            [
                folder(name, source.choice([0o755, 0o700])),
                file(name, source.choice([b"", b"1", b"22", b"33"]), source.choice([0o644, 0o755])),
                ImageEntry(names=(name,), kind=SYMLINK, link=source.choice("xy")),
                link(name, source.choice(regular or ["absent"])),
            ]
        )
        if name in entries or (made.kind == HARD_LINK and not regular):
            continue
        entries[name] = made
        folders += [name] if made.kind == DIRECTORY else []
    return list(entries.values())


@pytest.mark.parametrize("seed", range(200))
def test_delta_over_the_old_image_shows_the_new_one(seed: int, tmp_path: Path) -> None:
    source = random.Random(seed)  # noqa: S311 - trees to compare
    old, new = random_tree(source), random_tree(source)
    compared = Compared(old, new, tmp_path)
    assert laid_over(compared.delta, records(old, tmp_path)) == records(new, tmp_path)
    folders = [path for path, record in compared.delta.items() if record.type == "d"]
    order = list(compared.delta)
    assert all(order.index(path) > order.index(path.rpartition("/")[0]) for path in order if "/" in path)
    assert compared.changes.deleted == list(compared.delta.values()).count(WHITEOUT)
    assert compared.changes.changed == len(order) - len(folders) - compared.changes.deleted


def test_same_files_are_no_change_whatever_their_time(tmp_path: Path) -> None:
    old = [folder("d"), file("d/a", b"1"), link("d/b", "d/a")]
    new = [entry.changed(mtime_s=9) for entry in old]
    assert Compared(old, new, tmp_path).delta == {}


def test_content_decides_where_size_and_time_are_equal(tmp_path: Path) -> None:
    compared = Compared([file("a", b"1")], [file("a", b"2")], tmp_path)
    assert list(compared.delta) == ["a"]
    assert compared.reads == 1


def test_large_file_that_differs_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "_MOST_HELD_BYTES", 3)
    compared = Compared(
        [file("a", b"1111"), file("b", b"1111")], [file("a", b"2222"), file("b", b"1111")], tmp_path
    )
    assert list(compared.delta) == ["a"]
    assert compared.reads == 2


def test_new_name_of_an_unchanged_file_has_its_content(tmp_path: Path) -> None:
    old = [file("a", b"1")]
    compared = Compared(old, [*old, link("b", "a"), link("c", "a")], tmp_path)
    assert compared.delta == {name: records(old, tmp_path)["a"] for name in "bc"}
    assert compared.reads == 2


OLD_CODE = [folder("__pycache__"), file("__pycache__/a.cpython-311.pyc", b"old time"), file("a.py", b"1")]


def test_bytecode_stays_with_an_unchanged_source(tmp_path: Path) -> None:
    """Its header has the time of the source, which a repeated installation changes."""
    new = [OLD_CODE[0], file("__pycache__/a.cpython-311.pyc", b"another time"), OLD_CODE[2]]
    assert Compared(OLD_CODE, new, tmp_path).delta == {}
    assert Compared(OLD_CODE, [new[0], new[2], new[1]], tmp_path).delta == {}


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_bytecode_comes_with_a_changed_source(tmp_path: Path, order: tuple[int, ...]) -> None:
    new = [OLD_CODE[0], file("__pycache__/a.cpython-311.pyc", b"new time"), file("a.py", b"2")]
    compared = Compared(OLD_CODE, [new[number] for number in order], tmp_path)
    assert compared.delta == records(new, tmp_path)


def test_bytecode_whose_source_is_gone_is_a_change(tmp_path: Path) -> None:
    new = [OLD_CODE[0], file("__pycache__/a.cpython-311.pyc", b"new time")]
    compared = Compared(OLD_CODE, new, tmp_path)
    assert compared.delta == {**records(new, tmp_path), "a.py": WHITEOUT}


def test_files_that_an_engine_makes_are_left_alone(tmp_path: Path) -> None:
    old = [
        folder("dev"),
        ImageEntry(names=("dev/x",), kind=CHARACTER),
        folder("etc"),
        file("etc/hosts", b"1"),
    ]
    new = [folder("etc"), file("etc/resolv.conf", b"1"), folder("proc", 0o555)]
    assert Compared(old, new, tmp_path).delta == {}


def test_deleted_folder_is_one_whiteout(tmp_path: Path) -> None:
    compared = Compared([folder("d"), folder("d/e"), file("d/e/f")], [], tmp_path)
    assert compared.delta == {"d": WHITEOUT}


def test_hard_link_to_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="which is not before it"):
        Compared([], [link("a", "absent")], tmp_path)


def test_file_below_a_link_is_refused(tmp_path: Path) -> None:
    """Nothing is written through a link of the image."""
    new = [ImageEntry(names=("opt",), kind=SYMLINK, link="usr"), file("opt/imgkit", b"1")]
    with pytest.raises(CheckFailed, match="/opt of the image is not a folder"):
        Compared([], new, tmp_path)
