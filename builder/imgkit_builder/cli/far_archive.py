"""An archive that ``imgkit run`` lets a remote convert: its system, and what ``--plan`` says about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_builder.cli.progress import reporter
from imgkit_entrypoints.errors import UsageError

if TYPE_CHECKING:
    from imgkit_builder.job.request import Request, SubmittedJob
    from imgkit_builder.project.origins import ValueSource
    from imgkit_builder.remote.conversion import Conversion


def ordered(
    file: Path, request: Request, recipe: str, *, keep: Callable[[SubmittedJob], None], as_json: bool
) -> Conversion:
    """The conversion of `file`; its system is that of its image, or else of the remote's `recipe`.

    Parameters
    ----------
    keep : keeps the record of the job.

    Raises
    ------
    UsageError : neither is known, or `file` holds no image, or several.
    CheckFailed : it is damaged.
    """
    from imgkit_builder.cli import zipapp
    from imgkit_builder.recipe import targets
    from imgkit_builder.remote import conversion

    target = conversion.target_of(file)
    if target is None and not recipe:
        raise UsageError(
            "neither the archive nor the remote says which system it is for",
            where=str(file),
            hint="a remote with a recipe: imgkit remote add NAME USER@HOST:DIR --recipe RECIPE --replace",
        )
    with reporter(as_json=as_json) as report:
        archive = conversion.read(file, report)
    return conversion.Conversion(
        archive=archive,
        target=target or targets.find(recipe),
        request=request,
        write_tool=zipapp.bundle,
        keep=keep,
    )


def told(wanted: Conversion, home: str, remote: str) -> tuple[ValueSource, ...]:
    """What a run would do with the archive, for people."""
    from imgkit_builder.project.origins import ValueSource
    from imgkit_builder.remote import conversion

    size = f"{wanted.archive.size_bytes / 1e6:.1f} MB"
    rows = conversion.sketch(wanted, home).text.splitlines()
    asked = " ".join(row.split(" ", 1)[1] for row in rows if row.startswith(("#SBATCH ", "#PBS ")))
    return (
        ValueSource(name="image-id", value=wanted.archive.image_id, flag="RECIPE"),
        ValueSource(name="to-send", value=f"{size}, if {remote} does not have the image", flag="RECIPE"),
        ValueSource(name="conversion", value=f"then, by a job: {asked}", flag="system.queue.sif"),
    )
