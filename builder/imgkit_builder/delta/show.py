"""Facts about a .sif or delta, for ``imgkit show FILE``; `singularity inspect` shows only the base."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imgkit_builder.delta import descriptor
from imgkit_builder.delta.descriptor import Delta
from imgkit_builder.sif import image
from imgkit_builder.sif.image import ImgkitRecord

SCHEMA = 1
_MB, _KB = 1e6, 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """Content of a .sif (`record`, and `deltas` lowest first), or a delta alone (no `record`)."""

    path: str
    size_bytes: int
    arch: str
    record: ImgkitRecord | None
    deltas: tuple[Delta, ...]

    def lines(self) -> tuple[str, ...]:
        """Aligned lines for people."""
        rows = list(self._rows())
        width = max(len(key) for key, _ in rows)
        return tuple(f"{key:{width}}  {value}".rstrip() for key, value in rows)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, with its schema number."""
        return {"schema": SCHEMA, "kind": "sif" if self.record else "delta", **dataclasses.asdict(self)}

    def _rows(self) -> Iterator[tuple[str, str]]:
        record = self.record
        yield "sif" if record else "delta", f"{self.path}  {self.size_bytes / _MB:.1f} MB  {self.arch}"
        if record:
            yield "base", f"{record.source}  {record.image_id}"
            yield "", f"root partition sha256:{record.root_sha256}, {len(record.diff_ids)} layers"
            yield "", f"{record.compression}, by {record.runtime}"
        for number, delta in enumerate(self.deltas, 1):
            yield f"delta {number}" if record else "image", f"{delta.source}  {delta.image_id}"
            yield "", f"{delta.size_bytes / _KB:.1f} kB  sha256:{delta.sha256}, made {delta.created}"
            if not record:
                yield "over", str(delta.base)
        if record:
            top = self.deltas[-1] if self.deltas else record
            yield "together", f"{top.source}  {top.image_id}"


def is_file(name: str) -> bool:
    """Whether the file `name` exists and is a .sif or delta."""
    path = Path(name)
    return image.is_sif(path) or descriptor.is_delta(path)


def file_facts(name: str) -> FileFacts:
    """The facts of the .sif or delta `name`.

    Raises
    ------
    CheckFailed : the .sif has no record, is damaged, or has other deltas than recorded.
    """
    path = Path(name)
    if image.is_sif(path):
        stack = descriptor.stack(path)
        arch, record, deltas = stack.sif.arch, stack.sif.record, stack.deltas
    else:
        delta = descriptor.read(path)
        arch, record, deltas = delta.arch, None, (delta,)
    return FileFacts(path=name, size_bytes=path.stat().st_size, arch=arch, record=record, deltas=deltas)
