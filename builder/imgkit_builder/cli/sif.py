"""``imgkit sif``: any image to a .sif."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from imgkit_builder.cli.common import (
    ARCHIVE_SUFFIXES,
    JSON,
    RECIPE_SUFFIXES,
    UNPACK_LIMIT,
    complete_names,
    gigabytes,
    module_line,
    show,
    stem,
    system_of,
)
from imgkit_builder.cli.conversion import (
    MB,
    NO_TEST,
    RUNTIME,
    VERBOSE,
    engine_image,
    helper,
    next_line,
    stage_lines,
    stage_seconds,
    terminable,
)
from imgkit_builder.cli.progress import reporter
from imgkit_entrypoints.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from imgkit_builder.archive.sidecar import Sidecar
    from imgkit_builder.sif.conversion import Converted, Options, Source
    from imgkit_entrypoints.system import SystemFacts

SCHEMA = 1
_MORE_ENTRIES = "--max-entries N allows more; do not use the image if you do not know its author"


class SifCompression(str, enum.Enum):
    """Compression of the .sif."""

    AUTO = "auto"
    ZSTD = "zstd"
    GZIP = "gzip"


class Origin(str, enum.Enum):
    """Source of the image."""

    ARCHIVE = "archive"
    DAEMON = "daemon"
    LAYERS = "layers"
    OCI = "oci"
    REGISTRY = "registry"


def verb_sif(
    image: str = typer.Argument(
        metavar="ARCHIVE|RECIPE|IMAGE|OCI-DIR|-",
        autocompletion=complete_names,
        help="An archive from imgkit save or docker save (- for standard input), a built recipe, a local "
        "image, or an OCI folder.",
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="X.sif", help="File to write (default: NAME.sif here)."
    ),
    origin: Origin | None = typer.Option(
        None,
        "--from",
        help="Source (default: a file is an archive, an image comes from the engine by the faster way). "
        "daemon: write the engine's export straight into the .sif. "
        "layers: save the image's layers to disk first, and merge them.",
    ),
    compression: SifCompression = typer.Option(
        SifCompression.AUTO, help="auto: zstd if this machine can write and mount it, else gzip."
    ),
    tmpdir: Path | None = typer.Option(
        None,
        metavar="DIR",
        help="Folder for what a compressed archive or --from layers puts on disk (default: $IMGKIT_TMPDIR, "
        "$APPTAINER_TMPDIR, $SINGULARITY_TMPDIR, $TMPDIR, else beside the .sif).",
    ),
    unpack_limit: float | None = UNPACK_LIMIT,
    max_entries: int = typer.Option(
        5_000_000, min=1, metavar="N", help="Most files, folders and links in a layer."
    ),
    force: bool = typer.Option(
        False, "--force", help="Convert even if the .sif is up to date; overwrite a file that is no .sif."
    ),
    runtime: str | None = RUNTIME,
    no_test: bool = NO_TEST,
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the commands, run nothing."),
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """Convert an image to a .sif for Singularity or Apptainer, and check it.

    Needs no root and, for an archive, no Docker and no Singularity. Replaces an older .sif in one
    step, and only by a checked one; leaves an up-to-date .sif alone. An
    interrupted run leaves the old file or none.

    \b
    Examples:
      imgkit sif mn5.tar
      imgkit sif mn5
      docker save mine:1 | imgkit sif - -o mine.sif
      imgkit sif mn5.tar.zst -o /scratch/mn5.sif --tmpdir /scratch/tmp
      imgkit sif 127.0.0.1:5000/mine:1 --from registry
    """
    from imgkit_builder.archive.tar_read import TarLimits
    from imgkit_builder.sif import convert
    from imgkit_builder.sif.conversion import EngineImage, Options

    with (
        terminable(),
        reporter(as_json=as_json, verbose=verbose) as report,
        source_of(image, origin) as (source, system),
    ):
        if image == "-" and output is None:
            raise UsageError("an image from standard input has no name yet", where="-", hint="-o FILE.sif")
        target = output or Path(f"{stem(image)}.sif")
        options = Options(
            runtime=runtime,
            module_hint=module_line(system),
            compression=compression.value,
            direct={Origin.DAEMON: True, Origin.LAYERS: False}.get(origin) if origin else None,
            tmpdir=tmpdir,
            unpack_limit_bytes=gigabytes(unpack_limit),
            limits=TarLimits(entries=max_entries, hint=_MORE_ENTRIES),
            force=force,
            test=not no_test,
            helper=helper(source if isinstance(source, EngineImage) else None),
        )
        if dry_run:
            lines, data = _planned(source, target, options)
        else:
            converted = convert.convert(source, target, options, report)
            lines, data = _result(converted, target)
    show(data, *lines, as_json=as_json)


@contextlib.contextmanager
def source_of(image: str, origin: Origin | None) -> Iterator[tuple[Source, SystemFacts | None]]:
    """Yield the source called `image`, and its system if that is known; an engine stays connected."""
    from imgkit_builder.archive import sidecar
    from imgkit_builder.sif.conversion import Archive, OciFolder, Piped, Registry

    path = Path(image)
    if image == "-":
        yield Piped(stream=sys.stdin.buffer), None
    elif origin is Origin.REGISTRY:
        yield Registry(reference=image.removeprefix("docker://")), system_of(image)
    elif (
        origin not in (Origin.DAEMON, Origin.LAYERS) and path.is_file() and path.suffix not in RECIPE_SUFFIXES
    ):
        _refuse_sif(path)
        described = sidecar.read(path)
        if described:
            _refuse_unfinished(path, described)
        yield Archive(path=path), described.system if described else None
    elif origin is Origin.OCI or (origin is None and (path / "oci-layout").is_file()):
        if not (path / "oci-layout").is_file():
            raise UsageError("not an OCI folder: it has no file oci-layout", where=image)
        yield OciFolder(path=path), None
    else:
        if image.endswith(ARCHIVE_SUFFIXES):
            raise UsageError(
                "there is no such archive",
                where=image,
                hint=f"save it on the build host: imgkit save {stem(image)}",
            )
        with engine_image(image) as found:
            yield found, system_of(image)


def _refuse_unfinished(path: Path, described: Sidecar) -> None:
    """Raise CheckFailed if the save of this archive has not come to its end."""
    from imgkit_builder.archive import read, sidecar
    from imgkit_builder.base.progress import Silent

    if sidecar.read_sha256(path) is None:
        what, mend = sidecar.incomplete(path, read.sha256(path, report=Silent()), described)
        raise CheckFailed(what, where=str(path), hint=mend)


def _refuse_sif(path: Path) -> None:
    from imgkit_builder.sif.image import is_sif

    if is_sif(path):
        raise UsageError("it is a .sif already", where=str(path), hint=f"check it: imgkit test {path}")


def _planned(source: Source, target: Path, options: Options) -> tuple[list[str], dict[str, Any]]:
    from imgkit_builder.sif import convert

    convert.check_target(target.absolute(), force=options.force)
    commands = convert.commands(source, target.absolute(), options)
    data = {"schema": SCHEMA, "dry_run": True, "sif": str(target), "commands": list(commands)}
    return list(commands), data


def _result(converted: Converted, target: Path) -> tuple[list[str], dict[str, Any]]:
    following = next_line(target, "dist-train")
    record = converted.record
    data = {
        "schema": SCHEMA,
        "sif": str(converted.path),
        "size_bytes": converted.size_bytes,
        "arch": converted.arch,
        "up_to_date": converted.up_to_date,
        "record": dataclasses.asdict(record),
        "seconds": stage_seconds(converted.stages),
        "log": str(converted.log) if converted.log else None,
        "next": following,
    }
    lines = stage_lines(converted.stages)
    about = f"{converted.size_bytes / MB:.1f} MB  {converted.arch}  {record.compression}, {record.runtime}"
    lines.append(f"{target}  {about}{'  up to date' if converted.up_to_date else ''}")
    if record.image_id:
        lines.append(f"image  {record.image_id}")
    lines += [f"root   sha256:{record.root_sha256}", f"next:  {following}"]
    return lines, data
