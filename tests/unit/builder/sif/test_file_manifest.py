"""The file manifest of an image: what it says of every file, and what it refuses."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from imgkit_builder.archive.tar_read import (
    CAPABILITY,
    CHARACTER,
    DIRECTORY,
    FIFO,
    HARD_LINK,
    REGULAR,
    SYMLINK,
)
from imgkit_builder.sif import file_manifest
from imgkit_builder.sif.entries import ImageEntry
from imgkit_builder.sif.file_manifest import (
    BakedFacts,
    BakedFactsCollector,
    Distribution,
    FileRecord,
    ManifestWriter,
)
from imgkit_entrypoints.errors import CheckFailed

ODD = "d/\udcff\"\n'é"
ENTRIES = (
    ImageEntry(names=("d",), kind=DIRECTORY, mode=0o2755, uid=7, gid=8, mtime_s=5),
    ImageEntry(names=(ODD, "d/other"), kind=REGULAR, xattrs={CAPABILITY: b"\1\2"}).with_content(b"data"),
    ImageEntry(names=("empty",), kind=REGULAR, mode=0o600),
    ImageEntry(names=("late",), kind=HARD_LINK, link="empty"),
    ImageEntry(names=("link",), kind=SYMLINK, link="../x"),
    ImageEntry(names=("null",), kind=CHARACTER, mode=0o666, device=(1, 3)),
    ImageEntry(names=("pipe",), kind=FIFO),
)
DATA = hashlib.sha256(b"data").hexdigest()
EMPTY = hashlib.sha256().hexdigest()


def written(
    folder: Path, entries: tuple[ImageEntry, ...] = ENTRIES, facts: BakedFacts | None = None
) -> bytes:
    writer = ManifestWriter(folder / "manifest")
    for entry in writer.recorded(entries):
        entry.read()
    data = writer.finish(facts or BakedFacts())
    assert not list(folder.iterdir())
    return data


def packed(*lines: object) -> bytes:
    return gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def test_every_name_is_listed_with_type_owner_and_content(tmp_path: Path) -> None:
    records = file_manifest.parse_records(written(tmp_path), where="x")
    data = FileRecord("f", 0o755, 0, 0, 4, DATA, "0102")
    assert records == {
        "d": FileRecord("d", 0o2755, 7, 8, 0, "", ""),
        ODD: data,
        "d/other": data,
        "empty": FileRecord("f", 0o600, 0, 0, 0, EMPTY, ""),
        "late": FileRecord("f", 0o600, 0, 0, 0, EMPTY, ""),
        "link": FileRecord("l", 0o777, 0, 0, 0, "../x", ""),
        "null": FileRecord("c", 0o666, 0, 0, 0, "1,3", ""),
        "pipe": FileRecord("p", 0o755, 0, 0, 0, "", ""),
    }
    assert records["d"].mode_text == "drwxr-sr-x"


def test_entries_pass_as_they_are(tmp_path: Path) -> None:
    entry = ENTRIES[1]
    writer = ManifestWriter(tmp_path / "manifest")
    passed = [(one.names, one.header, one.read()) for one in writer.recorded([entry])]
    assert passed == [(entry.names, entry.header, b"data")]
    writer.finish(BakedFacts())


def test_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    assert written(tmp_path) == written(tmp_path)


def test_facts_come_back(tmp_path: Path) -> None:
    facts = BakedFacts(manifest="{}", system="é", distributions=(Distribution(name="a", folder="/x"),))
    assert file_manifest.parse_facts(written(tmp_path, facts=facts), where="x") == facts


def collected(files: dict[str, bytes], path: str = "/usr/bin:/opt/v/bin") -> BakedFacts:
    collector = BakedFactsCollector()
    entries = [ImageEntry(names=(name,), kind=REGULAR).with_content(data) for name, data in files.items()]
    passed = {entry.name: entry.read() for entry in collector.observed(entries)}
    assert passed == files
    return collector.facts(path)


def test_packages_that_python_finds_are_facts() -> None:
    origin = json.dumps({"url": "file:///work/my%20code", "dir_info": {"editable": True}}).encode()
    info = "usr/local/lib/python3.11/dist-packages/my_code-1.dist-info"
    facts = collected(
        {
            "opt/imgkit/manifest.json": b"{}",
            f"{info}/METADATA": b"",
            f"{info}/direct_url.json": origin,
            "opt/v/lib/python3.12/site-packages/a-b-2.dist-info/METADATA": b"",
            "opt/other/lib/python3.12/site-packages/hidden-2.dist-info/METADATA": b"",
        }
    )
    assert facts.manifest == "{}"
    assert facts.distributions == (
        Distribution(name="a-b"),
        Distribution(name="my_code", folder="/work/my code"),
    )


def test_lock_leaves_only_packages_with_an_origin() -> None:
    folder = "usr/lib/python3/dist-packages"
    facts = collected(
        {
            "opt/imgkit/lock.toml": b"",
            f"{folder}/a-1.dist-info/METADATA": b"",
            f"{folder}/b-1.dist-info/METADATA": b"",
            f"{folder}/b-1.dist-info/direct_url.json": b"damaged",
        }
    )
    assert facts.distributions == (Distribution(name="b"),)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no gzip",
        packed({"schema": 1})[:-20],
        packed({"schema": 1, "manifest": 5}),
        packed({"schema": 1, "unknown": ""}),
        packed([]),
        gzip.compress(b'{"schema": 1}'),
    ],
    ids=range(7),
)
def test_damaged_facts_are_refused(data: bytes) -> None:
    with pytest.raises(CheckFailed, match="its file manifest is damaged"):
        file_manifest.parse_facts(data, where="x")


def test_facts_of_a_later_version_are_refused() -> None:
    with pytest.raises(CheckFailed, match="later version"):
        file_manifest.parse_facts(packed({"schema": 2}), where="x")


@pytest.mark.parametrize(
    "line",
    [5, ["a"], ["a", "f", "0", 0, 0, 0, "", ""], ["a", "h", 0, 0, 0, 0, "absent", ""], ["a" * (5 << 20)]],
)
def test_damaged_line_is_refused(line: object) -> None:
    with pytest.raises(CheckFailed, match="its file manifest is damaged"):
        file_manifest.parse_records(packed({"schema": 1}, line), where="x")


def test_manifest_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_manifest, "_MOST_BYTES", 1 << 20)
    lines = (["a", "f", 0, 0, 0, 0, "0" * 64, ""] for _ in range(20_000))
    with pytest.raises(CheckFailed, match="too many"):
        file_manifest.parse_records(packed({"schema": 1}, *lines), where="x")


def test_manifest_with_another_digest_is_refused() -> None:
    with pytest.raises(CheckFailed, match="another sha256"):
        file_manifest.refuse_other(b"forged", hashlib.sha256(b"true").hexdigest(), where="x")
