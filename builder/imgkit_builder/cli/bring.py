"""Build where needed, and let a remote have the image by the least that has to move."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError

if TYPE_CHECKING:
    from imgkit_builder.base.progress import Reporter
    from imgkit_builder.delta.descriptor import Delta, Stack
    from imgkit_builder.job.code import CodeFolder
    from imgkit_builder.job.request import CodeRecord, Job
    from imgkit_builder.remote.connection import Connection
    from imgkit_builder.remote.store import Store

_WORTH = 0.5
"""A delta of more than this share of the .sif below it is not worth two files at every start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The image to bring."""

    recipe: str
    """The user's word for its recipe; empty for an archive or a .sif."""
    base: str | None
    """Another base than the recipe's."""
    sif: Path
    """The .sif here, which may have to be made."""
    whole: bool
    """Send no delta."""
    most_per_s: float | None
    """Most bytes per second to send."""
    code: CodeFolder | None = None
    """A folder to lay over the image."""
    archive: Path | None = None
    """The archive or OCI folder of the image; None for a recipe or a .sif."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The image on the remote."""

    home: str
    """imgkit's folder there."""
    image: str
    """Path of the .sif in it."""
    overlay: str = ""
    """Path of the delta over it; empty if there is none."""
    delta: Delta | None = None
    code: CodeRecord | None = None
    code_files: tuple[str, ...] = ()
    """Paths of the deltas of the code, lowest first."""

    @property
    def image_id(self) -> str:
        """The id of the image with its delta, which is in the name of its file."""
        return self.delta.image_id if self.delta else f"sha256:{Path(self.image).name.partition('-')[0]}"

    def over(self, job: Job) -> Job:
        """`job`, which has been resolved with the .sif alone, with the delta and the code over it."""
        from imgkit_builder.job import contents

        if self.delta:
            job = contents.laid_over(job, f"{self.home}/{self.overlay}", self.delta)
        if self.code:
            job = contents.with_code(job, self.code, [f"{self.home}/{file}" for file in self.code_files])
        return job


def bring(wanted: Wanted, far: Connection, program: str, report: Reporter) -> Placed:
    """Let the remote have the image: nothing, a delta or the .sif is sent, and then the code.

    Parameters
    ----------
    program : the program of the scheduler, which must be there.

    Raises
    ------
    UsageError : the remote has no such program, or imgkit has not made the .sif.
    ImgkitError : as of the build, the conversion and the transfer.
    """
    from imgkit_builder.remote import store
    from imgkit_builder.sif import image

    name = ""
    if wanted.archive:
        name = _converted_archive(wanted, wanted.archive, far.remote.name, report)
        image_id = f"sha256:{name.partition('-')[0]}"
    elif wanted.recipe:
        image_id, is_locked = _built(wanted, report)
        if is_locked:
            # Its .sif has an id of its own (docs/adr/0019).
            name = _converted(wanted, report)
            image_id = f"sha256:{name.partition('-')[0]}"
    else:
        record = image.read(wanted.sif).record
        if record is None:
            raise UsageError(
                "imgkit has not made this .sif",
                where=str(wanted.sif),
                hint="imgkit sif makes one of an archive or image",
            )
        image_id, name = record.image_id, image.store_name(record)
    report.stage(f"look at {far.remote.name}")
    there = store.look(far, image_id=image_id, program=program, wanted=name)
    if not there.has_program:
        raise UsageError(
            f"{far.remote.address} has no {program}",
            where="--on",
            hint=f"imgkit remote check {far.remote.name}",
        )
    placed = _image(wanted, far, there, image_id, name, report)
    if wanted.code is None:
        return placed
    files = _code(wanted, wanted.code, far, there, report)
    return dataclasses.replace(placed, code=wanted.code.record, code_files=files)


def _image(
    wanted: Wanted, far: Connection, there: Store, image_id: str, name: str, report: Reporter
) -> Placed:
    """Send the image if the remote lacks it; `name` is that of a .sif in the store."""
    if placed := _placed(there, whole=wanted.whole):
        report.note(f"to send: nothing; {far.remote.name} has the image")
        return placed
    if (
        wanted.recipe
        and not name
        and not wanted.whole
        and (placed := _by_delta(wanted, far, there, image_id, report))
    ):
        return placed
    if wanted.recipe and not name:
        name = _converted(wanted, report)
    _sent(wanted, far, there, wanted.sif, f"images/{name}", report)
    return Placed(home=there.home, image=f"images/{name}")


def _code(
    wanted: Wanted, code: CodeFolder, far: Connection, there: Store, report: Reporter
) -> tuple[str, ...]:
    """Send what the remote lacks of the code; the result is the paths of its deltas, lowest first."""
    from imgkit_builder.cli.conversion import helper, terminable
    from imgkit_builder.remote import code as far_code
    from imgkit_builder.sif.conversion import Options

    with terminable(), far_code.plan(code, there, Options(helper=helper()), report) as plan:
        if plan.file is None:
            report.note(f"to send: no code; {far.remote.name} has that of {code.folder}")
        else:
            _sent(wanted, far, there, plan.file, plan.targets[-1], report)
    return plan.targets


def _placed(there: Store, *, whole: bool) -> Placed | None:
    """The image as the remote has it; None if it does not."""
    for name in there.images:
        return Placed(home=there.home, image=f"images/{name}")
    for held in () if whole else there.deltas:
        overlay = f"deltas/{held.name}"
        return Placed(home=there.home, image=f"images/{held.base}", overlay=overlay, delta=held.delta)
    return None


def _sent(wanted: Wanted, far: Connection, there: Store, file: Path, target: str, report: Reporter) -> None:
    from imgkit_builder.remote import transfer

    size = file.stat().st_size
    shown = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    report.note(f"to send: {file}, {shown}")
    transfer.upload(far, file, home=there.home, target=target, report=report, most_per_s=wanted.most_per_s)


def _built(wanted: Wanted, report: Reporter) -> tuple[str, bool]:
    """The id of the recipe's image, which is built if it is not up to date, and whether it has a lock."""
    from imgkit_builder.cli.build_image import make, up_to_date
    from imgkit_builder.cli.build_options import BuildOptions

    options = BuildOptions(base=wanted.base)
    done = up_to_date(wanted.recipe, options, report)
    if done is None:
        from imgkit_builder.recipe.load import load

        done = make(load(wanted.recipe), wanted.recipe, options, report)
    return str(done.data["id"]), bool(done.data.get("locked"))


def _converted(wanted: Wanted, report: Reporter) -> str:
    """Make the .sif here; the result is its name in the store."""
    from imgkit_builder.cli.conversion import engine_image, helper, terminable
    from imgkit_builder.sif import convert, image
    from imgkit_builder.sif.conversion import Options

    with terminable(), engine_image(wanted.recipe) as source:
        options = Options(helper=helper(source))
        return image.store_name(convert.convert(source, wanted.sif, options, report).record)


def _converted_archive(wanted: Wanted, archive: Path, remote: str, report: Reporter) -> str:
    """Make the .sif of the archive here; the result is its name in the store."""
    from imgkit_builder.cli.conversion import helper, terminable
    from imgkit_builder.cli.sif import source_of
    from imgkit_builder.sif import convert, image
    from imgkit_builder.sif.conversion import Options

    try:
        with terminable(), source_of(str(archive), None) as (source, _):
            done = convert.convert(source, wanted.sif, Options(helper=helper()), report)
    except ToolMissing as error:
        there = f"imgkit submit RECIPE --sif {shlex.quote(archive.name)}"
        hint = f"{error.hint}\nor copy it to {remote}, and there: {there}, then imgkit submit RECIPE"
        raise ToolMissing(error.what, where=str(archive), hint=hint) from error
    return image.store_name(done.record)


def _by_delta(
    wanted: Wanted, far: Connection, there: Store, image_id: str, report: Reporter
) -> Placed | None:
    """Send a delta over the .sif that is both here and there; None where there is none, or it is large."""
    from imgkit_builder.delta import descriptor
    from imgkit_builder.remote import store

    try:
        stack = descriptor.stack(wanted.sif)
    except (CheckFailed, UsageError):
        return None
    base = store.base_name(stack.base)
    if base not in there.names or stack.base.image_id == image_id:
        return None
    try:
        file, delta = _difference(wanted, stack, image_id, report)
    except CheckFailed as error:
        report.note(f"no delta over {wanted.sif}: {error.what}")
        return None
    if file.stat().st_size > _WORTH * stack.sif.size_bytes:
        size = file.stat().st_size / 1e6
        report.note(f"the delta over {wanted.sif} has {size:.1f} MB: a new .sif goes instead")
        return None
    overlay = f"deltas/{store.delta_name(delta)}"
    _sent(wanted, far, there, file, overlay, report)
    return Placed(home=there.home, image=f"images/{base}", overlay=overlay, delta=delta)


def _difference(wanted: Wanted, stack: Stack, image_id: str, report: Reporter) -> tuple[Path, Delta]:
    """The delta of the image over the .sif here; one that an earlier run has made is used again."""
    from imgkit_builder.cli.conversion import engine_image, helper, terminable
    from imgkit_builder.delta import descriptor
    from imgkit_builder.delta.make import make
    from imgkit_builder.sif.conversion import Options

    file = wanted.sif.with_suffix(".imgdelta")
    if descriptor.is_delta(file):
        known = descriptor.read(file)
        if known.image_id == image_id and known.base == stack.base:
            return file, known
    with terminable(), engine_image(wanted.recipe) as source:
        return file, make(source, wanted.sif, file, Options(helper=helper(source)), report).delta
