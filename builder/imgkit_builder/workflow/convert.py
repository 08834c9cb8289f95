"""Find the image to convert, and convert it to a .sif or .sqsh.

The image is an archive, an OCI folder, an image of the engine, or standard input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from imgkit_builder import engine as engines
from imgkit_builder.archive import read, sidecar
from imgkit_builder.base.progress import SILENT, Reporter
from imgkit_builder.base.suffixes import ARCHIVE_SUFFIXES, RECIPE_SUFFIXES
from imgkit_builder.sif import convert as conversion
from imgkit_builder.sif.conversion import Options
from imgkit_builder.sif.entries import Archive, OciFolder, Piped
from imgkit_builder.sif.image import is_sif
from imgkit_builder.sif.sqsh import is_sqsh
from imgkit_builder.workflow.names import (
    image_name,
    module_line,
    name_stem,
    system_of,
)
from imgkit_entrypoints.errors import CheckFailed, ToolMissing, UsageError

if TYPE_CHECKING:
    from imgkit_builder.sif.conversion import Converted
    from imgkit_builder.sif.entries import EngineImage, Source
    from imgkit_entrypoints.system import CompressionChoice, SystemFacts

_DEFAULTS = Options()


class PlannedConversion(NamedTuple):
    """What a conversion would do."""

    target: Path
    """The file to write."""
    commands: tuple[str, ...]


class _Conversion(NamedTuple):
    """An image, the file to convert it to, and the options."""

    source: Source
    target: Path
    options: Options
    """The options of the user, completed by those of the image's system."""


def convert(
    image: str | Path,
    sif: str | Path | None = None,
    options: Options = _DEFAULTS,
    *,
    report: Reporter = SILENT,
) -> Converted:
    """Convert `image` to the file `sif`, which may also be a .sqsh, and check the result.

    An existing file is replaced in one step, and only after the new file has passed the check. If the
    existing file is up to date, it is left as it is.

    Parameters
    ----------
    image : an archive, a built recipe, an image of the engine, an OCI folder, or ``-`` for standard input.
    sif : the file to write, in the format of `options`. By default it is in the current folder and has the
        name of the image: ``mn5.sif``.
    options : the options of the conversion. If the compression is ``auto``, the compression of the image's
        system is used, if the image names a system.

    Raises
    ------
    UsageError : there is no such image, or the target exists and is a file of another format.
    CheckFailed : the archive is damaged, or the new file fails its check.
    ToolMissing, ToolFailed : the runtime, mksquashfs or the engine is missing or failed.
    """
    with _prepare_conversion(str(image), sif, options) as (source, target, completed_options):
        return conversion.convert(source, target, completed_options, report)


def plan_conversion(
    image: str | Path, output: str | Path | None = None, options: Options = _DEFAULTS
) -> PlannedConversion:
    """Return the file that `convert` would write, and the commands that it would run.

    Raises
    ------
    UsageError : there is no such image, or the target exists and is a file of another format.
    CheckFailed : the archive is damaged.
    ToolMissing : the runtime, mksquashfs or the engine is missing.
    """
    with _prepare_conversion(str(image), output, options) as (source, target, completed_options):
        conversion.check_target(target.absolute(), force=options.force, format=options.format)
        commands = tuple(conversion.list_commands(source, target.absolute(), completed_options))
    return PlannedConversion(target, commands)


def refuse_format(output: str | Path | None, options: Options) -> None:
    """Raise UsageError if the format in `options` contradicts the name `output` or another option.

    An example is ``--format sqsh -o X.sif``, which would write a .sqsh under the name of a .sif. The option
    ``--runtime-command`` is refused for a .sqsh as well, because imgkit does not start a .sqsh.

    Parameters
    ----------
    output : the file to write, or None for the default name.
    """
    suffix = Path(output or "").suffix
    # A name with another suffix says nothing about the format.
    if suffix in (".sif", ".sqsh") and suffix != f".{options.format}":
        raise UsageError(
            f"--format {options.format} writes no {suffix}",
            where=f"-o {output}",
            hint=f"-o NAME.{options.format}",
        )
    # The field `runtime` is the value of --runtime-command.
    if options.format == "sqsh" and options.runtime:
        raise UsageError(
            "--runtime-command cannot be combined with --format sqsh: imgkit starts no .sqsh",
            where="--runtime-command",
            hint="leave it out",
        )


@contextlib.contextmanager
def _prepare_conversion(image: str, output: str | Path | None, options: Options) -> Iterator[_Conversion]:
    """Find the image to convert. Yield it with the file to write, and the completed options.

    If the image is in an engine (Docker or Podman), the connection to the engine is closed at the end of the
    block.
    """
    refuse_format(output, options)
    # `system` is the cluster that the image is for, or None if it is unknown.
    with source_of(image) as (source, system):
        if image == "-" and output is None:
            raise UsageError(
                "an image from standard input has no name yet", where="-", hint=f"-o FILE.{options.format}"
            )
        target = Path(output or f"{name_stem(image)}.{options.format}")  # in the current folder by default
        completed_options = dataclasses.replace(
            options,
            module_hint=module_line(system),  # for the error if there is no runtime: "module load ..."
            compression=compression_for(system, options.compression),
        )
        yield _Conversion(source, target, completed_options)


def compression_for(system: SystemFacts | None, choice: CompressionChoice = "auto") -> CompressionChoice:
    """Return the compression to use: `choice`, or the compression of `system` if `choice` is ``auto``.

    If neither of them names a compression, the result is ``auto``. In a .sqsh, ``auto`` means gzip. In a
    .sif, it means zstd if this machine can mount a squashfs that is compressed with zstd.
    """
    if choice != "auto" or system is None:
        return choice
    return system.runtime.compression


@contextlib.contextmanager
def source_of(image: str) -> Iterator[tuple[Source, SystemFacts | None]]:
    """Yield the image called `image`, and the system that it is for, or None if the system is unknown.

    `image` can be ``-`` for standard input, the path of an archive or of an OCI folder, a recipe, or the name
    of an image in the engine (Docker or Podman). The engine stays connected within the ``with`` block.
    """
    path = Path(image)
    # A file with the suffix of a recipe stands for the image that was built from the recipe, in the last
    # branch.
    if image == "-":
        yield Piped(stream=sys.stdin.buffer), None
    elif path.is_file() and path.suffix not in RECIPE_SUFFIXES:
        _refuse_converted(path)
        yield Archive(path=path), _read_system_of_archive(path)
    elif (path / "oci-layout").is_file():
        yield OciFolder(path=path), None
    elif image.endswith(ARCHIVE_SUFFIXES):  # it looks like an archive, but there is no such file
        raise UsageError(
            "there is no such archive",
            where=image,
            hint=f"save it on the build host: imgkit save {name_stem(image)}",
        )
    else:
        with open_engine_image(image) as source:
            yield source, system_of(image)


def _read_system_of_archive(path: Path) -> SystemFacts | None:
    """Return the system that the image in an archive is for, or None if it is unknown.

    The system is stored in the file ``X.tar.manifest.json`` beside the archive. If there is no such file, or
    imgkit did not build the image, the system is unknown.

    Raises
    ------
    CheckFailed : the checksum file beside the archive is missing, for example after an interrupted save.
    """
    description = sidecar.read_sidecar(path)  # imgkit save writes this file
    if description is None:
        return None
    if sidecar.read_sha256(path) is None:
        # The message says whether the digest in the description is that of the archive.
        actual_sha256 = read.hash_file(path, report=SILENT)
        message, hint = sidecar.describe_incomplete(path, actual_sha256, description)
        raise CheckFailed(message, where=str(path), hint=hint)
    return description.system


def _refuse_converted(path: Path) -> None:
    """Raise UsageError if `path` is a .sif or .sqsh, which are results of a conversion and not its input."""
    if is_sif(path):
        raise UsageError("it is a .sif already", where=str(path), hint=f"check it: imgkit test {path}")
    if is_sqsh(path):
        raise UsageError(
            "it is a .sqsh, which is not converted: a .sif is made of the image itself",
            where=str(path),
            hint=f"check it: imgkit verify {path}",
        )


@contextlib.contextmanager
def open_engine_image(image: str) -> Iterator[EngineImage]:
    """Yield the image called `image` in Docker or Podman, and close the connection at the end."""
    name = image_name(image)
    try:
        connection = engines.connect()
    except ToolMissing as error:
        hint = f"{error.hint}\nwithout Docker, give the archive: imgkit sif {name_stem(image)}.tar"
        raise ToolMissing(error.what, where=error.where, hint=hint) from error
    with connection as engine:
        yield engines.local_image(engine, name)
