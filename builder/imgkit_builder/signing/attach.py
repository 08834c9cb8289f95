"""Adds a statement to a .sif as one more object, which belongs to the file and its signature from then on."""

from __future__ import annotations

from pathlib import Path

from imgkit_builder.base import files
from imgkit_builder.delta import apply
from imgkit_builder.sif import coverage, image, table
from imgkit_builder.sif.image import IMGKIT_OBJECT, DataType
from imgkit_builder.sif.table import NewObject
from imgkit_entrypoints.errors import CheckFailed

NAME = "imgkit-provenance"


def add(path: Path, statement: str) -> None:
    """Write `statement` into the .sif `path`, in place of an older one; a failure leaves the file as it was.

    The statement lies before imgkit's record and the coverage object, which is written anew and covers it. It
    is about the partitions: the digest of the whole file would change by adding it.

    Raises
    ------
    CheckFailed : the .sif is signed, or is not one of imgkit's.
    """
    sif = image.read(path)
    if sif.record is None or sif.root is None:
        raise CheckFailed("imgkit did not make this .sif", where=str(path), hint="write a file: -o FILE")
    if sif.signatures:
        raise CheckFailed(
            "it is signed, and one more object would break the signature",
            where=str(path),
            hint=f"write a file: imgkit provenance {path}\nor add the statement first, and sign then",
        )
    part = files.temporary_name(path)
    try:
        apply.clone(path, part)
        coverage.clear(part, names=(IMGKIT_OBJECT, coverage.NAME, NAME))
        data = statement.encode()
        table.add(part, NewObject(datatype=DataType.JSON, name=NAME, group=sif.root.group, data=data))
        coverage.put_record(part, sif.record)
        if faults := coverage.check(part).faults:
            raise CheckFailed(
                f"it cannot be read back: {faults[0]}", where=str(path), hint="please report this"
            )
        part.chmod(path.stat().st_mode & 0o777)
        files.publish(part, path)
    finally:
        part.unlink(missing_ok=True)
