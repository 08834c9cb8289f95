"""Compare each file of a squashfs with its file manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import disk_usage

from imgkit_builder.base import files
from imgkit_builder.base.sizes import size_text
from imgkit_builder.sif.file_manifest import FileRecord
from imgkit_builder.sif.unsquash import ListedFile, Squashfs
from imgkit_builder.sif.workspace import scratch
from imgkit_entrypoints.errors import UsageError


def differences(squashfs: Squashfs, records: Mapping[str, FileRecord]) -> Iterator[str]:
    """Yield the names in the squashfs or in the manifest that the other one lacks, or states otherwise.

    Raises
    ------
    UsageError : there is no room for the files.
    CheckFailed, ToolFailed, ToolMissing : as of `Squashfs.listed` and `Squashfs.unpack`.
    """
    expected = {
        f"{name} -> {record.content}" if record.type == "l" else name: (name, record)
        for name, record in records.items()
    }
    # unsquashfs lists a name with a line break on two lines: only its content is compared.
    broken = {text: expected.pop(text) for text in list(expected) if "\n" in text}
    cut = {text.partition("\n")[0] for text in broken}
    with scratch(squashfs.path) as folder:
        needed, free = sum(record.size_bytes for record in records.values()), disk_usage(folder).free
        if free < needed:
            raise UsageError(
                f"{size_text(free)} are free in {folder.parent}, and the files have {size_text(needed)}",
                hint="export IMGKIT_TMPDIR=DIR with a folder on a larger disk",
            )
        squashfs.unpack(folder / "files")
        for file in squashfs.listed():
            if file.path in cut and file.path not in expected:
                continue
            name, record = expected.pop(file.path, (file.path, None))
            if record is None or _differs(file, record) or not _has_content(folder / "files" / name, record):
                yield f"/{name}"
        for name, record in broken.values():
            if not _has_content(folder / "files" / name, record):
                yield f"/{name}"
    yield from (f"/{name}" for name, _ in expected.values())


def _differs(file: ListedFile, record: FileRecord) -> bool:
    size = record.content if record.type in ("c", "b") else str(record.size_bytes)
    is_as_recorded = (file.mode, file.uid, file.gid) == (record.mode_text, record.uid, record.gid)
    return not is_as_recorded or (record.type in ("f", "c", "b") and file.size != size)


def _has_content(path: Path, record: FileRecord) -> bool:
    if record.type != "f":
        return record.type in ("c", "b") or os.path.lexists(path)  # only root makes devices
    if not path.is_file():
        return False
    # An image has files that nobody but root may read.
    path.chmod(0o600)
    with files.open_regular(path) as stream:
        return files.sha256(stream, 0, record.size_bytes) == record.content
