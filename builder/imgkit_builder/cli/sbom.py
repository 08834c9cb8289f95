"""``imgkit sbom``: the packages in a .sif or .sqsh."""

from __future__ import annotations

from pathlib import Path

from imgkit_builder.cli.common import name_argument, output_option
from imgkit_entrypoints import terminal
from imgkit_entrypoints.errors import UsageError


def verb_sbom(
    image: Path = name_argument("SIF|SQSH", "A file from imgkit sif."),
    output: Path | None = output_option("FILE", "File to write (default: standard output)."),
) -> None:
    """List the packages in a .sif, with versions and digests.

    Prints the SPDX 2.3 document in JSON, which scanners read, that imgkit sif wrote
    into the file, at /opt/imgkit/sbom.spdx.json: Debian and Python packages and
    imgkit's own files. Executes nothing in the image.

    \b
    Examples:
      imgkit sbom mn5.sif
      imgkit sbom mn5.sif -o mn5.spdx.json
    """
    from imgkit_builder.inventory.collector import DOCUMENT
    from imgkit_builder.sif import sqsh, unsquash
    from imgkit_builder.sif.image import is_sif
    from imgkit_entrypoints import files, json_text

    if not (is_sif(image) or sqsh.is_sqsh(image)):
        raise UsageError("it is not a .sif or .sqsh", where=str(image), hint="make one: imgkit sif IMAGE")
    data = unsquash.read(image, [DOCUMENT]).get(DOCUMENT, b"")
    try:
        json_text.parse(data, most_bytes=unsquash.MOST_BYTES)
    except ValueError as error:
        raise UsageError(
            f"it has no list of packages at /{DOCUMENT}: a runtime or another program made it",
            where=str(image),
            hint="convert the image: imgkit sif IMAGE --writer imgkit; or use a scanner, such as syft",
        ) from error
    if output is None:
        terminal.document(data.decode())
        return
    with files.replacing(output, failed="cannot be written", hint="name a writable file") as stream:
        stream.write(data)
    terminal.err(f"imgkit: wrote {output}")
