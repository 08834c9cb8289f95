"""Which way a conversion takes on this machine, with which programs, and the commands that say so."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from imgkit_builder.base import files
from imgkit_builder.base.progress import Reporter
from imgkit_builder.oci.config import epoch
from imgkit_builder.sif import compression, mksquashfs, runtime_build, squash_ways
from imgkit_builder.sif.compression import Compression
from imgkit_builder.sif.options import EngineImage, Options, Registry, Source, name_of
from imgkit_builder.sif.runtime import RuntimeTool, find_runtime, runtime_if_any
from imgkit_builder.sif.squasher import Squasher, SquashOrder
from imgkit_builder.sif.workspace import tmp_base
from imgkit_entrypoints.errors import ImgkitError, ToolMissing

Way = Literal["stream", "export", "layers"]
"""How the files travel; the record calls it the route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a conversion works with."""

    way: Way
    packing: Compression
    squasher: Squasher | None
    """None where a runtime builds."""
    tool: RuntimeTool | None
    """The runtime that builds, or else the one that tests the file, where there is one."""
    notes: tuple[str, ...]
    """Sentences for the user."""


def choose(source: Source, options: Options) -> Means:
    """The best way that works here.

    Raises
    ------
    ToolMissing : nothing here squashes, and no runtime builds.
    UsageError : the compression that was asked for is not possible.
    """
    if isinstance(source, Registry):
        return _by_runtime(options, "")
    try:
        squasher = squash_ways.choose(options.helper)
    except ToolMissing as error:
        if options.direct:
            raise
        return _by_runtime(options, error.what)
    way: Way = "export" if isinstance(source, EngineImage) and options.direct is not False else "stream"
    exported = "the engine's export goes straight into the .sif; --from layers: its layers do"
    packing = compression.choose(None, options.compression, lacks_zstd=squasher.lacks_zstd)
    notes = (exported if way == "export" else "", squasher.note, packing.note)
    return Means(
        way=way,
        packing=packing,
        squasher=squasher,
        tool=runtime_if_any(options.runtime) if options.test else None,
        notes=tuple(filter(None, notes)),
    )


def ready(means: Means, options: Options, report: Reporter) -> Means:
    """Tell `means`, and get what they need, or else those of the runtime, if there is one."""
    for note in means.notes:
        report.note(note)
    if means.squasher is None:
        return means
    try:
        means.squasher.prepare(report)
    except ImgkitError as error:
        try:
            other = _by_runtime(options, f"{means.squasher}: {error.what}")
        except ImgkitError:
            raise error from None
        for note in other.notes:
            report.note(note)
        return other
    return means


def _by_runtime(options: Options, obstacle: str) -> Means:
    """The runtime builds; `obstacle` says what keeps imgkit from it, empty where only a runtime can."""
    why = f"the runtime builds the .sif from the image's layers (slower): {obstacle}" if obstacle else ""
    try:
        builder = find_runtime(options.runtime, module_hint=options.module_hint)
    except ToolMissing as error:
        if not obstacle:
            raise
        more = f"or without a runtime: {squash_ways.INSTALL}"
        raise ToolMissing(error.what, hint=f"{error.hint}; {more}") from error
    lacks = mksquashfs.lacks_zstd(mksquashfs.find())
    packing = compression.choose(builder.capabilities, options.compression, lacks_zstd=lacks)
    notes = tuple(filter(None, (why, packing.note)))
    return Means(way="layers", packing=packing, squasher=None, tool=builder, notes=notes)


def commands(source: Source, target: Path, options: Options) -> tuple[str, ...]:
    """What a conversion would run, for people; temporary names are placeholders.

    Raises
    ------
    UsageError, ToolMissing : as in `choose`.
    """
    means = choose(source, options)
    part = files.temporary_name(target, "TOKEN")
    folder = tmp_base(target, options.tmpdir) / f"{files.TEMPORARY}sif.TOKEN"
    lines = [f"# {note}" for note in means.notes]
    if means.squasher is None:
        assert means.tool is not None  # noqa: S101 - for the type checker: this way has one
        words = runtime_build.source_words(means.tool, source)
        lines.append(f"cd {folder}")
        if not isinstance(source, Registry):
            lines.append("# lay out the image as an OCI folder with uncompressed layers")
        lines.append(
            shlex.join([str(means.tool.path), *runtime_build.words(means.tool, means.packing, part, words)])
        )
    else:
        squashed = means.squasher.shown(_order(part, folder, means.packing))
        name = name_of(source)
        if means.way == "export":
            lines.append(f"docker export CONTAINER-OF-{name} | {squashed}")
        else:
            lines += [f"# merge the layers of {name} into one stream", f"... | {squashed}"]
    lines.append("# add the record of the image, and digests of everything in the file")
    return (*lines, f"mv {part} {target}")


def _order(part: Path, folder: Path, packing: Compression) -> SquashOrder:
    """An order that is only shown."""
    return SquashOrder(
        target=part,
        offset=0,
        created_s=epoch(""),
        compression=packing,
        folder=folder,
        log=sys.stderr,
        on_line=lambda _: None,
        note=lambda _: None,
    )
