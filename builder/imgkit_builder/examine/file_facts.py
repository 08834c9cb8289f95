"""The facts that ``imgkit show`` prints about a .sif, a .sqsh, or a file of ``imgkit add``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from imgkit_builder.packages import record as packages_record
from imgkit_builder.packages.record import PackagesRecord
from imgkit_builder.sif import image, sqsh
from imgkit_builder.sif.image import ImgkitRecord
from imgkit_entrypoints.errors import CheckFailed

# Version of the JSON form.
_SCHEMA = 2
# Bytes in a megabyte, for sizes that are printed for people.
_MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """Facts about a .sif or .sqsh that imgkit wrote: size, architecture, and the record stored in it."""

    kind: Literal["sif", "sqsh"]
    path: str
    size_bytes: int
    arch: str
    record: ImgkitRecord

    def lines(self) -> tuple[str, ...]:
        """Return the facts as aligned lines that are printed for people."""
        rows = list(self._rows())
        width = max(len(key) for key, _ in rows)
        return tuple(f"{key:{width}}  {value}".rstrip() for key, value in rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form with its schema number. The list of packages in the record is left out."""
        record = dataclasses.asdict(self.record)
        del record["facts"]
        return {
            "schema": _SCHEMA,
            "kind": self.kind,
            "path": self.path,
            "size_bytes": self.size_bytes,
            "arch": self.arch,
            "record": record,
        }

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the table as pairs of name and value.

        The name is empty in a row that continues the row above it.
        """
        record = self.record
        yield self.kind, f"{self.path}  {self.size_bytes / _MB:.1f} MB  {self.arch}"
        yield "image", f"{record.source}  {record.image_id}"
        root = "squashfs" if self.kind == "sqsh" else "root partition"
        yield "", f"{root} sha256:{record.root_sha256}, {len(record.diff_ids)} layers"
        yield "", f"{record.compression}, by {record.runtime}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagesFacts:
    """Facts about a file of packages that ``imgkit add`` wrote: its size, and the record stored in it."""

    path: str
    size_bytes: int
    record: PackagesRecord

    def lines(self) -> tuple[str, ...]:
        """Return the facts as aligned lines that are printed for people."""
        record = self.record
        rows = [
            ("packages", f"{self.path}  {self.size_bytes / _MB:.1f} MB  {record.arch}"),
            ("for", f"{record.image}  {record.image_id}  Python {record.python}"),
            ("made by", record.command(record.image, self.path)),
            *(("", f"{package.name} {package.version}") for package in record.packages),
        ]
        return tuple(f"{key:8}  {value}".rstrip() for key, value in rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with its schema number."""
        return {"schema": _SCHEMA, "kind": "packages", **dataclasses.asdict(self)}


def is_image_file(name: str) -> bool:
    """Return whether the file `name` exists and is a .sif or .sqsh."""
    path = Path(name)
    return image.is_sif(path) or sqsh.is_sqsh(path)


def read_file_facts(name: str) -> FileFacts | PackagesFacts:
    """Return the facts about the file `name`, which is a .sif, a .sqsh, or a file of ``imgkit add``.

    Most of them are from the record, a description of the content that imgkit writes into such a file.

    Raises
    ------
    CheckFailed : the file is damaged, or has no record because another program made it.
    """
    path = Path(name)
    if packages_record.is_packages(path):
        stored_record = packages_record.read_record(path)
        return PackagesFacts(path=name, size_bytes=path.stat().st_size, record=stored_record)
    if image.is_sif(path):
        sif = image.read(path)
        kind: Literal["sif", "sqsh"] = "sif"
        record, arch = sif.record, sif.arch
    else:
        kind = "sqsh"
        record = sqsh.read_record(path)
        # A squashfs itself does not tell the architecture. Only the record in the file does.
        arch = record.arch if record else ""
    if record is None or not record.image_id:
        raise CheckFailed(
            f"it has no record of imgkit: another program made this .{kind}",
            where=name,
            hint=f"imgkit verify {name}",
        )
    return FileFacts(kind=kind, path=name, size_bytes=path.stat().st_size, arch=arch, record=record)
